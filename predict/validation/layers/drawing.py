"""Box plots of the relative errors of layers, by stage and by kind (KernelMLP, figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from paradl_bench.core.terminal.printed import in_drawing
from predict.validation.layers.comparison import STAGES, LayerError, LayerValidation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = dict(zip(STAGES, COLOURS, strict=False))
_MOST_KINDS = 12
_LEGIBLE = 1.5
"""Errors beyond stand at the edge of the drawing: a tiny layer may be missed by a hundred times."""


def draw_layers(found: LayerValidation, target: str, *, force: bool) -> None:
    """Boxes of RE: quartiles, median, whiskers to 1.5 of their distance, means as diamonds, single layers as dots.

    Raises:
        UserError: the file exists and ``force`` is not given, or cannot be written.
    """
    known = [each for each in found.layers if each.re is not None]
    of_kinds = grouped((each for each in known if each.stage != "WU"), lambda each: each.kind)
    kinds = sorted(of_kinds, key=lambda kind: -sum(each.measured_s for each in of_kinds[kind]))[:_MOST_KINDS]
    stages = [stage for stage in STAGES if stage in found.stages]
    figure = new_figure(4.5 + 1.1 * len(kinds), 4.8)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(len(stages) + 0.5, max(2 * len(kinds), 2)))
    for at, stage in enumerate(stages):
        _box(left, at, [each for each in known if each.stage == stage], stage, width=0.6)
    left.set_xticks(range(len(stages)), [_titled(found, stage) for stage in stages])
    for at, kind in enumerate(kinds):
        for shift, stage in ((-0.2, "FW"), (0.2, "BW")):
            _box(right, at + shift, [each for each in of_kinds[kind] if each.stage == stage], stage, width=0.34)
    right.set_xticks(range(len(kinds)), [in_drawing(kind.replace("_", "\n")) for kind in kinds])
    _label(left, right, len(of_kinds) - len(kinds), known)
    title = f"{found.model}, batch {found.batch}, {found.dtype}: layers {found.layers_from} against measured"
    figure.suptitle(in_drawing(f"{title}\n{_said(found)}"), fontsize=11)
    shows = "relative errors of layers, by stage and by kind"
    write_figure(figure, target, title=f"{found.model}: {shows}", shows=shows, force=force)


def _box(panel: Axes, at: float, layers: Sequence[LayerError], stage: str, *, width: float) -> None:
    errors = [100 * min(each.re, _LEGIBLE) for each in layers if each.re is not None]
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
        showmeans=True,
        patch_artist=True,
        boxprops={"facecolor": colour, "alpha": 0.25, "edgecolor": colour},
        medianprops={**lines, "linewidth": 2},
        whiskerprops=lines,
        capprops=lines,
        meanprops={"marker": "D", "markerfacecolor": colour, "markeredgecolor": "white", "markersize": 6},
    )
    # Spread evenly over the width, in the order of the model: layers of one error do not hide each other.
    places = [at + width * 0.7 * ((index + 0.5) / len(errors) - 0.5) for index in range(len(errors))]
    panel.plot(places, errors, "o", color=colour, markersize=2.5, alpha=0.6)


def _label(left: Axes, right: Axes, hidden: int, known: Sequence[LayerError]) -> None:
    from matplotlib.lines import Line2D

    for panel in (left, right):
        panel.axhline(0, color="0.4", linewidth=0.9)
        panel.grid(True, axis="y", color="0.9", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("(estimated - measured) / measured, %")
    left.set_xlabel("stage")
    beyond = sum(each.re is not None and each.re > _LEGIBLE for each in known)
    right.set_xlabel(
        "kind of layer, the one of most seconds first"
        + (f"; {hidden} more kinds are not drawn" if hidden else "")
        + (f"; {beyond} errors above {_LEGIBLE:.0%} stand there" if beyond else "")
    )
    handles = [
        Line2D([], [], color=_COLOURS[stage], marker="s", linestyle="", label=stage, alpha=0.6)
        for stage in ("FW", "BW")
    ]
    handles.append(Line2D([], [], color="0.4", marker="D", linestyle="", label="mean"))
    right.legend(handles=handles, fontsize=8, ncols=3, loc="upper right")


def _titled(found: LayerValidation, stage: str) -> str:
    errors = found.stages[stage]
    return f"{stage} ({errors.count})" + ("" if errors.wre is None else f"\nWRE {errors.wre:.1%}")


def _said(found: LayerValidation) -> str:
    whole = found.network
    said = "" if whole.re is None or whole.wre is None else f"network: RE {whole.re:+.1%}, WRE {whole.wre:.1%}"
    fitted_on, regressed = found.of_regressed
    return f"{said}; {fitted_on} of {regressed} regressed layers have swept shapes" if regressed else said
