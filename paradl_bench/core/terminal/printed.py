"""What other programs print, and how they end, in words that a terminal can show."""

from __future__ import annotations

import re
import signal

# Colours and cursor movements, titles of windows (up to BEL or ST), and the escapes of two characters.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
# A tab and line breaks stay. Those from 0x80 on are read as escapes by some terminals; the others turn the direction
# of what stands behind them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """A text without escape sequences and control characters, which would do to a terminal whatever they say."""
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def in_markdown(text: str) -> str:
    """A text as one line that Markdown shows as it is: no HTML, no link or image, no new cell, no heading.

    Emphasis stays possible: it changes nothing but looks, and names are full of underscores.
    """
    line = " ".join(plain(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    line = line.replace("|", "\\|").replace("](", "]\\(")
    return f"\\{line}" if line[:1] in ("#", ">", "`", "~") else line


def in_code(text: str) -> str:
    """A text as a span of code in Markdown."""
    return f"`{' '.join(plain(text).split()).replace('`', chr(39))}`"


def in_html(text: str) -> str:
    """A text as one line that HTML shows as it is."""
    # Not above: few commands write HTML, and all would wait for its names of characters.
    from html import escape

    return escape(" ".join(plain(text).split()))


def in_script(document: bytes) -> str:
    """A JSON document inside of a ``script`` element of HTML, which neither it nor a comment in it can end.

    Every string in it is as :func:`plain` in a page that shows it as text; here it is whole.
    """
    text = document.decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def in_drawing(text: str) -> str:
    """A text as matplotlib draws it: dollars are no mathematics, which fails where it is none."""
    return " ".join(plain(text).split()).replace("$", "\\$")


def plain_lines(text: str) -> list[str]:
    """The lines of a text that are not empty, as :func:`plain`; what a progress bar wrote over is a line of its own."""
    lines = (line.rstrip() for line in re.split(r"[\r\n]+", plain(text)))
    return [line for line in lines if line]


def ending(exit_code: int) -> str:
    """How a program ended, by its exit code as :mod:`subprocess` gives it, negative where a signal ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-exit_code} ({name})"
