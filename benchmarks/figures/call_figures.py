"""Pictures of calls that were timed one by one: figures 6 and 8 of ParaDL, 5 and 7 of OSF; data of timed_calls.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from timed_calls import CONGESTED, EXCHANGED, PLANNED_FUSIONS, QUIET, TimedRun

from paradl_bench.core.files.storage import read_json
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Stack = tuple[str, Mapping[str, float]]
"""Label of a bar, and its parts by name; milliseconds."""
_MS = 1e3
_OUTLIER = 1.5
"""Times its median, from which on a transfer is drawn as an outlier."""
_SHORTEST_S = 1e-6
_OSF_PARTS = {
    "waiting_s": "waits for the last rank (NEGOTIATE)",
    "transferring_s": "transfers (ALLREDUCE)",
    "filling_s": "waits for a full bucket (WAIT)",
    "copying_s": "copies gradients back (MISC)",
}
_EXCHANGES = {"": "DDP's buckets"}


def draw_outliers(runs: Sequence[TimedRun], target: str) -> None:
    """Single transfers against the size of their message, a panel a run."""
    figure = new_figure(7, 3.2 * len(runs))
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_transfers(axes, run)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    panels[-1].set_xlabel("message [bytes]")
    write_figure(figure, target, title="outliers", shows="transfers of single calls by size", force=True)


def _draw_transfers(axes: Axes, run: TimedRun) -> None:
    of_sizes, outliers = transfers_by_size(run), 0
    for message_bytes, _, near, far in of_sizes:
        outliers += len(far)
        for seconds, colour in ((near, COLOURS[0]), (far, COLOURS[1])):
            axes.plot([message_bytes] * len(seconds), _MS * seconds, ".", color=colour, markersize=4)
    medians = [_MS * median_s for _, median_s, _, _ in of_sizes]
    axes.plot([size for size, *_ in of_sizes], medians, "k_", markersize=11, label="median of an operation and size")
    axes.plot([], [], ".", color=COLOURS[1], label=f"over {_OUTLIER:g} times it")
    total = sum(len(call.transfers_us) for call in run.calls)
    axes.set_xscale("log")
    axes.set_yscale("log")
    named = run.name.removeprefix("train-").replace("-", " ")
    axes.set_title(f"{named}: {outliers} of {total} calls are outliers", fontsize=10)
    axes.set_ylabel("transfer [ms]")


def transfers_by_size(run: TimedRun) -> list[tuple[int, float, Floats, Floats]]:
    """By operation and size: its bytes, the median transfer, the transfers near it and those far above it; seconds."""
    alike = grouped(run.calls, lambda call: (call.message_bytes, call.operation))
    found = []
    for (message_bytes, _), calls in sorted(alike.items()):
        # A transfer that was over before all ranks had come took no time that could be drawn.
        seconds = np.maximum(1e-6 * np.concatenate([call.transfers_us for call in calls]), _SHORTEST_S)
        median_s = float(np.median(seconds))
        far = seconds > _OUTLIER * median_s
        found.append((message_bytes, median_s, seconds[~far], seconds[far]))
    return found


def draw_compute(runs: Sequence[TimedRun], target: str) -> None:
    """Measured forward and backward in parts. Convolutions are the rest: their own measurement holds the copies too."""
    stacks: list[Stack] = []
    for run in runs:
        others = sum(seconds for kind, seconds in run.layers_s.items() if not kind.startswith("conv"))
        convolutions = max(run.compute_s - others - run.copies_s, 0.0)
        parts = {"convolutions": convolutions, "other layers": others, "split and concatenation": run.copies_s}
        stacks.append((f"{run.model}\n{run.strategy}", {name: _MS * seconds for name, seconds in parts.items()}))
    _draw_stacks(stacks, target, "forward and backward of a rank [ms]", title="compute of filter and channel")


def draw_communication(runs: Sequence[TimedRun], target: str, *, by_rank: bool) -> None:
    """What communication of gradients is made of: of each rank, or by how gradients are merged."""
    stacks: list[Stack] = []
    for run in runs:
        for rank in run.spent if by_rank else run.spent[:1]:
            chosen = [rank] if by_rank else run.spent
            parts = {
                name: _MS * float(np.mean([getattr(one, part) for one in chosen])) for part, name in _OSF_PARTS.items()
            }
            below = f"rank {rank.rank}" if by_rank else _merged(run)
            stacks.append((f"{run.model}\n{below}", parts))
    _draw_stacks(stacks, target, "communication of gradients [ms]", title="communication, in the parts of OSF")


def _merged(run: TimedRun) -> str:
    """How gradients were merged, in two lines at most."""
    return _EXCHANGES.get(run.fused_by, run.fused_by.replace(", ", "\n"))


def _draw_stacks(stacks: Sequence[Stack], target: str, label: str, *, title: str) -> None:
    figure = new_figure(2.2 + 1.25 * len(stacks), 4.2)
    axes = figure.subplots()
    names = list(stacks[0][1])
    for index, (_, parts) in enumerate(stacks):
        bottom = 0.0
        for name, colour in zip(names, COLOURS, strict=False):
            axes.bar(index, parts[name], 0.6, bottom=bottom, color=colour, label=name if index == 0 else None)
            bottom += parts[name]
        axes.annotate(f"{bottom:.3g}", (index, bottom), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(stacks)), [name for name, _ in stacks], fontsize=8)
    axes.set_ylabel(label)
    axes.margins(y=0.1)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    write_figure(figure, target, title=title, shows=f"{title}, stacked", force=True)


def chosen(runs: Sequence[TimedRun], *names: str) -> list[TimedRun]:
    """Those of these names that are there, in this order."""
    by_name = {run.name: run for run in runs}
    return [by_name[name] for name in names if name in by_name]


def read_calls(path: Path) -> list[TimedRun]:
    """Runs as `timed_calls.py` writes them."""
    return read_json(path, list[TimedRun])


def draw_calls(runs: Sequence[TimedRun], output: Path) -> None:
    """The pictures of calls, each of the runs that are there."""
    single = chosen(runs, "train-resnet18-d2-none", "train-resnet18-f2", "train-cosmoflow-s2")
    draw_outliers(single, str(output / "figure-6-outliers.png"))
    if uplink := chosen(runs, *(f"train-resnet18-d2-{name}" for name in (QUIET, CONGESTED))):
        draw_outliers(uplink, str(output / "figure-6-congestion.png"))
    if shared := chosen(runs, "train-resnet18-f2", "train-resnet18-c2"):
        draw_compute(shared, str(output / "figure-8-split-and-concatenation.png"))
    ddp = chosen(runs, *(f"train-{model}-d2-ddp" for model in EXCHANGED))
    draw_communication(ddp, str(output / "osf-figure-5-ranks.png"), by_rank=True)
    merged = (f"train-{model}-d2-{name}" for model in EXCHANGED for name in ("none", "buffer", *PLANNED_FUSIONS, "ddp"))
    draw_communication(chosen(runs, *merged), str(output / "osf-figure-7-fusion.png"), by_rank=False)
