"""torchtitan's settings: arguments, by the names of its 0.3.0, and TOML, as its 0.2.2 read them; most names are both's.

Its mesh has the pipeline outermost, and tensor parallelism innermost, inside of context parallelism. Replicas are
DDP's, or shards of FSDP2, which are ZeRO's stage 3, and stage 2 where parameters are not sharded again after forward.
Ranks along the sequence hold shards always, and so do ranks with other experts, which are innermost among those that
its degree of shards counts. Version 0.3.0 takes the model and the optimizer from ``--module`` and
``--config``. DDP's buckets are of 100 MiB there, whatever is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paradl_bench.importers.training_programs.degrees import Degrees
from paradl_bench.importers.training_programs.file_formats import ARGUMENTS, SUBCOMMAND
from paradl_bench.importers.training_programs.launch import MIB, FileSettings, Launch, Settings, Wanted
from paradl_bench.importers.training_programs.program import Program
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, computed_in
from paradl_bench.plan.schedules.catalog import names_by_torch_name, schedules

_ORDER = ("pipeline", "replicas", "data", "expert", "context", "tensor")
_PARALLELISM, _TRAINING = "parallelism.", "training."
_REPLICATE = f"{_PARALLELISM}data_parallel_replicate_degree"
_SHARD = f"{_PARALLELISM}data_parallel_shard_degree"
_RESHARD = f"{_PARALLELISM}fsdp_reshard_after_forward"
_TENSOR = f"{_PARALLELISM}tensor_parallel_degree"
_CONTEXT = f"{_PARALLELISM}context_parallel_degree"
_ROTATE = f"{_PARALLELISM}context_parallel_rotate_method"
_EXCHANGES = {"gather": "allgather", "ring": "alltoall"}
_PIPELINE = f"{_PARALLELISM}pipeline_parallel_degree"
_SCHEDULE = f"{_PARALLELISM}pipeline_parallel_schedule"
_MICRO_BATCH = f"{_PARALLELISM}pipeline_parallel_microbatch_size"
_SEQUENCE_PARALLEL = f"{_PARALLELISM}enable_sequence_parallel"
_NO_SEQUENCE_PARALLEL = f"{_PARALLELISM}no_enable_sequence_parallel"
_EXPERT = f"{_PARALLELISM}expert_parallel_degree"
_OF_EXPERTS = f"{_PARALLELISM}expert_tensor_parallel_degree"
_MAX_NORM = f"{_TRAINING}max_norm"
_BUCKET_CAP_BYTES = 100 * MIB
_RESHARDS = {2: "never", 3: "always"}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_REDUCES = "torchtitan reduces gradients in fp32; predictions of a pipeline reduce them in bf16"
_OTHERS = {
    f"{_TRAINING}enable_cpu_offload": "offloading of parameters",
}

_LEFT_OUT = {
    f"{_PARALLELISM}module_fqns_per_model_part": "this cut into stages: see --stages",
    f"{_PARALLELISM}pipeline_parallel_layers_per_stage": "this cut into stages: see --stages",
}


def _write(wanted: Wanted, kind: str) -> Settings:
    launch = wanted.launch
    degrees = wanted.degrees(_ORDER)
    if degrees.stage == 1:
        wanted.refuse("has no ZeRO stage 1", f"predict d{degrees.data}, z2d{degrees.data} or z3d{degrees.data}")
    beside = next((kind for kind in ("context", "expert") if getattr(degrees, kind) > 1), None)
    if beside and degrees.stage < 2:
        stages = (degrees._replace(stage=stage).strategy(_ORDER) for stage in _RESHARDS)
        wanted.refuse(f"shards parameters along {beside} parallelism", f"predict {' or '.join(map(str, stages))}")
    micro = wanted.micro_batches(degrees)
    sharded, batch = degrees.stage > 1, launch.batch or 1
    settings: Settings = {
        f"{_TRAINING}local_batch_size": batch // degrees.reading if degrees.pipeline > 1 else micro.samples,
        f"{_TRAINING}global_batch_size": batch,
    }
    if launch.sequence:
        settings[f"{_TRAINING}seq_len"] = launch.sequence
    _check_precision(wanted, degrees)
    if launch.dtype:
        settings[f"{_TRAINING}mixed_precision_param"] = _DTYPES[computed_in(launch.dtype)]
    settings |= {
        # It clips always; no norm is larger than this one.
        _MAX_NORM: wanted.norm() or math.inf,
        _REPLICATE: degrees.replicas if sharded else degrees.data,
        _SHARD: degrees.data * degrees.expert if sharded else 1,
        _TENSOR: degrees.tensor,
        _PIPELINE: degrees.pipeline,
        _CONTEXT: degrees.context,
    }
    exchange = wanted.exchange(_EXCHANGES, degrees)
    settings |= {_ROTATE: exchange} if degrees.context > 1 else {}
    settings |= _experts_written(wanted, kind, degrees)
    if sharded:
        # In a pipeline what is predicted is its default: parameters stay gathered through the micro-batches.
        settings[_RESHARD] = _RESHARDS[2 if degrees.pipeline > 1 else degrees.stage]
    if degrees.pipeline > 1:
        schedule = schedules()[wanted.take("schedule", "gpipe")]
        settings |= {_SCHEDULE: schedule.torch_name, _MICRO_BATCH: micro.samples}
    _note(wanted, degrees)
    return {**settings, **_of_format(wanted, kind, degrees)}


def _experts_written(wanted: Wanted, kind: str, degrees: Degrees) -> Settings:
    """How many ranks hold other experts, and parts of each."""
    settings: Settings = {_EXPERT: degrees.expert} if degrees.expert > 1 else {}
    if degrees.expert == 1 or degrees.tensor == 1:
        return settings
    if kind == ARGUMENTS:
        wanted.refuse(
            "0.3 gives ranks of tensor parallelism whole experts where there is expert parallelism",
            "write a TOML file for 0.2 (--export-to FILE.toml)",
        )
    return settings | {_OF_EXPERTS: degrees.tensor}


def _check_precision(wanted: Wanted, degrees: Degrees) -> None:
    """Refuse bf16 parameters beside fp32 copies, but for shards whose gradients are reduced in fp32."""
    if degrees.stage < 2:
        wanted.refuse_copies()
    elif wanted.launch.dtype == WEIGHTS_DTYPE and wanted.take("reduce_dtype", "own") == "own":
        if degrees.pipeline == 1:
            wanted.refuse("reduces gradients in fp32", "predict with --reduce-dtype fp32")
        wanted.notes.append(_REDUCES)


def _note(wanted: Wanted, degrees: Degrees) -> None:
    """What the settings don't tell, and predictions take otherwise."""
    launch = wanted.launch
    if launch.dtype == "bf16" and (degrees.stage > 1 or degrees.reading < degrees.ranks):
        wanted.note_gathers(degrees)
    if degrees.data > 1 and not degrees.stage and launch.bucket_cap_bytes not in (None, _BUCKET_CAP_BYTES):
        cap = (launch.bucket_cap_bytes or 0) / MIB
        wanted.notes.append(f"predicted with buckets of {cap:g} MiB; torchtitan's have 100: see --bucket-cap-mb 100")


def _of_format(wanted: Wanted, kind: str, degrees: Degrees) -> Settings:
    """What the two versions call otherwise."""
    recomputes, optimizer = wanted.recomputes(), wanted.launch.optimizer
    settings: Settings = {"compile.enable": True} if wanted.take_kernel("compile") else {}
    whole = degrees.tensor > 1 and wanted.take("sequence_parallel", "off") == "off"
    if kind == ARGUMENTS:
        if degrees.pipeline > 1:
            # Its CUDA graphs know no pipelines, and are on by default.
            settings[f"{_TRAINING}disable_cuda_graphs"] = True
        if whole:
            settings[f"{_PARALLELISM}no-enable-sequence-parallel"] = True
        if optimizer:
            wanted.notes.append(f"predicted with {optimizer}; torchtitan's optimizer is that of --config")
        # A subcommand of its parser, which has to be the last word.
        return {**settings, f"{SUBCOMMAND}:{'full' if recomputes else 'none'}": True}
    if optimizer == "sgd":
        wanted.refuse("has no optimizer sgd in a TOML file", "predict with --optimizer adam")
    if optimizer:
        family, _, fused = optimizer.partition("-")
        settings["optimizer.name"] = {"adam": "Adam", "adamw": "AdamW"}[family]
        settings |= {"optimizer.implementation": "fused"} if fused else {}
    if whole:
        wanted.notes.append("torchtitan 0.2 has sequence parallelism beside tensor parallelism; predicted without it")
    return {**settings, "activation_checkpoint.mode": "full" if recomputes else "none"}


def _data(settings: FileSettings, others: int, context: int) -> tuple[int, int, int]:
    """Replicas of shards, ranks of data parallelism beside them, and the stage of ZeRO."""
    replicate, shard = settings.whole(_REPLICATE, 1), settings.whole(_SHARD, -1, least=-1)
    if shard < 1:
        shard = settings.replicas(settings.ranks("ranks"), replicate * others * context)
    if shard * context == 1:
        return 1, replicate, 0
    # By default parameters are kept after forward where there is a pipeline.
    pipelined = settings.whole(_PIPELINE, 1) > 1
    kept = "2" if pipelined else "3"
    stage = int(settings.choice(_RESHARD, {"default": kept, "always": "3", "never": "2"}, "default"))
    if pipelined and stage == 3:
        settings.notes.append(
            f"torchtitan gathers for every micro-batch ({_RESHARD}); predictions gather once an iteration"
        )
    return replicate, shard, stage


def _recompute(settings: FileSettings) -> str:
    name = SUBCOMMAND if settings.has(SUBCOMMAND) else "activation_checkpoint.mode"
    choices = {"full": "all", "none": "none", "selective": "", "memory_budget": "", "memory-budget": ""}
    meant = settings.choice(name, choices, "selective")
    if not meant:
        settings.notes.append(
            f"predictions leave out that torchtitan recomputes some operations ({name}): see --recompute"
        )
    return meant or "none"


def _dtype(settings: FileSettings) -> str:
    if settings.text(f"{_TRAINING}dtype", "float32") != "float32":
        raise settings.wrong(
            f"{_TRAINING}dtype is {settings.text(f'{_TRAINING}dtype')[:40]}: predict keeps parameters in fp32"
        )
    words = {word: dtype for dtype, word in _DTYPES.items()}
    return settings.choice(f"{_TRAINING}mixed_precision_param", words, "bfloat16")


def _read(settings: FileSettings) -> Launch:
    settings.refuse_set(_OTHERS)
    settings.note_set(_LEFT_OUT)
    tensor, pipeline, context = (settings.whole(name, 1) for name in (_TENSOR, _PIPELINE, _CONTEXT))
    replicas, data, stage = _data(settings, tensor * pipeline, context)
    experts = _experts(settings, data if stage else 1)
    degrees = Degrees(pipeline, data // experts, tensor, stage, replicas, experts, context)
    settings.features_of_experts(degrees, _OF_EXPERTS, 1)
    local = settings.whole(f"{_TRAINING}local_batch_size", 8)
    batch = settings.whole(f"{_TRAINING}global_batch_size", -1, least=-1, most=1 << 40)
    batch = local * degrees.reading if batch < 1 else batch
    options = {"recompute": _recompute(settings), **settings.norm(_MAX_NORM, "1.0", off="inf")}
    on = not settings.truth(_NO_SEQUENCE_PARALLEL) and settings.truth(_SEQUENCE_PARALLEL, True)
    options |= settings.sequence_parallel(degrees, on)
    options |= settings.context_exchange(degrees, _ROTATE, _EXCHANGES, "allgather")
    dtype = _dtype(settings)
    if dtype == "bf16" and stage > 1:
        # fully_shard gathers in bf16.
        dtype = WEIGHTS_DTYPE
        if pipeline == 1:
            options["reduce_dtype"] = "fp32"
        else:
            settings.notes.append(_REDUCES)
    if pipeline > 1:
        if batch != local * degrees.reading:
            raise settings.wrong("gradients are accumulated over runs of a pipeline, which predict has no strategy for")
        options |= settings.micro_batches(degrees, batch, settings.whole(_MICRO_BATCH, 1))
        options["schedule"] = settings.choice(_SCHEDULE, names_by_torch_name(), "1F1B")
    else:
        options |= settings.micro_batches(degrees, batch, local)
    return Launch(
        strategy=degrees.strategy(_ORDER),
        batch=batch,
        sequence=settings.whole(f"{_TRAINING}seq_len", 2048, least=2),
        dtype=dtype,
        optimizer=_optimizer(settings),
        bucket_cap_bytes=_BUCKET_CAP_BYTES if degrees.data > 1 and not degrees.stage else None,
        kernels=("compile",) if settings.truth("compile.enable") else (),
        options=options,
    )


def _experts(settings: FileSettings, shards: int) -> int:
    """Ranks with other experts, which are among those that hold shards."""
    experts = settings.whole(_EXPERT, 1)
    if shards % experts:
        raise settings.wrong(
            f"{_EXPERT} is {experts}: predict parts experts among ranks of data parallelism that hold shards, and"
            f" {_SHARD} has {shards} of them"
        )
    return experts


def _optimizer(settings: FileSettings) -> str | None:
    name = settings.text("optimizer.name").lower()
    if name == "adamw":
        return "adamw-fused" if settings.text("optimizer.implementation") == "fused" else name
    return "adam" if name == "adam" else None


def _knows(settings: Mapping[str, object]) -> bool:
    return any(name.startswith((_PARALLELISM, _TRAINING)) for name in settings)


PROGRAM = Program(
    name="torchtitan",
    title="torchtitan",
    looked_at="0.3.0 for arguments, 0.2.2 for TOML",
    formats=(ARGUMENTS, "toml"),
    suffix=".args",
    write=_write,
    knows=_knows,
    read=_read,
    start={
        ARGUMENTS: "torchrun ... -m torchtitan.train --module M --config C $(grep -v '^#' {file})",
        "toml": "torchrun ... -m torchtitan.train --job.config_file {file} and the model's arguments",
    },
)
