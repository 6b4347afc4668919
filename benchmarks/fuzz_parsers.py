"""Fuzz every reader of foreign files and the loaders of our own: nothing but the project's own errors may come out.

    python benchmarks/fuzz_parsers.py --runs 1000000 [--only kineto,osu] [--seed 0] [--engine own|atheris]

Inputs are changed from small files of every format; those that reach new lines are changed on. With atheris (libFuzzer;
pip install atheris) every target runs in a process of its own. The first failing input is printed; exit code 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coverage_guided import Fuzzer
from parser_targets import seeds, targets

_LONGEST_INPUT = 1 << 16


def fuzz_own(name: str, runs: int, seed: int) -> int:
    """Fuzz one target by the small fuzzer of the tests; lines reached."""
    fuzzer = Fuzzer(targets()[name], seeds(name), random.Random(f"{seed} {name}"), traced_every=5)
    start = time.monotonic()
    fuzzer.run(runs)
    rate = fuzzer.runs / (time.monotonic() - start)
    print(f"{name}: {fuzzer.runs} inputs, {len(fuzzer.lines.seen)} lines, {len(fuzzer.corpus)} kept, {rate:.0f}/s")
    return len(fuzzer.lines.seen)


def fuzz_atheris(name: str, runs: int, seed: int) -> None:
    """Fuzz one target by atheris in a process of its own.

    Raises:
        subprocess.CalledProcessError: an input failed; atheris has printed it.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(seeds(name)):
            (Path(folder) / str(number)).write_bytes(content)
        limits = [
            f"-runs={runs}",
            f"-seed={seed + 1}",
            f"-max_len={_LONGEST_INPUT}",
            "-timeout=20",
        ]
        arguments = [sys.executable, __file__, "--child", name, *limits, folder]
        subprocess.run(arguments, check=True)


def child(name: str, arguments: list[str]) -> None:
    """Run libFuzzer in this process."""
    import atheris

    # What was imported before has to be instrumented afterwards.
    target = targets()[name]
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], lambda content: target(bytes(content)))
    atheris.Fuzz()


def main() -> None:
    """Share the runs over the targets."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs over all targets")
    parser.add_argument("--only", default="", help="targets, parted by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["own", "atheris"], default="own")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else sorted(targets())
    for name in names:
        share = options.runs // len(names)
        try:
            fuzz_own(name, share, options.seed) if options.engine == "own" else fuzz_atheris(name, share, options.seed)
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}")
            sys.exit(1)


if __name__ == "__main__":
    main()
