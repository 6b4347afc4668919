"""Every figure of the predictor's speed, one after the other: closed forms, simulator, whole processes, search.

    python benchmarks/speed/predictor_speed.py
    python benchmarks/speed/predictor_speed.py --only closed_forms --only search_speed

Runs closed_forms.py, simulator_speed.py, predict_speed.py and search_speed.py, each in a process of its own: what one
of them holds in memory would count in the next. On a quiet machine, for figures to keep; some minutes.

The figures to reach, on two cores: 200,000 points a second of the closed forms; 5,000,000 tasks a second, 64 stages
with 512 micro-batches in 0.5 s, d256p64 as a process in 1 s; ten rank counts in 1 s and 150 MB; a search at 1,024 ranks
of 50,000 candidates in 10 s and 500 MB.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

PARTS = {"closed_forms": (), "simulator_speed": (), "predict_speed": (), "search_speed": ("--no-simulator",)}
"""Scripts beside this one, and what they are given."""


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="This part, and those that are named too.")
def main(only: tuple[str, ...]) -> None:
    """Print every figure."""
    for name in only or PARTS:
        click.echo(f"{name}.py")
        script = str(Path(__file__).with_name(f"{name}.py"))
        done = subprocess.run([sys.executable, script, *PARTS[name]], check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        click.echo()


if __name__ == "__main__":
    main()
