"""The site of docs/: every page is in one menu, commands show their options in groups, a broken link fails."""

from __future__ import annotations

import collections
import importlib.util
import re
from pathlib import Path

import click
import pytest

DOCS = Path(__file__).parents[3] / "docs"
_SPEC = importlib.util.spec_from_file_location("make_site", DOCS / "make_site.py")
assert _SPEC is not None
assert _SPEC.loader is not None
make_site = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_site)

INDEXES = [path for path in DOCS.rglob("*.md") if path.name in ("index.md", "README.md")]


def test_every_page_is_in_one_menu() -> None:
    entries: collections.Counter[Path] = collections.Counter()
    for index in INDEXES:
        for menu in make_site.menus(index, index.read_text()):
            linked = re.findall(r"^([\w/-]+\.md)$", menu, flags=re.MULTILINE)
            entries.update(index.parent / name for name in linked if not name.startswith("reference/"))
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} == set(entries)
    assert [path for path, count in entries.items() if count > 1] == []


def test_the_menu_has_four_parts() -> None:
    menus = "".join(make_site.menus(DOCS / "index.md", (DOCS / "index.md").read_text()))
    assert re.findall(":caption: (.*)", menus) == ["Tutorials", "How-to", "Reference", "Explanation"]
    assert len(list((DOCS / "how-to").glob("*.md"))) == 10


def test_each_command_has_a_page_with_its_options_in_groups() -> None:
    pages = dict(make_site.generated_pages())
    for program, group in make_site.PROGRAMS.items():
        for name in group.list_commands(click.Context(group)):
            assert pages[f"{program}-{name}"].startswith(f"# {program} {name}\n")
    search = pages["predict-search"]
    assert search.index("## Axes of a strategy") < search.index("`--split") < search.index("## Input")
    assert "\n    predict search --from-profile" in search
    assert re.search(r"^## Other options\n\n\|.*\n\|.*\n(\|.*\n)*\| `-h, --help` \|", search, flags=re.MULTILINE)
    # A bar inside of a cell would end it.
    assert "`--layers measured\\|regressed" in search
    rows = [line for line in search.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_links_out_of_docs_become_words(tmp_path: Path) -> None:
    page = make_site.page(DOCS / "papers.md")
    assert "[model](model/README.md)" in page
    assert "[drawn-modules]" not in page
    assert "drawn-modules (`results/drawn-modules`)" in page


def test_the_site_builds_and_asks_for_no_network(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    assert make_site.main(["-o", str(tmp_path)]) == 0, capfd.readouterr().err
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > 60
    fetched = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    assert [found for page in pages for found in fetched.findall(page.read_text())] == []
    api = (tmp_path / "html" / "reference" / "api-predict.html").read_text()
    assert 'id="predict.api.loaded_profile.LoadedProfile.search"' in api


def test_a_broken_link_fails_the_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text("# One\n\n[to a page](nowhere.md)\n")
    assert make_site.build(source, tmp_path / "html", tmp_path / "cache") == 1
    told = capfd.readouterr().err
    assert "nowhere.md" in told
