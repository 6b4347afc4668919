"""What can be trained by autocast, or compiled.

Gradients that replicas exchange have the dtype of parameters. Activations that ranks hand each other go in the dtype
that autocast computed them in, which axes have planned or not (``Trait.SENDS_AS_COMPUTED``). Statistics that are
synchronised convert tensors of their own, which are not in plans or in the memory model. What is
compiled is a whole model: rules that run its layers one by one are not followed into it.
"""

from __future__ import annotations

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, computed_in, has_masters, is_autocast
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.frameworks.presets import framework_of

_MIB = 1024 * 1024


def check_dtype(strategy: Strategy, settings: PlanSettings, dtype: str) -> None:
    """Refuse what is not planned for in a dtype.

    Raises:
        UserError: names what does not go with it.
    """
    if settings.of(ExchangeOptions).reduce_dtype != "own":
        _check_reduction(strategy, dtype)
    if not is_autocast(dtype):
        return
    axes = (axis for axis in strategy.axes if axis.degree > 1)
    unplanned = [axis.kind for axis in axes if not (axis.has(Trait.DIVIDES_BATCH) or axis.has(Trait.SENDS_AS_COMPUTED))]
    if unplanned:
        known = " and ".join(kind.name for kind in kinds_with(Trait.SENDS_AS_COMPUTED))
        raise UserError(
            f"--dtype {dtype} with {unplanned[0]} parallelism: ranks would hand on activations in {dtype}, which its"
            f" plan does not hold; it goes with serial and data parallelism (d, z), {known}"
        )
    shared_out = Trait.DIVIDES_BATCH, Trait.SHARDS_LAYERS
    apart = [axis.kind for axis in strategy.axes if axis.degree > 1 and all(map(axis.has, shared_out))]
    if has_masters(dtype) and apart and zero_stage(strategy) < 2 and not framework_of(settings).gradient_dtype:
        raise UserError(
            f"--dtype {dtype} with {apart[0]} parallelism, where no run has shown fp32 copies of parameters that fewer"
            f" ranks hold: give --dtype {computed_in(dtype)}"
        )
    if settings.batch_norm == "sync":
        raise UserError(f"--dtype {dtype} with --batch-norm sync: normalise over each rank's samples, or train in fp32")


def settings_of_update(strategy: Strategy, settings: PlanSettings) -> PlanSettings:
    """With the dtype that the optimizer updates in: shards of ZeRO's stages 2 and 3 are fp32 by themselves."""
    if zero_stage(strategy) < 2 or not has_masters(settings.dtype):
        return settings
    return msgspec.structs.replace(settings, dtype=computed_in(settings.dtype))


def _check_reduction(strategy: Strategy, dtype: str) -> None:
    """Refuse a dtype of reductions where gradients have it already, or where nothing reduces in another."""
    if not has_masters(dtype):
        raise UserError(f"--reduce-dtype is for --dtype {WEIGHTS_DTYPE}: gradients of --dtype {dtype} are not bf16")
    if zero_stage(strategy) < 2:
        raise UserError(
            f"strategy {strategy}: --reduce-dtype is for stages 2 and 3 of ZeRO (z2, z3), whose shards are fp32; other"
            " exchanges send gradients as they are"
        )
    staging = next((axis.kind for axis in strategy.axes if axis.has(Trait.STAGES) and axis.degree > 1), None)
    if staging:
        raise UserError(
            f"strategy {strategy}: --reduce-dtype in a {staging} is not planned, where torch adds up whole gradients of"
            " micro-batches in that dtype; leave it out"
        )


def check_kernel_settings(strategy: Strategy, settings: PlanSettings, label: str) -> None:
    """Refuse what is not run with kernel settings.

    Raises:
        UserError: names what does not go with them.
    """
    names = label.split("+")
    if "compile" in names:
        _check_compile(strategy, settings)
    if "channels_last" not in names:
        return
    what = _sharded_or_zero(strategy)
    if what:
        raise UserError(
            f"--channels-last with {what}, which cuts tensors along their channels and rows: it goes with serial and"
            " data parallelism (d, z1)"
        )


def _sharding_kinds(strategy: Strategy) -> list[str]:
    """Kinds of parallelism in which a rank does not run the whole model."""
    return [axis.kind for axis in strategy.axes if not axis.has(Trait.DIVIDES_BATCH) and axis.degree > 1]


def _sharded_or_zero(strategy: Strategy) -> str:
    """What keeps ranks from holding every tensor whole, in words; empty where nothing does."""
    kinds = _sharding_kinds(strategy)
    stages = [zero_stage(strategy)] if zero_stage(strategy) > 1 else []
    return f"{kinds[0]} parallelism" if kinds else f"stage {stages[0]} of ZeRO" if stages else ""


def _check_compile(strategy: Strategy, settings: PlanSettings) -> None:
    what = _sharded_or_zero(strategy)
    if what:
        raise UserError(
            f"--compile with {what}, which runs or gathers a model's layers one by one: a model is compiled whole, with"
            " serial and data parallelism (d, z1)"
        )
    if settings.recompute:
        raise UserError("--compile with --recompute: a compiler chooses itself what it computes again in backward")
    if settings.batch_norm == "sync":
        raise UserError("--compile with --batch-norm sync: normalise over each rank's samples, or leave it uncompiled")
    least, cap = ExchangeOptions().first_bucket_bytes, settings.of(ExchangeOptions).bucket_cap_bytes
    if cap < least and any(axis.degree > 1 for axis in strategy.axes):
        raise UserError(
            f"--compile with --bucket-cap-mb {cap / _MIB:g}: torch parts a compiled graph at"
            f" buckets of {least / _MIB:g} MiB or more"
        )
