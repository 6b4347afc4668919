"""What ``paradl-bench layers`` is asked for; needs no torch, so that it is checked before ranks are started."""

from __future__ import annotations

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.compiler import refuse_without_compiler
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axis_planner import refuse_unused
from paradl_bench.plan.mesh import label_of_gathers
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.kernel_settings import NO_SETTINGS, KernelSettings
from paradl_bench.records.measurement import argument_texts
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings


class LayersRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``paradl-bench layers`` is asked to measure, on local batches.

    Attributes:
        dtype: ``fp32``, or ``bf16`` by autocast (:mod:`~paradl_bench.network.kinds.autocast`).
        ranks_on_host: how many ranks of the host compute at once, in turn; as many are started as the most of them.
        pairs: uninstrumented and instrumented iterations a block.
        isolated: ``split`` measures both parts of backward of operations that have them, ``all`` every operation.
        shards: strategies whose ranks' parts of the model are measured as well, with options of ``axes``; of ZeRO's
            stages 2 and 3 all of it, behind gathers.
        verify: whether these parts are proved to make up the model first; None for where that is quick.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    input_shape: tuple[int, ...] | None
    device: str
    dtype: str
    kernel_settings: KernelSettings = NO_SETTINGS
    optimizer: str
    ranks_on_host: tuple[int, ...]
    blocks: int
    pairs: int
    warmup: int
    isolated: str
    shards: tuple[Strategy, ...] = ()
    axes: tuple[AxisOptions, ...] = ()
    seed: int = 0
    verify: bool | None = None

    def check(self) -> None:
        """Raises:
        UserError: what does not go together; says what would be right.
        """
        refuse_unused(self.settings(batch=1), self.shards)
        self.kernel_settings.check(self.device)
        for strategy in self.shards:
            check_dtype(strategy, self.settings(batch=1), self.dtype)
            check_kernel_settings(strategy, self.settings(batch=1), self.kernel_settings.label)
            if label_of_gathers(strategy):
                _check_gathered(strategy, self.ranks, self.device)
        if self.kernel_settings.compile and self.isolated != "none":
            raise UserError(
                f"--isolated {self.isolated} with --compile: the backward of a compiled operation computes all"
                " gradients at once; leave --isolated out"
            )
        refuse_without_compiler(self.kernel_settings, self.device)

    def settings(self, batch: int) -> PlanSettings:
        """What decides the shards on a local batch."""
        return PlanSettings(batch=batch, optimizer=self.optimizer, dtype=self.dtype, device=self.device, axes=self.axes)

    @property
    def ranks(self) -> int:
        """Ranks to start."""
        return max(self.ranks_on_host)

    def arguments(self) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        always = ("dtype", "optimizer", "ranks_on_host", "blocks", "pairs", "warmup", "isolated", "seed")
        return {
            **argument_texts(self, "models", "batches"),
            "input_shape": "x".join(map(str, self.input_shape)) if self.input_shape else "default",
            **argument_texts(self, *always, *(("shards",) if self.shards else ())),
            **({"kernel_settings": self.kernel_settings.label} if self.kernel_settings.label else {}),
            **self.settings(batch=1).options,
        }


def _check_gathered(strategy: Strategy, ranks: int, device: str) -> None:
    """Raises:
    UserError: the strategy has other axes, or ranks that do not measure together, or a device whose time can't stop.
    """
    asked = f"--shards {strategy}"
    if len(strategy.axes) > 1:
        raise UserError(f"{asked}: layers behind gathers are measured of one axis; give {strategy.axes[0]}")
    if device != "cpu":
        raise UserError(
            f"{asked}: a GPU's time can't stop while parameters are gathered; leave it out: layers are whole"
        )
    if strategy.ranks != ranks:
        raise UserError(
            f"{asked}: {strategy.ranks} ranks gather parameters, and {ranks} measure; give --ranks-on-host"
            f" {strategy.ranks}"
        )
