"""What can be trained by autocast: where ranks exchange gradients alone, which stay fp32.

Activations that ranks hand each other would go in the lower dtype, and segments that are computed again, or statistics
that are synchronised, convert tensors of their own: neither is in plans or in the memory model.
"""

from __future__ import annotations

from paradl_bench.layers.autocast import is_autocast
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Strategy


def check_dtype(strategy: Strategy, settings: PlanSettings, dtype: str) -> None:
    """Refuse what is not planned for in a dtype.

    Raises:
        UserError: names what does not go with it.
    """
    if not is_autocast(dtype):
        return
    kinds = [axis.kind for axis in strategy.axes if axis.kind != "data" and axis.degree > 1]
    if kinds:
        raise UserError(
            f"--dtype {dtype} with {kinds[0]} parallelism: ranks would hand on activations in {dtype}, which no plan"
            " holds; it goes with serial and data parallelism (d, z)"
        )
    if settings.recompute:
        raise UserError(f"--dtype {dtype} with --recompute: what is converted again in backward is not in the plan")
    if settings.batch_norm == "sync":
        raise UserError(f"--dtype {dtype} with --batch-norm sync: normalise over each rank's samples, or train in fp32")


def check_kernel_settings(strategy: Strategy, settings: PlanSettings, label: str) -> None:
    """Refuse what is not run with kernel settings.

    Raises:
        UserError: names what does not go with them.
    """
    if "channels_last" not in label.split("+"):
        return
    kinds = [axis.kind for axis in strategy.axes if axis.kind != "data" and axis.degree > 1]
    stages = [axis.zero_stage for axis in strategy.axes if axis.zero_stage > 1]
    what = f"{kinds[0]} parallelism" if kinds else f"stage {stages[0]} of ZeRO" if stages else ""
    if what:
        raise UserError(
            f"--channels-last with {what}, which cuts tensors along their channels and rows: it goes with serial and"
            " data parallelism (d, z1)"
        )
