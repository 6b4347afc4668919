"""Training of pipelines as a user runs it: cut by what was measured, layers shared, gone on with, predicted as cut."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from synthetic_measurements import ENVIRONMENT

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.summary import summarise_training
from paradl_bench.network.models.catalog import load_model
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.records.measurement import LAYERS_FILE, read_manifest
from paradl_bench.records.samples import LayerSamples
from paradl_bench.strategies.pipeline.axis import PipelineOptions

pytestmark = pytest.mark.distributed

NETWORKS = Path(__file__).parents[2] / "on_ranks"
MODEL = "pipeline_networks:Chain"


def train(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join((str(NETWORKS), str(NETWORKS.parents[1])))
    with mock.patch.dict(os.environ, PYTHONPATH=places):
        return run_in_process(where, "train", MODEL, *arguments)


def write_layers(path: Path, slow: str) -> None:
    """Every layer takes a millisecond forward, and one of them a hundred."""
    directory = MeasurementDirectory.open(
        path, kind="layers", arguments={}, command_line=("paradl-bench", "layers"), environment=ENVIRONMENT
    )
    directory.append(
        LAYERS_FILE,
        [
            LayerSamples(
                model=MODEL,
                layer=layer.name,
                operation=layer.operation,
                phase="FW",
                mode="in_situ",
                batch=1,
                dtype="fp32",
                ranks_on_host=1,
                rank=0,
                block=0,
                samples_s=(0.1 if layer.name == slow else 0.001,),
            )
            for layer in trace_network(load_model(MODEL)).layers
        ],
    )


@pytest.mark.slow
def test_stages_that_share_layers_are_cut_by_measured_seconds(tmp_path: Path) -> None:
    write_layers(tmp_path / "layers", "classifier.3")
    settings = ("--strategy", "p2s2", "--batch", "4", "--iterations", "3", "--warmup", "3", "-o", "run")
    result = train(tmp_path, *settings, "--balance", "layers")
    assert result.returncode == 0, result.stderr
    assert "every collective agrees with the plan to the byte" in result.stdout
    summary = summarise_training(tmp_path / "run")
    run = summary.run
    assert run.stages == ("classifier.3",)
    assert run.cut_by == "measured seconds of layers, batch 1, 1 rank on the host"
    assert run.settings.of(PipelineOptions).stages == run.stages
    assert read_manifest(tmp_path / "run").arguments["stages"] == "classifier.3"
    # Halos belong to the stages before the cut, which are a part of forward and backward there.
    kinds = [set(rank.communication) for rank in summary.ranks]
    assert {"FW halo", "FW all_gather", "BW halo"} <= kinds[0]
    assert not kinds[2]
    for rank in summary.ranks[:2]:
        for phase in ("FW", "BW"):
            parts = [item.median_s for name, item in rank.communication.items() if name.startswith(phase)]
            assert 0 < sum(parts) < 2 * rank.phases[phase].median_s
    again = train(tmp_path, *settings, "--stages", "classifier.3")
    assert again.returncode == 0, again.stderr
    assert "holds all 3 iterations already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "p2", "--balance", "nowhere"), "nowhere is no measurement directory"),
        (("--strategy", "d2", "--balance", "nowhere"), "--balance is for pipelines"),
        (("--strategy", "p2f7"), "7 ranks along f7, but p <= 5: fewest filters, layer classifier.3"),
    ],
)
def test_mistakes_are_one_line_before_any_rank_starts(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run_in_process(tmp_path, "train", MODEL, *arguments, "--batch", "4", "-o", "run")
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
