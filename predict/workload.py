"""What an evaluator makes of a point: costs, and how they add up to an iteration.

An evaluator is one file under :mod:`predict.evaluators` that declares ``EVALUATOR``. It prepares a workload once; the
interval then asks for its time under costs that are shifted by each mode of error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.registry import discover, named
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import check_batch, degree_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from predict.costs.compute.model_costs import Spread
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.sourced import Costs, Floats, Remarks
from predict.ledger.ledger import RoleLedger


class Timing(NamedTuple):
    """One iteration on the slowest rank, in seconds.

    ``fw_s``, ``bw_s``, ``ge_s`` and ``wu_s`` follow each other: forward; backward until the last gradient is there;
    what is left of the gradient exchange after it; the rest. With ``idle_s`` and ``input_s`` they add up to the
    iteration.

    Attributes:
        fw_of_layers_s, bw_of_layers_s: inside of forward and of backward, communication for layers while compute is
            not active, by name (``halo``, ``all_gather``, ...).
        exposed_communication_s: communication active while compute is not, anywhere in the iteration.
        overlap_s: both active.
        idle_s: waiting for other stages of a pipeline.
        input_s: waiting for the next mini-batch to be read and copied. h2d_s: that part of it while it is copied.
        stage: of a pipeline, the one whose phases these are; None where a closed form takes the slowest of each phase.
    """

    fw_s: float
    bw_s: float
    ge_s: float
    wu_s: float
    exposed_communication_s: float
    overlap_s: float
    fw_of_layers_s: Mapping[str, float] = {}
    bw_of_layers_s: Mapping[str, float] = {}
    idle_s: float = 0.0
    input_s: float = 0.0
    h2d_s: float = 0.0
    stage: int | None = None

    @property
    def iteration_s(self) -> float:
        """Seconds of the iteration."""
        return self.fw_s + self.bw_s + self.ge_s + self.wu_s + self.idle_s + self.input_s

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Phases without communication for layers, which stands apart, and what a rank waits for, if it does."""
        forward, backward = self.fw_of_layers_s, self.bw_of_layers_s
        return {
            "FW": self.fw_s - sum(forward.values()),
            "BW": self.bw_s - sum(backward.values()),
            "GE": self.ge_s,
            "WU": self.wu_s,
            **({"pipeline_idle": self.idle_s} if self.idle_s else {}),
            **({"input": self.input_s - self.h2d_s} if self.input_s > self.h2d_s else {}),
            **({"h2d": self.h2d_s} if self.h2d_s else {}),
            **{name: forward.get(name, 0.0) + backward.get(name, 0.0) for name in sorted({*forward, *backward})},
            "exposed_communication": self.exposed_communication_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration to predict: a strategy and a global batch; a UserError where that has no equal local batches."""

    strategy: Strategy
    settings: PlanSettings

    def __post_init__(self) -> None:
        check_batch(self.strategy, self.settings.batch)

    @property
    def data_degree(self) -> int:
        """Parts into which the batch is split."""
        return degree_of(self.strategy, Trait.DIVIDES_BATCH)

    @property
    def local_batch(self) -> int:
        """Samples that a rank computes."""
        return self.settings.batch // self.data_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """Costs of a point and the way from costs to time.

    Attributes:
        time: from (seconds, compute slow-down, communication slow-down), each per part of ``costs``.
        of_rows: whole iterations from such costs, each of shape (rows, parts) or, for all rows, (parts,); None where
            nothing is faster than to ask ``time`` for each row.
        ledger: what every second is made of, role by role. memory: of the rank that needs most. Both take longer than
            the time does, and are asked for where they are shown.
        straggler: how much longer the slowest rank computes than a median one.
        overlap_is_unmeasured: whether what compute and communication side by side cost each other was assumed.
        likeness: equal for evaluations of the same tasks at the same costs; None where telling takes as long as those.
    """

    costs: Costs
    spread: Spread
    remarks: Remarks
    memory: Callable[[], EstimatedMemory]
    limits: tuple[str, ...]
    time: Callable[[Floats, Floats, Floats], Timing]
    ledger: Callable[[], tuple[RoleLedger, ...]]
    straggler: float = 1.0
    overlap_is_unmeasured: bool = False
    of_rows: Callable[[Floats, Floats, Floats], Floats] | None = None
    likeness: Callable[[], bytes] | None = None
    found: Answers = field(init=False, default_factory=Answers, compare=False, repr=False)

    def iterations_s(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Floats:
        """Whole iterations, of shape (rows,): of seconds (rows, parts), and slow-downs (rows, parts) or (parts,)."""
        if self.of_rows is not None:
            return self.of_rows(seconds, compute_slowdown, communication_slowdown)
        rows = zip(*np.broadcast_arrays(seconds, compute_slowdown, communication_slowdown), strict=True)
        return np.array([self.time(*row).iteration_s for row in rows])

    def timing(self) -> Timing:
        """The time under the costs as they are."""
        costs = self.costs
        return self.found.once(
            "timing", lambda: self.time(costs.seconds, costs.compute_slowdown, costs.communication_slowdown)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """A way from costs to an iteration.

    Attributes:
        prepare: raises UserError where it has nothing to say on the point's strategy or settings.
        covers: whether it has something to say on a strategy. knows: whether it does under these settings.
        lacks: what it misses to say anything at all, in words; empty where it can.
        estimated_by: of the costs, those by which a search estimates its iterations from below; raises UserError as
            ``prepare`` does. None where no estimate is from below.
    """

    name: str
    prepare: Callable[[CostModel, Configuration], PreparedEvaluation]
    covers: Callable[[Strategy], bool] = lambda strategy: True
    knows: Callable[[PlanSettings], bool] = lambda settings: True
    lacks: Callable[[CostModel], str] = lambda costs: ""
    estimated_by: Callable[[CostModel], CostModel] | None = None


def evaluators() -> dict[str, Evaluator]:
    """All evaluators by name."""
    return discover("predict.evaluators", "EVALUATOR", Evaluator)


def evaluator_named(name: str) -> Evaluator:
    """The evaluator of a name; a UserError, which names the choices, if there is none."""
    return named("predict.evaluators", "EVALUATOR", Evaluator, name, "evaluator")
