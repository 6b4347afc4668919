"""Regressors of kernels in words: what each was fitted on, and how far off it is on kernels that it had not seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from calibrate.kernels.model import KernelModel
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_difference

if TYPE_CHECKING:
    from rich.console import Console


def kernel_lines(models: Sequence[KernelModel]) -> Iterator[str]:
    """A line a regressor, for the end of a fit."""
    for model in models:
        others = ", ".join(
            f"{candidate.model} {candidate.held_out_re:.1%}, {candidate.held_out_wre:.1%}"
            for candidate in model.candidates
            if candidate.model != model.model
        )
        chosen = next(candidate for candidate in model.candidates if candidate.model == model.model)
        yield (
            f"{model.title}: {model.kernels} kernels, {model.model}; held out RE {chosen.held_out_re:.1%}, "
            f"WRE {chosen.held_out_wre:.1%}" + (f" ({others})" if others else "")
        )


def print_kernel_models(models: Sequence[KernelModel], console: Console) -> None:
    """A table of all candidates of all regressors; nothing where there are none."""
    if not models:
        return
    rows = []
    for model in models:
        place = (model.title, str(model.kernels))
        for candidate in sorted(model.candidates, key=lambda one: one.model != model.model):
            taken = candidate.model == model.model
            cells = (
                place[0],
                candidate.model + (" (taken)" if taken else ""),
                place[1],
                f"{candidate.validation_re:.1%}",
                f"{candidate.held_out_re:.1%}",
                f"{candidate.held_out_wre:.1%}",
                format_difference(candidate.held_out_bias),
                f"x/ {math.exp(model.interval_log):.2f}" if taken else "",
            )
            rows.append(cells)
            place = ("", "")
    columns = ("kernel", "model", "kernels", "chosen by", "RE", "WRE", "bias", "90% interval")
    console.print(table(columns, rows, title="Regressors of kernels: errors on the held-out fifth of the kernels"))
    console.print(
        "RE: mean |estimated - measured| / measured. WRE: the same over the sum of all seconds. chosen by: RE on"
        " the 16% of kernels used to choose a candidate. bias: median error with its sign."
    )
