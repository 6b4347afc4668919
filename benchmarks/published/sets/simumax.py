"""SimuMax: Llama-3 with few blocks, trained by Megatron-LM in bf16 on eight B200, and peak memory of each rank.

Inputs are the system file: products and attention as its mapping reads them (each layer, and each part of one that a
rank runs, by its very shape), shares of the memory's bandwidth for all else, and fits of NVLink collectives.
Megatron-LM computes queries, keys and values by one product, of which each takes its share here, and its gate's product
with the activation by one kernel. It gives each stage as many blocks, which was set when first results had been seen:
``predict`` would balance FLOPs. Settings are those of the script that its publisher starts Llama-3 with
(``run_pretrain_llama3.sh``), which was read when results had been seen: bf16 parameters, parts of the sequence beside
tensor parallelism, the optimizer's state in parts over replicas, gradients clipped, and exchanged after backward. Runs
with expert or context parallelism are named, and not predicted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from public.toolkit import run
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run

from paradl_bench.network.graph import Layer, ModelGraph, read_network
from paradl_bench.network.kernel import KernelSamples, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.tensor.plan import PLANNER
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions

RUNS = Path("simumax-b200", "measured_half.json")
SYSTEM = Path("simumax-b200", "system_b200_bf16.json")
NEEDS = (RUNS, SYSTEM)
CITED = "MooreThreads/SimuMax @ 4dcaae51, Apache-2.0"
PLACE = Place("NVIDIA B200", 180_000_000_000, "b200")
MODELS = {"llama3-70b": ("sets.networks:llama3_70b_l12", 12), "llama3-405b": ("sets.networks:llama3_405b_l4", 4)}
"""How the network is made, and how many blocks it has."""
SHARE_OF_PEAK = 0.5
HALVES: tuple[KernelStage, ...] = ("FW", "BW_input", "BW_weight")
GIB = 2**30
DTYPE = "bf16-weights"
SETTINGS = ("--dtype", DTYPE, "--optimizer", "adamw-fused", "--clip-norm", "1", "--bucket-cap-mb", "1e6")
SETTINGS += ("--preset", "megatron")
"""Of all runs; gradients in one bucket are exchanged after backward. Megatron-LM's Adam is one kernel, and AdamW."""
CAUSES = (
    "The system file's latency of kernels that memory bounds counts since results had been seen.",
    "The script's settings count since results had been seen. Before, state and sequence were whole, parameters fp32,"
    " and gradients were exchanged during backward: tensor-parallel runs were 8.0% off, pipelines 1.9%.",
    "The head's parts take their share of the whole products' time: the file has them for a padded vocabulary.",
    "Megatron-LM gathers inputs of column-parallel layers again in backward, beside products. Predicted times have them"
    " kept.",
    "Megatron-LM adds up gradients in fp32, reduce-scatters these and gathers parameters. Predicted times have bf16"
    " ones, all-reduced, and each replica broadcasts the parameters that it updated.",
    "Positions are not rotated in the network that is predicted.",
    "From 4 to 32 micro-batches errors of pipelines fall by 7 and 8 points: what is sent once an iteration is predicted"
    " too long, and what each micro-batch takes too short. No input has clocks or power.",
)
MEMORY_CAUSES = (
    "The optimizer's kernel and what Megatron-LM holds (--preset megatron) count since results had been seen: before,"
    " peaks were 30.8% too large. Sources are its code and TransformerEngine's. Nothing is fitted.",
    "Queries, keys and values are three products here: their placeholder is smaller than that of Megatron-LM's one.",
)
_NOT_HERE = {
    "ep": "the tool has an axis for experts, and this set no network of DeepSeek's attention",
    "cp": "this set predicts no run whose ranks have parts of the sequence",
}
_DEGREE = re.compile(r"(tp|pp|dp|ep|cp)(\d+)")
_QKV = ("query", "key", "value")

Times = dict[tuple[str, str, tuple[int, ...]], float]
"""Seconds by kind, stage and sizes."""


class Case(NamedTuple):
    """A run as it was set up, without what was measured of it."""

    name: str
    model: str
    micro_batches: int
    degrees: dict[str, int]

    @property
    def not_here(self) -> str:
        """Why the tool can't predict it; empty where it can."""
        return next((why for axis, why in _NOT_HERE.items() if self.degrees.get(axis, 1) > 1), "")

    @property
    def strategy(self) -> tuple[str, ...]:
        """Strategy and options of ``predict``."""
        data, tensor, stages = (self.degrees.get(axis, 1) for axis in ("dp", "tp", "pp"))
        batch = ("--batch", f"{data * self.micro_batches}")
        if stages == 1:
            how = ("--sequence-parallel", "on", "--accumulate", f"{self.micro_batches}")
            return f"z1d{data}t{tensor}", *batch, *how
        blocks = MODELS[self.model][1]
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


def kernel_times(folder: Path) -> Times:
    """What the system file's import holds."""
    lines = (folder / "kernels.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=KernelSamples) for line in lines]
    return {
        _key(row.shape.kind, row.shape.stage, row.shape.sizes, row.shape.settings): row.samples_s[0] for row in rows
    }


def _key(kind: str, stage: str, sizes: dict[str, int], settings: dict[str, str]) -> tuple[str, str, tuple[int, ...]]:
    groups = int(settings.get("queries_per_key", "1"))
    return kind, stage, (groups, *(sizes[name] for name in sorted(sizes)))


class Prices:
    """Seconds of layers on one sample, from the system file and the times that were imported of it.

    Args:
        qkv_features: of queries, keys and values together, whole or as a rank has them. tokens: of the vocabulary.
    """

    def __init__(self, system: dict[str, Any], times: Times, qkv_features: int, tokens: int) -> None:
        self._times = times
        self._timed_features = {**dict.fromkeys(_QKV, qkv_features), "head": tokens}
        shares = system["accelerator"]["bandwidth"].items()
        self._memory = {
            name: (each["efficient_factor"] * each["gbps"] * GIB, each["latency_us"] * 1e-6) for name, each in shares
        }

    def timed(self, layer: Layer, shard: str = "") -> Timed:
        """Forward and backward."""
        return Timed(layer, self._seconds(layer, "FW"), self._seconds(layer, "BW"), shard)

    def _seconds(self, layer: Layer, stage: KernelStage) -> float:
        if layer.kind == "loss":
            # Logits of bf16: read forward, read and written backward.
            logits = 2 * layer.input_elements
            return self._moved_s(logits * (1 if stage == "FW" else 2), "ce_fusion")
        halves = (layer.kind, stage) == ("linear", "BW")
        stages = HALVES[1:] if halves else (stage,)
        return sum(self._kernel(layer, each) for each in stages)

    def _kernel(self, layer: Layer, stage: KernelStage) -> float:
        shape = kernel_shape(layer, stage, 1, "bf16")
        if shape is None or layer.kind == "activation":
            # A view; or one kernel with the product that reads it.
            return 0.0
        if layer.kind not in ("linear", "attention"):
            return self._moved_s(shape.bytes, "default")
        sizes, share = dict(shape.sizes), 1.0
        features = self._timed_features.get(layer.name.split(".")[-1])
        if features is not None:
            share = sizes["out_features"] / features
            sizes["out_features"] = features
        return share * self._times[_key(shape.kind, shape.stage, sizes, shape.settings)]

    def _moved_s(self, size_bytes: float, name: str) -> float:
        """Of a kernel that memory bounds: the file has its share of the bandwidth, and its latency."""
        rate, latency_s = self._memory[name]
        return size_bytes / rate + latency_s


def timed_layers(network: ModelGraph, system: dict[str, Any], times: Times, ranks: int) -> list[Timed]:
    """Whole layers, and those that each of so many tensor-parallel ranks runs; 1 for none."""
    features = sum(layer.output_shape[-1] for layer in network.layers if layer.name.split(".")[-1] in _QKV)
    blocks = sum(layer.name.endswith(".query") for layer in network.layers)
    tokens = next(layer.output_shape[-1] for layer in network.layers if layer.name == "head")
    whole = Prices(system, times, features // blocks, tokens)
    found = [whole.timed(layer) for layer in network.layers]
    if ranks > 1:
        part = Prices(system, times, features // blocks // ranks, tokens)
        axis = parse_strategy(f"t{ranks}").axes[0]
        settings = PlanSettings(batch=1, dtype=DTYPE, device="cuda").having(SequenceOptions(sequence_parallel="on"))
        shards = PLANNER.shard(network, AxisPlace(axis, 0, 0, 1), settings).shards.values()
        found += [part.timed(each.layer, each.shard) for each in shards if each.shard]
    return found


def link_file(system: dict[str, Any], ranks: int, path: Path) -> Path:
    """A cluster file with the system file's fit of reduce-scatters, as a ring's hops over so many ranks.

    All that runs at length is scattered or gathered, whose fits are alike.
    """
    link = system["networks"]["high_intra_node"]
    fit, peak = link["op"]["reduce_scatter"], link["bandwidth"]["gbps"] * GIB
    hops = fit["scale"] * (ranks + fit["offset"])
    alpha_s = (fit["latency_us"] + fit["fixed_latency_us"] / hops) * 1e-6
    level = {"name": "node", "ranks": 8, "alpha_s": alpha_s, "beta_s_per_byte": 1 / (fit["efficient_factor"] * peak)}
    path.write_text(json.dumps({"name": PLACE.cluster, "levels": [level]}))
    return path


def profile(data: Path, model: str, system: dict[str, Any], times: Times, work: Path) -> Path:
    """The profile of a model's layers, whole and as four tensor-parallel ranks run them."""
    work.mkdir(parents=True)
    run("paradl_bench", "describe", model, "-o", str(work / "network.json"))
    network = read_network(work / "network.json")
    write_layers(work / "layers", data / SYSTEM, network, timed_layers(network, system, times, 4), PLACE, DTYPE)
    run("calibrate", "fit", str(work / "layers"), "-o", str(work / "profile.json"))
    return work / "profile.json"


def predicted(fitted: Path, case: Case, link: Path) -> tuple[Predicted, Predicted]:
    """Seconds of an iteration, and GiB of the rank that holds most."""
    strategy, *options = case.strategy
    about = ("--from-profile", str(fitted), "--model", MODELS[case.model][0], "--strategy", strategy, *options)
    told = json.loads(run("predict", *about, *SETTINGS, "--cluster", str(link), "--json"))[0]
    low_s, high_s = told["interval_s"]
    return Predicted("simulate", told["iteration_s"], (low_s, high_s)), Predicted("walk", told["memory_bytes"] / GIB)


def by_flops(network: ModelGraph, case: Case, system: dict[str, Any]) -> Predicted:
    """All FLOPs of an iteration over a constant share of eight peaks."""
    samples = case.micro_batches * case.degrees["dp"]
    peak = system["accelerator"]["op"]["matmul"]["tflops"] * 1e12
    flops = samples * (network.fw_flops + network.bw_flops)
    return Predicted("FLOPs", flops / (SHARE_OF_PEAK * 8 * peak))


def predictions(data: Path, work: Path) -> dict[str, tuple[Predicted, Predicted, Predicted]]:
    """Of every case that is predicted, by its name: simulated, by FLOPs, and memory."""
    system = json.loads((data / SYSTEM).read_text())
    told = ("--mapping", "simumax", "--device-name", PLACE.device_name, "-o", str(work / "kernels"))
    run("paradl_bench", "import", "operators", str(data / SYSTEM), *told)
    times = kernel_times(work / "kernels")
    fitted = {name: profile(data, model, system, times, work / name) for name, (model, _) in MODELS.items()}
    # Four ranks share layers in tensor parallelism, or are replicas in pipelines.
    link = link_file(system, 4, work / "cluster.yaml")
    found = {}
    for case in cases(data):
        if not case.not_here:
            network = read_network(work / case.model / "network.json")
            simulated, memory = predicted(fitted[case.model], case, link)
            found[case.name] = simulated, by_flops(network, case, system), memory
    return found


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """Times and peaks of memory of all runs, beside what SimuMax said."""
    found = predictions(data, work)
    answers = {each["case"]: each for each in json.loads((data / RUNS).read_text())}
    runs, peaks = [], []
    for case in cases(data):
        answer = answers[case.name]
        measured_s, measured_gib = answer["real_ms"] * 1e-3, answer["real_alloc_gib"]
        if case.name not in found:
            runs.append(Run(case.name, measured_s, (), case.not_here))
            continue
        simulated, flops, memory = found[case.name]
        theirs = Predicted("SimuMax", answer["perf_ms"] * 1e-3), Predicted("SimuMax", answer["perf_alloc_gib"])
        runs.append(Run(case.name, measured_s, (simulated, flops, theirs[0])))
        peaks.append(Run(case.name, measured_gib, (memory, theirs[1])))
    inputs = "kernels' shares of the peak, and fits of links"
    return (
        PublishedSet("SimuMax, eight B200", CITED, inputs, CAUSES, tuple(runs)),
        PublishedSet("SimuMax, peak memory", CITED, "the plan", MEMORY_CAUSES, tuple(peaks), "measured GiB", 1.0),
    )
