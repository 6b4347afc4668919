"""Published training iterations, predicted from published operations and sweeps alone, run by run.

    python benchmarks/published/published_runs.py [--data ../shared/data] [--only SET] [-o DIR]

Nothing is fitted to an answer: each set (``SETS``) reads answers once its predictions stand. Beside them stand the
simplest prediction, FLOPs over a constant share of the peak, and what the publishers' own tool said, where the data
have it. Data that are absent are said to be. A few minutes a set, of which vTrain's is the longest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imports import DATA  # noqa: E402
from sets import evidence, llm_foundry, neusight, neusight_four, neusight_kernels, primus, vtrain  # noqa: E402
from sets.runs import PublishedSet, summary, table  # noqa: E402
from sets.simumax import published_set as simumax  # noqa: E402

from paradl_bench.core.files.storage import write_text_atomically  # noqa: E402

SETS = {
    "neusight": neusight,
    "neusight-kernels": neusight_kernels,
    "neusight-four": neusight_four,
    "simumax": simumax,
    "llm-foundry": llm_foundry,
    "primus": primus,
    "vtrain": vtrain,
}


def report(data: Path, names: list[str]) -> str:
    """Tables of the sets of these names."""
    lines: list[str] = []
    sets: list[PublishedSet] = []
    for name in names:
        missing = [str(path) for path in SETS[name].NEEDS if not (data / path).exists()]
        if missing:
            lines += [f"{name}: skipped, {missing[0]} is not in {data}", ""]
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as work:
            found = SETS[name].published(data, Path(work) / name)
        sets += found
        lines += [line for each in found for line in table(each)]
    if names == list(SETS) and all((data / path).exists() for path in evidence.NEEDS):
        lines += evidence.lines(data)
    return "\n".join([*(summary(sets) if sets else ()), *lines])


def main() -> None:
    """Predict, then compare, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published measurements")
    parser.add_argument("--only", choices=SETS, action="append", help="this set alone; repeatable")
    parser.add_argument("-o", "--output", type=Path, help="folder for report.md")
    given = parser.parse_args()
    text = report(given.data, given.only or list(SETS))
    print(text)
    if given.output is not None:
        write_text_atomically(given.output / "report.md", text)


if __name__ == "__main__":
    main()
