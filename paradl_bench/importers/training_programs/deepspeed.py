"""DeepSpeed's JSON configuration, by the names of its 0.19.8.

The stages of a pipeline are no setting: a script gives them to ``PipelineModule``. What is computed again is no setting
either, but how; a model does it. The number of replicas follows from the batch sizes. Its mesh has tensor parallelism
(AutoTP) innermost.
"""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.importers.training_programs.degrees import Degrees
from paradl_bench.importers.training_programs.launch import FP32_BYTES, FileSettings, Launch, Settings, Wanted
from paradl_bench.importers.training_programs.program import Program
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, computed_in, has_masters

_ORDER = ("data", "tensor")
_BATCH, _SAMPLES, _ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_STAGE, _BUCKET = "zero_optimization.stage", "zero_optimization.reduce_bucket_size"
_OFFLOAD = "zero_optimization.offload_optimizer.device"
_TENSOR = "tensor_parallel.autotp_size"
_CLIPPING = "gradient_clipping"
_BF16, _GRADIENTS = "bf16.enabled", "data_types.grad_accum_dtype"
_AUTOCAST, _AUTOCAST_DTYPE = "torch_autocast.enabled", "torch_autocast.dtype"
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}
_OPTIMIZERS = {"adam": "Adam", "sgd": "SGD", "adamw": "AdamW", "adamw-fused": "AdamW"}
_DEFAULT_BUCKET_BYTES = 500_000_000 * FP32_BYTES
_OTHERS = {
    "fp16.enabled": "fp16",
    "sequence_parallel_size": "sequence parallelism",
    "zero_optimization.offload_param.device": "offloading of parameters",
}


def _write(wanted: Wanted, kind: str) -> Settings:
    launch = wanted.launch
    if any(axis.kind == "pipeline" and axis.degree > 1 for axis in launch.strategy.axes):
        wanted.refuse(
            "has no setting for a pipeline's stages, which a script gives to PipelineModule",
            "export to megatron or torchtitan, or predict without p",
        )
    degrees = wanted.degrees(_ORDER)
    micro = wanted.micro_batches(degrees)
    settings: Settings = {
        _BATCH: launch.batch or 1,
        _SAMPLES: micro.samples,
        _ACCUMULATE: micro.number,
        _STAGE: degrees.stage,
    }
    if degrees.stage == 1 and launch.bucket_cap_bytes:
        settings[_BUCKET] = max(1, launch.bucket_cap_bytes // FP32_BYTES)
    elif degrees.data > 1 and launch.bucket_cap_bytes:
        wanted.notes.append("the buckets of gradients are DeepSpeed's own")
    if wanted.take("offload", "none") == "optimizer":
        if not degrees.stage:
            wanted.refuse("offloads an optimizer under ZeRO alone", "predict with z1d, z2d or z3d")
        settings[_OFFLOAD] = "cpu"
    if degrees.tensor > 1:
        settings[_TENSOR] = degrees.tensor
    if norm := wanted.norm():
        settings[_CLIPPING] = norm
    settings |= _precision(launch.dtype)
    wanted.refuse_fp32_reductions()
    if wanted.recomputes():
        wanted.refuse("has no setting to compute activations again: a model's code does", "predict without --recompute")
    if launch.optimizer:
        settings["optimizer.type"] = _OPTIMIZERS[launch.optimizer]
        wanted.notes.append("learning rate and momentum are not predicted: add optimizer.params")
    if launch.sequence:
        wanted.notes.append(f"predicted with samples of {launch.sequence} tokens, which the script gives")
    return settings


def _read(settings: FileSettings) -> Launch:
    settings.refuse_set(_OTHERS)
    tensor = settings.whole(_TENSOR, 1, least=0) or 1
    batch = settings.whole(_BATCH, most=1 << 40)
    if settings.knows_ranks:
        data = settings.replicas(settings.ranks(), tensor)
        samples = settings.whole(_SAMPLES, max(1, batch // data // settings.whole(_ACCUMULATE, 1)))
    else:
        samples, count = settings.whole(_SAMPLES), settings.whole(_ACCUMULATE)
        data = max(1, batch // (samples * count))
    stage = settings.whole(_STAGE, 0, least=0, most=3) if data > 1 else 0
    degrees = Degrees(1, data, tensor, stage)
    autocast = settings.choice(_AUTOCAST_DTYPE, _DTYPES, "bfloat16") if settings.truth(_AUTOCAST) else "fp32"
    options = settings.micro_batches(degrees, batch, samples) | settings.norm(_CLIPPING, "0")
    if settings.text(_OFFLOAD, "none") != "none":
        options["offload"] = "optimizer"
    named = settings.text("optimizer.type").lower()
    return Launch(
        strategy=degrees.strategy(_ORDER),
        batch=batch,
        dtype=_low_dtype(settings) or autocast,
        optimizer="adamw" if named == "adamw" else "adam" if "adam" in named else "sgd" if named == "sgd" else None,
        bucket_cap_bytes=(settings.elements_bytes(_BUCKET) or _DEFAULT_BUCKET_BYTES) if stage == 1 else None,
        options=options,
    )


def _precision(dtype: str | None) -> Settings:
    if dtype and has_masters(dtype):
        return {_BF16: True, _GRADIENTS: computed_in(dtype)}
    return {_AUTOCAST: True, _AUTOCAST_DTYPE: "bfloat16"} if dtype == "bf16" else {}


def _low_dtype(settings: FileSettings) -> str:
    """What bf16 parameters are predicted as; empty where there are none."""
    if not settings.truth(_BF16):
        return ""
    if _DTYPES.get(settings.text(_GRADIENTS)):
        return WEIGHTS_DTYPE
    settings.note_set({_BF16: "that parameters are bf16: they are fp32, with autocast"})
    return computed_in(WEIGHTS_DTYPE)


def _knows(settings: Mapping[str, object]) -> bool:
    return any(name in settings for name in (_BATCH, _SAMPLES, _STAGE))


PROGRAM = Program(
    name="deepspeed",
    title="DeepSpeed",
    looked_at="0.19.8",
    formats=("json",),
    suffix=".json",
    write=_write,
    knows=_knows,
    read=_read,
    start={"json": "deepspeed ... SCRIPT --deepspeed --deepspeed_config {file}"},
)
