"""Random modules by strategies: training on real ranks against serial training in float64, and what is issued.

    python benchmarks/correctness/drawn_modules.py --cases 2000 --seed 0 -o FILE.json
    python benchmarks/correctness/drawn_modules.py --case 17

Each case is a module that is drawn as users write them (``tests/random_modules``), a strategy and settings, all by one
number. What ``paradl-bench train`` refuses before it starts ranks is listed with its reason. All else has to train as
the serial model does: outputs, gradients of inputs and parameters, and what the optimizer makes of them; and every
collective has to be a planned one. Called again with the same file, the benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from random_modules.case import case_of
from random_modules.run import Result, run

OF_A_SEED = 1_000_000
"""Numbers that a seed has."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of a run."""

    seed: int
    counts: dict[str, int]
    results: tuple[Result, ...]


def write(output: Path, seed: int, results: Sequence[Result]) -> Report:
    """Keep what was found so far."""
    ordered = tuple(sorted(results, key=lambda result: result.number))
    report = Report(seed=seed, counts=dict(Counter(result.outcome for result in ordered)), results=ordered)
    write_bytes_atomically(output, encode_pretty(report))
    return report


def main() -> int:
    """Run what has no result yet; the status is 1 where a case differs, crashes or issues other collectives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, action="append", help="run this number alone, and print its module")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat the cases of the file that failed")
    options = parser.parse_args()
    if options.case:
        return repeat(options.case)
    if options.output is None:
        parser.error("-o FILE.json takes what is found")
    results: list[Result] = []
    if options.output.exists():
        results = list(msgspec.json.decode(options.output.read_bytes(), type=Report).results)
    if options.again:
        results = [result for result in results if not result.failed]
    known = {result.number for result in results}
    first = options.seed * OF_A_SEED
    for result in run(case_of(n) for n in range(first, first + options.cases) if n not in known):
        results.append(result)
        if result.failed:
            print(result.line, flush=True)
        if len(results) % 20 == 0:
            write(options.output, options.seed, results)
    report = write(options.output, options.seed, results)
    print(report.counts)
    return int(any(result.failed for result in results))


def repeat(numbers: Sequence[int]) -> int:
    """Print each case's module, and what is found."""
    failed = False
    for number in numbers:
        print(json.dumps(case_of(number).description))
    for result in run(map(case_of, numbers)):
        print(f"{result.number}: {result.case}: {result.outcome}", *result.reasons, sep="\n  ")
        failed |= result.failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
