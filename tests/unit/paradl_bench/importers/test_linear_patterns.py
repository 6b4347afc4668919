"""Every regular expression of the packages takes time in proportion to its text, however it is called."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pattern_pumps import pumped

from paradl_bench.core.errors import UserError
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, LogFile

ROOT = Path(__file__).parents[4]
_TIMES_MORE = 8
_SHORT, _MIDDLE, _LONG = 500, 500 * _TIMES_MORE, 500 * _TIMES_MORE**2
_NOTHING_S = 0.002
"""What a text of the middle length may take without a look at others: a quadratic search takes longer."""
_MOST_S = 0.5
_MOST_GROWTH = 3.0 * _TIMES_MORE


def _modules() -> Iterator[ModuleType]:
    for package in ("paradl_bench", "calibrate", "predict"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if re.search(r"^import re$|^from re import", file.read_text(), re.MULTILINE):
                yield importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def _held(value: object) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _held(part)
    elif isinstance(value, dict):
        yield from _held(list(value.values()))


def _called(module: ModuleType) -> Iterator[re.Pattern[str]]:
    """Patterns that are given to a function of :mod:`re` where they are used."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
        ):
            assert node.func.attr == "compile" or isinstance(node.args[0], ast.Constant), ast.unparse(node)
            if isinstance(node.args[0], ast.Constant):
                yield re.compile(node.args[0].value)


def _patterns() -> dict[str, re.Pattern[str]]:
    found = {}
    for module in _modules():
        for pattern in (*_held([v for k, v in vars(module).items() if not k.startswith("__")]), *_called(module)):
            found.setdefault(pattern.pattern, pattern)
    return found


def grows(call: Callable[[str], object], texts: tuple[str, str, str]) -> bool:
    """Whether a call's time grows faster than its text, from short over middle to long.

    A bounded repetition (``.{0,2000}``) looks quadratic up to its bound: the longest text tells.
    """
    middle_s = _seconds(call, texts[1])
    if middle_s < _NOTHING_S or _growth(call, *texts[:2]) < _MOST_GROWTH:
        return False
    return middle_s > _MOST_S or _growth(call, *texts[1:]) > _MOST_GROWTH


def _growth(call: Callable[[str], object], one: str, other: str) -> float:
    """How many times as long the other text takes; it is timed once, since what grows is looked at again."""
    return _seconds(call, other) / max(min(_seconds(call, one) for _ in range(2)), 1e-6)


def _seconds(call: Callable[[str], object], text: str) -> float:
    begin = time.thread_time()
    call(text)
    return time.thread_time() - begin


def slow_text(pattern: re.Pattern[str]) -> str | None:
    """A text on which a pattern's time grows faster than the text, shortened; None where none is known."""
    for texts in zip(*(pumped(pattern, length) for length in (_SHORT, _MIDDLE, _LONG)), strict=True):
        for call in (pattern.search, pattern.match, pattern.fullmatch):
            if grows(call, texts) and grows(call, texts):  # again, since others use the machine
                return f"{call.__name__} {texts[0][:40]!r}...{texts[0][-5:]!r}"
    return None


def test_no_pattern_takes_more_than_its_text_is_longer() -> None:
    patterns = _patterns()
    assert len(patterns) > 50
    slow = {text: where for text, pattern in patterns.items() if (where := slow_text(pattern))}
    assert not slow


@pytest.mark.parametrize("quadratic", [r"\s+x", r"a .*b", r"#\s*\w*\s*:"])
def test_the_search_finds_quadratic_ones(quadratic: str) -> None:
    assert slow_text(re.compile(quadratic))


_HEADERS = (
    "",
    "# OSU MPI Allreduce Latency Test v7.0\n# Size ",
    "# OSU MPI Allreduce Latency Test v7.0\n| Size | (",
    "# Benchmarking Allreduce\n| #bytes | (",
    "# nThread 1\n| size | (",
)
_PIECES = (" ", "(", "[ ", "| ", "#", "1,", "NCCL ", "Rank 0 ", "-", "size ( ", "\x1b]", '{"', "x1", "\n", "|\n")


@pytest.mark.parametrize("name", sorted(importers()))
def test_no_importer_takes_more_than_its_line_is_longer(name: str) -> None:
    """Long lines of what formats are made of, alone and behind the header of each format."""

    def read(text: str) -> None:
        with contextlib.suppress(UserError):
            importers()[name].read(LogFile(path="a.log", content=text.encode()), ImportOptions(batch=1, ranks=2))

    for header in _HEADERS:
        for piece in _PIECES:
            texts = [header + piece * (length // len(piece)) + "x |\n" for length in (_SHORT, _MIDDLE, _LONG)]
            known = (texts[0], texts[1], texts[2])
            assert not (grows(read, known) and grows(read, known)), (header, piece)
