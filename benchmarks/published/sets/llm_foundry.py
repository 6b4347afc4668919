"""llm-foundry: MPT trained by FSDP (full shards) on 8 to 64 H100; tokens a second and GPU against the smallest run.

Of each model the run on the fewest GPUs gives the compute of a token, spread over layers by their FLOPs. All else are
nccl-tests of other nodes with eight H100: one, and ten together. Other runs of the model are predicted from these: what
``predict`` says of a run, over what it says of the smallest. Of the network of the runs on A100 the data have no sweep;
those with other sequences, or in fp8, have no second rank count.
"""

from __future__ import annotations

import csv
import json
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
DTYPE = "bf16-weights"
"""FSDP gathers bf16 parameters in both of Composer's modes, and keeps fp32 shards."""
REDUCES = {"PURE": "own", "DEFAULT": "fp32"}
"""What gradients are reduced in: composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision."""
NEEDS = (RUNS, *SWEEPS)
CITED = "mosaicml/llm-foundry @ 8c8dd48f, Apache-2.0; xxrjun/nccl-tests-cluster @ 455de4f8, Apache-2.0"
PLACE = Place("NVIDIA H100 80GB HBM3", 80_000_000_000, "h100")
CAUSES = (
    "The smallest run of the 70b model has a micro-batch of 2, the other of 8; of the 30b model 3, and 10 and 14."
    " Kernels of larger matrices reach more of the peak, which a time proportional to tokens does not know.",
    "The smallest run of the 760m model is 8% slower a GPU than the larger ones with the same micro-batch. It adds up"
    " two micro-batches, they have one. No input says why.",
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


def timed_layers(network: ModelGraph, smallest: Row, tokens: int) -> list[Timed]:
    """The smallest run's seconds of a micro-batch, by FLOPs; a block that is recomputed runs forward in backward again.

    ``predict`` knows no recomputation beside ZeRO stage 3, so that it stands in backward's time.
    """
    forward = {layer.name: layer.fw_flops for layer in network.layers}
    backward = {layer.name: layer.bw_input_flops + layer.bw_weight_flops for layer in network.layers}
    if smallest.recompute:
        backward |= {name: backward[name] + forward[name] for name in forward if name.startswith("blocks.")}
    second = smallest.micro_batch * tokens / smallest.tokens_per_s / (sum(forward.values()) + sum(backward.values()))
    return [Timed(each, forward[each.name] * second, backward[each.name] * second) for each in network.layers]


def profile(data: Path, smallest: Row, sweeps: Path, work: Path) -> Path:
    """The profile of a model by its smallest run."""
    work.mkdir(parents=True)
    run("paradl_bench", "describe", model_of(smallest), "-o", str(work / "network.json"))
    network = read_network(work / "network.json")
    timed = timed_layers(network, smallest, network.input_shape[0])
    write_layers(work / "layers", data / RUNS, network, timed, PLACE, DTYPE, smallest.micro_batch, "in_situ")
    fitted = work / "profile.json"
    run("calibrate", "fit", str(work / "layers"), str(sweeps), "--force", "-o", str(fitted))
    return fitted


def model_of(row: Row) -> str:
    """What makes its network."""
    return f"sets.networks:mpt_{row.model}"


def simulated(fitted: Path, row: Row) -> tuple[float, tuple[float, float], bool]:
    """Tokens a second and GPU over those of one sample a second: rate, interval, and whether it fits in memory."""
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
    settings = ("--optimizer", "adam", "--backend", "nccl")
    told = json.loads(run("predict", *about, *how, *settings, "--json"))[0]
    low_s, high_s = told["interval_s"]
    return samples / told["iteration_s"], (samples / high_s, samples / low_s), bool(told["fits"])


def predictions(data: Path, work: Path) -> tuple[dict[Row, tuple[Predicted, Predicted]], dict[Row, bool]]:
    """Of every H100 run but the smallest of its model: simulated, and the smallest's rate as it is; which runs fit."""
    sweeps = work / "nccl"
    work.mkdir(parents=True)
    told = ("--cluster", PLACE.cluster, "--device-name", PLACE.device_name, "-o", str(sweeps))
    run("paradl_bench", "import", "nccl-tests", *(str(data / path) for path in SWEEPS), *told)
    found, fits = {}, {}
    for name, (smallest, *others) in by_model(rows(data, "h100_80gb")).items():
        fitted = profile(data, smallest, sweeps, work / name)
        base, _, fits[smallest] = simulated(fitted, smallest)
        for row in others:
            rate, (low, high), fits[row] = simulated(fitted, row)
            scale = smallest.tokens_per_s / base
            found[row] = (
                Predicted("simulate", rate * scale, (low * scale, high * scale)),
                Predicted("as the smallest", smallest.tokens_per_s),
            )
    return found, fits


def _fitting(row: Row, fits: bool) -> str:
    return "recomputes: no memory is predicted" if row.recompute else "fits" if fits else "does not fit"


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all runs."""
    found, fits = predictions(data, work)
    runs = [Run(row.name, row.tokens_per_s, by, _fitting(row, fits[row])) for row, by in found.items()]
    left = [row for group in by_model(rows(data, "a100_40gb")).values() for row in group[1:]]
    runs += [Run(f"A100: {row.name}", row.tokens_per_s, (), "the data have no sweep of this network") for row in left]
    kept = [row for row in fits if not row.recompute]
    fitting = (
        f"Of {len(kept)} runs that keep activations, all of which ran, {sum(fits[row] for row in kept)} fit by predict."
    )
    inputs = "the smallest run of the same model, and nccl-tests of other H100 nodes"
    return (
        PublishedSet("llm-foundry, FSDP", CITED, inputs, (*CAUSES, fitting), tuple(runs), "measured tokens/s", 1.0),
    )
