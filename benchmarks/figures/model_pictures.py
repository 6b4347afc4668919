"""Pictures of docs/model, one a concept, drawn from what `predict` says.

python benchmarks/figures/model_pictures.py -o docs/images/model
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from paradl_bench.core.terminal.pictures import COLOURS, new_figure, write_figure
from predict import load_profile
from predict.api.loaded_profile import LoadedProfile

PROFILE = Path(__file__).parents[2] / "results/cpu-2core/2026-11-21-ffbe79c/accuracy/profile.json"
MODEL, EIGHT = "resnet18", {"strategy": "d8", "batch": 32}
LARGE, GPU = "gpt2-medium", "h100-sxm"
_SHOWN_LAYERS = 12
_TOKENS = 8192


def main() -> None:
    """Draw them all into a folder; those that are there are replaced."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    measured, shipped = load_profile(PROFILE), load_profile(GPU)
    for name, (figure, shows) in pictures(measured, shipped).items():
        write_figure(figure(), str(output / f"{name}.svg"), title=name, shows=shows, force=True)


def pictures(measured: LoadedProfile, shipped: LoadedProfile) -> dict[str, tuple[Callable[[], Figure], str]]:
    """By name, how each is drawn and what it shows."""
    return {
        "compute": (lambda: layers(measured), "seconds of the layers that take most"),
        "communication": (measured.plot, "measured and fitted seconds of collectives"),
        "simulate": (lambda: streams(measured, MODEL, **EIGHT), "streams of one rank over an iteration"),
        "closed-forms": (lambda: evaluators(measured), "iteration over ranks by several evaluators"),
        "prediction": (lambda: waterfall(measured), "steps of an iteration, each behind the last"),
        "interval": (measured.sweep(MODEL, ["data"], ranks=[2, 4, 8, 16], batch=8).plot, "iteration and its band"),
        "what-if": (
            measured.what_if(
                MODEL, batch=32, strategy="d8", vary=["bandwidth=0.25:4:log", "peak-flops=0.25:4:log"]
            ).plot,
            "iteration over bandwidth and over FLOP/s",
        ),
        "search": (
            shipped.search(LARGE, ranks=64, batch=512, memory="80GiB", top=8, pareto=True).plot,
            "time over memory",
        ),
        "memory": (lambda: memory(shipped), "what the fullest rank holds"),
        "plans": (
            lambda: streams(shipped, "vgg16", strategy="p4", batch=64, micro_batches=4, schedule="1f1b"),
            "tasks of four stages of a pipeline",
        ),
        "context": (lambda: context(shipped), "iteration by how ranks exchange keys and values"),
        "experts": (lambda: experts(shipped), "parts of an iteration by the load of the busiest rank"),
    }


def layers(profile: LoadedProfile) -> Figure:
    """Compute of a rank by layer: measured seconds, and what effects add to them."""
    entries = profile.predict(MODEL, EIGHT["strategy"], batch=EIGHT["batch"]).explain().ledger.roles[0].entries
    computed = [entry for entry in entries if entry.phase in ("FW", "BW") and "group" not in entry.details]
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for place, entry in enumerate(computed[:_SHOWN_LAYERS]):
        added_s = entry.total_s - entry.base_s
        axes.barh(place, 1e3 * entry.base_s, color=COLOURS[0], label="" if place else entry.source)
        axes.barh(place, 1e3 * added_s, left=1e3 * entry.base_s, color=COLOURS[1], label="" if place else "added")
    _name_rows(axes, [entry.name for entry in computed[:_SHOWN_LAYERS]])
    axes.set_xlabel("ms of an iteration")
    axes.legend(fontsize=8)
    return figure


def streams(profile: LoadedProfile, model: str, *, strategy: str, batch: int, **options: object) -> Figure:
    """Tasks of each role as bars, a row a stream."""
    tasks = profile.timeline(model, strategy, batch=batch, **options).to_frame()
    rows = list(dict.fromkeys(zip(tasks.role, tasks.stream, strict=True)))
    phases = list(dict.fromkeys(tasks.phase))
    figure = new_figure(9, 1.4 + 0.45 * len(rows))
    axes = figure.subplots()
    for phase in phases:
        own = tasks[tasks.phase == phase]
        places = [rows.index(row) for row in zip(own.role, own.stream, strict=True)]
        widths = 1e3 * (own.end_s - own.start_s)
        axes.barh(
            places, widths, left=1e3 * own.start_s, color=COLOURS[phases.index(phase) % len(COLOURS)], label=phase
        )
    _name_rows(axes, [f"{role}, {stream}" for role, stream in rows])
    axes.set_xlabel("ms since the iteration began")
    axes.legend(fontsize=8, ncols=len(phases), loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure


def evaluators(profile: LoadedProfile) -> Figure:
    """The same points by the simulator and by the papers' equations."""
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for index, name in enumerate(("simulate", "paradl", "osf", "csf", "dag")):
        frame = profile.sweep(MODEL, ["data"], ranks=[2, 4, 8, 16], batch=8, evaluator=name).to_frame()
        axes.plot(frame.ranks, 1e3 * frame.iteration_s, "o-", label=name, color=COLOURS[index % len(COLOURS)])
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms an iteration")
    axes.legend(fontsize=8)
    return figure


def waterfall(profile: LoadedProfile) -> Figure:
    """Steps of an iteration, each behind the last."""
    steps = profile.predict(MODEL, EIGHT["strategy"], batch=EIGHT["batch"]).explain().ledger.waterfall_s
    figure = new_figure(7, 2.6)
    axes = figure.subplots()
    begin_s = 0.0
    for place, seconds in enumerate(steps.values()):
        axes.barh(place, 1e3 * seconds, left=1e3 * begin_s, color=COLOURS[0])
        begin_s += seconds
    _name_rows(axes, list(steps))
    axes.set_xlabel("ms of an iteration")
    return figure


def memory(profile: LoadedProfile) -> Figure:
    """What the fullest of eight ranks holds at its peak."""
    figure = new_figure(7, 3)
    axes = figure.subplots()
    strategies = ("d8", "z2d8", "z3d8", "d4t2")
    for place, strategy in enumerate(strategies):
        parts = profile.predict(LARGE, strategy, batch=32).prediction.memory.memory_parts_bytes
        begin = 0.0
        for index, (part, held) in enumerate(parts.items()):
            gib = held / 2**30
            axes.barh(place, gib, left=begin, color=(*COLOURS, "0.6")[index], label="" if place else part)
            begin += gib
    _name_rows(axes, list(strategies))
    axes.set_xlabel("GiB of a rank")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def context(profile: LoadedProfile) -> Figure:
    """One long sequence over more ranks, by each exchange of keys and values."""
    figure = new_figure(9, 3.5)
    sides = figure.subplots(1, 2)
    ranks = [2, 4, 8]
    for index, exchange in enumerate(("gather", "all-to-all", "ring")):
        asked = {"batch": 1, "sequence": _TOKENS, "context_exchange": exchange}
        predicted = [profile.predict("llama-3-8b", f"x{count}", **asked).prediction for count in ranks]
        waited_s = [prediction.time.breakdown_s["exposed_communication"] for prediction in predicted]
        for axis, seconds in zip(sides, ([each.iteration_s for each in predicted], waited_s), strict=True):
            axis.plot(ranks, [1e3 * each for each in seconds], "o-", label=exchange, color=COLOURS[index])
    for axis, what in zip(sides, ("ms an iteration", "ms of communication that nothing hides"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, map(str, ranks))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("ranks along the axis")
        axis.set_ylabel(what)
    sides[0].legend(fontsize=8)
    return figure


def experts(profile: LoadedProfile) -> Figure:
    """What an iteration is made of as the busiest rank has more rows."""
    figure = new_figure(7, 3)
    axes = figure.subplots()
    loads = (1, 1.5, 2, 4)
    for place, load in enumerate(loads):
        asked = {"batch": 64, "sequence": 1024, "expert_imbalance": load}
        parts = dict(profile.predict("mixtral-8x7b", "d8e8", **asked).prediction.time.breakdown_s)
        # Parts of these parts, added up over the whole iteration.
        del parts["exposed_communication"]
        begin_s = 0.0
        for index, (part, seconds) in enumerate(parts.items()):
            axes.barh(place, seconds, left=begin_s, color=COLOURS[index], label="" if place else part)
            begin_s += seconds
    _name_rows(axes, [f"{load:g} times the even share" for load in loads])
    axes.set_xlabel("s of an iteration")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _name_rows(axes: object, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)  # type: ignore[attr-defined]
    axes.invert_yaxis()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
