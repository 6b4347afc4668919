"""What a kind of work declares of its price, and what it is told to find it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from calibrate.profile.profile import Profile
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.works.work import Work
from predict.costs.communication.communication_costs import Call, CommunicationCosts
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.spread.assembly import Priced

W = TypeVar("W", bound=Work)


class PricingContext(NamedTuple):
    """What, besides the work itself, decides its seconds."""

    local_batch: int
    ranks_on_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """What is known of one model's single costs.

    Attributes:
        operations: of the whole model, per phase, how many there is time between.
        updated_elements: parameters of the whole model.
        proportional: a shard takes its share of the whole layer's time, whatever was measured of it.
    """

    profile: Profile
    model_name: str
    layers: LayerCosts
    model: ModelCosts
    communication: CommunicationCosts
    operations: Mapping[str, int]
    updated_elements: int
    proportional: bool = False


class PlanContext(NamedTuple):
    """What the works of a plan share.

    Attributes:
        between: how many operations each phase has time between.
        shard: what every rank runs of the model (``f2``), a pipeline's its stages of that; empty for the whole.
        updated_elements: parameters that ranks at one place along that axis hold, over all stages; the mean of places.
        stage_ranks: as of a :class:`~paradl_bench.plan.tasks.Plan`.
    """

    place: PricingContext
    strategy: Strategy
    between: Mapping[str, int]
    shard: str
    updated_elements: float
    stage_ranks: tuple[int, ...]


class WorkContext(NamedTuple):
    """Where a work stands: in which plan, how often, and how it is called there."""

    plan: PlanContext
    occurrences: float
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCosts(Generic[W]):
    """The price of a kind of work, as its file declares it under ``COSTS``.

    Attributes:
        price: seconds, source and spread.
        alone_on_host: seconds while no other rank of the host computes over those while all do, and the ratio's sd.
        spread_of_event: standard deviation of one event over its median; 0 where it was not measured.
        decisive: what of a work decides its price and its spread, beside the context: those with equal ones share them.
        demand: FLOPs and bytes that a roofline scales it by on another device; None for what stays as it is.
    """

    kind: type[W]
    price: Callable[[W, KnownCosts, WorkContext], Priced]
    alone_on_host: Callable[[W, KnownCosts, PricingContext], tuple[float, float]] = lambda *_: (1.0, 0.0)
    spread_of_event: Callable[[W, KnownCosts, PricingContext], float] = lambda *_: 0.0
    decisive: Callable[[W], Hashable] = lambda work: work
    demand: Callable[[W, DemandContext], Demand | None] = lambda *_: None

    @property
    def name(self) -> str:
        """Of the kind."""
        return self.kind.__name__
