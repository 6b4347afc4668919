"""The cost model: seconds, sources and spread of every distinct work of a plan, and of a model's sums.

The closed forms read sums over the same prices, so that they and the simulation differ by what they assume, never by
what they read.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from calibrate.profile.profile import ModelTime, Profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, Compute, FrameworkOverhead, Plan, Work
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.measurement import PhaseName
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.data.fusion.buffers import Buffers, fused, fused_as_ddp, ready_seconds
from paradl_bench.strategies.data.fusion.layerwise_plan import layerwise_plan
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.memory.of_plan import paradl_memory_of_plan
from predict.costs.communication.calls import works_after_compute
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.compute.host_dispatch import with_dispatch
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.layer_source import MEASURED_FIRST, LayersFrom, of_layers_from, refuse_without_source
from predict.costs.compute.model_costs import ModelCosts, Spread
from predict.costs.compute.unmeasured_costs import of_missing_layers
from predict.costs.files import of_kernel_settings
from predict.costs.flops_alone import flops_alone, without_latency
from predict.costs.hardware.what_if_device import OtherDevice, with_stated_rates
from predict.costs.hardware.what_if_hardware import AS_MEASURED, Hardware
from predict.costs.input.input_terms import NO_INPUT, InputOptions
from predict.costs.kinds.catalog import costs_of, demand_of
from predict.costs.kinds.kind_costs import KnownCosts, PricingContext
from predict.costs.kinds.work_costs import (
    computing_parts_of,
    in_parts,
    operations_between,
    parts_of,
    relative_spreads,
    shard_of,
    shares_of_layers,
    updated_elements,
)
from predict.costs.memory_estimate import EstimatedMemory, Plans, with_factor, with_reuse
from predict.costs.priced import PricedPlan, PricedSums
from predict.costs.sourced import Cost, Costs, Floats, Remark, Remarks
from predict.costs.spread.assembly import Priced, assemble
from predict.costs.spread.stragglers import RankSpread

NO_SPREAD = Spread(0.0, (0.0,))
"""Of a device that takes the seconds of the profile as they stand."""

_PHASES: tuple[Literal["FW", "BW"], ...] = ("FW", "BW")

SUMS = ("FW", "BW", "FW between", "BW between", "WU")


@dataclass(slots=True)
class CostModel:
    """Prices works for one network, dtype and optimizer, on one cluster through one library.

    Args:
        kernel_settings: label of those whose times are taken, and no others'.
        cluster: of a cluster file, which may be of another device; None takes the profile's own, and goes on beyond its
            ranks.
        backend: library of the collectives; None takes the one that suits the profile's device.
        proportional: a shard takes its share of the whole layer's time, whatever was measured of it.
        input_options: what was asked of the input side, for evaluators that know it.
        hardware: factors on the links and the device that were measured.
        fusion: which gradients share an all-reduce, for evaluators that ask; None leaves it to the evaluator.
        slow_rank: one rank that computes slower, for evaluators that know ranks.
        layers_from: what the seconds of layers and of the weight update are taken from.
    """

    profile: Profile
    network: ModelGraph
    optimizer: str = "sgd"
    dtype: str = "fp32"
    kernel_settings: str = ""
    cluster: Cluster | None = None
    backend: str | None = None
    proportional: bool = False
    input_options: InputOptions = field(default_factory=InputOptions)
    hardware: Hardware = AS_MEASURED
    fusion: Fusion | None = None
    slow_rank: SlowRank | None = None
    layers_from: LayersFrom = MEASURED_FIRST
    communication: CommunicationCosts = field(init=False)
    device: OtherDevice = field(init=False)
    plans: Plans = field(init=False)
    _layers: LayerCosts = field(init=False)
    _model: ModelCosts = field(init=False)
    _known: KnownCosts = field(init=False)
    _sums: dict[PricingContext, PricedSums] = field(init=False, default_factory=dict)
    _remainders: dict[tuple[int, int, str], float] = field(init=False, default_factory=dict)
    _by_flops: CostModel | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        asked = of_layers_from(of_kernel_settings(self.profile, self.kernel_settings), self.layers_from)
        self.profile = with_stated_rates(asked, self.cluster)
        refuse_without_source(self.profile, self.layers_from, self.dtype, self.kernel_settings, self.network.name)
        self._layers = LayerCosts(self.profile, self.network, self.dtype, self.layers_from)
        self._model = ModelCosts(
            self.profile, self.network, dtype=self.dtype, optimizer=self.optimizer, layers_from=self.layers_from
        )
        self.plans = Plans(self.network, self.dtype, self.device_kind)
        self._place_on_hardware()

    def on(self, hardware: Hardware) -> CostModel:
        """The same on other hardware, with the plans, memory and layers of both; with what both links or devices share.

        Raises:
            UserError: the profile lacks what other hardware is scaled by.
        """
        other = copy.copy(self)
        other.hardware = hardware
        same_links = hardware.link_factors == self.hardware.link_factors and hardware.device == self.hardware.device
        other._place_on_hardware(self.communication.anew() if same_links else None)
        if hardware.device_factors == self.hardware.device_factors:
            other.device, other._sums = self.device, self._sums
        return other

    def _place_on_hardware(self, communication: CommunicationCosts | None = None) -> None:
        """Find whatever depends on links and rates; ``communication``: of the same links, where it is known."""
        found = communication or CommunicationCosts(self.profile, self.cluster, self.backend, self.hardware)
        self.communication = found
        self.device = OtherDevice(self.profile, self.network, self.dtype, demand_of, self.hardware, self.cluster)
        self._sums, self._by_flops = {}, None
        self._known = KnownCosts(
            profile=self.profile,
            model_name=self.network.name,
            layers=self._layers,
            model=self._model,
            communication=self.communication,
            operations=operations_between(self.network),
            updated_elements=updated_elements(self.network),
            proportional=self.proportional,
        )

    @property
    def _serial(self) -> Plan:
        """What one rank does by itself, planned where that is asked for; works do not depend on the batch."""
        return self.plans.plan(Strategy(), PlanSettings(batch=1, optimizer=self.optimizer))

    def memory(self, strategy: Strategy, settings: PlanSettings, within: float = math.inf) -> EstimatedMemory:
        """What the rank that needs most holds at its peak, or the first that needs over ``within`` bytes of tensors."""
        return with_factor(self.profile, self.plans.memory(strategy, settings, within))

    def paradl_memory(self, strategy: Strategy, settings: PlanSettings) -> EstimatedMemory:
        """The same by the paper's sum."""
        use = paradl_memory_of_plan(self.network, strategy, settings, dtype=self.dtype)
        return with_reuse(self.profile, self.network.name, use)

    def by_flops(self) -> CostModel:
        """The costs of the same device and links by FLOPs and bytes alone (:mod:`predict.costs.flops_alone`)."""
        if self._by_flops is None:
            hardware, stated = self.hardware, self.device.stated_peak
            self._by_flops = dataclasses.replace(
                self,
                profile=flops_alone(self.profile, stated, hardware.peak_flops),
                cluster=self.cluster and without_latency(self.cluster),
                input_options=NO_INPUT,
                layers_from=MEASURED_FIRST,
                hardware=dataclasses.replace(hardware, peak_flops=1.0, memory_bandwidth=1.0),
            )
        return self._by_flops

    @property
    def device_kind(self) -> str:
        """``cpu`` or ``cuda``: of the device that was measured."""
        return self.profile.devices[0].kind if self.profile.devices else "cpu"

    def place(self, strategy: Strategy, local_batch: int) -> PricingContext:
        """Where a rank stands: as many ranks share its host as the innermost level holds, if there are so many."""
        return PricingContext(local_batch, min(strategy.ranks, self.communication.cluster.ranks_per_node))

    @property
    def missing_layers(self) -> tuple[Remark, ...]:
        """What is to be said of a network that was imported in part."""
        return of_missing_layers(self.profile, self.network)

    def price(self, plan: Plan, *, as_swept: bool = False) -> PricedPlan:
        """Costs of all works of a plan.

        Args:
            as_swept: communication takes what a sweep measures, as in closed forms, and nothing surrounds it.

        Raises:
            UserError: the profile has nothing for a work; the message names the command that would measure it.
        """
        self._layers.learn(plan.sharded)
        if self.proportional:
            self._layers.share_out(shares_of_layers(self.network, plan))
        place = self._place_of(plan)
        priced, remarks = self._on_device(plan, place, as_swept=as_swept), Remarks()
        remarks.add(*self.missing_layers, *(remark for part in priced for remark in part.cost.remarks))
        remarks.add(*(Remark(note, False) for note in plan.notes))
        spread = self._spread(place, plan)
        costs = assemble(priced, spread.common_relative_sd)
        return PricedPlan(
            plan=plan,
            place=place,
            costs=costs,
            parts=priced,
            rank_spread=self.rank_spread(place),
            slow_copies=self.device.computes,
            own_relative_sd=relative_spreads(self._known, plan, costs.total_s, place),
            spread=spread,
            blocking=frozenset(index for index, part in enumerate(priced) if part.blocking),
            remarks=remarks,
        )

    def alone_on_host(self, plan: Plan, place: PricingContext) -> tuple[Floats, Floats] | None:
        """Per work, its seconds while no other rank of the host computes over those while all do, and their spread.

        1 and 0 for what does not compute; None where nothing was measured both ways, or the device does not compute.
        """
        ratios, sds = np.ones(len(plan.works)), np.zeros(len(plan.works))
        alone = place.ranks_on_host <= 1 or not self.device.computes
        if alone or self._layers.host_ratio(place.ranks_on_host, 1) is None:
            return None
        for index, work in enumerate(plan.works):
            ratios[index], sds[index] = costs_of(work).alone_on_host(work, self._known, place)
        return ratios, sds

    @property
    def operations(self) -> dict[tuple[str, PhaseName], int]:
        """How often one rank's iteration runs each operation and phase of the whole network."""
        serial = self._serial
        (role,) = serial.roles
        occurrences: Counter[tuple[str, PhaseName]] = Counter()
        counts = role.counts(len(serial.works)).tolist()
        for index, work in serial.of_kind(Compute).items():
            occurrences[work.operation, work.phase] += counts[index]
        return occurrences

    def layer_costs(self, names: Iterable[str], place: PricingContext) -> dict[tuple[str, PhaseName], Cost]:
        """What forward and backward of whole layers cost, by their names.

        Raises:
            UserError: the profile has nothing for one of them.
        """
        operation_of = {layer.name: layer.operation for layer in self.network.layers}
        works: dict[tuple[str, PhaseName], Work] = {
            (name, phase): Compute(layer=name, operation=operation_of[name], phase=phase)
            for name in names
            for phase in _PHASES
        }
        priced = [
            Priced(self._layers.cost(operation_of[name], phase, "", *place), 1, (name, phase)) for name, phase in works
        ]
        parts = self.device.parts(tuple(works.values()), priced, (), *place)
        return dict(zip(works, (part.cost for part in parts), strict=True))

    def rank_spread(self, place: PricingContext) -> RankSpread:
        """How single iterations of a rank spread."""
        return self._model.rank_spread(*place)

    def sums(self, place: PricingContext) -> PricedSums:
        """Sums of the model's layers, time between them and weight update; kept per (batch, ranks on the host)."""
        if place not in self._sums:
            self._sums[place] = self._sum_up(place)
        return self._sums[place]

    def collective(self, work: Collective, strategy: Strategy) -> tuple[Costs, tuple[Remark, ...]]:
        """Costs of one collective that no compute runs beside."""
        priced = self.communication.cost(work, strategy)
        part = Priced(priced.cost, 1, work, True, priced.modes)
        return assemble([part], 0.0), priced.cost.remarks

    def buffers(self, fusion: Fusion, strategy: Strategy, settings: PlanSettings) -> Buffers:
        """Which gradients a rule of fusion sends together, by when they are ready and what all-reduces take.

        Those of a run that exchanged in given messages, whatever the rule.
        """
        if fusion.rule == "ddp" or settings.of(ExchangeOptions).fused_bytes:
            return fused_as_ddp(self.network, settings)
        compute = layerwise_plan(self.network, strategy, settings, {})
        ready = ready_seconds(compute, self.network, self.price(compute).costs.seconds)

        def exchange_s(message_bytes: float) -> float:
            size = max(1, round(message_bytes))
            work = Collective(operation="all_reduce", message_bytes=size, ranks=strategy.ranks)
            return self.communication.cost(work, strategy).cost.seconds

        return fused(self.network, fusion, ready, exchange_s)

    def _sum_up(self, place: PricingContext) -> PricedSums:
        groups: dict[str, list[tuple[Work, Priced]]] = {name: [] for name in SUMS}
        serial = self._serial
        for work, part in zip(serial.works, self._on_device(serial, place), strict=True):
            name = f"{work.way} between" if isinstance(work, FrameworkOverhead) else work.way
            groups[name].append((work, part))
        remarks = (remark for group in groups.values() for _, part in group for remark in part.cost.remarks)
        return PricedSums(
            groups=tuple(groups.values()),
            spread=self._spread(place),
            remarks=(*self.missing_layers, *remarks),
        )

    def _on_device(self, plan: Plan, place: PricingContext, *, as_swept: bool = False) -> list[Priced]:
        """Parts in the order of ``plan.works``, on the device that is asked for."""
        priced = parts_of(self._known, plan, place, as_swept=as_swept)
        parts = self.device.parts(plan.works, priced, plan.sharded, *place)
        return [
            *with_dispatch(self._model.dispatch(*place), plan, dict(enumerate(parts)), works_after_compute).values()
        ]

    def compute_costs(self, plan: Plan) -> dict[int, Cost]:
        """What computes of a plan's works (layers, time between them, weight update), by its index."""
        return {index: part.cost for index, part in self._computing(plan).items()}

    def own_deviations(self, plan: Plan) -> tuple[RankSpread, dict[int, float]]:
        """How a rank's iterations spread, and by index of what computes of a plan's works how one event of it does.

        The latter are standard deviations relative to the event's seconds, of what falls on it by itself alone.
        """
        place = self._place_of(plan)
        parts, total_s = self._computing(plan), np.zeros(len(plan.works))
        for index, part in parts.items():
            total_s[index] = part.cost.seconds * part.occurrences
        spread = self.rank_spread(place)
        deviations = spread.own_deviation(relative_spreads(self._known, plan, total_s, place))
        return spread, {index: float(deviations[index]) for index in parts}

    def _place_of(self, plan: Plan) -> PricingContext:
        return self.place(plan.strategy, plan.local_batch // plan.micro_batches)

    def _computing(self, plan: Plan) -> dict[int, Priced]:
        """Parts of what computes, by index of the plan's works."""
        self._layers.learn(plan.sharded)
        place = self._place_of(plan)
        of_plan = computing_parts_of(self._known, plan, place)
        works, priced = [plan.works[index] for index in of_plan], list(of_plan.values())
        of_works = dict(zip(of_plan, self.device.parts(works, priced, plan.sharded, *place), strict=True))
        return with_dispatch(self._model.dispatch(*place), plan, of_works, works_after_compute)

    @property
    def overlap_is_unmeasured(self) -> bool:
        """Whether what compute and collectives side by side cost each other is not known of these devices."""
        return self.device.computes and not self.communication.interferes

    def _spread(self, place: PricingContext, plan: Plan | None = None) -> Spread:
        """The model's spread, with what its parts' medians leave of the median iteration where that was measured.

        Args:
            plan: whose ranks' own iterations tell more than the whole model's, where they were measured.
        """
        if not self.device.computes:
            return NO_SPREAD
        as_measured = plan is not None and self.layers_from.measured and not self.proportional
        shard = shard_of(plan, self._model, place) if plan is not None and as_measured and not in_parts(plan) else ""
        spread = self._model.spread(*place, shard)
        measured = self._model.nearest_shard(*place, shard)
        if measured is None or plan is None:
            plan, measured = None, self._model.nearest(*place)
        if measured is None or not self.layers_from.measured or not measured.iteration.median_s:
            return spread
        key = measured.batch, measured.ranks_on_host, measured.shard
        if key not in self._remainders:
            self._remainders[key] = 1 - self._added_up_s(plan or self._serial, measured) / measured.iteration.median_s
        return spread._replace(remainders=(*spread.remainders, self._remainders[key]))

    def _added_up_s(self, plan: Plan, measured: ModelTime) -> float:
        """Seconds of what a rank of a plan computes, in the mean over ranks, at the place of a measurement."""
        parts = computing_parts_of(self._known, plan, PricingContext(measured.batch, measured.ranks_on_host))
        counts = [role.counts(len(plan.works)).tolist() for role in plan.roles]
        of_roles = [sum(part.cost.seconds * count[index] for index, part in parts.items()) for count in counts]
        ranks = [role.multiplicity for role in plan.roles]
        return sum(math.prod(pair) for pair in zip(of_roles, ranks, strict=True)) / sum(ranks)
