"""ParaDL's closed form of a pipeline (Table 3 of the paper), over the works of its plan.

    (p + S - 1)(max_i fw_i + max_i bw_i) + max_i wu_i + 2 (p + S - 2) max_i (alpha + m_i beta)

fw_i and bw_i are of one micro-batch on stage i, m_i what it sends of one. Stages run in lock-step: the largest sets the
pace, and nothing is computed while a transfer is under way. The paper knows one stage a rank and no schedule but GPipe;
time between operations is no part of its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.tasks import Compute, Plan, Transfer, Work
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.sourced import Floats


class LockStep(NamedTuple):
    """Seconds of forward, backward, transfers and weight update of an iteration."""

    fw_s: float
    bw_s: float
    transfers_s: float
    wu_s: float

    @property
    def iteration_s(self) -> float:
        """Their sum."""
        return sum(self)


def lock_step_settings(settings: PlanSettings) -> PlanSettings:
    """Of the plan that the closed form reads: GPipe's, with the stages that are given where each is a rank's own."""
    options = settings.of(PipelineOptions)
    stages = options.stages if schedule_of(options.schedule).placement.stages_per_rank == 1 else ()
    return settings.changed(PipelineOptions, schedule="gpipe", stages=stages)


class PipelineClosedForm:
    """The closed form over seconds of the works of a plan with one stage a rank."""

    def __init__(self, plan: Plan) -> None:
        self._ranks, self._micro_batches = len(plan.roles), plan.micro_batches
        counts = [role.counts(len(plan.works)) for role in plan.roles]

        def of_micro_batch(chosen: list[bool]) -> Floats:
            """Per role, how often a micro-batch does each of the chosen works."""
            return np.array([np.where(chosen, of_role, 0) for of_role in counts]) / self._micro_batches

        self._forward = of_micro_batch([_is_layer(work, "FW") for work in plan.works])
        self._backward = of_micro_batch([_is_layer(work, "BW") for work in plan.works])
        self._sends = np.zeros(len(plan.works))
        # The paper has no stages that share parameters.
        crossing = [index for index, work in plan.of_kind(Transfer).items() if work.to < 0 and work.direction == "send"]
        self._sends[crossing] = 1.0
        self._updates = of_micro_batch([work.way == "WU" for work in plan.works]) * self._micro_batches

    def __call__(self, seconds: Floats) -> LockStep:
        """The iteration under these seconds, one a work."""
        steps = self._ranks + self._micro_batches - 1
        once = self.of_micro_batch(seconds)
        return LockStep(
            fw_s=steps * once.fw_s,
            bw_s=steps * once.bw_s,
            transfers_s=2 * (steps - 1) * once.transfers_s,
            wu_s=once.wu_s,
        )

    def terms(self, seconds: Floats) -> Iterator[tuple[str, str, Floats]]:
        """Phase and letters of each term of the equation, and how often it has each work."""
        steps = self._ranks + self._micro_batches - 1
        for phase, term, of_roles, times in (
            ("FW", "(p + S - 1) max_i fw_i", self._forward, steps),
            ("BW", "(p + S - 1) max_i bw_i", self._backward, steps),
            ("WU", "max_i wu_i", self._updates, 1),
        ):
            yield phase, term, times * of_roles[int(np.argmax(of_roles @ seconds))]
        longest = np.zeros(len(seconds))
        longest[int(np.argmax(self._sends * seconds))] = 2 * (steps - 1)
        yield "FW", "2 (p + S - 2) max_i (alpha + m_i beta)", longest

    def of_micro_batch(self, seconds: Floats) -> LockStep:
        """The largest stage's forward and backward of one micro-batch, the longest transfer, the largest update."""
        return LockStep(
            fw_s=float((self._forward @ seconds).max()),
            bw_s=float((self._backward @ seconds).max()),
            transfers_s=float((self._sends * seconds).max()),
            wu_s=float((self._updates @ seconds).max()),
        )


def _is_layer(work: Work, phase: str) -> bool:
    return isinstance(work, Compute) and work.phase == phase
