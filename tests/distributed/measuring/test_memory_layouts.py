"""A memory layout from measurements of layers and of a run through the profile to the validation."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import run_in_process
from own_network import NET

from calibrate.fitting.fit import fit_profile
from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.records.measurement import LAYERS_FILE, read_records
from paradl_bench.records.samples import LayerSamples
from paradl_bench.records.training.training_record import read_run
from predict.validation.validation import validate_runs

LABEL = "channels_last"
LAYERS = ("layers", "--batch", "2", "--blocks", "2", "--iterations", "2", "--warmup", "1")


@pytest.mark.distributed
def test_layers_and_runs_keep_their_memory_layout_through_validation(tmp_path: Path) -> None:
    (tmp_path / "nets_of_layouts_test.py").write_text(NET)
    model = "nets_of_layouts_test:Net"
    for flags, name in (((), "plain"), (("--channels-last",), "last")):
        result = run_in_process(tmp_path, *LAYERS, model, *flags, "-o", name)
        assert result.returncode == 0, result.stderr
    directories = [tmp_path / "plain", tmp_path / "last"]
    assert {r.kernel_settings for r in read_records(directories[1], LAYERS_FILE, LayerSamples)} == {LABEL}
    profile = fit_profile(directories, command_line=("calibrate", "fit"), force=False)
    labels = [time.kernel_settings for time in profile.layer_times]
    assert labels.count("") == labels.count(LABEL) > 0
    write_profile(tmp_path / "both.json", profile)
    train = ("train", model, "--strategy", "serial", "--batch", "2", "--iterations", "6", "--channels-last")
    result = run_in_process(tmp_path, *train, "-o", "run")
    assert result.returncode == 0, result.stderr
    assert read_run(tmp_path / "run").kernel_settings == LABEL
    report = validate_runs(tmp_path / "both.json", [tmp_path / "run"], cluster_path=None, force=False)
    assert {pair.kernel_settings for pair in report.pairs} == {LABEL}
    write_profile(tmp_path / "plain.json", fit_profile(directories[:1], command_line=("fit",), force=False))
    with pytest.raises(UserError, match="no iterations with --channels-last"):
        validate_runs(tmp_path / "plain.json", [tmp_path / "run"], cluster_path=None, force=False)
