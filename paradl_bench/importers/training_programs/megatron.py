"""Megatron-LM's arguments, by the names of ``megatron/training/arguments.py`` (its main branch, 0.20.0, d98e8a64).

Its own order of ranks has tensor parallelism innermost, then context parallelism, and the pipeline outermost;
``--use-tp-pp-dp-mapping`` has data parallelism outermost. It runs pipelines by 1F1B, with two stages a rank as
interleaved ones. ZeRO's stage 1 is its distributed optimizer, stages 2 and 3 its FSDP. It trains in bf16 with bf16
parameters, where predictions are of autocast.
"""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.importers.training_programs.degrees import Degrees
from paradl_bench.importers.training_programs.file_formats import ARGUMENTS
from paradl_bench.importers.training_programs.launch import FP32_BYTES, FileSettings, Launch, Settings, Wanted
from paradl_bench.importers.training_programs.program import Program
from paradl_bench.network.graph import DTYPE_BYTES
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, computed_in, has_masters

_ORDER = ("pipeline", "replicas", "data", "expert", "context", "tensor")
_DATA_OUTERMOST = ("replicas", "data", "pipeline", "expert", "context", "tensor")
_DATA_OUTERMOST_FLAG = "use-tp-pp-dp-mapping"
_VIRTUAL_STAGES = 2
_SCHEDULES = ("1f1b", "interleaved")
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_LEAST_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000
"""Elements of a bucket that nobody said: the larger of the first, and the second for each rank of data parallelism."""
_ONE_BUCKET_BYTES = 1 << 50
"""Of all gradients, which are exchanged after backward."""
_ADAM = "adamw-fused"
_OPTIMIZERS = {"adam": _ADAM, "sgd": "sgd"}
"""Its Adam is one kernel of TransformerEngine or Apex, whose decay is apart from the gradient, as AdamW's is."""
_EXCHANGES = {"gather": "allgather", "all-to-all": "a2a", "ring": "p2p"}
_OTHERS = {
    "fp16": "fp16",
    "fp8_format": "fp8",
    "num_layers_per_virtual_pipeline_stage": "stages by their layers: give --num-virtual-stages-per-pipeline-rank",
    "pipeline_model_parallel_layout": "stages by such a layout: give --stages",
}

_BF16_GRADIENTS = "grad-reduce-in-bf16"
_LEFT_OUT = {
    "recompute_activations": "that attention is computed again: see --recompute",
    "decoder_first_pipeline_num_layers": "this cut into stages: see --stages",
    "decoder_last_pipeline_num_layers": "this cut into stages: see --stages",
}


def _write(wanted: Wanted, kind: str) -> Settings:
    launch, degrees = wanted.launch, wanted.degrees(_ORDER, _DATA_OUTERMOST)
    settings: Settings = {
        "tensor-model-parallel-size": degrees.tensor,
        "pipeline-model-parallel-size": degrees.pipeline,
        "context-parallel-size": degrees.context,
    }
    exchange = wanted.exchange(_EXCHANGES, degrees)
    settings |= {"cp-comm-type": exchange} if degrees.context > 1 else {}
    kinds = [axis.kind for axis in launch.strategy.axes if axis.degree > 1]
    if kinds[:2] == ["data", "pipeline"]:
        settings[_DATA_OUTERMOST_FLAG] = True
    if degrees.pipeline > 1:
        schedule = wanted.take("schedule", "gpipe")
        if schedule not in _SCHEDULES:
            wanted.refuse(f"runs no pipeline by {schedule}", f"predict with --schedule {' or '.join(_SCHEDULES)}")
        if schedule == "interleaved":
            settings["num-virtual-stages-per-pipeline-rank"] = _VIRTUAL_STAGES
    settings["micro-batch-size"] = wanted.micro_batches(degrees).samples
    settings["global-batch-size"] = launch.batch or 1
    settings |= {"seq-length": launch.sequence, "max-position-embeddings": launch.sequence} if launch.sequence else {}
    settings |= {"clip-grad": wanted.norm() or 0.0, "expert-model-parallel-size": degrees.expert}
    settings |= _data_parallel(wanted, degrees)
    if launch.dtype == "bf16":
        settings["bf16"] = True
        wanted.notes.append("Megatron-LM's bf16 has bf16 parameters; predicted with autocast and fp32 parameters")
    elif launch.dtype and has_masters(launch.dtype):
        settings |= {"bf16": True} | ({_BF16_GRADIENTS: True} if wanted.take("reduce_dtype", "own") == "own" else {})
    settings |= _sequence_parallel(wanted, degrees)
    if degrees.tensor * degrees.context > 1:
        wanted.notes.append("Megatron-LM asks for CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell")
    if wanted.recomputes():
        settings |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    settings |= _optimizer(wanted)
    if wanted.take("offload", "none") == "optimizer":
        if not degrees.stage:
            wanted.refuse("offloads a distributed optimizer alone", f"predict z1d{degrees.data}")
        settings |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    return settings


def _optimizer(wanted: Wanted) -> Settings:
    named = wanted.launch.optimizer
    if not named:
        return {}
    if named not in _OPTIMIZERS.values():
        wanted.notes.append(f"Megatron-LM's adam is {_ADAM}; predicted with {named}")
    return {"optimizer": named.partition("w")[0]}


def _sequence_parallel(wanted: Wanted, degrees: Degrees) -> Settings:
    on, beside_experts = wanted.take("sequence_parallel", "off") == "on", degrees.tensor > 1 and degrees.expert > 1
    if beside_experts and not on:
        wanted.notes.append(
            "Megatron-LM trains experts beside tensor parallelism with sequence parallelism alone; predicted without it"
        )
    return {"sequence-parallel": True} if on or beside_experts else {}


def _data_parallel(wanted: Wanted, degrees: Degrees) -> Settings:
    """How gradients are exchanged, where there are several replicas."""
    if degrees.exchanging == 1:
        return {}
    settings: Settings = {"overlap-grad-reduce": True}
    if degrees.replicas > 1:
        settings["num-distributed-optimizer-instances"] = degrees.replicas
    if degrees.stage:
        settings["use-distributed-optimizer"] = True
    if degrees.stage in _SHARDED and degrees.pipeline > 1:
        wanted.refuse("gathers for every micro-batch under its FSDP, and predict once", f"predict z1d{degrees.data}")
    if degrees.stage in _SHARDED:
        settings |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": _SHARDED[degrees.stage]}
        # The only format of checkpoints that it takes.
        settings["ckpt-format"] = "fsdp_dtensor"
    elif wanted.launch.bucket_cap_bytes:
        settings["ddp-bucket-size"] = max(1, wanted.launch.bucket_cap_bytes // _gradient_bytes(wanted.launch.dtype))
    return settings


def _stage(settings: FileSettings) -> int:
    if settings.truth("use_torch_fsdp2"):
        return 3
    if not settings.truth("use_megatron_fsdp"):
        return int(settings.truth("use_distributed_optimizer"))
    stages = {"no_shard": "0", "optim": "1"} | {name: str(stage) for stage, name in _SHARDED.items()}
    return int(settings.choice("data_parallel_sharding_strategy", stages, "optim_grads_params"))


def _degrees(settings: FileSettings, pipeline: int, tensor: int, context: int) -> Degrees:
    """Data parallelism is what other degrees leave of the ranks: parted into replicas of shards, and experts."""
    experts = settings.whole("expert_model_parallel_size", 1)
    data = settings.replicas(settings.ranks("ranks"), tensor * context * pipeline * experts)
    instances = settings.whole("num_distributed_optimizer_instances", 1)
    stage = _stage(settings) if data * experts * context > 1 else 0
    if stage > 1 and pipeline > 1:
        settings.notes.append(
            "Megatron-LM gathers for every micro-batch under its FSDP; predictions gather once an iteration"
        )
    if instances > 1 and (not stage or data % instances):
        raise settings.wrong(
            f"num_distributed_optimizer_instances is {instances}: it has to part {data} ranks of data parallelism, with"
            " --use-distributed-optimizer"
        )
    # Shards that one rank has alone are none.
    parts = data // instances
    return (
        Degrees(pipeline, parts, tensor, stage, instances, experts, context)
        if parts * context * experts > 1
        else Degrees(pipeline, instances, tensor, 0, 1, experts)
    )


def _read(settings: FileSettings) -> Launch:
    settings.refuse_set(_OTHERS)
    settings.note_set(_LEFT_OUT)
    tensor = settings.whole("tensor_model_parallel_size", 1)
    pipeline = settings.whole("pipeline_model_parallel_size", 1)
    degrees = _degrees(settings, pipeline, tensor, settings.whole("context_parallel_size", 1))
    settings.features_of_experts(degrees, "expert_tensor_parallel_size", tensor)
    samples = settings.whole("micro_batch_size")
    batch = settings.whole("global_batch_size", samples * degrees.reading, most=1 << 40)
    options = settings.micro_batches(degrees, batch, samples) | settings.norm("clip_grad", "1.0")
    options |= settings.sequence_parallel(degrees, settings.truth("sequence_parallel"))
    options |= settings.context_exchange(degrees, "cp_comm_type", _EXCHANGES, "p2p")
    if pipeline > 1:
        chunks = settings.whole("num_virtual_stages_per_pipeline_rank", 1)
        if chunks > _VIRTUAL_STAGES:
            raise settings.wrong(f"num_virtual_stages_per_pipeline_rank is {chunks}: interleaved pipelines have 2 here")
        options["schedule"] = _SCHEDULES[chunks - 1]
    options |= _recomputed(settings)
    if settings.truth("optimizer_cpu_offload"):
        options["offload"] = "optimizer"
    dtype = _dtype(settings, degrees)
    if dtype == WEIGHTS_DTYPE and not _reduces_in_bf16(settings):
        options["reduce_dtype"] = "fp32"
    default = max(_LEAST_BUCKET, _BUCKET_OF_A_RANK * degrees.reading) * _gradient_bytes(dtype)
    exchanges = degrees.exchanging > 1 and degrees.stage < 2
    bucket_bytes = (
        (_bucket_bytes(settings, dtype) or default) if settings.truth("overlap_grad_reduce") else _ONE_BUCKET_BYTES
    )
    return Launch(
        strategy=degrees.strategy(_DATA_OUTERMOST if settings.truth("use_tp_pp_dp_mapping") else _ORDER),
        batch=batch,
        sequence=settings.whole("seq_length", least=2) if settings.has("seq_length") else None,
        dtype=dtype,
        optimizer=settings.choice("optimizer", _OPTIMIZERS, "adam"),
        bucket_cap_bytes=bucket_bytes if exchanges else None,
        options=options,
    )


def _recomputed(settings: FileSettings) -> dict[str, str]:
    """All blocks, or none; of so many of each stage predictions know nothing."""
    if settings.choice("recompute_granularity", {"full": "all", "selective": "", "none": ""}, "none"):
        if settings.choice("recompute_method", {"block": "some", "uniform": ""}, "uniform"):
            if not settings.whole("recompute_num_layers", 1, least=0):
                return {}
            settings.notes.append("predictions compute all blocks again, not recompute_num_layers of each stage")
        return {"recompute": "all"}
    if settings.has("recompute_granularity"):
        settings.note_set({"recompute_granularity": "that some modules are computed again: see --recompute"})
    return {}


def _reduces_in_bf16(settings: FileSettings) -> bool:
    return settings.truth(_BF16_GRADIENTS.replace("-", "_"))


def _dtype(settings: FileSettings, degrees: Degrees) -> str:
    """Parameters of bf16 have fp32 copies; gradients are added up and sent in fp32 unless they are told otherwise.

    Predictions send fp32 ones of shards alone, and in no pipeline.
    """
    if not settings.truth("bf16"):
        return "fp32"
    if _reduces_in_bf16(settings) or (degrees.stage > 1 and degrees.pipeline == 1):
        return WEIGHTS_DTYPE
    settings.note_set(
        {"bf16": "that parameters are bf16: they are fp32, with autocast, and so are the gradients that are sent"}
    )
    return computed_in(WEIGHTS_DTYPE)


def _gradient_bytes(dtype: str | None) -> int:
    return DTYPE_BYTES[computed_in(dtype)] if dtype and has_masters(dtype) else FP32_BYTES


def _bucket_bytes(settings: FileSettings, dtype: str) -> int:
    return (settings.elements_bytes("ddp_bucket_size") or 0) // FP32_BYTES * _gradient_bytes(dtype)


def _knows(settings: Mapping[str, object]) -> bool:
    return any(name in settings for name in ("tensor_model_parallel_size", "micro_batch_size", "global_batch_size"))


PROGRAM = Program(
    name="megatron",
    title="Megatron-LM",
    looked_at="main branch at d98e8a64 (0.20.0)",
    formats=(ARGUMENTS,),
    suffix=".args",
    write=_write,
    knows=_knows,
    read=_read,
    start={ARGUMENTS: "torchrun ... pretrain_gpt.py $(grep -v '^#' {file}) and the model's arguments"},
)
