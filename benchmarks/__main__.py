"""``python benchmarks`` lists the rooms, the commands in each, and what they tell."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent


def rooms() -> list[Path]:
    """Their folders."""
    return sorted(path.parent for path in HERE.glob("*/__init__.py"))


def commands(room: Path) -> list[Path]:
    """Its files that are run by name."""
    return sorted(path for path in room.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())


def first_line(path: Path) -> str:
    """Of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> None:
    """Print the list."""
    print("Each is run as `python benchmarks/ROOM/NAME.py`; `--help` says how.")
    for room in rooms():
        print(f"\n{room.name}: {first_line(room / '__init__.py')}")
        for path in commands(room):
            print(f"  {path.name:24} {first_line(path)}")


if __name__ == "__main__":
    main()
