"""Settings of programs that train: written from a strategy, and read back."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from program_files import ACCELERATE, DEEPSPEED, MEGATRON, PROGRAMS, TITAN, TOML, launch, written

from paradl_bench.core.errors import UserError
from paradl_bench.importers.training_programs.launch import MIB, Launch
from paradl_bench.importers.training_programs.program import read_launch
from paradl_bench.plan.strategy import parse_strategy

NOT_IN_FILE = {
    MEGATRON: set[str](),
    TITAN: {"optimizer", "bucket_cap_mb"},
    TOML: {"bucket_cap_mb"},
    DEEPSPEED: {"sequence", "bucket_cap_mb"},
    ACCELERATE: {"batch", "sequence", "optimizer", "bucket_cap_mb", "accumulate", "clip_norm"},
}
"""What a program's file can't say, and its notes have to."""
DEFAULTS = {"accumulate": "1", "recompute": "none", "offload": "none", "sequence_parallel": "off"}


def said(told: Launch, *left_out: str) -> dict[str, str]:
    """Options, without defaults and without what says nothing of a strategy."""
    found = told.as_options
    stages = [axis.prefix for axis in told.strategy.axes if axis.kind in ("data", "expert")]
    if not stages or max(stages) > 1:
        found.pop("bucket_cap_mb", None)
    return {name: text for name, text in found.items() if name not in left_out and DEFAULTS.get(name) != text}


def drawn(draw: random.Random) -> Launch:
    axes = [(kind, draw.choice((2, 4))) for kind in draw.sample("pdte", k=draw.randint(0, 3))]
    stage = draw.choice(("", "", "z1", "z2", "z3")) if [kind for kind, _ in axes] == ["d"] else ""
    # Replicas of shards, in the order that programs have and in another.
    outside, behind = draw.choice((("", ""), ("d2", ""), ("", "d2"))) if stage else ("", "")
    text = "".join(f"{stage if kind == 'd' else ''}{kind}{degree}" for kind, degree in axes) or "serial"
    text = f"{outside}{text}{behind}"
    degrees = dict(axes)
    options = {"recompute": draw.choice(("none", "all"))}
    if "p" in degrees:
        options |= {
            "schedule": draw.choice(("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")),
            "micro_batches": "8",
        }
    else:
        options["accumulate"] = draw.choice(("1", "2", "3"))
    if "t" in degrees and "e" not in degrees:
        options["sequence_parallel"] = draw.choice(("off", "on"))
    if draw.random() < 0.5:
        options["clip_norm"] = draw.choice(("0.5", "1.0", "2.25"))
    if stage:
        options["offload"] = draw.choice(("none", "optimizer"))
    return launch(text, batch=str(96 * draw.randint(1, 3)), **options)


def _as_gathered(told: Launch, file: str) -> Launch:
    """With what the program makes of bf16 where it shards parameters."""
    if file == DEEPSPEED:
        return told
    whole = file == ACCELERATE or "p" in str(told.strategy)
    options = told.options if whole else told.options | {"reduce_dtype": "fp32"}
    return msgspec.structs.replace(told, dtype="bf16-weights", options=options)


@pytest.mark.parametrize("file", PROGRAMS)
def test_what_is_written_is_read_back(file: str, tmp_path: Path) -> None:
    draw, kinds = random.Random(26), set()
    for _ in range(400):
        told = drawn(draw)
        if file == MEGATRON:
            told = msgspec.structs.replace(told, optimizer=draw.choice(("sgd", "adamw-fused")))
        try:
            path, notes = written(tmp_path, file, told)
        except UserError:
            continue
        if "z2" in str(told.strategy) or "z3" in str(told.strategy):
            told = _as_gathered(told, file)
            path, notes = written(tmp_path, file, told)
        kinds.add((str(told.strategy), told.options.get("schedule"), told.options["recompute"]))
        missing = NOT_IN_FILE[file]
        if file == TOML and told.options.get("sequence_parallel") == "off":
            missing = missing | {"sequence_parallel"}
            assert any("has sequence parallelism beside" in note for note in notes)
        if any("trains experts beside tensor parallelism with" in note for note in notes):
            missing = missing | {"sequence_parallel"}
        if file == ACCELERATE and "DEEPSPEED" in path.read_text():
            missing = missing - {"accumulate", "clip_norm"}
        read = read_launch(path).launch
        if file == DEEPSPEED and read.bucket_cap_bytes is not None:
            missing = missing - {"bucket_cap_mb"}
        expected = said(told, *missing)
        assert said(read, *missing) == expected, path.read_text()
        if "optimizer" in missing:
            assert any("adam" in note for note in notes)
    assert len(kinds) >= 6
    strategies = [strategy for strategy, *_ in kinds]
    assert any(strategy.startswith("d2z") for strategy in strategies) == (file in (MEGATRON, TITAN, TOML))
    assert any("e" in strategy for strategy in strategies if strategy != "serial") == (file == MEGATRON)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_megatrons_adam_decays_parameters_in_one_kernel(optimizer: str, tmp_path: Path) -> None:
    path, notes = written(tmp_path, MEGATRON, msgspec.structs.replace(launch("d2"), optimizer=optimizer))
    assert f"Megatron-LM's adam is adamw-fused; predicted with {optimizer}" in notes
    assert read_launch(path).launch.optimizer == "adamw-fused"


@pytest.mark.parametrize(
    ("file", "strategy", "exchange"),
    [
        *((MEGATRON, "d2x2t2", exchange) for exchange in ("gather", "all-to-all", "ring")),
        *((MEGATRON, strategy, "ring") for strategy in ("x2t2", "z1d1x4", "z3d2x2t2", "d2z1d2x2", "p2z1d2x2t2")),
        *((TITAN, strategy, "ring") for strategy in ("z3d2x2t2", "z2d1x2t2", "d2z3d1x2", "p2z2d2x2t2")),
        *((TOML, strategy, "gather") for strategy in ("z3d2x2t2", "z2d1x4", "z3d2e2", "z3d2e2t2")),
        *((MEGATRON, strategy, "gather") for strategy in ("z1d2e2", "z1d1e4", "z3d2e2", "d2z1d2e2", "p2d2e2t2")),
        *((TITAN, strategy, "gather") for strategy in ("z3d2e2", "z2d1e4", "d2z3d1e2")),
    ],
)
def test_axes_beside_shards_are_written_and_read(file: str, strategy: str, exchange: str, tmp_path: Path) -> None:
    piped = {"schedule": "1f1b"} if "p" in strategy else {}
    parted = {"sequence_parallel": "on"} if "t" in strategy else {}
    told = launch(strategy, dtype="fp32", context_exchange=exchange, **piped, **parted)
    read = read_launch(written(tmp_path, file, told)[0]).launch
    assert str(read.strategy) == strategy
    assert {name: read.options[name] for name in parted} == parted
    assert read.batch == told.batch
    assert read.options.get("context_exchange", "gather") == exchange


@pytest.mark.parametrize(("file", "stage", "read"), [(MEGATRON, 1, 1), (TITAN, 2, 2), (TOML, 3, 2)])
def test_sharded_stages_are_read_as_predicted(file: str, stage: int, read: int, tmp_path: Path) -> None:
    path, _ = written(tmp_path, file, launch(f"p2z{stage}d2", schedule="1f1b", micro_batches="4"))
    assert str(read_launch(path).launch.strategy) == f"p2z{read}d2"


@pytest.mark.parametrize(
    ("file", "strategy", "options", "why"),
    [
        (MEGATRON, "p2d2", {"schedule": "gpipe"}, "runs no pipeline by gpipe"),
        (MEGATRON, "t2d2", {}, "does not nest axes as t2d2 does; predict d2t2"),
        (MEGATRON, "s2", {}, "no setting for spatial parallelism"),
        (MEGATRON, "d2", {"offload": "optimizer"}, "offloads a distributed optimizer alone; predict z1d2"),
        (MEGATRON, "t2x2", {}, "does not nest axes as t2x2 does; predict x2t2"),
        (DEEPSPEED, "x2", {}, "no setting for context parallelism"),
        (TITAN, "d2x2", {}, "shards parameters along context parallelism; predict z2d2x2 or z3d2x2"),
        (TITAN, "z3d2x2", {"context_exchange": "all-to-all"}, "predict with --context-exchange gather or ring"),
        (TITAN, "z1d2", {}, "has no ZeRO stage 1"),
        (TITAN, "z3d2e2t2", {}, "whole experts where there is expert parallelism; write a TOML file for 0.2"),
        (TITAN, "d2p2", {}, "predict p2d2"),
        (TITAN, "d2e2", {}, "shards parameters along expert parallelism; predict z2d2e2 or z3d2e2"),
        (DEEPSPEED, "d2e2", {}, "no setting for expert parallelism; it takes data, tensor"),
        (DEEPSPEED, "d2z3d2", {}, "told of no two data axes as d2z3d2 has them"),
        (MEGATRON, "z3d2d2", {}, "told of no two data axes"),
        (MEGATRON, "p2z3d2", {"schedule": "1f1b"}, "gathers for every micro-batch under its FSDP, and predict once"),
        (TITAN, "d2", {"batch_norm": "sync"}, "no setting for --batch-norm sync"),
        (TITAN, "d2", {"recompute": "layers.0"}, "to compute layers.0 again alone"),
        (TITAN, "d2", {"offload": "optimizer"}, "no setting for --offload optimizer"),
        (TITAN, "p2", {"micro_batches": "5"}, "not 5 of 96 samples"),
        (DEEPSPEED, "p2", {}, "stages, which a script gives to PipelineModule"),
        (DEEPSPEED, "d2", {"offload": "optimizer"}, "under ZeRO alone"),
        (ACCELERATE, "d2t2", {}, "in shards of FSDP alone"),
        (ACCELERATE, "p2", {}, "pipelines by Megatron-LM alone"),
        (ACCELERATE, "d2", {"dtype": "bf16-weights"}, "no fp32 copies of bf16 parameters; predict with --dtype bf16"),
        (TITAN, "z3d2", {"dtype": "bf16-weights"}, "in fp32; predict with --reduce-dtype fp32"),
        (ACCELERATE, "z3d2", {"dtype": "bf16-weights", "reduce_dtype": "fp32"}, "predict without --reduce-dtype"),
        (DEEPSPEED, "z3d2", {"dtype": "bf16-weights", "reduce_dtype": "fp32"}, "predict without --reduce-dtype"),
        (TITAN, "d2", {"dtype": "bf16-weights"}, "no fp32 copies of bf16 parameters; predict with --dtype bf16"),
    ],
)
def test_what_a_program_cannot_do_is_said(
    file: str, strategy: str, options: dict[str, str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--export: ") as caught:
        written(tmp_path, file, launch(strategy, **options))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("file", "strategy", "settings"),
    [
        (MEGATRON, "d2t2", "--grad-reduce-in-bf16"),
        (DEEPSPEED, "z1d4", '"grad_accum_dtype": "bf16"'),
        (MEGATRON, "z3d4", "--grad-reduce-in-bf16"),
        (DEEPSPEED, "z3d4", '"grad_accum_dtype": "bf16"'),
    ],
)
def test_parameters_in_bf16_are_written_and_read(file: str, strategy: str, settings: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path, file, launch(strategy, dtype="bf16-weights"))
    assert settings in path.read_text()
    read = read_launch(path, parse_strategy(strategy).ranks)
    assert read.launch.dtype == "bf16-weights"
    assert read.launch.bucket_cap_bytes == (None if "z3" in strategy else 25 * MIB)
    assert not any("bf16" in note for note in read.notes)


def test_options_without_a_setting_are_in_comments(tmp_path: Path) -> None:
    told = launch("d2", stages="a,b", exchange="leader")
    path, notes = written(tmp_path, MEGATRON, told)
    assert "predicted with --exchange leader, which Megatron-LM decides itself" in notes
    assert all(f"# {note}\n" in path.read_text() for note in notes)


@pytest.mark.parametrize(
    ("file", "text", "ranks", "expected"),
    [
        (
            "train.sh",
            "ARGS='x'\ntorchrun pretrain_gpt.py \\\n  --tensor-model-parallel-size=4 --pipeline-model-parallel-size 2"
            " --micro-batch-size 1 --global-batch-size 64 --sequence-parallel --bf16",
            16,
            {
                **{"strategy": "p2d2t4", "batch": "64", "micro_batches": "32", "schedule": "1f1b", "dtype": "bf16"},
                **{"sequence_parallel": "on", "clip_norm": "1.0"},
            },
        ),
        (
            "sequence.sh",
            "pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 4 --sequence-parallel",
            8,
            # Without --overlap-grad-reduce all gradients are one bucket.
            {"strategy": "d2t4", "sequence_parallel": "on", "clip_norm": "1.0", "bucket_cap_mb": "1073741824.0"},
        ),
        (
            "none-again.sh",
            "pretrain_gpt.py --micro-batch-size 1 --overlap-grad-reduce --recompute-granularity full"
            " --recompute-method block --recompute-num-layers 0",
            8,
            {"strategy": "d8", "recompute": None, "bucket_cap_mb": f"{40e6 * 4 / MIB}"},
        ),
        (
            "moe.sh",
            "pretrain_gpt.py --micro-batch-size 1 --expert-model-parallel-size 4 --clip-grad 0 --sequence-parallel",
            8,
            {"strategy": "d2e4", "batch": "8", "accumulate": "1", "sequence_parallel": None, "clip_norm": None},
        ),
        (
            "moe-distributed.sh",
            "pretrain_gpt.py --micro-batch-size 1 --expert-model-parallel-size 4 --use-distributed-optimizer",
            4,
            {"strategy": "z1d1e4", "batch": "4", "clip_norm": "1.0"},
        ),
        (
            "moe-tensor.sh",
            "pretrain_gpt.py --micro-batch-size 1 --expert-model-parallel-size 2 --tensor-model-parallel-size 4"
            " --sequence-parallel --clip-grad 0",
            16,
            {"strategy": "d2e2t4", "batch": "4", "sequence_parallel": "on"},
        ),
        (
            "moe-tensor.toml",
            "[parallelism]\ndata_parallel_shard_degree = 8\nexpert_parallel_degree = 2\ntensor_parallel_degree = 2\n"
            "expert_tensor_parallel_degree = 2\n",
            16,
            {"strategy": "z3d4e2t2", "batch": "64", "sequence_parallel": "on"},
        ),
        (
            "moe.toml",
            "[parallelism]\ndata_parallel_shard_degree = 8\nexpert_parallel_degree = 2\n",
            8,
            {"strategy": "z3d4e2", "batch": "64", "dtype": "bf16-weights", "reduce_dtype": "fp32"},
        ),
        (
            "hsdp.sh",
            "pretrain_gpt.py --micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
            " --tensor-model-parallel-size 2 --clip-grad 0.5",
            16,
            {"strategy": "d2z1d4t2", "batch": "8", "sequence_parallel": None, "clip_norm": "0.5"},
        ),
        (
            "hsdp.toml",
            "[parallelism]\ndata_parallel_shard_degree = -1\ndata_parallel_replicate_degree = 2\n"
            "enable_sequence_parallel = false\ntensor_parallel_degree = 2\n[training]\nmax_norm = inf\n",
            16,
            {"strategy": "d2z3d4t2", "batch": "64", "sequence_parallel": None, "clip_norm": None},
        ),
        (
            "llama.toml",
            "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[training]\n"
            'local_batch_size = 2\n[activation_checkpoint]\nmode = "full"\n',
            8,
            {
                **{"strategy": "z3d4t2", "batch": "8", "accumulate": "1", "recompute": "all", "sequence": "2048"},
                **{"sequence_parallel": "on", "clip_norm": "1.0"},
            },
        ),
        (
            "ds.json",
            '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},'
            ' "gradient_clipping": 2}',
            8,
            {"strategy": "z2d8", "batch": "32", "accumulate": "2", "dtype": "fp32", "clip_norm": "2.0"},
        ),
        (
            "ds.yaml",
            "distributed_type: DEEPSPEED\nnum_processes: 2\n"
            "deepspeed_config:\n  zero_stage: 2\n  gradient_clipping: none\n",
            None,
            {"strategy": "z2d2", "clip_norm": None},
        ),
        (
            "fsdp.yaml",
            "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
            "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
            None,
            {"strategy": "z3d8", "dtype": "bf16-weights"},
        ),
    ],
)
def test_files_of_others_are_read(
    file: str, text: str, ranks: int | None, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    read = read_launch(tmp_path / file, ranks).launch.as_options
    assert {name: read.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("file", "text", "note"),
    [
        ("a.args", "--micro-batch-size 1 --overlap-grad-reduce --bf16", "parameters are bf16"),
        (
            "a.args",
            "--micro-batch-size 1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "compute all blocks again",
        ),
        ("a.args", "--micro-batch-size 1 --overlap-grad-reduce --recompute-granularity selective", "see --recompute"),
        ("a.toml", "[training]\nseq_len = 64", "recomputes some operations"),
        ("a.json", '{"train_batch_size": 8, "bf16": {"enabled": true}}', "parameters are bf16"),
        ("a.toml", '[parallelism]\npipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"', "gather once"),
        (
            "a.args",
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --use-megatron-fsdp",
            "gather once an iteration",
        ),
    ],
)
def test_what_predictions_leave_out_is_noted(file: str, text: str, note: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    assert any(note in each for each in read_launch(tmp_path / file, 8).notes)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("a.args", "--tensor-model-parallel-size 2 --micro-batch-size 1", "give --ranks"),
        (
            "a.yaml",
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_cp_size: 2\n",
            "none of it from a file: context",
        ),
        (
            "a.toml",
            "[parallelism]\ndata_parallel_shard_degree = 1\ncontext_parallel_degree = 2\n"
            "context_parallel_rotate_method = 'p2p'",
            "does not know",
        ),
        (
            "a.args",
            "# ranks: 8\n--micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 3",
            "has to part 8 ranks",
        ),
        ("a.args", "# ranks: 8\n--micro-batch-size 1 --clip-grad -1", "a norm larger than 0, or 0 for none"),
        ("a.args", "--micro-batch-size '1", "No closing quotation"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0\n[training]\nseq_len = 1", "whole number from 1"),
        ("a.toml", "[parallelism\n", "is no valid toml"),
        ("a.toml", "[training]\ndtype='bfloat16'\n[parallelism]\ndata_parallel_shard_degree=1", "parameters in fp32"),
        (
            "a.toml",
            "[parallelism]\ndata_parallel_shard_degree = 6\nexpert_parallel_degree = 4\n",
            "expert_parallel_degree is 4: predict parts experts among ranks of data parallelism that hold shards",
        ),
        (
            "a.toml",
            "[parallelism]\ndata_parallel_shard_degree = 4\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2\n",
            "expert_tensor_parallel_degree is 1: predict cuts the features of experts among ranks of tensor",
        ),
        (
            "a.args",
            "# ranks: 8\n--micro-batch-size 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
            " --expert-tensor-parallel-size 1",
            "expert_tensor_parallel_size is 1: predict cuts the features of experts",
        ),
        ("a.toml", "[parallelism]\ndata_parallel_shard_degree = 2\n[training]\nmax_norm = 0", "or inf for none"),
        (
            "a.json",
            '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,'
            ' "gradient_clipping": "nan"}',
            "it has to be a norm larger than 0, or 0 for none",
        ),
        ("a.json", '{"train_batch_size": "auto"}', "is 'auto'"),
        ("a.json", "[" * 100000, "nested too deep"),
        ("a.args", "9" * 40_000, "it holds more than 32.0 KiB"),
        ("a.json", '{"lr": 1}', "no configuration of a program that is known"),
        ("a.yaml", "distributed_type: TPU", "which predict does not know"),
        ("a.yaml", "distributed_type: FSDP", "give --ranks"),
    ],
)
def test_what_cannot_be_predicted_is_refused(file: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError) as caught:
        read_launch(tmp_path / file)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
