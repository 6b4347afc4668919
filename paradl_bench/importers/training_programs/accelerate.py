"""accelerate's YAML configuration, by the names of its 1.15.0, with its plugin for FSDP2 and, for ZeRO 1, DeepSpeed's.

Its mesh has tensor parallelism innermost, which it nests in FSDP's shards alone. Batches, what a sample is, and the
optimizer are arguments of a script. Pipelines it has by Megatron-LM alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.importers.training_programs.degrees import Degrees
from paradl_bench.importers.training_programs.launch import FileSettings, Launch, Settings, Wanted
from paradl_bench.importers.training_programs.program import Program
from paradl_bench.network.kinds.autocast import AUTOCAST_DTYPES, WEIGHTS_DTYPE

_ORDER = ("data", "tensor")
_TYPE, _RANKS = "distributed_type", "num_processes"
_FSDP, _DEEPSPEED, _SIZES = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_"
_RESHARD = f"{_FSDP}reshard_after_forward"
_ACCUMULATE = f"{_DEEPSPEED}gradient_accumulation_steps"
_OFFLOAD = f"{_DEEPSPEED}offload_optimizer_device"
_CLIPPING = f"{_DEEPSPEED}gradient_clipping"
_STAGES = {
    **{"true": "3", "full_shard": "3", "1": "3"},
    **{"false": "2", "shard_grad_op": "2", "2": "2"},
    **{"no_shard": "0", "3": "0"},
}
"""Of ZeRO, by what FSDP reshards, or by the strategies of its version 1."""
_OTHERS = {
    f"{_SIZES}cp_size": "context parallelism",
    f"{_SIZES}sp_size": "sequence parallelism",
    f"{_FSDP}offload_params": "offloading of parameters",
    f"{_DEEPSPEED}offload_param_device": "offloading of parameters",
    "megatron_lm_config.megatron_lm_pp_degree": "reading of accelerate's Megatron-LM settings: give Megatron-LM's own",
    "megatron_lm_config.megatron_lm_tp_degree": "reading of accelerate's Megatron-LM settings: give Megatron-LM's own",
}


def _write(wanted: Wanted, kind: str) -> Settings:
    launch = wanted.launch
    if any(axis.kind == "pipeline" and axis.degree > 1 for axis in launch.strategy.axes):
        wanted.refuse("has pipelines by Megatron-LM alone", "export to megatron or torchtitan, or predict without p")
    degrees = wanted.degrees(_ORDER)
    if degrees.tensor > 1 and degrees.data > 1 and degrees.stage < 2:
        wanted.refuse("nests tensor parallelism in shards of FSDP alone", "export to megatron or torchtitan")
    micro = wanted.micro_batches(degrees)
    script = [f"batches of {micro.samples}"]
    settings: Settings = {"compute_environment": "LOCAL_MACHINE"}
    recomputes, norm = wanted.recomputes(), wanted.norm()
    clipping: Settings = {_CLIPPING: norm} if norm else {}
    script += [] if norm is None or degrees.stage == 1 else [f"accelerator.clip_grad_norm_(parameters, {norm:g})"]
    if degrees.stage == 1:
        settings |= clipping
        settings |= {_TYPE: "DEEPSPEED", f"{_DEEPSPEED}zero_stage": 1, _ACCUMULATE: micro.number}
        settings[_OFFLOAD] = "cpu" if wanted.take("offload", "none") == "optimizer" else "none"
    elif degrees.stage > 1 or degrees.tensor > 1:
        settings |= _fsdp(degrees, recomputes)
    else:
        settings[_TYPE] = "MULTI_GPU" if degrees.data > 1 else "NO"
    if recomputes and settings[_TYPE] != "FSDP":
        wanted.refuse("computes activations again under FSDP alone", "predict z2d or z3d, or without --recompute")
    if micro.number > 1 and degrees.stage != 1:
        script.append(f"gradient_accumulation_steps={micro.number}")
    if launch.sequence:
        script.append(f"{launch.sequence} tokens a sample")
    if launch.optimizer:
        script.append(launch.optimizer)
    cap = launch.bucket_cap_bytes
    if degrees.data > 1 and not degrees.stage and cap:
        script.append(f"DistributedDataParallelKwargs(bucket_cap_mb={cap / 1024**2:.12g})")
    wanted.notes.append(f"predicted with what a script gives: {', '.join(script)}")
    if wanted.take_kernel("compile"):
        settings["dynamo_config.dynamo_backend"] = "INDUCTOR"
    settings["mixed_precision"] = _precision(wanted, degrees, lowers_all=settings[_TYPE] != "MULTI_GPU")
    return {**settings, _RANKS: degrees.ranks, "num_machines": 1}


def _precision(wanted: Wanted, degrees: Degrees, *, lowers_all: bool) -> str:
    """What ``mixed_precision`` is; ``lowers_all`` is whether that is parameters and gradients too."""
    dtype = wanted.launch.dtype
    if degrees.stage < 2:
        wanted.refuse_copies()
    else:
        wanted.refuse_fp32_reductions()
    if dtype == "bf16" and lowers_all and degrees.ranks > 1:
        wanted.note_gathers(degrees)
    return "bf16" if dtype in AUTOCAST_DTYPES else "no"


def _fsdp(degrees: Degrees, recomputes: bool) -> Settings:
    settings: Settings = {
        _TYPE: "FSDP",
        f"{_FSDP}version": 2,
        _RESHARD: degrees.stage != 2,
        f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{_FSDP}activation_checkpointing": recomputes,
        f"{_FSDP}offload_params": False,
    }
    if degrees.tensor > 1:
        sizes = {"dp_replicate": 1, "dp_shard": degrees.data, "tp": degrees.tensor, "cp": 1}
        settings |= {f"{_SIZES}{name}_size": size for name, size in sizes.items()}
    return settings


def _read(settings: FileSettings) -> Launch:
    settings.refuse_set(_OTHERS)
    kinds = {name: name for name in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")}
    kind = settings.choice(_TYPE, kinds, "NO")
    tensor = settings.whole(f"{_SIZES}tp_size", 1)
    ranks = 1 if kind == "NO" else settings.ranks(_RANKS)
    data = settings.replicas(ranks, tensor)
    options: dict[str, str] = {}
    stage = 0
    if kind == "FSDP":
        replicas = settings.whole(f"{_SIZES}dp_replicate_size", 1)
        if replicas > 1:
            raise settings.wrong(f"replicas of shards are read from no file: write their strategy, as d{replicas}z3d4")
        name = _RESHARD if settings.has(_RESHARD) else f"{_FSDP}sharding_strategy"
        stage = int(settings.choice(name, _STAGES, "true"))
        options["recompute"] = "all" if settings.truth(f"{_FSDP}activation_checkpointing") else "none"
    elif kind == "DEEPSPEED":
        if settings.has(f"{_DEEPSPEED}deepspeed_config_file"):
            raise settings.wrong(f"{_DEEPSPEED}deepspeed_config_file: give that file, as --strategy @FILE")
        stage = settings.whole(f"{_DEEPSPEED}zero_stage", 2, least=0, most=3)
        options |= {"accumulate": str(settings.whole(_ACCUMULATE, 1)), **settings.norm(_CLIPPING, "0")}
        options["offload"] = "none" if settings.text(_OFFLOAD, "none").lower() == "none" else "optimizer"
    return Launch(
        strategy=Degrees(1, data, tensor, stage if data > 1 else 0).strategy(_ORDER),
        # FSDP gathers and reduces in the lower dtype.
        dtype=settings.choice(
            "mixed_precision", {"no": "fp32", "bf16": WEIGHTS_DTYPE if kind == "FSDP" and data > 1 else "bf16"}, "no"
        ),
        kernels=("compile",) if settings.text("dynamo_config.dynamo_backend").upper() == "INDUCTOR" else (),
        options=options,
    )


def _knows(settings: Mapping[str, object]) -> bool:
    return _TYPE in settings


PROGRAM = Program(
    name="accelerate",
    title="accelerate",
    looked_at="1.15.0",
    formats=("yaml",),
    suffix=".yaml",
    write=_write,
    knows=_knows,
    read=_read,
    start={"yaml": "accelerate launch --config_file {file} SCRIPT"},
)
