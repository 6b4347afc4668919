"""Published training iterations, predicted from published operations alone, run by run.

    python benchmarks/published/published_runs.py [--data ../shared/data] [-o DIR]

First set: NeuSight's runs on one GPU (fp32, torch 2.1), each from the operations traced on the same GPU, through
import, fit and predict. Beside it the simplest prediction: FLOPs over a constant share of the peak. Nothing is fitted
to an answer; answers are read once predictions stand. About half a minute a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imports import DATA  # noqa: E402
from public import neusight  # noqa: E402
from public.neusight import Answer, Predicted  # noqa: E402

from paradl_bench.core.files.storage import write_text_atomically  # noqa: E402


def report(runs: list[tuple[Answer, list[Predicted]]]) -> str:
    """A row a run, with the measured time and every prediction's error; then means of |error|."""
    names = [each.by for each in runs[0][1]]
    lines = [f"## {neusight.SOURCE} ({neusight.CITED})", ""]
    lines += ["| run | measured ms | " + " | ".join(names) + " | forward, backward of the first |"]
    lines += ["|---|---|" + "---|" * (len(names) + 1)]
    for answer, found in runs:
        measured_ms = 1e3 * (answer.forward_s + answer.backward_s)
        errors = " | ".join(f"{each.error(answer):+.1%}" for each in found)
        first = found[0]
        parts = f"{first.forward_s / answer.forward_s - 1:+.1%}, {first.backward_s / answer.backward_s - 1:+.1%}"
        lines.append(f"| {answer.name} | {measured_ms:.1f} | {errors} | {parts} |")
    for title, kept in (("all", runs), ("H100", [each for each in runs if "H100" in each[0].name])):
        if kept:
            means = [
                statistics.fmean(abs(found[at].error(answer)) for answer, found in kept) for at in range(len(names))
            ]
            lines.append(
                f"| mean of errors' sizes, {title} | | " + " | ".join(f"{mean:.1%}" for mean in means) + " | |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Predict, then compare, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="that holds neusight-train")
    parser.add_argument("-o", "--output", type=Path, help="folder for report.md")
    given = parser.parse_args()
    traces = neusight.traces(given.data)
    if not traces:
        sys.exit(f"{given.data / 'neusight-train'} is not here")
    with tempfile.TemporaryDirectory() as work:
        predicted = [neusight.predictions(trace, Path(work) / f"{at}") for at, trace in enumerate(traces)]
    runs = [(neusight.read_answer(trace), found) for trace, found in zip(traces, predicted, strict=True)]
    text = report(runs)
    print(text)
    if given.output is not None:
        write_text_atomically(given.output / "report.md", text)


if __name__ == "__main__":
    main()
