"""Predictions, searches, timelines, fits and imports whose numbers a change of structure has to keep.

The profiles are the committed one of two ranks, and an emulated cluster's: fitted here from the committed sweeps, with
the layers of a synthetic device.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.extend(str(ROOT / "benchmarks" / room) for room in ("emulation", "networks"))

import emulated_profile
from click.testing import CliRunner

from calibrate.cli import group as calibrate
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model

MEASURED = ROOT / "results/cpu-2core/2026-11-21-ffbe79c/accuracy/profile.json"
CLUSTERS = ROOT / "results/emulation/2026-11-23-db62732/4-a-node"
SWEEPS = ("layers", "buckets", "beside", "crossed", "inside", "beside-inside", "inside-buckets", "at-once")
EVALUATORS = ("simulate", "paradl", "osf", "csf", "dag")
IMAGES, TOKENS = "emulated_networks:small_vgg", "transformer_networks:Own"
RUNS = ("small_vgg-d2f4", "small_vgg-d8", "small_vgg-p8-schedule=1f1b-micro_batches=16")


class Case(NamedTuple):
    """A command of ``predict`` or ``calibrate``, whose output is JSON.

    Attributes:
        words: the command line without the program's name.
    """

    name: str
    program: str
    words: tuple[str, ...]


def emulated(directory: Path) -> Path:
    """The profile of two emulated nodes with four ranks each."""
    sweeps = [str(CLUSTERS / "2x4" / f"sweep-{name}") for name in SWEEPS]
    fitted = directory / "fitted.json"
    words = ["fit", *sweeps, str(CLUSTERS / "2x4" / "host"), "--force", "-o", str(fitted)]
    CliRunner().invoke(calibrate, words, catch_exceptions=False)
    networks = [trace_network(load_model(IMAGES, (3, 32, 32))), trace_network(load_model(TOKENS))]
    path = directory / "emulated.json"
    profile = emulated_profile.read_profile(fitted)
    emulated_profile.write_profile(path, emulated_profile.with_synthetic_layers(profile, networks))
    return path


def cases(profile: Path, directory: Path) -> Iterator[Case]:
    """All of them.

    Args:
        profile: of the emulated cluster. directory: for what commands write.
    """
    of_measured = ("--from-profile", str(MEASURED))
    of_emulated = ("--from-profile", str(profile))
    yield from _of_two_ranks(of_measured)
    yield from _nested(of_emulated)
    yield from _settings(of_emulated)
    yield from _tools(of_measured, of_emulated, directory)


def _predict(name: str, *words: str) -> Case:
    return Case(name, "predict", (*words, "--json"))


def _of_two_ranks(profile: tuple[str, ...]) -> Iterator[Case]:
    for model, evaluator in itertools.product(("vgg11", "resnet18", "mobilenet_v2"), EVALUATORS):
        words = ("--model", model, "--batch", "8,32", "--evaluator", evaluator)
        yield _predict(f"{model} {evaluator}", *profile, *words, "--strategy", "serial,d2,d4,d8")
        ranks = ("--strategy", "data", "--ranks", "2:64:x4", "--scaling", "strong", "--dataset-samples", "50000")
        yield _predict(f"{model} {evaluator} strong", *profile, "--model", model, "--batch", "64", *ranks)


_SHARED = ("f4", "c4", "s4", "d2f4", "d2c4", "d2s4", "f2d4", "s2x2", "f8", "c2d4")
_STAGED = ("p4", "p8")
_NESTED = ("d2p4", "p2f4", "p2s4", "d4p2", "z1d8", "z2d8", "z3d8")
OF_EVALUATOR = {
    "simulate": ("serial", "d2", "d8", *_SHARED, *_STAGED, *_NESTED),
    "paradl": ("serial", "d2", "d8", *_SHARED, *_STAGED),
    **dict.fromkeys(("osf", "csf", "dag"), ("serial", "d2", "d8")),
}


def _nested(profile: tuple[str, ...]) -> Iterator[Case]:
    for evaluator, strategies in OF_EVALUATOR.items():
        words = ("--model", IMAGES, "--batch", "8,16,32", "--evaluator", evaluator)
        for strategy in strategies:
            yield _predict(f"images {strategy} {evaluator}", *profile, *words, "--strategy", strategy)
    for strategy in ("serial", "d8", "t4", "d2t4", "p4", "z1d8", "z3d8", "d2p2t2", "p2t4"):
        words = ("--model", TOKENS, "--batch", "16", "--strategy", strategy)
        yield _predict(f"Own {strategy}", *profile, *words)
    under = itertools.product(("gpipe", "1f1b", "interleaved", "zb", "zbv"), ("4", "8"))
    for schedule, count in (*under, ("dualpipev", "8")):
        words = ("--model", IMAGES, "--batch", "16", "--schedule", schedule, "--micro-batches", count)
        for strategy in ("p4", "d2p4", "p2s2"):
            yield _predict(f"images {strategy} {schedule} {count}", *profile, *words, "--strategy", strategy)


SETTINGS = {
    "d8": (
        ("--bucket-cap-mb", "1"),
        ("--bucket-cap-mb", "0.25"),
        ("--accumulate", "2"),
        ("--recompute", "all"),
        ("--batch-norm", "sync"),
        ("--exchange", "leader"),
        ("--exchange", "leaders:2"),
        ("--exchange", "segmented"),
        ("--slow-rank", "2@1"),
        ("--fusion", "none"),
        ("--fusion", "buffer"),
        ("--fusion", "ada"),
        ("--fusion", "mg-wfbp"),
        ("--fusion", "ddp"),
        ("--io-seconds", "0.2"),
        ("--io-seconds", "0.2", "--prefetch", "0"),
        ("--h2d-seconds", "0.01"),
        ("--io-seconds", "0.1", "--prefetch", "3"),
    ),
    "f4": (("--filter-backward", "reduce-scatter"), ("--split", "all"), ("--accumulate", "2")),
    "d2f4": (("--filter-backward", "reduce-scatter"), ("--bucket-cap-mb", "1"), ("--slow-rank", "1.5")),
    "s4": (("--accumulate", "2"), ("--recompute", "all"), ("--batch-norm", "sync")),
    "z3d8": (("--accumulate", "2"), ("--bucket-cap-mb", "1")),
    "z1d8": (("--recompute", "all"), ("--bucket-cap-mb", "1")),
    "p4": (("--stages", "measured"), ("--schedule", "zb", "--slow-rank", "2@3")),
}


def _settings(profile: tuple[str, ...]) -> Iterator[Case]:
    for strategy, choices in SETTINGS.items():
        for chosen in choices:
            words = ("--model", IMAGES, "--batch", "16,32", "--strategy", strategy)
            yield _predict(f"{strategy} {' '.join(chosen)}", *profile, *words, *chosen)


def _tools(measured: tuple[str, ...], emulated: tuple[str, ...], directory: Path) -> Iterator[Case]:
    images = ("--model", IMAGES, "--batch", "16")
    yield _predict("search 8", "search", *emulated, *images, "--ranks", "8", "--top", "20", "--pareto")
    yield _predict("search 8 again", "search", *emulated, *images, "--ranks", "4,8", "--recompute", "all", "--pareto")
    yield _predict("search tokens", "search", *emulated, "--model", TOKENS, "--batch", "16", "--ranks", "8", "--pareto")
    yield _predict("search 2", "search", *measured, "--model", "vgg11", "--batch", "32", "--ranks", "2,4", "--pareto")
    yield _predict("buckets", "buckets", *measured, "--model", "resnet18", "--batch", "32", "--strategy", "d2,d4")
    vary = ("--vary", "bandwidth=0.5,2", "--vary", "latency=0.5,2", "--vary", "peak-flops=2")
    yield _predict("what-if", "what-if", *measured, "--model", "vgg11", "--batch", "32", "--strategy", "d2", *vary)
    yield _predict("what-if grid", "what-if", *emulated, *images, "--strategy", "d2f4", *vary, "--grid")
    for strategy in ("d8", "d2f4", "d2p4", "p4"):
        out = str(directory / f"trace-{strategy}.json")
        yield _predict(f"timeline {strategy}", "timeline", *emulated, *images, "--strategy", strategy, "-o", out)
    runs = [str(CLUSTERS / "2x4" / name) for name in RUNS]
    report = str(directory / "report")
    yield _predict("validate", "validate", *emulated, *runs, "--force", "-o", report)
    for layout in ("1x4", "4x4"):
        sweeps = sorted(str(path) for path in (CLUSTERS / layout).glob("sweep-*"))
        yield Case(f"fit {layout}", "calibrate", ("fit", *sweeps, "--force", "-o", str(directory / f"{layout}.json")))
    yield Case("fit 2x4", "calibrate", ("show", str(emulated[1]), "--json"))
