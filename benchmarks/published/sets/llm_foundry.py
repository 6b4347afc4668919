"""llm-foundry: MPT trained by FSDP (full shards) on 8 to 64 H100; tokens a second and GPU against the smallest run.

Of each model the run on the fewest GPUs gives the compute of a token, spread over layers by their FLOPs: its seconds
less those that ``predict`` adds for the run's own exchange and update. Where another run has another micro-batch,
linear layers of a GH200 say how much less a token of it takes. All else are nccl-tests of other nodes with eight H100:
one, and ten together. Other runs of the model are predicted from these: what ``predict`` says of a run, over what it
says of the smallest. Of the network of the runs on A100 the data have no sweep; those with other sequences, or in fp8,
have no second rank count.
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from public.toolkit import run
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run

from paradl_bench.network.graph import ModelGraph, read_network

RUNS = Path("llm-foundry-fsdp", "fsdp_throughput.csv")
_LOG = "xxrjun-h100__{}__without-debug__nccl_{}.log"
SWEEPS = (
    Path("nccl-logs", _LOG.format("single-node__20260128-145017", "N1_G8_cnode3-002")),
    Path("nccl-logs", _LOG.format("multi-node__20260129-180219", "N10_G8")),
)
DTYPE, PRESET = "bf16-weights", "llm-foundry"
"""FSDP gathers bf16 parameters in both of Composer's modes, and keeps fp32 shards."""
REDUCES = {"PURE": "own", "DEFAULT": "fp32"}
"""What gradients are reduced in: composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision."""
LINEAR_LAYERS = tuple(
    Path("transformer-operators", "Vista", "operator", f"NVIDIAGH200120GB_linear{number}_fp16.csv")
    for number in range(1, 5)
)
"""Of a block, on a GPU of the same generation: the larger a product is, the more of the peak it reaches."""
NEEDS = (RUNS, *SWEEPS, *LINEAR_LAYERS)
CITED = (
    "mosaicml/llm-foundry @ 8c8dd48f, Apache-2.0; xxrjun/nccl-tests-cluster @ 455de4f8, Apache-2.0;"
    " DebarghaG/estimate-train-time @ 1ac4d5e4, MIT"
)
GIB = 2**30
CORRECTIONS = 2
"""What is added hardly depends on what is computed: the second leaves less than a thousandth."""
PLACE = Place("NVIDIA H100 80GB HBM3", round(79.11 * GIB), "h100")
"""torch counts 79.11 GiB of such a GPU (vllm-project/vllm, issue 27508): its maker's 80 GB are of 2**30 bytes."""
CAUSES = (
    "The smallest run of the 70b model has a micro-batch of 2, the other of 8; of the 30b model 3, and 10 and 14."
    " Kernels of larger matrices reach more of the peak: since results had been seen, a GH200's linear layers count,"
    " which take 1.6 to 1.9% less a token at these sizes. No input says what the rest is.",
    "The smallest run of the 760m model is 8% slower a GPU than the larger ones with the same micro-batch. It adds up"
    " two micro-batches, they have one. No input says why.",
    "What predict adds for the smallest run's own exchange and update is taken off its seconds since results had been"
    " seen: before, it counted twice, as 1 to 6% of them.",
    "The loss is flash-attention's kernel (--preset llm-foundry), as by default in llm-foundry, since results had been"
    " seen: before, copies of the logits in fp32 made six runs too large. It keeps the logits beside their gradient.",
)


class Row(NamedTuple):
    """A run as it was set up, and tokens a second and GPU that were measured."""

    model: str
    ranks: int
    micro_batch: int
    accumulate: int
    recompute: bool
    reduce_dtype: str
    tokens_per_s: float

    @property
    def name(self) -> str:
        """Model, GPUs and micro-batch."""
        return f"{self.model}, {self.ranks} GPUs, micro-batch {self.micro_batch}"


def rows(data: Path, gpu: str) -> list[Row]:
    """bf16 runs of 2,048 tokens on a GPU, the fewest ranks of a model first."""
    with open(data / RUNS, newline="") as stream:
        table = [each for each in csv.DictReader(stream) if each["seq_len"] == "2048" and each["gpu"] == gpu]
    found = (
        Row(
            model=each["model"],
            ranks=int(each["gpus"]),
            micro_batch=int(each["micro_batch"]),
            accumulate=int(each["grad_accum"]),
            recompute=each["activation_checkpointing"] == "True",
            reduce_dtype=REDUCES[each["mp_mode"]],
            tokens_per_s=float(each["tokens_per_s_per_gpu"]),
        )
        for each in table
        if each["precision"] != "amp_fp8"
    )
    return sorted(found, key=lambda row: (row.model, row.ranks))


def by_model(found: list[Row]) -> dict[str, list[Row]]:
    """Of models with several rank counts."""
    models = {row.model: [other for other in found if other.model == row.model] for row in found}
    return {name: runs for name, runs in models.items() if len(runs) > 1}


def timed_layers(network: ModelGraph, smallest: Row, seconds: float) -> list[Timed]:
    """Of the smallest run's micro-batch, by FLOPs; blocks run forward once more where they are recomputed.

    Args:
        seconds: that the micro-batch computes.
    """
    forward = {layer.name: layer.fw_flops for layer in network.layers}
    backward = {layer.name: layer.bw_input_flops + layer.bw_weight_flops for layer in network.layers}
    again = sum(flops for name, flops in forward.items() if smallest.recompute and name.startswith("blocks."))
    flops = sum(forward.values()) + sum(backward.values()) + again
    second = seconds / flops
    return [Timed(each, forward[each.name] * second, backward[each.name] * second) for each in network.layers]


def us_a_token(data: Path, width: int, tokens: int) -> float | None:
    """A block's linear layers forward and backward on a GH200, on so many tokens; None of sizes that it has not."""
    total_us = 0.0
    for path in LINEAR_LAYERS:
        with open(data / path, newline="") as stream:
            times_us = [
                float(row["F_dur(us)"]) + float(row["B_dur(us)"])
                for row in csv.DictReader(stream)
                if (float(row["mp"]), float(row["dim"]), float(row["b"]) * float(row["l"])) == (1, width, tokens)
            ]
        if not times_us:
            return None
        total_us += statistics.fmean(times_us)
    return total_us / tokens


def of_micro_batch(timed: Sequence[Timed], more: float, of_token: float) -> list[Timed]:
    """The layers on ``more`` times as many samples, of which a token takes ``of_token`` times as long in products."""
    factors = ((each, more * (of_token if each.layer.kind == "linear" else 1.0)) for each in timed)
    return [Timed(each.layer, factor * each.forward_s, factor * each.backward_s) for each, factor in factors]


def profiles(data: Path, runs: Sequence[Row], sweeps: Path, work: Path) -> tuple[Path, Path]:
    """Of a model: by its smallest run alone, and with a GH200's linear layers for other micro-batches."""
    work.mkdir(parents=True)
    smallest = runs[0]
    run("paradl_bench", "describe", model_of(smallest), "-o", str(work / "network.json"))
    network = read_network(work / "network.json")
    tokens = network.input_shape[0]
    timed = timed_layers(network, smallest, computed_s(data, network, smallest, sweeps, work))
    width = next(layer.output_shape[-1] for layer in network.layers if layer.kind == "embedding")
    sizes = sorted({row.micro_batch for row in runs})
    of_token = {micro_batch: us_a_token(data, width, micro_batch * tokens) for micro_batch in sizes}
    own, folders = of_token[smallest.micro_batch], []
    for micro_batch, other in of_token.items():
        ratio = other / own if other and own else None
        if ratio is None and micro_batch != smallest.micro_batch:
            continue
        scaled = of_micro_batch(timed, micro_batch / smallest.micro_batch, ratio or 1.0)
        folders.append(work / f"layers-{micro_batch}")
        write_layers(folders[-1], data / RUNS, network, scaled, PLACE, DTYPE, micro_batch, "in_situ")
    alone, fitted = work / "alone.json", work / "profile.json"
    for path, used in ((alone, [work / f"layers-{smallest.micro_batch}"]), (fitted, folders)):
        run("calibrate", "fit", *map(str, used), str(sweeps), "--force", "-o", str(path))
    return alone, fitted


def computed_s(data: Path, network: ModelGraph, smallest: Row, sweeps: Path, work: Path) -> float:
    """Seconds that the smallest run's micro-batch computes, with which ``predict`` gives the time that it took."""
    took_s = smallest.micro_batch * network.input_shape[0] / smallest.tokens_per_s
    seconds, folder, fitted = took_s, work / "computed", work / "computed.json"
    for _ in range(CORRECTIONS):
        timed = timed_layers(network, smallest, seconds)
        write_layers(folder, data / RUNS, network, timed, PLACE, DTYPE, smallest.micro_batch, "in_situ")
        run("calibrate", "fit", str(folder), str(sweeps), "--force", "-o", str(fitted))
        samples_per_s, _, _ = simulated(fitted, smallest)
        seconds += took_s - smallest.micro_batch / samples_per_s
        shutil.rmtree(folder)
    return seconds


def model_of(row: Row) -> str:
    """What makes its network."""
    return f"sets.networks:mpt_{row.model}"


def simulated(fitted: Path, row: Row) -> tuple[float, tuple[float, float], int]:
    """Tokens a second and GPU over those of one sample a second: rate, interval, and the bytes that a rank needs."""
    samples = row.micro_batch * row.accumulate
    about = ("--from-profile", str(fitted), "--model", model_of(row), "--strategy", f"z3d{row.ranks}")
    how = (
        "--batch",
        str(samples * row.ranks),
        "--accumulate",
        str(row.accumulate),
        "--dtype",
        DTYPE,
        "--reduce-dtype",
        row.reduce_dtype,
    )
    settings = ("--optimizer", "adam", "--preset", PRESET, "--backend", "nccl")
    recomputed = ("--recompute", "all" if row.recompute else "none")
    told = json.loads(run("predict", *about, *how, *settings, *recomputed, "--json"))[0]
    low_s, high_s = told["interval_s"]
    return samples / told["iteration_s"], (samples / high_s, samples / low_s), int(told["memory_bytes"])


def predictions(data: Path, work: Path) -> tuple[dict[Row, tuple[Predicted, Predicted]], dict[Row, int]]:
    """Of every H100 run but the smallest of its model: simulated, and the smallest's rate as it is; bytes of all."""
    sweeps = work / "nccl"
    work.mkdir(parents=True)
    told = ("--cluster", PLACE.cluster, "--device-name", PLACE.device_name, "-o", str(sweeps))
    run("paradl_bench", "import", "nccl-tests", *(str(data / path) for path in SWEEPS), *told)
    found, needed = {}, {}
    for name, runs in by_model(rows(data, "h100_80gb")).items():
        smallest, *others = runs
        alone, fitted = profiles(data, runs, sweeps, work / name)
        base, _, needed[smallest] = simulated(fitted, smallest)
        for row in others:
            rate, (low, high), needed[row] = simulated(fitted, row)
            if row.micro_batch != smallest.micro_batch:
                # As uncertain as without the other GPU's table, of which the profile knows no error.
                own, edges, _ = simulated(alone, row)
                low, high = (rate * edge / own for edge in edges)
            scale = smallest.tokens_per_s / base
            found[row] = (
                Predicted("simulate", rate * scale, (low * scale, high * scale)),
                Predicted("as the smallest", smallest.tokens_per_s),
            )
    return found, needed


def _room(needed_bytes: int) -> str:
    return f"{needed_bytes / GIB:.1f} GiB"


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all runs."""
    found, needed = predictions(data, work)
    runs = [Run(row.name, row.tokens_per_s, by, _room(needed[row])) for row, by in found.items()]
    left = [row for group in by_model(rows(data, "a100_40gb")).values() for row in group[1:]]
    runs += [Run(f"A100: {row.name}", row.tokens_per_s, (), "the data have no sweep of this network") for row in left]
    beyond = [f"{row.name} ({_room(size)})" for row, size in needed.items() if size > PLACE.memory_bytes]
    fitting = (
        f"Of {len(needed)} runs, the smallest ones too, all of which ran, {len(needed) - len(beyond)} fit in"
        f" {PLACE.memory_bytes / GIB:.1f} GiB by predict. Others: {'; '.join(beyond) or 'none'}."
    )
    inputs = "the smallest run of the same model, linear layers of a GH200, and nccl-tests of other H100 nodes"
    return (
        PublishedSet(
            "llm-foundry, FSDP", CITED, inputs, (*CAUSES, fitting), tuple(runs), "measured tokens/s", 1.0, wanted=0.04
        ),
    )
