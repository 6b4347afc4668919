"""S-SGD's DAG against B-Caffe's published runs: GoogLeNet on one K80 a node over 10GbE, on 2 and 4 nodes.

python benchmarks/published/ssgd_dag.py [--data ../shared/data/bcaffe-k80]

The layer-wise logs have backward and the exchange of every parameter tensor on so many nodes; forward and all else is
what one node's measured iteration leaves. Each log becomes an S-SGD trace, which goes through ``paradl-bench import``
and ``calibrate fit`` to ``predict --evaluator dag``. Beside it stands the same closed form on the logged exchanges
themselves, so that what the fit of t(bytes) adds is seen apart. Nothing is fitted to the runs that are predicted.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from predict.costs.input.input_closed_form import exposed_exchange_seconds

BATCH = 64
ONE_NODE_PER_S = 163.4
LOGS = {"tmp2comm.log": 2, "tmp4comm.log": 4}
MEASURED_PER_S = {2: 299.3, 4: 599.3}
"""Wait-free, images a second over all nodes (shared/data/README.md)."""


class Layer(NamedTuple):
    """A layer with parameters: its backward, and bytes and seconds of the exchanges of its tensors."""

    number: int
    backward_s: float
    exchanges: tuple[tuple[int, float], ...]


def read_layers(path: Path, log: str) -> list[Layer]:
    """Layers of the last snapshot of a log; weight and bias repeat one backward time, which counts once."""
    with open(path, newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["file"] == log]
    last = max(int(row["snapshot"]) for row in rows)
    rows = [row for row in rows if int(row["snapshot"]) == last]
    layers = []
    for number, (weight, bias) in enumerate(zip(rows[::2], rows[1::2], strict=True), start=1):
        exchanges = tuple((4 * int(row["n_params"]), float(row["comm_us"]) * 1e-6) for row in (weight, bias))
        layers.append(Layer(number, float(weight["backward_compute_us"]) * 1e-6, exchanges))
    return layers


def from_log(layers: list[Layer]) -> float:
    """Seconds of an iteration with the exchanges as logged."""
    backward = np.array([layer.backward_s for layer in reversed(layers)])
    exchange = np.array([sum(seconds for _, seconds in layer.exchanges) for layer in reversed(layers)])
    ready = np.cumsum(backward)
    return BATCH / ONE_NODE_PER_S + exposed_exchange_seconds(ready, exchange, float(ready[-1]), wait_free=True)


def write_trace(path: Path, layers: list[Layer]) -> None:
    """An S-SGD trace with a line a tensor; what one node's iteration has beyond backward is the first one's forward."""
    forward_s = BATCH / ONE_NODE_PER_S - sum(layer.backward_s for layer in layers)
    lines = ["0 data 0 0 0 0"]
    for layer in layers:
        forward_us = forward_s * 1e6 if layer.number == 1 else 0.0
        # Both gradients are there when backward of the layer is done: the bias, behind it, takes the time.
        (weight, weight_s), (bias, bias_s) = layer.exchanges
        first = 2 * layer.number - 1
        lines.append(f"{first} weight{layer.number} {forward_us:.9g} 0 {weight_s * 1e6:.9g} {weight}")
        lines.append(f"{first + 1} bias{layer.number} 0 {layer.backward_s * 1e6:.9g} {bias_s * 1e6:.9g} {bias}")
    path.write_text("\n".join(lines) + "\n")


def run(module: str, *arguments: str) -> str:
    """Standard output of one of the three commands."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def predicted(layers: list[Layer], nodes: int, folder: Path) -> tuple[float, float, float]:
    """Iteration, and all its exchanges, through import, fit and predict; the fit's median error at what was logged."""
    trace, measured, profile = folder / f"{nodes}.txt", folder / f"m{nodes}", folder / f"p{nodes}.json"
    write_trace(trace, layers)
    place = ["--ranks", str(nodes), "--level", "system", "--library", "mpi-cuda", "--batch", str(BATCH)]
    run("paradl_bench", "import", "ssgd-trace", str(trace), "--model", "googlenet", *place, "-o", str(measured))
    run("calibrate", "fit", str(measured), "-o", str(profile))
    about = ["--from-profile", str(profile), "--model", "googlenet", "--strategy", f"d{nodes}"]
    feed = ["--evaluator", "dag", "--preset", "caffe-mpi", "--backend", "mpi-cuda"]
    found = json.loads(run("predict", *about, "--batch", str(BATCH * nodes), *feed, "--json"))
    fits = json.loads(profile.read_text())["communication"]
    return found[0]["iteration_s"], found[0]["communication_s"], max(fit["residual_relative_median"] for fit in fits)


def main() -> None:
    """Print predicted and measured images a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[3] / "shared" / "data" / "bcaffe-k80")
    options = parser.parse_args()
    path = options.data / "googlenet_k80_layerwise.csv"
    if not path.exists():
        sys.exit(f"{path} is not here: --data says where B-Caffe's logs are")
    print("GoogLeNet, K80, 10GbE, wait-free: images/s; ideal: no exchange is seen")
    heads = f"{'dag, exchanges as logged':>26} {'dag, from the profile':>23} {'exchanges: logged, fitted':>27}"
    print(f"{'nodes':>5} {'measured':>9} {'ideal':>7} {heads}  a fitted point is off by")
    with tempfile.TemporaryDirectory() as folder:
        for log, nodes in LOGS.items():
            layers = read_layers(path, log)
            through, exchanged_s, residual = predicted(layers, nodes, Path(folder))
            logged_s = sum(seconds for layer in layers for _, seconds in layer.exchanges)
            rates = [BATCH * nodes / seconds for seconds in (from_log(layers), through)]
            measured = MEASURED_PER_S[nodes]
            logged, fitted = (f"{rate:.1f} ({rate / measured - 1:+.1%})" for rate in rates)
            ideal = ONE_NODE_PER_S * nodes
            sums = f"{logged_s * 1e3:.0f} ms, {exchanged_s * 1e3:.0f} ms"
            print(f"{nodes:5} {measured:9.1f} {ideal:7.1f} {logged:>26} {fitted:>23} {sums:>27}  {residual:.0%}")


if __name__ == "__main__":
    main()
