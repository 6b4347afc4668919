"""Count the long sentences of README.md and of these pages: `make lint` fails where more than 2% have over 30 words.

python docs/sentences.py [FILE ...] lists them. Headings, code and tables are no sentences.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MOST_WORDS = 30
MOST_SHARE = 0.02
# A full stop inside of a name or a number is followed by no blank; after "e.g." a sentence goes on.
_END = re.compile(r"(?<=[.!?:])\s+(?=[\"'(]?[A-Z0-9])")


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """Sentences of a page in Markdown, each with its paragraph's first line; code and links count as their words."""
    line, outside = 0, True
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        if token.type in ("heading_open", "table_open"):
            outside = False
        elif token.type in ("heading_close", "table_close"):
            outside = True
        elif token.type == "inline" and outside:
            line = token.map[0] + 1 if token.map else line
            text = "".join(_text(child.type, child.content) for child in token.children or ())
            yield from ((line, sentence) for sentence in _END.split(text.strip()) if sentence)


def _text(kind: str, content: str) -> str:
    if kind in ("softbreak", "hardbreak"):
        return " "
    # A command or a formula is one word, whatever it holds.
    return "CODE" if kind == "code_inline" else content


def words(sentence: str) -> int:
    """Words of a sentence; a sign between two of them is none."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def main(files: list[str]) -> int:
    """Print the sentences that are too long, and return 1 where they are too many."""
    pages = [Path(name) for name in files] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    count = 0
    long: list[str] = []
    for page in pages:
        for line, sentence in sentences(page.read_text()):
            count += 1
            if words(sentence) > MOST_WORDS:
                long.append(f"{page}:{line}: {words(sentence)} words: {sentence[:100]}")
    many = len(long) > MOST_SHARE * count
    if many or files:
        print(*long, sep="\n")
    print(f"{len(long)} of {count} sentences have more than {MOST_WORDS} words; at most {MOST_SHARE:.0%} may")
    return int(many)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
