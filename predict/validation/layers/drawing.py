"""Box plots of the relative errors of layers, by stage and by kind (KernelMLP, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.core.units import counted
from predict.validation.layers.comparison import STAGES, LayerError, LayerValidation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = dict(zip(STAGES, COLOURS, strict=False))
_MOST_KINDS = 12
_LEGIBLE = 1.5
"""Errors beyond stand at the edge of the drawing: a tiny layer may be missed by a hundred times."""


def draw_layers(validation: LayerValidation, target: str, *, force: bool) -> None:
    """Boxes of RE: quartiles, median, whiskers to 1.5 of their distance, means as diamonds, single layers as dots.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    known = [layer for layer in validation.layers if layer.re is not None]
    of_kinds = grouped((layer for layer in known if layer.stage != "WU"), lambda layer: layer.kind)
    kinds = sorted(of_kinds, key=lambda kind: -sum(layer.measured_s for layer in of_kinds[kind]))[:_MOST_KINDS]
    stages = [stage for stage in STAGES if stage in validation.stages]
    figure = new_figure(6.5 + 1.1 * len(kinds), 5.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5 * len(stages), max(2 * len(kinds), 3)))
    for at, stage in enumerate(stages):
        _box(left, at, [layer for layer in known if layer.stage == stage], stage, width=0.6)
    left.set_xticks(range(len(stages)), [_titled(validation, stage) for stage in stages])
    for at, kind in enumerate(kinds):
        for shift, stage in ((-0.2, "FW"), (0.2, "BW")):
            _box(right, at + shift, [layer for layer in of_kinds[kind] if layer.stage == stage], stage, width=0.34)
    right.set_xticks(range(len(kinds)), [in_drawing(kind.replace("_", "\n")) for kind in kinds])
    _label(left, right)
    lines = [*_said(validation), *_undrawn(len(of_kinds) - len(kinds), known)]
    figure.suptitle("\n".join(in_drawing(line) for line in lines), fontsize=10)
    shows = "relative errors of layers, by stage and by kind"
    write_figure(figure, target, title=f"{validation.model}: {shows}", shows=shows, force=force)


def _box(panel: Axes, at: float, layers: Sequence[LayerError], stage: str, *, width: float) -> None:
    whole = [layer.re for layer in layers if layer.re is not None]
    errors = [100 * min(error, _LEGIBLE) for error in whole]
    if not errors:
        return
    colour = _COLOURS[stage]
    lines: dict[str, Any] = {"color": colour, "linewidth": 1.2}
    panel.boxplot(
        [errors],
        positions=[at],
        widths=width,
        manage_ticks=False,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": colour, "alpha": 0.25, "edgecolor": colour},
        medianprops={**lines, "linewidth": 2},
        whiskerprops=lines,
        capprops=lines,
    )
    mean = 100 * min(sum(whole) / len(whole), _LEGIBLE)
    panel.plot([at], [mean], "D", color=colour, markeredgecolor="white", markersize=6, zorder=3)
    # Spread evenly over the width, in the order of the model: layers of one error do not hide each other.
    places = [at + width * 0.7 * ((index + 0.5) / len(errors) - 0.5) for index in range(len(errors))]
    panel.plot(places, errors, "o", color=colour, markersize=2.5, alpha=0.6)


def _label(left: Axes, right: Axes) -> None:
    from matplotlib.lines import Line2D

    for panel in (left, right):
        panel.axhline(0, color="0.4", linewidth=0.9)
        panel.grid(True, axis="y", color="0.9", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("(estimated - measured) / measured, %")
    left.set_xlabel("stage, and how many layers")
    right.set_xlabel("kind of layer (sorted by seconds)")
    handles = [
        Line2D([], [], color=_COLOURS[stage], marker="s", linestyle="", label=stage, alpha=0.6)
        for stage in ("FW", "BW")
    ]
    handles.append(Line2D([], [], color="0.4", marker="D", linestyle="", label="mean"))
    right.legend(handles=handles, fontsize=8, ncols=3, loc="upper right")


def _titled(validation: LayerValidation, stage: str) -> str:
    errors = validation.stages[stage]
    return f"{stage} ({errors.count})" + ("" if errors.wre is None else f"\nWRE {errors.wre:.0%}")


def _said(validation: LayerValidation) -> list[str]:
    """What is drawn, the network's errors, and which of them are not held out."""
    whole, (fitted_on, regressed) = validation.network, validation.of_regressed
    parts = [] if whole.re is None or whole.wre is None else [f"network: RE {whole.re:+.1%}, WRE {whole.wre:.1%}"]
    if regressed:
        parts.append(f"{fitted_on} of {regressed} regressed layers have swept shapes, so their errors are not held out")
    return [
        f"{validation.model}, batch {validation.batch}, {validation.dtype}:"
        f" layers {validation.layers_from} against measured",
        "; ".join(parts),
    ]


def _undrawn(hidden: int, known: Sequence[LayerError]) -> list[str]:
    """What the drawing does not show in its place."""
    beyond = sum(layer.re is not None and layer.re > _LEGIBLE for layer in known)
    parts = [counted(hidden, "more kind") + " not drawn"] if hidden else []
    parts += [f"{counted(beyond, 'error')} above {_LEGIBLE:.0%}, drawn at {_LEGIBLE:.0%}"] if beyond else []
    return ["; ".join(parts)] if parts else []
