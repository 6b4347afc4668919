"""Primus: pipeline schedules of Llama-2 7B over eight stages on MI300, as ratios of throughput to 1F1B.

Layers take their FLOPs over a constant share of the device's peak, which ratios do not depend on; transfers take its
link to one of seven others. Each stage has as many blocks, as Megatron-LM cuts. How many micro-batches a mini-batch had
is not published: each of several numbers is predicted, and none is chosen.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from public.toolkit import run
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run

from paradl_bench.network.graph import read_network
from paradl_bench.records.devices.sheet import sheet_of_measured

RUNS = Path("primus-schedules", "llama2_7b_mi300_pp8.csv")
NEEDS = (RUNS,)
CITED = "AMD-AGI/Primus @ fd1eeabb, MIT"
MODEL, BLOCKS, STAGES = "sets.simumax.models:llama2_7b", 32, 8
PLACE = Place("AMD Instinct MI300X", 192_000_000_000, "mi300x")
MICRO_BATCHES = (16, 32, 64, 128)
SHARE_OF_PEAK = 0.5
EACH_WITHIN = 0.04
LINK_ALPHA_S = 1e-5
"""Of a transfer between two devices; no sweep is of any."""
SCHEDULES = {"1f1b": ("1f1b", STAGES), "interleaved": ("interleaved", 2 * STAGES), "zbb": ("zb", STAGES)}
"""By the publisher's name: the tool's, and how many stages there are."""
CAUSES = (
    "The number of micro-batches is not published, so that no column can be told to be the run's.",
    "zbb is held against ZB-H1, the tool's one schedule of its kind: theirs may keep more micro-batches under way.",
)


def profile(data: Path, work: Path) -> Path:
    """The profile of FLOPs, and a cluster file with the device's link beside it."""
    work.mkdir(parents=True)
    run("paradl_bench", "describe", MODEL, "-o", str(work / "network.json"))
    network = read_network(work / "network.json")
    sheet = sheet_of_measured(PLACE.device_name)
    if sheet is None or sheet.device_link_bytes_per_s is None:
        raise ValueError(f"no link is known of {PLACE.device_name}")
    rate = SHARE_OF_PEAK * sheet.peak("bf16")
    timed = [
        Timed(each, each.fw_flops / rate, (each.bw_input_flops + each.bw_weight_flops) / rate)
        for each in network.layers
    ]
    write_layers(work / "layers", data / RUNS, network, timed, PLACE, "bf16")
    beta = (STAGES - 1) / sheet.device_link_bytes_per_s
    level = {"name": "node", "ranks": STAGES, "alpha_s": LINK_ALPHA_S, "beta_s_per_byte": beta}
    (work / "cluster.yaml").write_text(json.dumps({"name": PLACE.cluster, "levels": [level]}))
    run("calibrate", "fit", str(work / "layers"), "-o", str(work / "profile.json"))
    return work / "profile.json"


def cuts(stages: int) -> str:
    """The first layer of each stage but the first."""
    return ",".join(f"blocks.{BLOCKS * stage // stages}.norm_1" for stage in range(1, stages))


def seconds(fitted: Path, schedule: str, stages: int, micro_batches: int) -> float:
    """Of an iteration of so many micro-batches of one sample."""
    about = ("--from-profile", str(fitted), "--model", MODEL, "--strategy", f"p{STAGES}", "--batch", str(micro_batches))
    how = ("--schedule", schedule, "--micro-batches", str(micro_batches), "--stages", cuts(stages), "--dtype", "bf16")
    told = json.loads(run("predict", *about, *how, "--cluster", str(fitted.with_name("cluster.yaml")), "--json"))[0]
    return float(told["iteration_s"])


def predictions(data: Path, work: Path) -> dict[str, tuple[Predicted, ...]]:
    """Ratios to 1F1B with as many micro-batches, of schedules that the tool has."""
    fitted = profile(data, work)
    found = {
        name: {count: seconds(fitted, schedule, stages, count) for count in MICRO_BATCHES}
        for name, (schedule, stages) in SCHEDULES.items()
    }
    base = found.pop("1f1b")
    return {
        name: tuple(Predicted(f"{count} micro-batches", base[count] / each[count]) for count in MICRO_BATCHES)
        for name, each in found.items()
    }


def read_answers(data: Path) -> dict[str, float]:
    """Throughput of each schedule over that of 1F1B: never read by what predicts."""
    with open(data / RUNS, newline="") as stream:
        rates = {row["schedule"]: float(row["tokens_per_s_per_gpu"]) for row in csv.DictReader(stream)}
    return {name: rate / rates["1f1b"] for name, rate in rates.items() if name != "1f1b"}


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all schedules."""
    found = predictions(data, work)
    answers = read_answers(data)
    runs = [Run(name, ratio, found.get(name, ()), "" if name in found else _MISSING) for name, ratio in answers.items()]
    inputs = "FLOPs, and the device's link"
    causes = (of_each([run for run in runs if run.predicted]), *CAUSES)
    return (PublishedSet("Primus, eight MI300", CITED, inputs, causes, tuple(runs), "ratio to 1F1B", 1.0),)


def of_each(runs: Sequence[Run]) -> str:
    """By the number of micro-batches, how many ratios are as near as wanted."""
    near = [sum(abs(run.error(at)) <= EACH_WITHIN for run in runs) for at in range(len(MICRO_BATCHES))]
    told = ", ".join(f"{count} with {number}" for count, number in zip(near, MICRO_BATCHES, strict=True))
    return f"Wanted within {EACH_WITHIN:.0%} each. Of {len(runs)} ratios this near, by micro-batches: {told}."


_MISSING = "the tool has no such schedule"
