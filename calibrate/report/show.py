"""A profile in words and tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.fitting.collectives.outliers import SHOWN_OUTLIERS, outlier_words
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.compared_runs import prediction_errors
from calibrate.profile.profile import Profile
from calibrate.profile.unlike_parts import unlike_parts
from calibrate.report.explanation import ModelSums, model_sums, weaknesses
from calibrate.report.sections.compared_show import print_compared
from calibrate.report.sections.contexts_show import print_contexts
from calibrate.report.sections.input_show import print_input_side
from calibrate.report.sections.kernel_show import print_kernel_models
from calibrate.report.sections.roofline_show import device_lines
from calibrate.report.weakness import Weakness
from paradl_bench.core.terminal.tables import table, table_of
from paradl_bench.core.units import format_bytes, format_difference, format_seconds
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.emulation import simulated_messages, words_of_emulation
from paradl_bench.records.measurement import Environment

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_WEAKNESSES = 8
_SHOWN_CANDIDATES = 3


def explanation(profile: Profile) -> dict[str, object]:
    """What ``calibrate show --json`` prints: the profile's statistics but for its long tables, and what follows."""
    return {
        "created_utc": profile.created_utc,
        "sources": profile.sources,
        "environments": profile.environments,
        "devices": profile.devices,
        "cluster": profile.cluster,
        "layer_times": len(profile.layer_times),
        "models": model_sums(profile),
        "copies": profile.copies,
        "communication": profile.communication,
        "communication_choices": profile.communication_choices,
        "input_side": profile.input_side,
        "contexts": profile.contexts,
        "prediction_errors": {
            kind: error._asdict() for kind, error in prediction_errors(profile.runs_compared).items()
        },
        "kernel_models": profile.kernel_models,
        "notes": profile.notes,
        "weaknesses": weaknesses(profile),
    }


def print_profile(profile: Profile, console: Console, path: Path | str = "PROFILE") -> None:
    """Explain all of a profile to a person; ``path`` is where the commands find it."""
    _print_origin(profile, console)
    sums = model_sums(profile)
    if sums:
        print_models(sums, console)
    if profile.copies:
        _print_copies(profile, console)
    if profile.communication:
        _print_communication(profile, console)
    for line in outlier_words(profile.communication)[:SHOWN_OUTLIERS]:
        console.print(line)
    if profile.communication_choices:
        _print_choices(profile, console)
    print_kernel_models(profile.kernel_models, console)
    print_input_side(profile.input_side, console)
    print_contexts(profile, console)
    print_compared(profile, console)
    # Profiles of before do not hold the first among their notes.
    for note in dict.fromkeys((*unlike_parts(profile), *profile.notes)):
        console.print(f"note: {note}")
    _print_weaknesses(weaknesses(profile), console, path)


def origin_lines(profile: Profile) -> Iterator[str]:
    """What was measured when, and the rates of its devices."""
    yield f"Profile of {profile.created_utc}"
    for environment in profile.environments:
        yield f"Measured on {_environment(environment)}"
    yield from device_lines(profile.devices)


def _print_origin(profile: Profile, console: Console) -> None:
    for line in (*origin_lines(profile), f"By {' '.join(profile.command_line)}"):
        console.print(line)
    rows = []
    for source in profile.sources:
        complete = "yes" if source.complete else "no"
        load = source.host_load
        host = "" if load is None else "busy" if load.is_busy else "quiet"
        rows.append((source.path, source.kind, source.created_utc, complete, host, " ".join(source.command_line)))
    columns = ("directory", "kind", "when", "complete", "host", "command")
    console.print(table(columns, rows, title="Measurements"))


def _environment(environment: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    memory = format_bytes(environment.memory_bytes) if environment.memory_bytes else "memory not known"
    words = words_of_emulation(environment.emulated)
    label = "" if simulated_messages(environment.emulated) else "emulated: "
    emulated = f"; {label}{words}" if words else ""
    return (
        f"{environment.hostname or 'several hosts'}: {environment.device_count} x {environment.device_name}"
        f" ({environment.device}), {memory}; {versions or 'versions not known'}{emulated}"
    )


def print_models(sums: tuple[ModelSums, ...], console: Console) -> None:
    """How layers add up to iterations, one by one model, batch, what it was computed in, and ranks on the host."""
    title = "Layers: their sum beside an iteration without probes (medians)"
    console.print(table_of([_model_cells(model) for model in sums], title=title, keys=4))
    console.print(
        "remainder: the iteration minus layers, time between operations and weight update, with sign and 90%"
        " interval. blocks: standard deviation between blocks spread over time."
    )


def _model_cells(sums: ModelSums) -> dict[str, str]:
    low, high = sums.remainder_interval
    return {
        "model": sums.model,
        "computed in": sums.computed_in,
        "batch": str(sums.batch),
        "ranks on host": str(sums.ranks_on_host),
        "layers": f"{sums.layers_measured}/{sums.layers}",
        "FW": format_seconds(sums.fw_layers_s),
        "BW": format_seconds(sums.bw_layers_s),
        "between": format_seconds(sums.fw_between_s + sums.bw_between_s),
        "WU": format_seconds(sums.wu_s),
        "sum": format_seconds(sums.sum_s),
        "iteration": format_seconds(sums.iteration_s),
        "remainder": f"{format_difference(sums.remainder_relative)} "
        f"[{format_difference(low)}, {format_difference(high)}]",
        "noise floor": f"{sums.noise_floor_relative:.1%}",
        "blocks": f"±{sums.common_relative_sd:.1%}",
    }


def _print_copies(profile: Profile, console: Console) -> None:
    rows = [
        {
            "copy": copy.direction,
            "ranks on host": str(copy.ranks_on_host),
            "a tensor": format_seconds(copy.alpha_s),
            "a byte": _per_byte(copy.beta_s_per_byte),
            "sd": f"±{copy.relative_sd:.1%}",
        }
        for copy in profile.copies
    ]
    console.print(table_of(rows, title="Copies of gradients into and out of buckets, and sums"))


def _print_communication(profile: Profile, console: Console) -> None:
    title = "Communication: alpha and beta, by regression on the algorithm's cost terms (± standard deviation)"
    console.print(table_of([_fit_cells(fit) for fit in profile.communication], title=title, keys=3))
    console.print(
        "alpha: time of one step of the algorithm; a call takes several steps, a ring all-reduce 2 (p - 1)."
        " Residual and held out: median relative error at the sizes fitted, and at sizes (or rank counts) left"
        " out in turn. Beyond the range of the fit, the line is extrapolated."
    )
    for operation in dict.fromkeys(operations()[fit.operation] for fit in profile.communication):
        if operation.size_factor(2) != 1:
            console.print(
                f"fitted on, of {operation.name}: bytes of {operation.message_bytes_is}. nccl-tests' size is that times"
                " the ranks."
            )


def _fit_cells(fit: CommunicationFit) -> dict[str, str]:
    return {
        "operation": fit.operation,
        "library": fit.library,
        "level": fit.level,
        "regime": fit.regime,
        "algorithm": fit.algorithm,
        "alpha a step": _alpha(fit),
        "beta": _beta(fit),
        "fitted on": f"{format_bytes(fit.bytes_range[0])} to {format_bytes(fit.bytes_range[1])}",
        "ranks": "-".join(map(str, dict.fromkeys(fit.ranks_range))),
        "residual": f"{fit.residual_relative_median:.1%}",
        "held out": f"{fit.held_out_relative_error:.1%}",
        "held-out ranks": _error(fit.held_out_ranks_relative_error),
        "blocks": f"±{fit.block_relative_sd:.1%}" if fit.block_relative_sd else "not known",
    }


def _error(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.1%}"


def _print_choices(profile: Profile, console: Console) -> None:
    rows: list[tuple[str, ...]] = []
    for choice in profile.communication_choices:
        place: tuple[str, ...] = (choice.operation, choice.library, choice.level)
        for candidate in choice.candidates[:_SHOWN_CANDIDATES]:
            errors = candidate.held_out_relative_error, candidate.held_out_ranks_relative_error
            rows.append((*place, candidate.form, *map(_error, errors)))
            place = ("", "", "")
        more = choice.considered - min(len(choice.candidates), _SHOWN_CANDIDATES)
        if more:
            rows.append(("", "", "", f"and {more} more", "", ""))
    title = (
        "Forms that were considered: mean relative error at sizes, and at rank counts, left out in turn. The"
        " first form was chosen"
    )
    columns = ("operation", "library", "level", "form", "held out", "held-out ranks")
    console.print(table(columns, rows, title=title))
    console.print(
        "Of the forms within one standard error of the best, and within the noise of a point, the form with the"
        " fewest parameters is chosen. Rank counts are fitted separately only where no form lies within one"
        " standard error of that."
    )


def _alpha(fit: CommunicationFit) -> str:
    inside = f", in a node {format_seconds(fit.inner.alpha_s)}" if fit.inner else ""
    return f"{format_seconds(fit.alpha_s)} ± {format_seconds(math.sqrt(max(fit.covariance[0][0], 0.0)))}{inside}"


def _beta(fit: CommunicationFit) -> str:
    sd = math.sqrt(max(fit.covariance[1][1], 0.0))
    if fit.doubling_s:
        return f"{format_seconds(fit.doubling_s)} a doubling ± {sd / fit.doubling_s:.1%}"
    relative = f" ± {sd / fit.beta_s_per_byte:.1%}" if fit.beta_s_per_byte else ""
    reduction = f", reduction {_per_byte(fit.gamma_s_per_byte)}" if fit.gamma_s_per_byte else ""
    inside = f", in a node {_per_byte(fit.inner.beta_s_per_byte)}" if fit.inner and fit.inner.beta_s_per_byte else ""
    return f"{_per_byte(fit.beta_s_per_byte)}{relative}{reduction}{inside}"


def _per_byte(seconds: float) -> str:
    return f"{1e-9 / seconds:.3g} GB/s" if seconds else "0 s"


def _print_weaknesses(weak: tuple[Weakness, ...], console: Console, path: Path | str) -> None:
    if not weak:
        return
    rows = [
        (weakness.kind, weakness.text, "" if weakness.size is None else f"{weakness.size:.1%}", weakness.command)
        for weakness in weak[:_SHOWN_WEAKNESSES]
    ]
    columns = ("", "what", "size", "command")
    console.print(table(columns, rows, title="Weak points of this profile, and what would help most"))
    if len(weak) > _SHOWN_WEAKNESSES:
        lesser = f"{len(weak) - _SHOWN_WEAKNESSES} lesser ones: calibrate show {shlex.quote(str(path))} --format json"
        console.print(lesser, highlight=False)
