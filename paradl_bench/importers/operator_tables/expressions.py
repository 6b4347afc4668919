"""Numbers of a table's row: sums and products of columns and constants, as a mapping writes them.

    B * M                       columns B and M
    4 * dim / mp                division is exact; what has to be a whole number and is none is no size
    ceil(50257 / (128 * mp))    the next whole number
    input_shapes[0][-1]         of a list of shapes the last extent of the first
    elements(output_shape)      the product of a shape's extents
    `F_dur(us)`                 a column whose name is no word

An expression is parsed once and evaluated for every row, over fractions: no size is rounded in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from paradl_bench.core.errors import UserError
from paradl_bench.importers.tables.numbers_read import decimal

Number = Fraction
Shape = tuple["Shape | int", ...]
Row = Mapping[str, str]
"""A row's texts by column."""

_LONGEST = 300
_DEEPEST = 16
_MOST_DIGITS = 60
"""Of a result's numerator: beyond, it is no size of anything, and products of it take long."""
_SHAPE_DEEPEST = 4
_LONGEST_SHAPE = 2000
_TOKEN = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)|([A-Za-z_][A-Za-z0-9_]*)|`([^`]{1,200})`|([-+*/()\[\],])")
_SHAPE_TOKEN = re.compile(r"([0-9]{1,15}|[\[\](),])")


class NoNumber(ValueError):
    """A row does not give an expression its number; the text says why."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression: its text, the columns that it reads, and what it is of a row."""

    text: str
    columns: tuple[str, ...]
    _evaluate: Callable[[Row], Number | Shape]

    def number(self, row: Row) -> Number:
        """Its value.

        Raises:
            NoNumber: a cell is no number or shape, a divisor is 0, an extent is not there, or it is beyond all sizes.
        """
        return _bounded(self._evaluate(row))

    def whole(self, row: Row) -> int:
        """Its value, which has to be a whole number from 0.

        Raises:
            NoNumber: also where it is none.
        """
        value = self.number(row)
        if value.denominator != 1 or value < 0:
            raise NoNumber(f"{self.text} is {_shown(value)}, no whole number from 0")
        return value.numerator


def _shown(value: Number) -> str:
    return str(value) if len(str(value)) <= _MOST_DIGITS else f"{float(value):g}"


def _bounded(value: Number | Shape) -> Number:
    if isinstance(value, tuple):
        raise NoNumber("a shape stands where a number has to be; name one of its extents, as in shape[0]")
    if value.numerator.bit_length() > 4 * _MOST_DIGITS or value.denominator.bit_length() > 4 * _MOST_DIGITS:
        raise NoNumber("the number has too many digits to be a size")
    return value


def parse_expression(text: str) -> Expression:
    """An expression of a mapping.

    Raises:
        UserError: it is none; the text says where it stops being one.
    """
    if len(text) > _LONGEST:
        raise UserError(f"an expression of {len(text)} characters is longer than {_LONGEST}: {text[:40]!r}...")
    parser = _Parser(text, _tokens(text))
    evaluate = parser.sum(0)
    if parser.at < len(parser.tokens):
        raise UserError(f"{text!r} is no expression: {parser.tokens[parser.at][1]!r} stands where it should end")
    return Expression(text, tuple(dict.fromkeys(parser.columns)), evaluate)


def _tokens(text: str) -> list[tuple[str, str]]:
    """Kind (number, name, mark) and text of every token."""
    tokens, at, stripped = [], 0, text.rstrip()
    while at < len(stripped):
        at = _past_blanks(stripped, at)
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise UserError(f"{text!r} is no expression: {stripped[at]!r} means nothing there")
        number, word, quoted, mark = match.groups()
        if number is not None:
            tokens.append(("number", number))
        elif mark is not None:
            tokens.append(("mark", mark))
        else:
            tokens.append(("name" if quoted is None else "quoted", word or quoted))
        at = match.end()
    return tokens


def _past_blanks(text: str, at: int) -> int:
    """Where the next token begins: a pattern of blanks in front of one would take quadratic time."""
    return next((place for place in range(at, len(text)) if not text[place].isspace()), len(text))


@dataclass(slots=True)
class _Parser:
    """Recursive descent over sums, products, signs and what is indexed; no deeper than ``_DEEPEST``."""

    text: str
    tokens: list[tuple[str, str]]
    at: int = 0
    columns: list[str] = field(default_factory=list)

    def taken(self, *marks: str) -> str | None:
        """The next token, where it is one of these marks."""
        if self.at < len(self.tokens) and self.tokens[self.at] in [("mark", mark) for mark in marks]:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def need(self, mark: str) -> None:
        if self.taken(mark) is None:
            raise UserError(f"{self.text!r} is no expression: {mark!r} is missing")

    def sum(self, depth: int) -> Callable[[Row], Number | Shape]:
        if depth > _DEEPEST:
            raise UserError(f"{self.text!r}: parentheses are nested deeper than {_DEEPEST} levels")
        value = self.product(depth)
        while mark := self.taken("+", "-"):
            value = _combined(mark, value, self.product(depth), self.text)
        return value

    def product(self, depth: int) -> Callable[[Row], Number | Shape]:
        value = self.factor(depth)
        while mark := self.taken("*", "/"):
            value = _combined(mark, value, self.factor(depth), self.text)
        return value

    def factor(self, depth: int) -> Callable[[Row], Number | Shape]:
        if self.taken("-"):
            if depth > _DEEPEST:
                raise UserError(f"{self.text!r}: more than {_DEEPEST} signs in a row")
            value = self.factor(depth + 1)
            return lambda row: -_bounded(value(row))
        value = self.one(depth)
        while self.taken("["):
            value = _extent(value, self.index(), self.text)
            self.need("]")
        return value

    def index(self) -> int:
        negative = self.taken("-") is not None
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "nothing")
        if kind != "number" or "." in text or len(text) > 3:
            raise UserError(f"{self.text!r} is no expression: an extent is named by a whole number, not {text!r}")
        self.at += 1
        return -int(text) if negative else int(text)

    def one(self, depth: int) -> Callable[[Row], Number | Shape]:
        if self.taken("("):
            value = self.sum(depth + 1)
            self.need(")")
            return value
        if self.at >= len(self.tokens):
            raise UserError(f"{self.text!r} is no expression: a number or a column is missing at its end")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            constant = Fraction(text)
            return lambda row: constant
        if kind == "mark":
            raise UserError(f"{self.text!r} is no expression: {text!r} stands where a number or a column should")
        if kind == "name" and self.taken("("):
            return self.call(text, depth)
        self.columns.append(text)
        return lambda row: _cell(row, text)

    def call(self, name: str, depth: int) -> Callable[[Row], Number | Shape]:
        known = {"ceil": _ceil, "elements": _elements}
        if name not in known:
            raise UserError(f"{self.text!r}: there is no function {name!r}; there are {' and '.join(known)}")
        argument = self.sum(depth + 1)
        self.need(")")
        return lambda row: known[name](argument(row))


def _combined(
    mark: str, left: Callable[[Row], Number | Shape], right: Callable[[Row], Number | Shape], text: str
) -> Callable[[Row], Number]:
    def evaluate(row: Row) -> Number:
        one, other = _bounded(left(row)), _bounded(right(row))
        if mark == "+":
            return one + other
        if mark == "-":
            return one - other
        if mark == "*":
            return one * other
        if not other:
            raise NoNumber(f"{text} divides by 0")
        return one / other

    return evaluate


def _ceil(value: Number | Shape) -> Number:
    return Fraction(math.ceil(_bounded(value)))


def _elements(value: Number | Shape) -> Number:
    if not isinstance(value, tuple):
        raise NoNumber("elements() is of a shape, and a number stands there")
    extents = [part for part in value if isinstance(part, int)]
    if len(extents) < len(value):
        raise NoNumber("elements() is of one shape, and a list of shapes stands there; name one, as in shapes[0]")
    return Fraction(math.prod(extents))


def _extent(value: Callable[[Row], Number | Shape], index: int, text: str) -> Callable[[Row], Number | Shape]:
    def evaluate(row: Row) -> Number | Shape:
        shape = value(row)
        if not isinstance(shape, tuple):
            raise NoNumber(f"{text} takes a part of a number")
        if not -len(shape) <= index < len(shape):
            raise NoNumber(f"{text}: there is no part {index} of {len(shape)}")
        part = shape[index]
        return Fraction(part) if isinstance(part, int) else part

    return evaluate


def _cell(row: Row, column: str) -> Number | Shape:
    text = row[column].strip()
    if text[:1] in ("[", "("):
        return shape_of(text)
    if decimal(text) is None:
        raise NoNumber(f"{column} is {_quoted(text)}, no number" if text else f"{column} is empty")
    # A finite number has no exponent that a fraction could not hold.
    return Fraction(text)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def shape_of(text: str) -> Shape:
    """``(1, 1024)`` or ``[[1, 1024], [5]]`` as whole numbers in tuples.

    Raises:
        NoNumber: it is none.
    """
    if len(text) > _LONGEST_SHAPE:
        raise NoNumber("a shape of so many characters is none")
    parts: list[list[Shape | int]] = [[]]
    at = 0
    while at < len(text):
        at = _past_blanks(text, at)
        match = _SHAPE_TOKEN.match(text, at)
        if match is None or not parts:
            raise NoNumber(f"{_quoted(text)} is no shape")
        at, symbol = match.end(), match.group(1)
        if symbol in "[(":
            parts.append([])
        elif symbol in "])":
            closed = tuple(parts.pop())
            if not parts:
                raise NoNumber(f"{_quoted(text)} is no shape")
            parts[-1].append(closed)
        elif symbol != ",":
            parts[-1].append(int(symbol))
        if len(parts) > _SHAPE_DEEPEST:
            raise NoNumber(f"{_quoted(text)} is no shape")
    if len(parts) != 1 or len(parts[0]) != 1 or not isinstance(parts[0][0], tuple):
        raise NoNumber(f"{_quoted(text)} is no shape")
    return parts[0][0]
