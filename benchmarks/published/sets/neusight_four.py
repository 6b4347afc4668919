"""NeuSight: GPT-2 large with a global mini-batch of 4 on four H100 of one node, by data, tensor and pipeline axes.

Inputs are nccl-tests of another node with four H100 of the same kind, and either NeuSight's tables of kernels, or the
operations of one block, embedding and head, timed at one sample on one H100 (launches taken off, as in the set of one
GPU). Each operation of the trace goes to the layer of the tool's own trace of the network that does the same; what that
lacks, as questions to the host, goes to the layer behind. Other local mini-batches and parts of layers are then as
``predict`` scales them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from public.toolkit import run
from sets import neusight, neusight_kernels
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run
from shipped.tables import Table

from paradl_bench.network.graph import Layer, ModelGraph, read_network

TRACE = Path("neusight-train", "NVIDIA_H100_80GB_HBM3", "gpt2_large-train-1024-1.csv")
SWEEPS = tuple(
    Path("nccl-logs", f"snellius-h100__1node__{name}.log")
    for name in ("all_reduce", "all_gather_perf", "reduce_scatter_perf")
)
NEEDS = (TRACE, *SWEEPS)
SWEPT = "odissei-benchmarks/nccl-tests @ 6df4cb51"
CAUSES = (
    "Tables of kernels come first since these results were seen: they have kernels of other batches and parts.",
    "By the trace: beyond one sample, which was traced alone, predict takes time as proportional to the local"
    " batch. Larger kernels reach more of the peak: of BERT-large's block, traced on the same GPU, 8 samples take 2.97"
    " times as long as 2.",
    "Tensor parallelism cuts the vocabulary; whether the published run did is not said.",
)
PLACE = Place("NVIDIA H100 80GB HBM3", 80_000_000_000, "h100")
STRATEGIES = {"dp4": ("d4",), "tp4": ("t4",), "pp4_1": ("p4", "--micro-batches", "1")}
"""Of an answer's name: strategy, and what else was published of the run."""
_KINDS = {"addmm": "addmm", "matmul": "matmul", "softmax": "softmax", "tanh": "activation", "where": "mask"}
_MODULES = {"wte": "embedding", "wpe": "embedding", "drop": "dropout", "dropout": "dropout", "lm_head": "linear"}
_POINTWISE = ("add", "mul", "truediv", "pow")


class Traced(NamedTuple):
    """A row of the trace: the kind of layer that does the same, empty if none; seconds of forward and backward."""

    kind: str
    in_block: bool
    forward_s: float
    backward_s: float


def traced(path: Path) -> list[Traced]:
    """Rows of a trace that took any time, launches taken off each part."""
    taken_off_ms = neusight.launch_ms(neusight.read_operations(path))
    with open(path, newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if float(row["latency"] or 0) > 0]
    return [_traced(row, taken_off_ms) for row in rows]


def _traced(row: dict[str, str], taken_off_ms: float) -> Traced:
    forward_ms, *backward_ms = (
        max(float(row[name]) - taken_off_ms, 0.0) for name in ("fw_latency", "bw_latency", "acc_latency")
    )
    return Traced(_kind(row), neusight.in_block(row), forward_ms * 1e-3, sum(backward_ms) * 1e-3)


def _kind(row: dict[str, str]) -> str:
    if row["op"] == "call_module":
        name = row["target"].split(".")[-1]
        return "norm" if name.startswith("ln_") else _MODULES.get(name, "dropout" if "dropout" in name else "")
    words = row["target"].replace(">", " ").split()
    named = next((word for word in words if word in _KINDS or word in _POINTWISE), "")
    # Sums of numbers on the host have one element.
    return _KINDS.get(named) or ("elementwise" if named and row["output_shape"] != "(1,)" else "")


def times_of(rows: Sequence[Traced], network: ModelGraph, blocks: int) -> list[Timed]:
    """Every layer that the trace has.

    Raises:
        ValueError: the network's layers do not follow each other as the trace's operations do.
    """
    layers = (layer for layer in network.layers if _does_work(layer))
    found: list[Timed] = []
    waiting = (0.0, 0.0)
    for row in _repeated(rows, blocks):
        seconds = waiting[0] + row.forward_s, waiting[1] + row.backward_s
        if not row.kind:
            waiting = seconds
            continue
        layer = next(layers, None)
        if layer is None or layer.kind != row.kind:
            found_as = f"{layer.name}, {layer.kind}" if layer else "missing"
            raise ValueError(f"the trace's {row.kind} is {found_as}, in the network")
        found.append(Timed(layer, *seconds))
        waiting = (0.0, 0.0)
    return found


def _does_work(layer: Layer) -> bool:
    """What every sample shares, as positions and masks, is made once, and no trace of a sample has it."""
    pointwise = layer.kind in ("mask", "elementwise") and layer.batchless
    return layer.kind not in ("view", "constant", "loss") and not pointwise


def _repeated(rows: Sequence[Traced], blocks: int) -> Iterator[Traced]:
    first = next(at for at, row in enumerate(rows) if row.in_block)
    yield from rows[:first]
    for _ in range(blocks):
        yield from (row for row in rows if row.in_block)
    yield from (row for row in rows[first:] if not row.in_block)


def profile(data: Path, work: Path) -> Path:
    """The profile of layers and NCCL's sweeps."""
    work.mkdir(parents=True)
    model = ("sets.networks:gpt2_large", "-o", str(work / "network.json"))
    run("paradl_bench", "describe", *model)
    network = read_network(work / "network.json")
    timed = times_of(traced(data / TRACE), network, neusight.blocks_of(data / TRACE))
    write_layers(work / "layers", data / TRACE, network, timed, PLACE, "fp32")
    logs = [str(data / path) for path in SWEEPS]
    told = ("--cluster", PLACE.cluster, "--device-name", PLACE.device_name, "-o", str(work / "nccl"))
    run("paradl_bench", "import", "nccl-tests", *logs, *told)
    fitted = work / "profile.json"
    run("calibrate", "fit", str(work / "layers"), str(work / "nccl"), "--force", "-o", str(fitted))
    return fitted


def link_file(fitted: Path, path: Path) -> Path:
    """A cluster file for transfers between two ranks, which no sweep is of: a link of the ring of all-gathers."""
    fits = json.loads(fitted.read_text())["communication"]
    link = max((fit for fit in fits if fit["operation"] == "all_gather"), key=lambda fit: float(fit["bytes_range"][1]))
    level = {"name": "node", "ranks": 4} | {name: link[name] for name in ("alpha_s", "beta_s_per_byte")}
    path.write_text(json.dumps({"name": PLACE.cluster, "levels": [level]}))
    return path


def profile_of_kernels(data: Path, work: Path) -> Path:
    """The profile of NeuSight's tables of kernels on the H100 and the same sweeps."""
    made = neusight_kernels.devices()
    (one,) = (each for each in made if each.device_name == PLACE.device_name)
    files = tuple(str(path) for path in SWEEPS)
    table = Table(name="nccl-tests", source=SWEPT, licence="BSD-3", files=files, reader="nccl-tests", level="node")
    four = dataclasses.replace(one, sweeps=(table,), ranks=4, ranks_per_node=4)
    (path,) = neusight_kernels.written(data, made, [four], {"gpt2_large"}, work).values()
    return path


def predicted(by: str, fitted: Path, strategy: str, *options: str) -> Predicted:
    """Forward, backward and communication of an iteration; no weight update is among the answers."""
    about = ("--from-profile", str(fitted), "--model", "sets.networks:gpt2_large", "--strategy", strategy)
    told = json.loads(run("predict", *about, "--batch", "4", "--backend", "nccl", *options, "--json"))[0]
    without_s = told["phases_s"].get("WU", 0.0)
    low, high = (edge - without_s for edge in told["interval_s"])
    return Predicted(by, told["iteration_s"] - without_s, (low, high))


def predictions(data: Path, work: Path) -> dict[str, list[Predicted]]:
    """By the answers' names: from kernels, from the trace, and by FLOPs over a constant share of the peak."""
    profiles = {
        "simulate, from kernels": profile_of_kernels(data, work / "kernels"),
        "simulate, from the trace": profile(data, work / "trace"),
    }
    single = neusight.by_flops(data / TRACE)
    # One micro-batch passes through the stages one after the other; else four ranks share the work of four samples.
    flops_s = single.forward_s + single.backward_s
    found = {}
    for name, told in STRATEGIES.items():
        staged = "--micro-batches" in told
        found[name] = []
        for by, fitted in profiles.items():
            link = ("--cluster", str(link_file(fitted, fitted.with_name("cluster.yaml")))) if staged else ()
            found[name].append(predicted(by, fitted, *told, *link))
        found[name].append(Predicted("FLOPs", flops_s * (4 if staged else 1)))
    return found


def read_answer(data: Path, name: str) -> float:
    """Seconds of an iteration that were measured: never read by what predicts."""
    path = (data / TRACE).with_name(f"gpt2_large-train-1024-4-{name}.json")
    return float(json.loads(path.read_text())["e2e_latency"]) * 1e-3


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all three."""
    found = predictions(data, work)
    found_set = PublishedSet(
        title="NeuSight, four H100 of one node",
        cited=neusight.CITED,
        inputs=f"tables of kernels, or operations traced on one H100, and nccl-tests of a node of four ({SWEPT})",
        causes=CAUSES,
        runs=tuple(Run(f"gpt2_large {name}", read_answer(data, name), tuple(each)) for name, each in found.items()),
        wanted=0.06,
    )
    return (found_set,)
