"""B-Caffe: one K80 a node over 10GbE, gradients exchanged wait-free tensor by tensor, or merged (MG-WFBP).

Known: the iteration on one node, the OSU sweeps of the nodes, and of GoogLeNet backward of every layer with parameters
and the exchange of every tensor. Forward, and all else, is what one node's iteration leaves. Backward is the mean over
the logs, since it does not depend on the nodes. What the logs count as an exchange is a copy to the host, MPI's
all-reduce, a division and a copy back, beside compute; the sweep is the all-reduce alone.

What exchanges and compute cost each other was not measured: ``simulate`` takes what was published of other GPUs, the
closed forms take nothing, as their papers do.

ResNet-50 has no logs: its iteration is shared out by the roofline, and its exchanges go by the fit of GoogLeNet's.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from public.estimated import described, shared_out
from public.pairs import Pair
from public.toolkit import TraceLayer, predict, run, write_trace

from predict.costs.input.input_closed_form import exposed_exchange_seconds

SOURCE = "B-Caffe"
MEASURED = """\
model,batch,nodes,exchange,images_per_s
googlenet,64,1,,163.4
googlenet,64,2,wait-free,299.3
googlenet,64,4,wait-free,599.3
googlenet,64,2,merged,316.1
googlenet,64,4,merged,600.2
resnet50,32,1,,76.85
resnet50,32,2,wait-free,151.1
resnet50,32,4,wait-free,294.7
resnet50,32,2,merged,151.2
resnet50,32,4,merged,295.2
"""
"""Over all nodes, with the batch of a node (shared/data/README.md). ``bcaffe-k80/measured.csv`` adds to these."""

_FUSION = {"wait-free": "none", "merged": "mg-wfbp"}
_CLOSED_FORMS = {"wait-free": ("--evaluator", "dag", "--preset", "caffe-mpi"),
                 "merged": ("--evaluator", "osf", "--fusion", "mg-wfbp")}  # fmt: skip
_SWEEP, _TRAINING = ("--backend", "mpi"), ("--backend", "mpi-cuda")
CHOSEN = "simulate, the sweep"
"""What predicts by default, of what was measured by itself: what exchanges and compute cost each other is its part to
tell. Decided when all figures had been seen (docs/model/validation.md, "What B-Caffe's inputs do not tell")."""
AS_LOGGED = "closed form, exchanges as logged"
"""Of runs that a log is there of: the exchanges of all tensors in the very iteration."""


def evaluators(exchange: str) -> dict[str, tuple[str, ...]]:
    """Options of ``predict`` by what they are called here; the exchanges by the sweep, or by those logged in training.

    What compute costs an exchange is in the latter already.
    """
    simulated = ("--evaluator", "simulate", "--fusion", _FUSION[exchange])
    return {
        CHOSEN: (*simulated, *_SWEEP),
        "simulate, the exchanges in training": (*simulated, *_TRAINING),
        "closed form, the sweep": (*_CLOSED_FORMS[exchange], *_SWEEP),
        "closed form, the exchanges in training": (*_CLOSED_FORMS[exchange], *_TRAINING),
    }


_LOG = re.compile(r"tmp(\d+)o?comm\.log")


class Tensor(NamedTuple):
    """A parameter tensor: its bytes, and seconds of the exchange by itself and of the merged one that it completes."""

    bytes: int
    exchange_s: float
    merged_s: float


class Logged(NamedTuple):
    """A layer with parameters as a log has it; its weight and its bias."""

    backward_s: float
    tensors: tuple[Tensor, Tensor]


class Run(NamedTuple):
    """A row of what was measured."""

    model: str
    batch: int
    nodes: int
    exchange: str
    iteration_s: float


def nodes_of(log: str) -> int:
    """As its name tells."""
    match = _LOG.fullmatch(log)
    if match is None:
        raise ValueError(f"{log} does not tell its nodes")
    return int(match.group(1))


def read_logs(path: Path) -> dict[str, list[Logged]]:
    """The last snapshot of every log whose name tells its nodes, layers from the input on.

    Weight and bias repeat one backward: it counts once.
    """
    found: dict[str, list[dict[str, str]]] = {}
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream):
            if _LOG.fullmatch(row["file"]):
                rows = found.setdefault(row["file"], [])
                if rows and rows[0]["snapshot"] != row["snapshot"]:
                    rows.clear()
                rows.append(row)
    return {name: list(_layers(rows)) for name, rows in found.items()}


def _layers(rows: Sequence[dict[str, str]]) -> Iterable[Logged]:
    for pair in zip(rows[::2], rows[1::2], strict=True):
        weight, bias = (
            Tensor(4 * int(row["n_params"]), float(row["comm_us"]) * 1e-6, float(row["merged_comm_us"] or 0) * 1e-6)
            for row in pair
        )
        yield Logged(float(pair[0]["backward_compute_us"]) * 1e-6, (weight, bias))


def is_merged(layers: Sequence[Logged]) -> bool:
    """Whether a log is of merged gradients; what it has of single tensors then is of the iterations before."""
    return any(tensor.merged_s for layer in layers for tensor in layer.tensors)


def exchanges(layers: Sequence[Logged]) -> list[list[tuple[int, float]]]:
    """Per layer, in the order of backward, the (bytes, seconds) of the exchanges that it completes."""
    merged, held = is_merged(layers), 0
    found: list[list[tuple[int, float]]] = []
    for layer in reversed(layers):
        own = []
        for tensor in reversed(layer.tensors):
            held += tensor.bytes
            taken = tensor.merged_s if merged else tensor.exchange_s
            if taken:
                own.append((held, taken))
                held = 0
        found.append(own)
    return found


def mean_backward(logs: Iterable[Sequence[Logged]]) -> list[float]:
    """Seconds of every layer over the logs, from the input on."""
    return [fmean(layer.backward_s for layer in same) for same in zip(*logs, strict=True)]


def as_logged(backward_s: Sequence[float], layers: Sequence[Logged], iteration_s: float) -> float:
    """Seconds of an iteration with the exchanges as a log has them, by dag's closed form."""
    exchange = np.array([sum(seconds for _, seconds in own) for own in exchanges(layers)])
    ready = np.cumsum(list(reversed(backward_s)))
    return iteration_s + exposed_exchange_seconds(ready, exchange, float(ready[-1]), wait_free=True)


def googlenet(layers: Sequence[Logged], backward_s: Sequence[float], iteration_s: float) -> list[TraceLayer]:
    """A line a tensor; what one node's iteration has beyond backward is the first one's forward."""
    forward_s = iteration_s - sum(backward_s)
    found = []
    for number, (layer, seconds) in enumerate(zip(layers, backward_s, strict=True)):
        weight, bias = layer.tensors
        # Both gradients are there when backward of the layer is done: the bias, behind it, takes the time.
        found.append(TraceLayer(f"weight{number}", 0.0 if number else forward_s, 0.0, 0.0, weight.bytes))
        found.append(TraceLayer(f"bias{number}", 0.0, seconds, 0.0, bias.bytes))
    return found


def profile_of(data: Path, folder: Path, models: dict[str, tuple[int, list[TraceLayer]]]) -> Path:
    """A profile of the models' iterations, the exchanges in the logs and the sweeps, by import and fit."""
    place = ("--level", "system", "--ranks-per-node", "1")
    made = []
    for model, (batch, layers) in models.items():
        trace, made = folder / f"{model}.txt", [*made, folder / model]
        write_trace(trace, [layers])
        run("paradl_bench", "import", "ssgd-trace", str(trace), "--model", model, "--batch", str(batch),
            "-o", str(made[-1]))  # fmt: skip
    for log, logged in read_logs(data / "googlenet_k80_layerwise.csv").items():
        sent = [each for own in exchanges(logged) for each in own]
        trace, made = folder / f"{log}.txt", [*made, folder / log]
        write_trace(trace, [[TraceLayer(f"sent{i}", 0.0, 1e-6, taken, size) for i, (size, taken) in enumerate(sent)]])
        run("paradl_bench", "import", "ssgd-trace", str(trace), "--model", log, "--batch", "1", "--library", "mpi-cuda",
            "--ranks", str(nodes_of(log)), *place, "-o", str(made[-1]))  # fmt: skip
    for nodes, text in _sweeps(data / "osu_allreduce_10gbe.csv").items():
        sweep, made = folder / f"osu-{nodes}.log", [*made, folder / f"osu-{nodes}"]
        sweep.write_text(text)
        run("paradl_bench", "import", "osu", str(sweep), "--ranks", str(nodes), *place, "-o", str(made[-1]))
    profile = folder / "profile.json"
    run("calibrate", "fit", *map(str, made), "--force", "-o", str(profile))
    return profile


def _sweeps(path: Path) -> dict[int, str]:
    """By nodes, in OSU's own form: the logs print the nodes in front of each size."""
    found: dict[int, list[str]] = {}
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream):
            found.setdefault(int(row["ranks"]), []).append(f"{row['bytes_as_printed']} {row['avg_us']}")
    title = "# OSU MPI Allreduce Latency Test v5.4.0\n# Size       Avg Latency(us)\n"
    return {nodes: title + "\n".join(lines) + "\n" for nodes, lines in found.items()}


def read_measured(home: Path) -> list[Run]:
    """The runs above, and those of a file beside the logs."""
    own = home / "measured.csv"
    texts = [MEASURED, *([own.read_text()] if own.exists() else [])]
    rows = {}
    for text in texts:
        for row in csv.DictReader(text.splitlines()):
            nodes, batch = int(row["nodes"]), int(row["batch"])
            seconds = batch * nodes / float(row["images_per_s"])
            rows[row["model"], batch, nodes, row["exchange"]] = seconds
    return [Run(*key, seconds) for key, seconds in rows.items()]


def pairs(data: Path, folder: Path) -> list[Pair]:
    """Every measured run on more than one node.

    Raises:
        RuntimeError: a command failed.
    """
    home = data / "bcaffe-k80"
    runs = read_measured(home)
    logs = read_logs(home / "googlenet_k80_layerwise.csv")
    backward_s = mean_backward(logs.values())
    alone = {run.model: run for run in runs if run.nodes == 1}
    models = {}
    for model, one in alone.items():
        if model == "googlenet":
            layers = googlenet(next(iter(logs.values())), backward_s, one.iteration_s)
        else:
            layers = shared_out(described(model, folder), "K80", one.batch, one.iteration_s)
        models[model] = one.batch, layers
    profile = profile_of(home, folder, models)
    found = []
    for each in runs:
        if each.nodes > 1:
            own_logs = logs if each.model == "googlenet" else {}
            found += _of_run(each, alone[each.model].iteration_s, profile, backward_s, own_logs)
    return found


def _of_run(
    measured: Run, alone_s: float, profile: Path, backward_s: Sequence[float], logs: dict[str, list[Logged]]
) -> list[Pair]:
    points = {
        name: (told.low_s, told.iteration_s, told.high_s)
        for name, options in evaluators(measured.exchange).items()
        for told in [predict(profile, measured.model, measured.nodes, measured.batch * measured.nodes, *options)]
    }
    low, _, high = points["closed form, the exchanges in training"]
    for log, layers in logs.items():
        if nodes_of(log) == measured.nodes and is_merged(layers) == (measured.exchange == "merged"):
            own = as_logged(backward_s, layers, alone_s)
            # A log is of one iteration, the fit of all that were logged: the interval holds both. Decided with the
            # results in sight.
            points[AS_LOGGED] = min(own, low), own, max(own, high)
    return [
        Pair(
            source=f"{SOURCE} {measured.model}",
            what=f"{measured.model}, {measured.batch} a node, {measured.nodes} nodes, {measured.exchange}",
            ranks=measured.nodes,
            evaluator=name,
            chosen=name == CHOSEN,
            unit="iteration",
            predicted_s=point,
            low_s=low,
            high_s=high,
            perfect_s=alone_s,
            measured_s=measured.iteration_s,
        )
        for name, (low, point, high) in points.items()
    ]
