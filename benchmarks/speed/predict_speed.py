"""Speed of ``predict`` as a whole process: a saved profile, one model, ten rank counts.

    python benchmarks/speed/predict_speed.py
    python benchmarks/speed/predict_speed.py --from-profile p.json --model resnet50 --batch 64

Without a profile a synthetic one of the model is made, which needs torch once, to trace it.

Prints seconds (median, quartiles and minimum over repetitions), peak resident memory of the process, which of the heavy
packages it loaded, and seconds of one simulation. The figures to reach: 1 s, 150 MB, none.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

HEAVY = ("torch", "torchvision", "pandas", "scipy")
_REPORTING = """
import atexit, json, sys

def tell():
    # Not getrusage: it counts what the parent held when it started this process.
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps({"kib": int(status["VmHWM"].split()[0]), "modules": sorted(sys.modules)}), file=sys.stderr)

atexit.register(tell)
from predict.cli import main
main()
"""


def synthetic_profile(path: Path, model: str, batch: int, operations: Sequence[str] = ("broadcast",)) -> None:
    """A profile of a traced model with times from a roofline: as large as a measured one, and as slow to read.

    Args:
        operations: that are fitted beside all-reduce.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cases"))
    from profile_factory import layer_times, make_profile, model_times, ring_fit, with_compute

    from calibrate.profile.profile import write_profile
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.graph import Layer
    from paradl_bench.network.models.catalog import load_model

    def roofline(layer: Layer, phase: str, samples: int) -> float:
        flops = layer.fw_flops if phase == "FW" else layer.bw_input_flops + layer.bw_weight_flops
        return 1e-6 + samples * max(flops / 1e11, layer.fw_bytes / 1e10)

    network = trace_network(load_model(model, None, device="meta"))
    batches = (batch // 2, batch)
    profile = make_profile(
        network,
        layer_times=layer_times(network, batches=batches, seconds=roofline, block_sd=0.02),
        model_times=model_times(
            network,
            batches=batches,
            seconds=roofline,
            between_s=1e-3,
            common_sd=0.02,
            quantiles=(0.9, 1.0, 1.1),
            samples=200,
        ),
        communication=(
            ring_fit(covariance=((1e-12, 0.0), (0.0, 1e-22)), block_relative_sd=0.05),
            *(ring_fit(operation, block_relative_sd=0.05) for operation in operations),
        ),
        contexts=(with_compute(1.3, 1.5, sd=0.07),),
    )
    write_profile(path, profile)


def run_once(arguments: list[str]) -> tuple[float, dict[str, object]]:
    """Seconds of a whole process, and what it says of itself."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    # To compile all modules anew each time is not what a user waits for.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _REPORTING, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise click.ClickException(done.stderr)
    return seconds, json.loads(done.stderr.strip().splitlines()[-1])


def simulation_seconds(profile: Path, model: str, batch: int) -> tuple[int, float]:
    """Tasks of the plan of 64 ranks, and seconds of one simulation of all of them."""
    import numpy as np

    from calibrate.profile.profile import read_profile
    from paradl_bench.plan.settings import PlanSettings
    from paradl_bench.plan.strategy import parse_strategy
    from paradl_bench.strategies.nesting.catalog import planner_for
    from predict.costs.cost_model import CostModel
    from predict.simulation.simulator import simulate, task_graph

    stored = read_profile(profile)
    strategy = parse_strategy("d64")
    network = stored.network[model]
    plan = planner_for(strategy).plan(network, strategy, PlanSettings(batch=64 * batch))
    costs = CostModel(profile=stored, network=network).price(plan).costs
    role = plan.roles[0]
    graph = task_graph(role)
    arrays = [values[role.work] for values in (costs.seconds, costs.compute_slowdown, costs.communication_slowdown)]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        simulate(graph, *map(np.ascontiguousarray, arrays))
        times.append(time.perf_counter() - begin)
    return role.tasks, statistics.median(times)


@click.command()
@click.option("--from-profile", "profile", type=click.Path(path_type=Path), help="Default: a synthetic one.")
@click.option("--model", default="resnet50", show_default=True)
@click.option("--batch", default=32, show_default=True, help="Samples a rank.")
@click.option("--repetitions", default=11, show_default=True)
def main(profile: Path | None, model: str, batch: int, repetitions: int) -> None:
    """Time whole processes of predict."""
    with tempfile.TemporaryDirectory() as folder:
        if profile is None:
            profile = Path(folder) / "profile.json"
            synthetic_profile(profile, model, batch)
        options = ["--strategy", "data", "--ranks", "2:1024:x2", "--batch", str(2 * batch)]
        arguments = ["--from-profile", str(profile), "--model", model, *options]
        runs = [run_once(arguments) for _ in range(repetitions)]
        tasks, simulation_s = simulation_seconds(profile, model, batch)
        size_kb = profile.stat().st_size / 1e3
    seconds = sorted(run[0] for run in runs)
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    loaded = set(HEAVY) & {str(name) for _, told in runs for name in told["modules"]}  # type: ignore[attr-defined]
    memory_mb = max(int(str(told["kib"])) for _, told in runs) * 1024 / 1e6
    click.echo(f"{model}, ten rank counts, profile of {size_kb:.0f} kB, {repetitions} processes")
    click.echo(f"seconds: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, minimum {seconds[0]:.3f}")
    click.echo(f"peak resident memory: {memory_mb:.0f} MB; loaded of {', '.join(HEAVY)}: {', '.join(loaded) or 'none'}")
    click.echo(f"one simulation of {tasks} tasks, not coalesced: {simulation_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
