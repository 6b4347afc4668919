"""The names and signatures that scripts and notebooks rely on, written out: who changes one changes it here too."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paradl_bench.core.frames import frame_of

ROOT = Path(__file__).parents[2]

FUNCTIONS = {
    "predict": {"load_profile": "(path: PathLike) -> LoadedProfile"},
    "calibrate": {
        "fit": "(directories: PathLike | Iterable[PathLike], output: PathLike, *,"
        " memory_runs: PathLike | Iterable[PathLike] = (), force: bool = False) -> CalibratedProfile",
        "merge": "(profiles: Iterable[PathLike], output: PathLike, *, force: bool = False) -> CalibratedProfile",
        "diff": "(first: PathLike, second: PathLike, *, order: Literal[sd, relative] = sd) -> ProfileDifference",
    },
    "paradl_bench": {
        "read": "(directory: PathLike) -> RawSamples",
        "measure_layers": "(model: Model, output: PathLike, *, batch: int | Sequence[int], **options: object)"
        " -> RawSamples",
        "train": "(model: Model, strategy: str, output: PathLike, *, batch: int, **options: object) -> RawSamples",
        "measure_collectives": "(output: PathLike, **options: object) -> RawSamples",
    },
}
METHODS = {
    "predict.api.loaded_profile.LoadedProfile": {
        "predict": "(self, model: str, strategy: str, *, batch: int, **options: object) -> OnePrediction",
        "sweep": "(self, model: str, strategies: Texts, *, batch: Counts, ranks: Counts | None = None,"
        " **options: object) -> Predictions",
        "search": "(self, model: str, *, ranks: Counts, batch: int, **options: object) -> Search",
        "what_if": "(self, model: str, strategy: Texts, *, batch: Counts, vary: Texts = (), replace: Texts = (),"
        " **options: object) -> WhatIf | ReplacedLayers",
        "timeline": "(self, model: str, strategy: str, *, batch: int, **options: object) -> Timeline",
        "validate": "(self, runs: PathLike | Iterable[PathLike], *, cluster: PathLike | None = None,"
        " layers: str = measured, force: bool = False) -> Validation",
        "explore": "(self, model: str | None = None, **options: object) -> ExplorePage",
        "to_frame": "(self, table: str = communication) -> DataFrame",
        "plot": "(self) -> Figure",
    },
    "predict.api.explored.ExplorePage": {"stop": "(self) -> None"},
    "calibrate.api.ProfileDifference": {"to_frame": "(self) -> DataFrame"},
    "paradl_bench.api.raw_samples.RawSamples": {"to_frame": "(self, table: str | None = None) -> DataFrame"},
    "predict.api.results.Predictions": {"to_frame": "(self) -> DataFrame", "plot": "(self) -> Figure"},
    "predict.api.results.OnePrediction": {"explain": "(self) -> Explained"},
    "predict.api.results.Explained": {"to_frame": "(self) -> DataFrame", "plot": "(self) -> Figure"},
    "predict.api.results.Search": {"to_frame": "(self) -> DataFrame", "plot": "(self) -> Figure"},
    "predict.api.results.WhatIf": {"to_frame": "(self) -> DataFrame", "plot": "(self) -> Figure"},
    "predict.api.results.ReplacedLayers": {"to_frame": "(self) -> DataFrame", "plot": "(self) -> Figure"},
    "predict.api.results.Validation": {
        "to_frame": "(self) -> DataFrame",
        "plot": "(self) -> Figure",
        "write": "(self, directory: str | Path, *, force: bool = False) -> Path",
    },
    "predict.api.timeline.Timeline": {
        "to_frame": "(self) -> DataFrame",
        "plot": "(self) -> Figure",
        "write": "(self, target: str | Path, *, every_rank: bool = False, force: bool = False) -> None",
    },
}
_PREDICTED = [
    *("model", "strategy", "ranks", "batch", "evaluator", "iteration_s", "interval_low_s", "interval_high_s"),
    *("epoch_s", "samples_per_s", "fw_s", "bw_s", "layer_communication_s", "ge_s", "wu_s", "pipeline_idle_s"),
    *("input_s", "h2d_s", "exposed_communication_s", "memory_bytes", "memory_interval_low_bytes"),
    *("memory_interval_high_bytes", "fits", "measured_share", "extrapolated", "notes"),
]
_POINT = [
    *("local_batch", "dtype", "optimizer", "bucket_cap_bytes", "options", "speedup", "efficiency"),
    *(
        "efficiency_interval_low",
        "efficiency_interval_high",
        "knee_ranks",
        "samples_per_s_per_rank",
        "tokens_per_s_per_rank",
    ),
    *("model_flops_utilisation", "rank_hours_per_epoch", "rank_hours_per_million_samples", "cost_per_epoch"),
    "cost_per_million_samples",
]
COLUMNS = {
    "PredictionRow": [*_PREDICTED, *_POINT],
    "RankedRow": [
        *(*_PREDICTED, *_POINT),
        *("place", "probability_best", "pareto", "estimate_s", "predict_command", "train_command"),
    ],
    "WhatIfRow": [
        *_PREDICTED,
        *("varied", "bandwidth", "latency", "peak_flops", "memory_bandwidth", "device", "layers_from"),
        *("speedup_over_base", "bound_by"),
    ],
    "ReplacedRow": [
        *_PREDICTED,
        *("replaced", "removed", "parameters", "gradient_bytes", "model_flops", "communication_s"),
        *("speedup_over_base", "scaling_factor", "scaling_factor_interval_low", "scaling_factor_interval_high"),
    ],
    "LedgerRow": [
        *("role", "role_ranks", "name", "phase", "source", "bytes", "group", "count", "base_s", "added_s"),
        *("total_s", "exposed_s", "hidden_s", "sd_s"),
    ],
    "PairRow": [
        *("run", "evaluator", "model", "strategy", "ranks", "batch", "dtype", "options", "iterations", "predicted_s"),
        *("interval_low_s", "interval_high_s", "measured_median_s", "measured_iqr_s", "noise_floor", "error"),
        *("accuracy", "covered", "explained_by", "fw_predicted_s", "fw_measured_s", "bw_predicted_s"),
        *("bw_measured_s", "ge_predicted_s", "ge_measured_s", "wu_predicted_s", "wu_measured_s"),
        *("memory_predicted_bytes", "memory_measured_bytes", "issued_equals_plan", "emulated", "extrapolated"),
    ],
}


def signature_of(function: object) -> str:
    return str(inspect.signature(function)).replace("'", "").replace('"', "")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", sorted(FUNCTIONS))
def test_packages_offer_these_functions(package: str) -> None:
    offered = importlib.import_module(package)
    found = {name: getattr(offered, name) for name in offered.__all__}
    assert {name: signature_of(value) for name, value in found.items()} == FUNCTIONS[package]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_results_have_these_methods(name: str) -> None:
    module, _, label = name.rpartition(".")
    kind = getattr(importlib.import_module(module), label)
    assert {each: signature_of(getattr(kind, each)) for each in METHODS[name]} == METHODS[name]
    own = {each for each, value in vars(kind).items() if inspect.isfunction(value) and not each.startswith("_")}
    assert own <= set(METHODS[name])


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_frames_of_predictions_have_these_columns(name: str) -> None:
    kind = getattr(importlib.import_module("predict.api.rows"), name)
    assert issubclass(kind, msgspec.Struct)
    assert list(frame_of(kind, [])) == COLUMNS[name]


def test_a_function_is_not_replaced_by_a_module() -> None:
    """A package's module of the same name would take its function's place as soon as anybody imports it."""
    for package, functions in FUNCTIONS.items():
        folder = ROOT / package
        assert not [name for name in functions if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]


def test_importing_the_packages_loads_nothing_slow() -> None:
    loads = "import sys\nfrom predict import load_profile\nimport calibrate, paradl_bench\n"
    tells = "import json\nprint(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"
    done = subprocess.run(
        [sys.executable, "-c", loads + tells],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    )
    slow = {"numpy", "pandas", "scipy", "matplotlib", "torch", "torchvision", "transformers", "click", "rich", "yaml"}
    assert not set(json.loads(done.stdout)) & slow
