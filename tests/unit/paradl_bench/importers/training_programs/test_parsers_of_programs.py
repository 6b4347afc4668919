"""Settings that are written for programs that train, held against the programs' own parsers."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from program_files import ACCELERATE, DEEPSPEED, MEGATRON, TITAN, TOML, launch, written


def flat(dataclass: Any, names: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in names:
        value = dataclass
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


EXPECTED_OF_TITAN = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.data_parallel_replicate_degree": 4,
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 6,
    "training.local_batch_size": 24,
    "training.global_batch_size": 96,
    "training.seq_len": 512,
    "training.max_norm": 0.5,
}


def test_torchtitan_parses_its_arguments(tmp_path: Path) -> None:
    tyro = pytest.importorskip("tyro")
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    path, _ = written(tmp_path, TITAN, launch("p2d4t2", schedule="interleaved", micro_batches="4", clip_norm="0.5"))
    words = shlex.split(path.read_text(), comments=True)
    config = tyro.cli(trainer.Trainer.Config, args=words)
    assert flat(config, EXPECTED_OF_TITAN) == EXPECTED_OF_TITAN
    assert config.activation_checkpoint is None
    assert config.parallelism.enable_sequence_parallel is False


def test_torchtitan_of_before_parses_its_toml(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.config.job_config", exc_type=ImportError)
    from torchtitan.config.manager import ConfigManager  # type: ignore[import-not-found]

    told = launch("p2d4t2", schedule="interleaved", micro_batches="4", recompute="all", clip_norm="0.5")
    path, _ = written(tmp_path, TOML, told)
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    assert flat(config, EXPECTED_OF_TITAN) == EXPECTED_OF_TITAN
    assert config.activation_checkpoint.mode == "full"


def test_deepspeed_reads_its_configuration(tmp_path: Path) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    path, _ = written(tmp_path, DEEPSPEED, launch("z1d1", accumulate="3", offload="none"))
    config = runtime.DeepSpeedConfig(str(path))
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (96, 3)
    assert config.torch_autocast_enabled
    path, _ = written(tmp_path, DEEPSPEED, launch("z1d2", offload="optimizer"))
    zero = runtime.get_zero_config(json.loads(path.read_text()))
    assert (int(zero.stage), zero.reduce_bucket_size, str(zero.offload_optimizer.device)) == (1, 6553600, "cpu")


def test_accelerate_reads_its_configuration(tmp_path: Path) -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args", exc_type=ImportError)
    for strategy, kind in (("d2", "MULTI_GPU"), ("z1d2", "DEEPSPEED"), ("z3d2", "FSDP"), ("t2", "FSDP")):
        path, _ = written(tmp_path, ACCELERATE, launch(strategy))
        config = arguments.load_config_from_file(str(path))
        assert (config.distributed_type.value, config.num_processes, config.mixed_precision) == (kind, 2, "bf16")


def test_megatron_parses_its_arguments(tmp_path: Path) -> None:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    for strategy, options in (("d2p2t2", {"schedule": "interleaved"}), ("z3d4", {"offload": "optimizer"})):
        path, _ = written(tmp_path, MEGATRON, launch(strategy, recompute="all", **options))
        parsed = parser.parse_args(shlex.split(path.read_text(), comments=True))
        assert parsed.global_batch_size == 96
        assert parsed.recompute_granularity == "full"
        assert parsed.use_tp_pp_dp_mapping is (strategy == "d2p2t2")
