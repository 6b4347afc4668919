"""What a training run is asked to do; torch-free, so that a launcher refuses a mistake before it starts any rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.compiler import refuse_without_compiler
from paradl_bench.measure.input.folder import SYNTHETIC, find_images
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axis_planner import refuse_unused
from paradl_bench.plan.mesh import degree_of, zero_stage
from paradl_bench.plan.settings import ChosenSettings, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.kernel_settings import NO_SETTINGS, KernelSettings, flag_of
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.data.fusion.fusion_file import AskedFusion
from paradl_bench.strategies.exchange.messages import check_messages
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.frameworks.framework_memory import TORCH
from paradl_bench.strategies.frameworks.presets import DEFAULT_PRESET, Preset, preset_named
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings, settings_of_update
from paradl_bench.strategies.pipeline.axis import PipelineOptions

RECORDED: tuple[Literal["first", "rebuild", "iteration"], ...] = ("first", "rebuild", "iteration")
"""What the first iterations of a run are (IssuedCollective.when), which are recorded and not timed."""


class TrainingRequest(ChosenSettings, frozen=True, kw_only=True):
    """What ``paradl-bench train`` is asked to run.

    Attributes:
        dtype: ``fp32``, or ``bf16`` by autocast (:mod:`~paradl_bench.network.kinds.autocast`).
        iterations: timed ones. warmup: untimed ones before them, the recorded ones included.
        balance: directory of ``paradl-bench layers`` whose seconds stages are to balance; see
            :mod:`paradl_bench.measure.training.stage_balance`.
        fusion: which gradients share an all-reduce; None for DDP's buckets, and where ``axes`` say it already; see
            :mod:`paradl_bench.measure.training.fused_messages`.
        emulate: file of the seconds that layers sleep instead of computing: a table, or a profile to make it of; None
            for a real run.
        slow_rank: one rank that sleeps longer still by a factor; None for none.
        spread: whether single sleeps are drawn as the profile's samples spread. seed: of what is drawn; None for 0.
        verify: whether the strategy is proved on the model first; None for where that is quick.
        input: folder of images that are trained on, or ``synthetic``; None for samples that are drawn in memory.
        io_workers: that read for each rank. preset: how input and exchange overlap; None for the default of either.
        time_collectives: whether each collective and message is timed by itself, in every second chunk of iterations.
    """

    model: str
    input_shape: tuple[int, ...] | None
    strategy: Strategy
    device: str
    dtype: str = "fp32"
    kernel_settings: KernelSettings = NO_SETTINGS
    balance: str | None = None
    fusion: AskedFusion | None = None
    axes: tuple[AxisOptions, ...] = ()
    layout: NodeLayout | None = None
    iterations: int = 30
    warmup: int = 5
    emulate: str | None = None
    dilate: float | None = None
    slow_rank: SlowRank | None = None
    spread: bool = False
    seed: int | None = None
    verify: bool | None = None
    input: str | None = None
    io_workers: int | None = None
    preset: str | None = None
    time_collectives: bool = False

    @property
    def overlap(self) -> Preset:
        """How input and exchange overlap."""
        return preset_named(self.preset or DEFAULT_PRESET)

    @property
    def settings(self) -> PlanSettings:
        """What a plan of this run needs."""
        return PlanSettings(
            blocking=self.device != "cuda", dtype=self.dtype, device=self.device, axes=self.axes, **self.chosen
        )

    @property
    def settings_of_update(self) -> PlanSettings:
        """What a plan of its weight update needs."""
        return settings_of_update(self.strategy, self.settings)

    @property
    def shares_layers(self) -> bool:
        """Whether the model's layers, parameters or samples limit what is asked for, beside its mini-batch."""
        shares = any(not axis.has(Trait.DIVIDES_BATCH) and axis.degree > 1 for axis in self.strategy.axes)
        return shares or zero_stage(self.strategy) > 1 or self.fusion is not None or self.input is not None

    def check(self) -> None:
        """Refuse, without torch, what no model could make right: kinds that cannot be planned, batch against ranks.

        Raises:
            UserError: says what would be right.
        """
        nothing = ModelGraph(name=self.model, input_shape=(), layers=(), parameters=())
        planner_for(self.strategy).check(nothing, self.strategy, self.settings)
        refuse_unused(self.settings, (self.strategy,))
        check_dtype(self.strategy, self.settings, self.dtype)
        self.kernel_settings.check(self.device)
        check_kernel_settings(self.strategy, self.settings, self.kernel_settings.label)
        self._check_balance()
        self._check_input()
        self._check_fusion()
        if self.layout is not None and self.device != "cpu":
            raise UserError("--nodes emulates nodes for ranks on a CPU: give --device cpu")
        self._check_emulation()
        self._check_timing()
        if self.warmup < len(RECORDED):
            raise UserError(
                f"--warmup {self.warmup} is too short: give at least {len(RECORDED)}, because the first"
                f" {len(RECORDED)} iterations are recorded, not timed"
            )
        refuse_without_compiler(self.kernel_settings, self.device)

    def _check_balance(self) -> None:
        if self.balance is not None and degree_of(self.strategy, Trait.STAGES) == 1:
            raise UserError(f"--balance is for pipelines; strategy {self.strategy} has no pipeline")
        if self.balance is not None and self.settings.of(PipelineOptions).stages:
            raise UserError("--balance finds the stages that --stages gives: give one of them")

    def _check_fusion(self) -> None:
        if self.fusion is None and not self.exchanges_by_preset:
            return
        flag = f"--preset {self.preset}" if self.fusion is None else "--fusion"
        check_messages(self.strategy, self.settings, flag)
        if self.kernel_settings.compile:
            raise UserError(
                f"{flag} with --compile: a compiled backward gives all gradients only at its end, so nothing can"
                " be sent beside it; leave one of them out"
            )

    def _check_input(self) -> None:
        of_input = {"--io-workers": self.io_workers, "--preset": self.preset}
        flag = next((flag for flag, given in of_input.items() if given is not None), None)
        if self.input is None and flag is not None:
            raise UserError(f"{flag} needs --input FOLDER or --input synthetic")
        if self.input is None:
            return
        preset = self.overlap
        if preset.memory != TORCH:
            raise UserError(
                f"--preset {self.preset} is only for predictions: a real run holds what torch holds; leave it out"
            )
        if not preset.reads_ahead and self.io_workers:
            raise UserError(f"--preset {self.preset} reads in the training process: give --io-workers 0")
        if self.emulate is not None:
            raise UserError("--emulate does not use samples: leave --input out")
        if self.input != SYNTHETIC:
            find_images(Path(self.input))

    @property
    def exchanges_by_preset(self) -> bool:
        """Whether gradients are exchanged layer by layer, as the preset says, and not as the library does."""
        return self.input is not None and bool(self.strategy.axes) and self.overlap.layerwise

    def _check_timing(self) -> None:
        if self.time_collectives and self.strategy.ranks == 1:
            raise UserError(
                f"--time-collectives: strategy {self.strategy} issues no collectives; give one of several ranks"
            )
        if self.time_collectives and self.device != "cpu":
            raise UserError(
                "--time-collectives is for --device cpu: it uses the host's clock, which GPU streams do not follow"
            )

    def _check_emulation(self) -> None:
        self._check_sleep()
        if self.emulate is None:
            return
        if self.slow_rank is not None:
            self.slow_rank.check(str(self.strategy), self.strategy.ranks)
        if self.dilate is not None and not 0 < self.dilate < math.inf:
            raise UserError(f"--dilate {self.dilate:g} has to be a positive number: 20 sleeps twenty times as long")
        if Path(self.emulate).is_dir():
            raise UserError(
                f"--emulate {self.emulate} is a directory; give a file: what predict ghost wrote, or a profile"
            )
        if not Path(self.emulate).is_file():
            raise UserError(
                f"--emulate {self.emulate}: there is no such file; give what predict ghost wrote, or a profile"
            )
        if self.device != "cpu":
            raise UserError("--emulate is for --device cpu: layers sleep on the host, not in GPU streams")
        if self.dtype != "fp32":
            raise UserError(f"--emulate knows --dtype fp32, not {self.dtype}")
        if self.offload != "none":
            raise UserError(f"with --emulate there is no optimizer state to copy: leave out --offload {self.offload}")
        if self.kernel_settings.label:
            flags = " ".join(map(flag_of, self.kernel_settings.label.split("+")))
            raise UserError(f"--emulate runs no kernels, so {flags} has no effect: leave it out")

    def _check_sleep(self) -> None:
        of_sleep = {
            "--dilate": self.dilate is not None,
            "--slow-rank": self.slow_rank is not None,
            "--spread": self.spread,
            "--seed": self.seed is not None,
        }
        flag = next((flag for flag, given in of_sleep.items() if given), None)
        if self.emulate is None and flag is not None:
            raise UserError(f"{flag} needs --emulate FILE")
        if self.seed is not None and not self.spread:
            raise UserError("--seed needs --spread, whose sleeps it draws")

    def arguments(self, context: RankContext) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        shape = "x".join(map(str, self.input_shape)) if self.input_shape else "default"
        exchange = self.settings.of(ExchangeOptions)
        cap = "default" if exchange.has_default_limits else f"{exchange.bucket_cap_bytes / 1024**2:g}"
        return {
            "model": self.model,
            "input_shape": shape,
            "strategy": str(self.strategy),
            "batch": str(self.batch),
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "backend": context.backend,
            "launcher": context.launcher,
            "bucket_cap_mb": cap,
            **({"kernel_settings": self.kernel_settings.label} if self.kernel_settings.label else {}),
            "iterations": str(self.iterations),
            "warmup": str(self.warmup),
            # The stages themselves have to be the same, not what found them.
            **{name: text for name, text in self.settings.options.items() if name != "cut_by"},
            **self._settled,
            **({"emulated_nodes": str(self.layout)} if self.layout else {}),
            **({"slow_rank": str(self.slow_rank)} if self.slow_rank else {}),
            **({"time_collectives": "yes"} if self.time_collectives else {}),
            **({"spread": f"seed {self.seed or 0}"} if self.spread else {}),
            **self.input_arguments,
        }

    @property
    def input_arguments(self) -> dict[str, str]:
        """What is read and how, in words; nothing where samples are drawn."""
        if self.input is None:
            return {}
        source = self.input if self.input == SYNTHETIC else str(Path(self.input).resolve())
        return {"input": source, "io_workers": str(self.io_workers or 0), "preset": self.preset or DEFAULT_PRESET}

    @property
    def _settled(self) -> dict[str, str]:
        """What the axes of the strategy make of their options."""
        settled: dict[str, str] = {}
        for axis in self.strategy.axes:
            for options in axis.declared.options if axis.degree > 1 else ():
                settled |= self.settings.of(options).settled(axis.degree)
        return settled
