"""results/ holds what a claim stands on: its index names every folder, and it stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "results"
INDEX = (RESULTS / "README.md").read_text()
FOLDERS = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("*/*") if path.is_dir())
ROWS = re.findall(r"^\|(.*)\|$", INDEX, flags=re.MULTILINE)[2:]
MOST_BYTES = 8_000_000


def test_the_index_names_every_folder_and_no_other() -> None:
    assert sorted(re.findall(r"\]\(([\w-]+/[\w-]+)\)", INDEX)) == FOLDERS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rpartition("(")[2].strip(" )"))
def test_a_row_has_claim_command_commit_and_folder(row: str) -> None:
    cells = [cell.strip() for cell in row.split("|")]
    assert len(cells) == 4
    assert all(cells)
    _, _, commit, folder = cells
    assert re.search(rf"/\d{{4}}-\d\d-\d\d-{commit}[\w-]*\)$", folder)


def test_results_are_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= MOST_BYTES


def test_links_between_results_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(RESULTS)}: {link}"
        for page in RESULTS.rglob("*.md")
        for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not broken


PAGES = [RESULTS.parent / "README.md", *sorted((RESULTS.parent / "docs").rglob("*.md"))]
NO_MEASUREMENTS = {
    "1.349": "interquartile range of a normal distribution",
    "2104.09075": "ParaDL's paper, by its number at arXiv",
    "1805.03812": "S-SGD's paper, by its number at arXiv",
    "2021.11": "a version of the Intel MPI Benchmarks",
    "3.11": "a version of Python",
    "22.05": "a version of Slurm",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_a_page_stands_in_results(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`|^ {4}.*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    figures = set(re.findall(r"(?<![\w.])\d+\.\d+(?!\w|\.\d)", text)) - set(NO_MEASUREMENTS)
    held = " ".join(path.read_text() for path in RESULTS.rglob("*.md"))
    missing = [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", held)]
    assert not missing
