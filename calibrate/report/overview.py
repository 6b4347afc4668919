"""A profile on one screen: what it holds, how well, and what would help most. ``--all`` prints the rest."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import communication_seconds
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import Profile
from calibrate.profile.unlike_parts import unlike_parts
from calibrate.report.explanation import ModelSums, model_sums, weaknesses
from calibrate.report.sections.compared_show import compared_lines
from calibrate.report.sections.kernel_show import kernel_lines
from calibrate.report.show import origin_lines
from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import counted, format_bytes, format_difference, format_seconds
from paradl_bench.plan.collectives.catalog import operations

if TYPE_CHECKING:
    from rich.console import Console

_SMALL_BYTES, _LARGE_BYTES = 1024, 64 * 1024**2
_MOST = 3
"""Weaknesses, notes and the like that are shown; of rows of a table twice as many."""


def print_overview(profile: Profile, console: Console, path: Path | str = "PROFILE") -> None:
    """One screen for a person; ``path`` is where the commands on it find the profile."""
    for line in (*origin_lines(profile), _sources(profile)):
        console.print(line, highlight=False)
    models = grouped(model_sums(profile), lambda sums: (sums.model, sums.computed_in))
    if models:
        computed = {sums.computed_in for of_model in models.values() for sums in of_model}
        rows = [_model_cells(of_model, computed) for of_model in models.values()]
        _print_rows(rows, f"Layers in {' or '.join(computed)}, and their sum against measured iterations", 2, console)
    calls = grouped(profile.communication, lambda fit: (fit.operation, fit.library, fit.level))
    if calls:
        libraries = {library for _, library, _ in calls}
        rows = [_call_cells(fits, libraries) for fits in calls.values()]
        _print_rows(rows, f"Collectives through {' or '.join(libraries)}: fitted time of a call by size", 3, console)
        console.print(
            "Sizes, and GB/s of the bus, are as nccl-tests defines them. In brackets: another size, if no size so small"
            " or so large was measured, and how far the fit is from the time measured there. alpha: time of one step of"
            " the algorithm; a call takes several steps. held out: error at sizes left out of the fit.",
            highlight=False,
        )
    for line in _first(list(_other_lines(profile)), 2 * _MOST):
        console.print(line, highlight=False)
    for line in _first(dict.fromkeys((*unlike_parts(profile), *profile.notes)), _MOST):
        console.print(f"note: {line}", highlight=False)
    weak = weaknesses(profile)
    if weak:
        console.print("What would help most:", highlight=False)
    for weakness in weak[:_MOST]:
        size = "" if weakness.size is None else f" ({weakness.size:.1%})"
        console.print(f"{weakness.kind}: {weakness.text}{size}", highlight=False)
        console.print(f"  {weakness.command}", highlight=False)
    more = f", and {counted(len(weak) - _MOST, 'more weak point')}" if len(weak) > _MOST else ""
    console.print(f"All tables{more}: calibrate show {shlex.quote(str(path))} --all", highlight=False)


def _sources(profile: Profile) -> str:
    kinds = grouped(profile.sources, lambda source: source.kind)
    listed = ", ".join(f"{len(sources)} of {kind}" for kind, sources in kinds.items())
    unfinished = sum(not source.complete for source in profile.sources)
    busy = sum(source.host_load is not None and source.host_load.is_busy for source in profile.sources)
    said = [f"{counted(len(profile.sources), 'measurement')}: {listed}"]
    said += [f"{unfinished} not finished"] if unfinished else []
    said += [f"{busy} while the host was busy"] if busy else []
    return "; ".join(said)


def _print_rows(rows: Sequence[dict[str, str]], title: str, keys: int, console: Console) -> None:
    console.print(table_of(rows[: 2 * _MOST], title=title, keys=keys))
    if len(rows) > 2 * _MOST:
        console.print(f"and {len(rows) - 2 * _MOST} more: --all", highlight=False)


def _model_cells(sums: Sequence[ModelSums], computed: set[str]) -> dict[str, str]:
    """One model, over all batches and ranks on the host."""
    worst = max(sums, key=lambda batch_sums: abs(batch_sums.remainder_relative))
    return {
        "model": sums[0].model,
        "computed in": sums[0].computed_in if len(computed) > 1 else "",
        "layers": f"{min(batch_sums.layers_measured for batch_sums in sums)}/{sums[0].layers}",
        "batches": _listed(batch_sums.batch for batch_sums in sums),
        "ranks": _listed(batch_sums.ranks_on_host for batch_sums in sums),
        "iteration": _ends([batch_sums.iteration_s for batch_sums in sums], format_seconds),
        "unexplained": format_difference(worst.remainder_relative),
        "blocks": f"±{max(batch_sums.common_relative_sd for batch_sums in sums):.1%}",
    }


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(numbers))))


def _ends(values: Sequence[float], words: Callable[[float], str]) -> str:
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} to {high}"


def _call_cells(fits: Sequence[CommunicationFit], libraries: set[str]) -> dict[str, str]:
    """One operation through a library on a level, at the most ranks that were measured."""
    first = min(fits, key=lambda fit: fit.bytes_range)
    ranks = max(fit.ranks_range[1] for fit in fits)
    return {
        "operation": first.operation,
        "library": first.library if len(libraries) > 1 else "",
        "level": first.level,
        "ranks": _ends([fit.ranks_range[end] for fit in fits for end in (0, 1)], lambda count: f"{count:.0f}"),
        format_bytes(_SMALL_BYTES): _call_cell(fits, ranks, _SMALL_BYTES),
        format_bytes(_LARGE_BYTES): _call_cell(fits, ranks, _LARGE_BYTES, as_rate=True),
        "alpha": format_seconds(first.alpha_s),
        "held out": f"{max(fit.held_out_relative_error for fit in fits):.1%}",
    }


def _call_cell(fits: Sequence[CommunicationFit], ranks: int, wanted_bytes: int, *, as_rate: bool = False) -> str:
    """The fitted time of a call, or its bus bandwidth; how far that is from the measured one, where there is one.

    Args:
        wanted_bytes: size as nccl-tests counts it. Where none so small or so large was measured, the nearest stands for
            it, and is named.
    """
    operation = operations()[fits[0].operation]
    factor = operation.size_factor(ranks)
    fewest, most = min(fit.bytes_range[0] for fit in fits), max(fit.bytes_range[1] for fit in fits)
    message_bytes = min(max(round(wanted_bytes / factor), fewest), most)
    fitted_s = float(communication_seconds(operation, fits, ranks, message_bytes))
    size_bytes = round(message_bytes * factor)
    said = [] if size_bytes == wanted_bytes else [format_bytes(size_bytes)]
    points = (point for fit in fits for point in fit.measured)
    here_s = (point.measured_s for point in points if (point.ranks, point.message_bytes) == (ranks, message_bytes))
    measured_s = next(here_s, 0.0)
    if measured_s and fitted_s:
        said.append(format_difference((measured_s / fitted_s if as_rate else fitted_s / measured_s) - 1, 0))
    rate = operation.bus_bandwidth(ranks, message_bytes, fitted_s) if as_rate and fitted_s else 0.0
    cell = f"{rate / 1e9:.3g} GB/s" if as_rate else format_seconds(fitted_s)
    return cell + (f" ({', '.join(said)})" if said else "")


def _other_lines(profile: Profile) -> Iterator[str]:
    """What surrounds calls, copies, regressors, input and compared runs, a line each."""
    for (library, context), entries in grouped(profile.contexts, lambda one: (one.library, one.context)).items():
        yield f"{library}, {context}: {_context_words(entries)}"
    if profile.copies:
        rates = [1e-9 / copy.beta_s_per_byte for copy in profile.copies if copy.beta_s_per_byte]
        if rates:
            yield f"copies of gradients into and out of buckets: {_ends(rates, lambda rate: f'{rate:.3g} GB/s')}"
    yield from kernel_lines(profile.kernel_models)
    for side in profile.input_side:
        yield f"input: {side.source}"
    yield from compared_lines(profile)


def _context_words(entries: Sequence[InContext]) -> str:
    sizes = _ends(
        [float(size) for entry in entries for size in entry.bytes_range], lambda size: format_bytes(round(size))
    )
    operations_named = ", ".join(dict.fromkeys(entry.operation for entry in entries))
    factors = [entry.factor for entry in entries if not entry.waits]
    slower = (
        f" take {_ends(factors, lambda factor: f'{factor:.3g}')} times as long as idle" if factors else " wait for it"
    )
    return f"calls of {operations_named}, {sizes},{slower}"


def _first(lines: Iterable[str], most: int) -> list[str]:
    listed = list(lines)
    return listed[:most] + ([f"and {len(listed) - most} more: --all"] if len(listed) > most else [])
