"""SimuMax: Llama-3 and DeepSeek with few blocks, by Megatron-LM in bf16 on eight B200, and peak memory of each rank.

Inputs are the system file: products and attention as its mapping reads them (each layer, and each part of one that a
rank runs, by its very shape), shares of the memory's bandwidth for all else, and fits of NVLink collectives.
Megatron-LM computes queries, keys and values by one product, of which each takes its share here, and its gate's product
with the activation by one kernel. It gives each stage as many blocks, which was set when first results had been seen:
``predict`` would balance FLOPs. Settings are those of the scripts that its publisher starts the runs with
(``run_pretrain_llama3.sh``, ``run_pretrain_deepseekv2.sh``), which were read when results had been seen: bf16
parameters, parts of the sequence beside tensor parallelism, the optimizer's state in parts over replicas, gradients
clipped, and exchanged after backward; tokens exchanged for heads; as many rows for each expert.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from public.toolkit import run
from sets.measured_layers import Place, write_layers
from sets.runs import Predicted, PublishedSet, Run, mean_error, short_by
from sets.simumax.links import link_file, write_sweeps
from sets.simumax.prices import GIB, Times, kernel_times, timed_layers

from paradl_bench.network.graph import Layer, ModelGraph, read_network
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.plan.axis_planner import AxisPlace, shard_in_turn
from paradl_bench.plan.mesh import axes_that_shard
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.context.options import ContextOptions
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions

RUNS = Path("simumax-b200", "measured_half.json")
SYSTEM = Path("simumax-b200", "system_b200_bf16.json")
NEEDS = (RUNS, SYSTEM)
CITED = "MooreThreads/SimuMax @ 4dcaae51, Apache-2.0"
PLACE = Place("NVIDIA B200", 180_000_000_000, "b200")
MODELS = {"llama3-70b": "llama3_70b", "llama3-405b": "llama3_405b"}
MODELS |= {"deepseekv2": "deepseek_v2", "deepseekv3": "deepseek_v3"}
"""Names in ``models.py``."""
SEQUENCES = {4096: "", 32768: "_32k", 131072: "_128k"}
SHARE_OF_PEAK = 0.5
SIGNED_WITHIN = 0.02
DTYPE, PRESET = "bf16-weights", "megatron"
SETTINGS = ("--dtype", DTYPE, "--optimizer", "adamw-fused", "--clip-norm", "1", "--bucket-cap-mb", "1e6")
SETTINGS += ("--preset", PRESET)
"""Of all runs; gradients in one bucket are exchanged after backward. Megatron-LM's Adam is one kernel, and AdamW."""
CAUSES = (
    "The system file's latency of kernels that memory bounds counts since results had been seen.",
    "The scripts' settings count since results had been seen, and so does what Megatron-LM adds up and sends.",
    "What a network's layers leave out counts since results had been seen: rotated positions, sums of gradients, copies"
    " around all-to-alls, the padded vocabulary, the memory's share in updates.",
    "Bytes as the publisher's benchmarks count them, of losses and of moved rows, count since results had been seen,"
    " and so do copies of queries, values and rows that Megatron-LM and TransformerEngine make.",
    "That a stage sends its last gradients before it divides and scatters its own, that the buffer is set to zero"
    " before an iteration, and that it is read for numbers that are not finite, count since results had been seen.",
    "Gathers of sequence parallelism that backward repeats beside products are not predicted, nor that activations'"
    " gradients are scattered beside products, nor the router's small kernels.",
    "What is left grows with a run's products and with its length: those of Llama-3 405B are 5 to 8% too short, but for"
    " pipelines. Products timed alone probably run at higher clocks. No input has clocks or power.",
)
MEMORY_CAUSES = (
    "The optimizer's kernel and what Megatron-LM holds (--preset megatron) count since results had been seen: before,"
    " peaks were 30.8% too large. Sources are its code and TransformerEngine's. Nothing is fitted.",
    "Queries, keys and values are three products here: their placeholder is smaller than that of Megatron-LM's one.",
)
_DEGREE = re.compile(r"(tp|pp|dp|ep|cp|seq|_l)(\d+)")


class Case(NamedTuple):
    """A run as it was set up, without what was measured of it."""

    name: str
    model: str
    micro_batches: int
    degrees: dict[str, int]

    @property
    def tokens(self) -> int:
        """Of a sample."""
        return self.degrees.get("seq", 4096)

    @property
    def network(self) -> str:
        """Name in ``models.py``."""
        return MODELS[self.model] + SEQUENCES[self.tokens]

    @property
    def strategy(self) -> tuple[str, ...]:
        """Strategy and options of ``predict``."""
        data, tensor, stages, context = (self.degrees.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
        batch = ("--batch", f"{data * self.micro_batches}")
        accumulated = ("--accumulate", f"{self.micro_batches}")
        if "ep" in self.degrees:
            return f"z1d{data // self.degrees['ep']}e{self.degrees['ep']}", *batch, *accumulated
        of_sequence = ("--sequence-parallel", "on", *accumulated)
        if context > 1:
            return f"z1d{data}x{context}t{tensor}", *batch, "--context-exchange", "all-to-all", *of_sequence
        if stages == 1:
            return f"z1d{data}t{tensor}", *batch, *of_sequence
        blocks = self.degrees["_l"]
        cuts = ",".join(f"blocks.{blocks * stage // stages}.norm_1" for stage in range(1, stages))
        how = ("--schedule", "1f1b", "--micro-batches", f"{self.micro_batches}", "--stages", cuts)
        return f"z1d{data}p{stages}", *batch, *how


def cases(data: Path) -> list[Case]:
    """All runs."""
    told = json.loads((data / RUNS).read_text())
    return [case_of(each["case"], each["model"], int(each["mbc"])) for each in told]


def case_of(name: str, model: str, micro_batches: int) -> Case:
    """A run by its name, as ``llama3_70b_l12_tp1_pp2_dp4_mbc4_cef``."""
    return Case(name, model, micro_batches, {axis: int(degree) for axis, degree in _DEGREE.findall(name)})


def parts_of(network: ModelGraph, case: Case) -> list[tuple[Layer, str]]:
    """What a rank runs of layers that it shares with others, and the labels of these parts."""
    strategy = parse_strategy(case.strategy[0])
    options = SequenceOptions(sequence_parallel="on" if "--sequence-parallel" in case.strategy else "off")
    exchange = ContextOptions(context_exchange="all-to-all" if "cp" in case.degrees else "gather")
    settings = PlanSettings(batch=1, dtype=DTYPE, device="cuda", preset=PRESET).having(options).having(exchange)
    places = [AxisPlace(strategy.axes[index], index, 0, 1) for index in axes_that_shard(strategy)]
    shards = shard_in_turn(as_held(network, DTYPE), places, settings).shards.values()
    return [(each.layer, each.shard) for each in shards if each.shard]


def profile(data: Path, case: Case, system: dict[str, Any], times: Times, work: Path) -> Path:
    """The profile of the layers that a case's ranks run, and of collectives."""
    name = case.network
    work.mkdir(parents=True)
    run("paradl_bench", "describe", f"sets.simumax.models:{name}", "-o", str(work / "network.json"))
    network = read_network(work / "network.json")
    timed = timed_layers(network, parts_of(network, case), system, times, case.degrees.get("tp", 1))
    share = system["accelerator"]["bandwidth"]["default"]
    reached = share["efficient_factor"] * share["gbps"] * GIB
    write_layers(work / "layers", data / SYSTEM, network, timed, PLACE, DTYPE, bytes_per_s=reached)
    write_sweeps(work / "nccl", data / SYSTEM, system, PLACE)
    run("calibrate", "fit", str(work / "layers"), str(work / "nccl"), "--force", "-o", str(work / "profile.json"))
    return work / "profile.json"


class Answer(NamedTuple):
    """Seconds of an iteration, and GiB of the rank that holds most."""

    simulated: Predicted
    memory: Predicted


def predicted(fitted: Path, case: Case, link: Path) -> Answer:
    """What ``predict`` says."""
    about = ("--from-profile", str(fitted), "--model", f"sets.simumax.models:{case.network}")
    how = ("--strategy", *case.strategy, *SETTINGS, "--backend", "nccl", "--cluster", str(link))
    told = json.loads(run("predict", *about, *how, "--json"))[0]
    low_s, high_s = told["interval_s"]
    simulated = Predicted("simulate", told["iteration_s"], (low_s, high_s))
    return Answer(simulated, Predicted("walk", told["memory_bytes"] / GIB))


def by_flops(network: ModelGraph, case: Case, system: dict[str, Any]) -> Predicted:
    """All FLOPs of an iteration over a constant share of eight peaks."""
    samples = case.micro_batches * case.degrees["dp"]
    peak = system["accelerator"]["op"]["matmul"]["tflops"] * 1e12
    flops = samples * (network.fw_flops + network.bw_flops)
    return Predicted("FLOPs", flops / (SHARE_OF_PEAK * 8 * peak))


def predictions(data: Path, work: Path) -> dict[str, tuple[Answer, Predicted]]:
    """Of every case, by its name: what ``predict`` says, and FLOPs."""
    system = json.loads((data / SYSTEM).read_text())
    told = ("--mapping", "simumax", "--device-name", PLACE.device_name, "-o", str(work / "kernels"))
    run("paradl_bench", "import", "operators", str(data / SYSTEM), *told)
    times = kernel_times(work / "kernels")
    # Four ranks share layers in tensor parallelism, or are replicas in pipelines.
    link = link_file(system, 4, work / "cluster.yaml")
    fitted: dict[str, Path] = {}
    found = {}
    for case in cases(data):
        # Runs that differ in micro-batches alone have the same layers.
        ranks = {axis: degree for axis, degree in case.degrees.items() if axis in ("tp", "ep", "cp", "seq")}
        key = "-".join([case.model, *(f"{axis}{degree}" for axis, degree in ranks.items())])
        if key not in fitted:
            fitted[key] = profile(data, case, system, times, work / key)
        network = read_network(work / key / "network.json")
        found[case.name] = predicted(fitted[key], case, link), by_flops(network, case, system)
    return found


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """Times and peaks of memory of all runs, beside what SimuMax said."""
    found = predictions(data, work)
    answers = {each["case"]: each for each in json.loads((data / RUNS).read_text())}
    runs, peaks = [], []
    for case in cases(data):
        answer = answers[case.name]
        told, flops = found[case.name]
        measured_s, measured_gib = answer["real_ms"] * 1e-3, answer["real_alloc_gib"]
        theirs = Predicted("SimuMax", answer["perf_ms"] * 1e-3), Predicted("SimuMax", answer["perf_alloc_gib"])
        runs.append(Run(case.name, measured_s, (told.simulated, flops, theirs[0])))
        peaks.append(Run(case.name, measured_gib, (told.memory, theirs[1])))
    inputs = "kernels' shares of the peak, and fits of links"
    signed = mean_error(runs, 0)[1]
    causes = (f"Mean with signs {signed:+.1%}, {short_by(abs(signed), SIGNED_WITHIN)}.", *CAUSES)
    return (
        PublishedSet("SimuMax, eight B200", CITED, inputs, causes, tuple(runs), wanted=0.04),
        PublishedSet(
            "SimuMax, peak memory", CITED, "the plan", MEMORY_CAUSES, tuple(peaks), "measured GiB", 1.0, wanted=0.015
        ),
    )
