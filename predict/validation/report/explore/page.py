"""The page of ``predict explore``: the controls, and the report's charts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paradl_bench.core.terminal.printed import in_script
from predict.validation.report.page import TEMPLATES, template

_OWN = Path(__file__).parent / "template"
_REPORT = TEMPLATES.parent
FILES = {
    path.name: path
    for path in (
        *(_REPORT / "vendored" / name for name in ("d3.min.js", "plot.umd.min.js")),
        *(TEMPLATES / name for name in ("page.css", "drawing.js", "charts.js", "timeline.js")),
        *(_OWN / name for name in ("explore.css", "explore.js")),
    )
}
"""All files that the page asks for, by name."""
_CHARTS = {
    "ranking": (
        "Time of an iteration",
        "A mark is a prediction, its line the 90% interval. A cross needs more memory.",
    ),
    "breakdown": ("What an iteration is made of", "Parts add up to the iteration of the chosen row."),
    "memory": ("Memory of the rank that needs most", "Parts add up to the peak. The dashed line is the limit."),
    "timeline": ("Timeline of one iteration", "A row is a stream of a rank. A bar is a task."),
}
_SLIDERS = {
    "bandwidth": "bandwidth of links",
    "latency": "latency of links",
    "peak_flops": "peak FLOP/s",
    "memory_bandwidth": "bandwidth of memory",
}


def page(choices: Mapping[str, Any], start: Mapping[str, Any]) -> bytes:
    """The HTML.

    Args:
        choices: of the controls. start: what they begin with.
    """
    beginning = in_script(msgspec.json.encode({**choices, "start": start}))
    text: str = template(_OWN / "explore.html.j2").render(
        charts=_CHARTS, sliders=_SLIDERS, beginning=beginning, scripts=[n for n in FILES if n.endswith(".js")]
    )
    return text.encode()
