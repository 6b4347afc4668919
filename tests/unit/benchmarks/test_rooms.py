"""The rooms of benchmarks/: each says what it is for, and one command lists what is in them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
LIST = subprocess.run([sys.executable, str(BENCHMARKS)], capture_output=True, text=True, check=True).stdout.splitlines()


def listed() -> Iterator[str]:
    """Commands as paths below benchmarks/."""
    room = ""
    for line in LIST[1:]:
        if line.startswith("  "):
            yield f"{room}/{line.split()[0]}"
        else:
            room = line.partition(":")[0] or room


LISTED = set(listed())


def test_the_list_names_every_command_of_a_page() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", ROOT / "results" / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {found for page in pages for found in re.findall(r"python benchmarks/([\w/]+\.py)", page.read_text())}
    assert len(named) > 20
    assert named <= LISTED


def test_files_that_pages_name_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "results" / "README.md"]
    named = {found for page in pages for found in re.findall(r"(?<![\w/])benchmarks/[\w/]+\.py", page.read_text())}
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s#]+)", page.read_text())]
    own = [(page, link) for page, link in links if not link.startswith(("http", "mailto"))]
    assert len(own) > 50
    assert [(page.name, link) for page, link in own if not (page.parent / link).exists()] == []


def test_every_command_and_room_says_what_it_is_for() -> None:
    named = [line for line in LIST[1:] if line]
    assert [line for line in named if len(line.split()) < 4] == []


def test_every_folder_is_a_room_of_the_list() -> None:
    folders = {path.name for path in BENCHMARKS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {line.partition(":")[0] for line in LIST[1:] if line and not line.startswith(" ")} == folders
