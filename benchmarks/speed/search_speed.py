"""Speed of ``predict search`` as a whole process: candidates, seconds and peak resident memory; then the simulator's.

    python benchmarks/speed/search_speed.py
    python benchmarks/speed/search_speed.py --models resnet50 --ranks 256 --repeat 3 --no-simulator

Profiles are synthetic: traced models with times from a roofline (which needs torch once), on a stated cluster of nodes
of 8 ranks in racks of 64. gpt2-medium-untied is GPT-2 of 345 million parameters whose head has weights of its own: with
one matrix for both ends, as gpt2-medium has it, no pipeline can be cut. The figure to reach at 1,024 ranks: 50,000
candidates in 10 s and 500 MB, on two cores. That of the large models, on a shipped profile: 20 s and 1 GB. Beside
seconds by the clock stand the processor's, to which other load on the machine adds less. The figures of the simulator
are those of ``benchmarks/speed/simulator_speed.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

CLUSTER = """name: synthetic
memory_bytes_per_rank: 80e9
levels:
  - {name: node, ranks: 8, alpha_s: 5e-6, beta_s_per_byte: 5e-12}
  - {name: rack, ranks: 64, alpha_s: 1e-5, beta_s_per_byte: 4e-11, contention: 1}
  - {name: system, ranks: 16384, alpha_s: 2e-5, beta_s_per_byte: 8e-11, contention: 2}
"""
SAMPLES = {"resnet50": 32, "vgg16": 32, "gpt2-medium": 1, "gpt2-medium-untied": 1}
"""A rank of data parallelism."""
LARGE = {"megatron-1t": 3072, "mixtral-8x7b": 512}
"""Models that no single node trains, and their ranks, with a sample each; in bf16."""
LARGE_ON = "h100-sxm"


@click.command()
@click.option("--models", default=",".join(SAMPLES), show_default=True)
@click.option("--ranks", default=1024, show_default=True)
@click.option("--repeat", default=1, show_default=True)
@click.option("--large/--no-large", default=True, show_default=True, help="Search for large models too.")
@click.option("--simulator/--no-simulator", default=True, show_default=True, help="Print the simulator's figures too.")
def main(models: str, ranks: int, repeat: int, large: bool, simulator: bool) -> None:
    """Search for each model, each time in a process of its own."""
    sys.path.insert(0, str(Path(__file__).parent))
    search_all(models.split(","), ranks, repeat)
    if large:
        search_large()
    if simulator:
        # In a process of its own as well: its repetitions would count what this one holds.
        subprocess.run([sys.executable, str(Path(__file__).with_name("simulator_speed.py"))], check=True)


def search_all(models: Sequence[str], ranks: int, repeat: int) -> None:
    """A line for each search."""
    from predict_speed import synthetic_profile

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(CLUSTER)
        for model in models:
            profile, answer = Path(folder) / f"{model}.json", Path(folder) / "answer.json"
            samples = SAMPLES.get(model, 32)
            synthetic_profile(profile, model, 2 * samples, ("all_gather", "send_recv", "broadcast", "reduce_scatter"))
            arguments = ["search", "--from-profile", str(profile), "--model", model, "--ranks", str(ranks)]
            arguments += ["--batch", str(samples * ranks), "--cluster", str(cluster), "-o", str(answer), "--force"]
            for _ in range(repeat):
                print_search(model, arguments, answer)


def search_large() -> None:
    """A line for each of the large models, on a device as it is shipped."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        for model, ranks in LARGE.items():
            arguments = ["search", "--from-profile", LARGE_ON, "--model", model, "--ranks", str(ranks)]
            arguments += ["--batch", str(ranks), "--dtype", "bf16", "-o", str(answer), "--force"]
            print_search(model, arguments, answer)


def print_search(model: str, arguments: list[str], answer: Path) -> None:
    """Search once, in a process of its own, and say what that took."""
    from predict_speed import run_once

    used = sum(os.times()[2:4])
    seconds, told = run_once(arguments)
    processor_s = sum(os.times()[2:4]) - used
    (searched,) = json.loads(answer.read_text())["searched"]
    best = json.loads(answer.read_text())["rows"][0]["prediction"]["strategy"]
    click.echo(
        f"{model:20} {searched['candidates']:9,} candidates, {searched['predicted']} predicted,"
        f" {searched['open']} open: {seconds:6.2f} s (processor {processor_s:.2f} s),"
        f" {int(str(told['kib'])) * 1024 / 1e6:.0f} MB; best {best}"
    )


if __name__ == "__main__":
    main()
