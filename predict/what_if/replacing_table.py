"""Predictions with layers replaced, as tables for a person, as rows of CSV, and drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.pictures import COLOURS, draw_line, new_figure, write_figure
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_around, format_bytes, format_seconds
from paradl_bench.network.replacement.modules import shape_text
from predict.prediction.confidence import confidence_in
from predict.prediction.presentation import memory_cell
from predict.what_if.replacing import LayerSeconds, Replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (
    "strategy", "ranks", "batch", "layers", "iteration", "90%", "speed-up", "parameters", "gradients", "communication",
    "exposed", "scaling factor", "90%", "memory",
)  # fmt: skip
_OF_LAYERS = ("layer", "", "returns", "parameters", "forward", "sd", "from", "backward", "sd", "from")


def print_replacing(rows: Sequence[Replacing], *, why: bool = False) -> None:
    """A table of all points before and after, one of the layers that are new or changed, and what they rest on.

    Args:
        why: list every remark.
    """
    first, changed = rows[0], rows[1]
    console = open_console()
    title = f"{first.model}: {first.evaluator}, what if {' and '.join(changed.replaced)}"
    console.print(table(_COLUMNS, [_cells(row) for row in rows], title=title, keys=4))
    if changed.layers:
        title = f"layers that are new or whose inputs have new shapes, on {changed.local_batch} samples"
        console.print(table(_OF_LAYERS, [_layer_cells(layer) for layer in changed.layers], title=title))
    console.print(
        "speed-up: samples/s over the samples/s with the original layers. gradients: bytes of all parameters."
        " communication: all of a rank's, as if alone; exposed: the part that nothing hides. scaling factor: T_1"
        " / (N T_N), the speed-up over one rank divided by the ranks.",
        highlight=False,
    )
    _print_notes(rows, why=why)


def _print_notes(rows: Sequence[Replacing], *, why: bool) -> None:
    """Of either network, what is extrapolated and remarked."""
    console = open_console()
    for which in ("as they are", "replaced"):
        of = [row for row in rows if bool(row.replaced) == (which == "replaced")]
        for line in confidence_in([(f"{row.strategy} on batch {row.batch}", row) for row in of]).lines(why=why):
            console.print(f"layers {which}: {line}", highlight=False)


def _cells(row: Replacing) -> tuple[str, ...]:
    return (
        row.strategy,
        str(row.ranks),
        str(row.batch),
        "replaced" if row.replaced else "as they are",
        format_seconds(row.iteration_s),
        format_around(row.interval_s, row.iteration_s),
        f"{row.speedup_over_base:.3g}",
        f"{row.parameters:,}",
        format_bytes(row.gradient_bytes),
        format_seconds(row.communication_s),
        format_seconds(row.exposed_communication_s),
        f"{row.scaling_factor:.2f}",
        "{:.2f} to {:.2f}".format(*row.scaling_factor_interval),
        memory_cell(row.memory_bytes, row.memory_interval_bytes, row.fits),
    )


def _layer_cells(layer: LayerSeconds) -> tuple[str, ...]:
    return (
        layer.name,
        "new" if layer.is_new else "reshaped",
        shape_text(layer.output_shape),
        f"{layer.parameters:,}",
        format_seconds(layer.fw_s),
        format_seconds(layer.fw_sd_s),
        layer.fw_source,
        format_seconds(layer.bw_s),
        format_seconds(layer.bw_sd_s),
        layer.bw_source,
    )


def draw_replacing(rows: Sequence[Replacing], target: str, *, strong_scaling: bool, force: bool) -> None:
    """Draw :func:`replacing_figure` into a file.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    title = f"{rows[0].model}: layers replaced"
    figure = replacing_figure(rows, strong_scaling=strong_scaling)
    write_figure(figure, target, title=title, shows="scaling factors over ranks", force=force)


def replacing_figure(rows: Sequence[Replacing], *, strong_scaling: bool) -> Figure:
    """The scaling factor over ranks, with its interval: a line each network, kind of strategy and batch.

    Args:
        strong_scaling: lines are of a global mini-batch; else of a rank's samples.
    """
    lines: dict[str, list[Replacing]] = {}
    for row in rows:
        samples = f"batch {row.batch}" if strong_scaling else f"{row.batch / row.ranks:g} samples a rank"
        kind = re.sub(r"[0-9]+", "", row.strategy)
        lines.setdefault(f"{kind}, {samples}: {'replaced' if row.replaced else 'as it is'}", []).append(row)
    figure = new_figure(6.5, 4.5)
    panel = figure.subplots()
    for index, (label, line) in enumerate(lines.items()):
        factors, intervals = [row.scaling_factor for row in line], [row.scaling_factor_interval for row in line]
        draw_line(panel, [row.ranks for row in line], factors, intervals, COLOURS[index % len(COLOURS)], label)
    panel.set_xscale("log", base=2)
    counts = sorted({row.ranks for row in rows})
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks")
    panel.set_ylabel("scaling factor, with 90% interval")
    panel.legend(fontsize=8)
    figure.suptitle(in_drawing(f"{rows[0].model}: {rows[0].evaluator}, layers replaced"))
    return figure
