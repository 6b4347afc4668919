"""Build docs/ as a site that needs no network: ``make docs``, or ``python docs/make_site.py -o DIR``.

Sphinx reads a copy of docs/. Beside it lie pages that are generated: one a command, from its options, and one a package
of the Python API, from its docstrings. Pages that are called index or README are the navigation: what they link to
becomes a part of the menu. Any warning fails the build: a link to nothing, a page that no menu has.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import calibrate.cli
import paradl_bench.cli
import predict.cli
from paradl_bench.core.terminal.help import options_by_group

DOCS = Path(__file__).parent
PROGRAMS = {"paradl-bench": paradl_bench.cli.group, "calibrate": calibrate.cli.group, "predict": predict.cli.group}
API = {
    "predict": ("predict.load_profile", "predict.api.loaded_profile", "predict.api.results", "predict.api.rows"),
    "calibrate": ("calibrate.api",),
    "paradl_bench": ("paradl_bench.api.raw_samples", "paradl_bench.core.errors"),
}
SETTINGS = {
    "project": "ParaDL",
    "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "html_theme": "furo",
    "html_title": "ParaDL",
    "html_show_sourcelink": False,
    "html_copy_source": False,
    "myst_heading_anchors": 4,
    "smartquotes": False,
    "autodoc_member_order": "bysource",
}
_LINK = re.compile(r"\[([^\[\]]{1,300})\]\(([^()\s]{1,300})\)")
_MENU = ("index.md", "README.md")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|{}])")


def main(words: list[str]) -> int:
    """Build the site; 1 where anything is wrong with it."""
    parser = argparse.ArgumentParser(description="Build docs/ as a site.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="its folder; what is in it is replaced")
    output = parser.parse_args(words).output
    source, html = output / "source", output / "html"
    for folder in (source, html):
        shutil.rmtree(folder, ignore_errors=True)
    gather(source)
    code = build(source, html, output / "cache")
    print(html / "index.html")
    return code


def build(source: Path, html: Path, cache: Path) -> int:
    """Make HTML of pages; 1 where Sphinx warns of anything, which it does on standard error."""
    from sphinx.application import Sphinx

    site = Sphinx(source, None, html, cache, "html", SETTINGS, freshenv=True, warningiserror=True, status=None)
    site.build()
    return site.statuscode


def gather(source: Path) -> None:
    """Put together what Sphinx reads: pages, pictures, and what is generated."""
    generated = {f"reference/{name}.md": text for name, text in generated_pages()}
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in (".md", ".png", ".svg", ".ipynb", ".json"):
            target = source / path.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                target.write_text(page(path))
            else:
                shutil.copyfile(path, target)
    (source / "reference").mkdir()
    for name, text in generated.items():
        (source / name).write_text(text)


def page(path: Path) -> str:
    """A page of docs/ as the site has it: links out of docs/ as words, and the menu of an index behind it."""
    text = path.read_text()

    def inside(link: re.Match[str]) -> str:
        words, target = link.groups()
        at = path.parent / target.partition("#")[0]
        if "://" in target or not at.exists() or at.resolve().is_relative_to(DOCS.resolve()):
            return link[0]
        return f"{words} (`{at.resolve().relative_to(DOCS.parent.resolve())}`)"

    shown = _LINK.sub(inside, text)
    return shown + "".join(menus(path, text)) if path.name in _MENU else shown


def menus(path: Path, text: str) -> Iterator[str]:
    """A menu of each section of docs/index.md; one of all pages beside another index."""
    top = path.parent == DOCS
    for section in text.split("\n## ")[1:] if top else [text]:
        linked = [link[2].partition("#")[0] for link in _LINK.finditer(section)]
        pages = [each for each in dict.fromkeys(linked) if each.endswith(".md") and (top or "/" not in each)]
        caption = section.partition("\n")[0]
        if top and caption == "Reference":
            pages += ["reference/api.md", *(f"reference/{program}.md" for program in PROGRAMS)]
        if pages:
            yield _menu(pages, caption if top else "")


def _menu(pages: list[str], caption: str) -> str:
    about = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n" + about + "\n" + "\n".join(pages) + "\n```\n"


def generated_pages() -> Iterator[tuple[str, str]]:
    """Names under reference/ and their text."""
    for program, group in PROGRAMS.items():
        context = click.Context(group, info_name=program, **group.context_settings)
        names = group.list_commands(context)
        rows = "".join(f"- [{program} {name}]({program}-{name}.md)\n" for name in names)
        menu = _menu([f"{program}-{name}.md" for name in names], "")
        yield program, f"{command_page(group, context)}\n## Commands\n\n{rows}{menu}"
        for name in names:
            command = group.get_command(context, name)
            assert command is not None
            yield (
                f"{program}-{name}",
                command_page(command, click.Context(command, context, name, **command.context_settings)),
            )
    links = "".join(f"- [{package}](api-{package}.md)\n" for package in API)
    about = "# Python API\n\nWhat scripts and notebooks call. [Python](../python.md) shows it at work.\n\n"
    yield "api", f"{about}{links}{_menu([f'api-{package}.md' for package in API], '')}"
    for package, modules in API.items():
        parts = "".join(_api_part(name) for name in modules)
        yield f"api-{package}", f"# {package}\n\n{parts}"


def _api_part(name: str) -> str:
    kind = "autofunction" if name == "predict.load_profile" else "automodule"
    members = "" if kind == "autofunction" else "\n   :members:\n   :inherited-members: Struct"
    return f"```{{eval-rst}}\n.. {kind}:: {name}{members}\n```\n\n"


def command_page(command: click.Command, context: click.Context) -> str:
    """What a command does, how it is called, and its options by their groups."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"# {context.command_path}\n", f"    {usage}\n"]
    parts += map(_paragraph, inspect.cleandoc(command.help or "").split("\n\n"))
    for title, records in options_by_group(command, context).items():
        rows = "".join(f"| `{flags.replace('|', chr(92) + '|')}` | {_words(text)} |\n" for flags, text in records)
        parts.append(f"## {title}\n\n| option | what it says |\n|---|---|\n{rows}")
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    """One of a docstring: what click leaves as it stands is code."""
    if text.startswith("\b"):
        return "\n".join(f"    {line}" for line in text.splitlines()[1:]) + "\n"
    return _words(" ".join(text.split())) + "\n"


def _words(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
