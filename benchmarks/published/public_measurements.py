"""Predictions against the public measurements beside the repository, by one command.

    python benchmarks/published/public_measurements.py -o results/public-measurements/DATE-COMMIT
                                                       [--data ../shared/data]

ABCI (ResNet-50 under Horovod), B-Caffe (GoogLeNet and ResNet-50), the ParaDL paper's VGG16, vTrain's GPT runs on a
node: each from its inputs through import, fit and predict, beside perfect scaling. Then how well predictions rank, on
those and on the repository's own results. Nothing is fitted to what is predicted. Writes report.md and pairs.csv. A few
minutes; a source whose data are absent is skipped, and said to be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imports import DATA  # noqa: E402
from public import abci, bcaffe, paradl_table, ranking, vtrain  # noqa: E402
from public.pairs import Pair, as_csv, scores, table  # noqa: E402

from paradl_bench.core.files.storage import write_bytes_atomically  # noqa: E402

MOST_ROWS = 40
INTRODUCTION = (
    "Error = (predicted - measured) / measured, accuracy the mean of 1 - |error|. Extra: over perfect scaling. The",
    "evaluator in bold is the one that a source is judged by. Nothing is fitted to the answers. Decided with ABCI's",
    "and B-Caffe's in sight: that `simulate`, which predicts by default, judges them; that, where no interference was",
    "measured, it has compute take 1.189 times as long beside communication on GPUs, a mean published of other",
    "GPUs, networks and libraries (arXiv:2507.03114); and that intervals then reach up to 95% of what is hidden.",
)


class Source(NamedTuple):
    """A set of public measurements.

    Attributes:
        needs: files under the data that it cannot do without. cited: repository, commit, licence.
        left_out: what of the measured time no input tells of, in words.
        in_sight: what was chosen when results had been seen already, in words; empty for nothing.
    """

    title: str
    needs: tuple[str, ...]
    cited: str
    inputs: str
    left_out: str
    pairs: Callable[[Path, Path], list[Pair]]
    in_sight: str = ""


SOURCES = (
    Source(
        "ABCI",
        ("abci-v100/resnet50_horovod_epoch_times.csv", "abci-v100/nccl_osu"),
        "aistabci/abci2.0benchmark at f0aa27f2, MIT",
        "the epoch on one node, NCCL's all-reduce sweeps, layers' times by the roofline of the network",
        "the restart of the loader and the checkpoint of each epoch, Horovod's cycles of negotiation, the all-reduces"
        " of metrics from the CPU in every iteration, what communication and compute cost each other, spread of ranks",
        abci.pairs,
    ),
    Source(
        "B-Caffe",
        ("bcaffe-k80/googlenet_k80_layerwise.csv", "bcaffe-k80/osu_allreduce_10gbe.csv"),
        "shyhuai/B-Caffe at 1e8a70d8, BSD-2",
        "the iteration on one node, backward and exchange by tensor (GoogLeNet), OSU's all-reduce sweeps",
        "backward of layers without parameters, what copies and MPI cost the compute beside them, nodes that differ",
        bcaffe.pairs,
        "that exchanges go by the sweep and not by what was logged of them in training, which said 93.8% of GoogLeNet"
        " and 92.5% of ResNet-50 before, and that the interval of those as logged holds their fit's as well",
    ),
    Source(
        "ParaDL",
        ("paradl-projections/README.md",),
        "numbers typed from TruongThaoNguyen/paraDL-analysis",
        "seconds a sample of the whole model, alpha and beta by level",
        "times of shards, copies of split and concatenation, collectives as they were; the batches of the hybrids",
        paradl_table.pairs,
    ),
    Source(
        "vTrain",
        ("vtrain-a100/ground_truth_single_half.csv", "vtrain-a100/a100__AR_GPU8_1M_1024M_LUT.csv"),
        "VIA-Research/vTrain at f8dda847, MIT",
        "the same run with the least data parallelism, all-reduce tables",
        "times of kernels, without which tensor and pipeline degrees cannot be told apart",
        lambda data, _: vtrain.pairs(data),
    ),
)


def section(source: Source, data: Path, folder: Path) -> tuple[list[str], list[Pair]]:
    """A source's part of the report, and its pairs."""
    left_out = f"Not in the inputs, named and not fitted: {source.left_out}."
    lines = [f"## {source.title}", "", f"{source.cited}. Known: {source.inputs}. {left_out}", ""]
    if source.in_sight:
        lines += [f"Chosen with results in sight: {source.in_sight}.", ""]
    missing = [name for name in source.needs if not (data / name).exists()]
    if missing:
        return [*lines, f"Skipped: {missing[0]} is not under {data.name}.", ""], []
    own = folder / source.title.lower()
    own.mkdir()
    pairs = source.pairs(data, own)
    for name in dict.fromkeys(pair.source for pair in pairs):
        of_name = [pair for pair in pairs if pair.source == name]
        lines += [f"### {name}", "", *scores(of_name), ""]
        if len(of_name) <= MOST_ROWS:
            lines += [*table(of_name), ""]
        else:
            worst = sorted(of_name, key=lambda pair: -abs(pair.error))[:10]
            lines += [f"The ten that are farthest off, of {len(of_name)} (all in pairs.csv):", "", *table(worst), ""]
    return lines, pairs


def report(data: Path, results: Path, folder: Path) -> tuple[str, list[Pair]]:
    """The whole report, and all pairs."""
    lines = ["# Predictions against public measurements", "", *INTRODUCTION, ""]
    pairs: list[Pair] = []
    for source in SOURCES:
        print(f"{source.title} ...", file=sys.stderr, flush=True)
        own_lines, own = section(source, data, folder)
        lines, pairs = lines + own_lines, pairs + own
    choices = [*ranking.of_exchanges(pairs), *ranking.of_results(results)]
    if choices:
        right = sum(choice.right for choice in choices)
        said = (
            f"Of {len(choices)} sets of runs at one size the one predicted best is the best measured, or within the"
            f" noise floor of it, in {right}. Predictions of this repository's own runs are those committed with them."
        )
        lines += ["## Ranking", "", said, "", *ranking.table(choices), ""]
    return "\n".join(lines), pairs


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="Folder for report.md and pairs.csv.")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="Of this repository, to rank in.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, pairs = report(options.data, options.results, Path(folder))
    options.output.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(options.output / "report.md", text.encode())
    write_bytes_atomically(options.output / "pairs.csv", as_csv(pairs).encode())
    print(text)


if __name__ == "__main__":
    main()
