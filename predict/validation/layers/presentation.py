"""Errors of estimated layers as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import counted, format_difference, format_seconds, format_share
from predict.validation.layers.comparison import Errors, LayerError, LayerValidation

_SHOWN_LAYERS = 20
_COLUMNS = ("layers", "measured", "estimated", "RE", "mean |RE|", "WRE")


def print_layers(validation: LayerValidation) -> None:
    """Stages and network, blocks, the layers that miss most seconds, and what is to be known of all of them."""
    console = open_console()
    on_host = f"{counted(validation.ranks_on_host, 'rank')} on the host"
    case = f"{validation.model}, batch {validation.batch}, {on_host}, {validation.dtype}"
    title = f"{case}: layers {validation.layers_from} against measured"
    parts: dict[str, Errors] = {**validation.stages, "network": validation.network}
    if validation.held_out is not None and validation.fitted_on is not None:
        parts |= {"shapes not fitted on": validation.held_out, "shapes fitted on": validation.fitted_on}
    console.print(table(("", *_COLUMNS), _rows(parts), title=title))
    console.print(table(("block", *_COLUMNS), _rows(validation.blocks), title="By block of the model's names"))
    worst = sorted(validation.layers, key=lambda layer: -abs(layer.estimated_s - layer.measured_s))
    shown = worst[:_SHOWN_LAYERS]
    more = f" of {len(worst)} (all with --json)" if len(worst) > len(shown) else ""
    columns = ("layer", "kind", "stage", "measured", "estimated", "RE", "WRE", "source", "fitted on")
    title = f"Layers, sorted by their error in seconds: {len(shown)}{more}"
    console.print(table(columns, [_layer_row(layer) for layer in shown], title=title))
    for line in lines_of(validation):
        console.print(line)


def lines_of(validation: LayerValidation) -> list[str]:
    """Which errors are of layers that no regressor was fitted on, where estimates come from, and what was left out."""
    shares = ", ".join(f"{source} {format_share(share)}" for source, share in validation.sources.items())
    lines = [
        "RE: (estimated - measured) / measured; for several layers, RE of their sums. WRE: mean |estimated -"
        " measured| over mean measured (KernelMLP, equations 1 to 3).",
        f"estimated seconds by source: {shares}",
    ]
    fitted_on, regressed = validation.of_regressed
    if regressed:
        said = (
            f"{fitted_on} of {regressed} regressed layers have a shape that was swept for their regressor. Their"
            " errors compare two measurements of one kernel and are not held out"
            if fitted_on
            else f"none of {regressed} regressed layers has a shape that was swept for its regressor: all are held out"
        )
        lines.append(said)
    if validation.unmeasured:
        named = ", ".join(validation.unmeasured[:3]) + (", ..." if len(validation.unmeasured) > 3 else "")
        lines.append(f"left out, not measured at batch {validation.batch}: {len(validation.unmeasured)} ({named})")
    lines += [f"extrapolated: {line}" for line in validation.extrapolated]
    return lines + [f"note: {line}" for line in validation.notes]


def _rows(parts: Mapping[str, Errors]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(errors.count),
            format_seconds(errors.measured_s),
            format_seconds(errors.estimated_s),
            *("" if value is None else format_difference(value) for value in (errors.re,)),
            *("" if value is None else format_share(value) for value in (errors.mean_re, errors.wre)),
        )
        for name, errors in parts.items()
    ]


def _layer_row(layer: LayerError) -> tuple[str, ...]:
    return (
        layer.layer,
        layer.kind,
        layer.stage,
        format_seconds(layer.measured_s),
        format_seconds(layer.estimated_s),
        "" if layer.re is None else format_difference(layer.re),
        format_difference(layer.wre),
        layer.source,
        "yes" if layer.fitted_on else "",
    )
