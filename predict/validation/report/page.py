"""Sections as one HTML file that needs no network.

The page runs the scripts that it carries and no other: its policy names them by their hashes, and forbids all else,
requests above all. Values stand in it as text (escaped by the template) or as JSON inside of ``script`` elements.

Charts are drawn by Observable Plot on D3, which lie in ``vendored`` beside their licences.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paradl_bench.core.errors import WorkError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.core.terminal.command_line import write_output
from paradl_bench.core.terminal.printed import in_script, plain
from paradl_bench.core.units import counted, format_bytes
from predict.validation.report.content import Content, Section
from predict.validation.report.sections import (
    answer,
    diagnosis,
    fits,
    measured,
    memory,
    next,
    provenance,
    scaling,
    seconds,
    timeline,
)

MOST_BYTES = 2_000_000
"""Of a page."""
_SECTIONS = (answer, measured, scaling, memory, timeline, seconds, diagnosis, fits, next, provenance)
_SCRIPTS = (
    *("vendored/d3.min.js", "vendored/plot.umd.min.js"),
    *("template/drawing.js", "template/charts.js", "template/timeline.js"),
)
TEMPLATES = Path(__file__).parent / "template"
_STYLE = "template/page.css"


def write_page(content: Content, output: str, *, force: bool) -> None:
    """Write a report.

    Raises:
        UserError: the file exists and ``force`` is not given.
        WorkError: the page would be larger than :data:`MOST_BYTES`, or jinja2 is missing.
    """
    write_output(output, page(content), force=force)


def page(content: Content) -> bytes:
    """The whole file; the same for the same content."""
    sections = [section for module in _SECTIONS if (section := module.section(content)) is not None]
    prediction = content.prediction
    about = f"{prediction.model} on {counted(prediction.ranks, 'rank')}, batch {prediction.batch}"
    title = f"Runs and predictions: {about}" if content.run else f"Prediction: {about}"
    made = _rendered(title, sections)
    if len(made) > MOST_BYTES:
        raise WorkError(
            f"the page has {format_bytes(len(made))}, more than {format_bytes(MOST_BYTES)}: give fewer strategies,"
            " rank counts or runs"
        )
    return made


def _rendered(title: str, sections: Sequence[Section]) -> bytes:
    scripts = [_read(name) for name in _SCRIPTS]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    documents: dict[str, str] = {}
    for section in sections:
        documents |= {f"data-{figure.name}": in_script(msgspec.json.encode(figure.data)) for figure in section.figures}
        documents |= {
            f"data-{name}": in_script(msgspec.json.encode(value)) for name, value in section.documents.items()
        }
    text: str = template(TEMPLATES / "page.html.j2").render(
        title=title, sections=sections, documents=documents, policy=policy, style=_read(_STYLE), scripts=scripts
    )
    return text.encode()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read(name: str) -> str:
    return read_whole(Path(__file__).parent / name).decode()


def template(path: Path) -> Any:
    """A page's template; it may include ``fills.html.j2``, the fills of charts.

    Raises:
        WorkError: jinja2 is missing.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise WorkError("jinja2 is not installed, and the page is written with it: pip install jinja2") from error

    def shown(value: Any) -> Any:
        """Names come from files and models: what would turn a text round is left out of it."""
        return plain(value) if type(value) is str else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, TEMPLATES]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)
