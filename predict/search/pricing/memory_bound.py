"""The least that candidates can hold, for many at once: rules out what surely does not fit, before anything is planned.

Held throughout are parameters, the optimizer's state, exchange buckets, and what stages receive into; gradients stay to
the update, which makes tensors of its own; the first rank of a pipeline has the activations of as many micro-batches as
its schedule has under way, and those of a backward beside all but one. From the second backward on gradients are beside
them. Where nothing is let go of, what was sent is there to the end. What an axis of p shares counts as 1/p of it, or as
the least part that a rank holds of it, and what else memory goes to is left out.

Of a mesh whose parameters alone are too many nothing else is looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers, Same
from paradl_bench.network.graph import DTYPE_BYTES
from paradl_bench.network.kinds.autocast import KEPT_DTYPE, as_held, computed_in, given_dtype, has_masters, widths_of
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.optimizers import optimizer_named
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.placement import ONE_STAGE, Placement
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.memory.gpu_kernels import layers_on_gpu
from paradl_bench.strategies.memory.peak import kept_copies, run_again
from paradl_bench.strategies.memory.rank_operations import RankRun, shares_input
from paradl_bench.strategies.passes.recomputation import parts_within
from paradl_bench.strategies.passes.weight_update import copies_of_state
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import data_flow, elements
from paradl_bench.strategies.pipeline.stage_shards import widths_inside
from paradl_bench.strategies.pipeline.stages import first_stage, stage_bounds
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.choices import Choices
from predict.search.candidates.mesh import Mesh, MeshPlans, Settings, Sharing, plans_of
from predict.search.candidates.space import Space
from predict.search.pricing.activations import Activations, ActivationsByLayer, UnderWay
from predict.search.pricing.links import sums_of_ranks
from predict.search.pricing.shared_work import SharedWork, SharedWorks
from predict.search.pricing.zero_messages import unit_bytes


class _Stages(NamedTuple):
    """What the ranks of a pipeline hold; arrays by rank.

    Attributes:
        parameters: bytes.
        received, sent: bytes a sample of what stages receive into, and of what they make and send.
        active: whole activations of the first stage. own: what a rank has of them at least, by its part of each layer.
    """

    parameters: Floats
    received: Floats
    sent: Floats
    active: Activations = Activations()
    own: Activations = Activations()


class _Units(NamedTuple):
    """What ranks hold under ZeRO's stages 2 and 3 without a pipeline, whose units are padded to equal parts.

    Attributes:
        padding: a rank's part of the parameters over an even one.
        most: bytes gathered in forward, at most. left: when that is over.
    """

    padding: float = 1.0
    most: float = 0.0
    left: float = 0.0


_Kind = tuple[str, int]
"""Of plans what they have beside their mesh and micro-batches: a schedule's name, and the index of what is held."""
_StagesOfKinds = Sequence[tuple[_Kind, _Stages]]


class _Values(NamedTuple):
    """What crosses the cuts of a pipeline and grows with the batch: arrays with an entry each.

    Attributes:
        cut, layer: indices. further: whether it is an output behind the layer's first.
        bytes, made: a sample of it, whole; where the stage in front has made it, else 0.
    """

    cut: Ints
    layer: Ints
    further: NDArray[np.bool_]
    bytes: Floats
    made: Floats


class MemoryBounds:
    """Bytes of tensors on the rank that is looked at, at least.

    Args:
        choices: of candidates' settings, or a space of candidates with such choices.

    Attributes:
        shared: parts of the network.
    """

    def __init__(self, costs: CostModel, choices: Choices, shared: SharedWorks) -> None:
        self._costs, self._choices, self.shared = costs, choices, shared
        self._masters, self._network = has_masters(costs.dtype), as_held(costs.network, costs.dtype)
        self._framework = framework_of(choices.settings)
        settings = msgspec.structs.replace(choices.settings, dtype=costs.dtype)
        # State is of fp32 where parameters are not.
        wider = DTYPE_BYTES[KEPT_DTYPE] // DTYPE_BYTES[computed_in(costs.dtype)] if self._masters else 1
        held = [msgspec.structs.replace(settings, **chosen) for chosen in choices.held]
        self._states = [wider * kept_copies(choice) for choice in held]
        # A CPU updates parameters one by one.
        own = optimizer_named(settings.optimizer).own_tensors and costs.device_kind != "cpu"
        # In the update alone: what comes from host memory, and tensors that the optimizer makes.
        self._moved = [wider * (copies_of_state(choice) - kept_copies(choice) + own) for choice in held]
        self._found = Answers()
        self._widths = widths_of(self._network, costs.dtype, costs.device_kind, self._framework.fuses)
        kinds = [layer_kinds().get(layer.kind) for layer in costs.network.layers]
        on_device = layers_on_gpu if costs.device_kind != "cpu" else lambda layers, _: layers
        self._aliases = list(map(shares_input, on_device(costs.network.layers, kinds), kinds))
        self._input_bytes = costs.network.input_bytes(1, given_dtype(costs.dtype))
        self._under_way = UnderWay()
        # Where the optimizer's state lies changes no activation: per choice, the first with its activations.
        again = [chosen.get("recompute") for chosen in choices.held]
        self._alike = [again.index(own) for own in again]

    def of(self, space: Space, within: float = np.inf) -> Floats:
        """Of every candidate.

        Args:
            within: bytes that a rank has; of what surely needs more, no tighter bound is looked for.
        """
        first, plan_of = space.plans
        plan_bytes, mesh = np.zeros(len(first)), space.mesh_of[space.strategy[first]]
        settings = space.micro_batches, space.schedule, space.again
        counts, schedule, again = (column[first].astype(np.int64) for column in settings)
        # Plans of a mesh stand together, and are worked out together.
        for rows in np.split(np.arange(len(first)), np.flatnonzero(np.diff(mesh)) + 1):
            plans = MeshPlans.of(counts[rows], schedule[rows], again[rows])
            plan_bytes[rows] = self._of(space.meshes[mesh[rows[0]]], plans, within)
        return plan_bytes[plan_of]

    def know(self, sharing: Sharing) -> None:
        """Find what all meshes with such axes ask for."""
        self.shared.of(sharing)

    def of_mesh(self, mesh: Mesh, rows: Settings, within: float) -> Floats:
        """Of a mesh's candidates, of which each row has the settings; as :meth:`of`."""
        least = self._least(mesh)
        if least > within:
            return np.full(len(rows), least)
        # Many meshes have the same settings.
        plans, plan = self._found.once(("plans", Same(rows)), lambda: plans_of(rows))
        return self._of(mesh, plans, within)[plan]

    def _least(self, mesh: Mesh) -> float:
        """Of a mesh, whatever its settings: parameters that are shared out over its stages evenly."""
        even = self.shared.of_all.gradient_bytes.sum() / self._parts_alone(mesh) / mesh.stages
        parted, piped = mesh.parted, mesh.stages > 1
        parts = parted if mesh.zero > 1 else 1
        at_end = (piped and mesh.zero > 1) + 1 / (1 if piped else parts)
        copies = (
            self._copies(mesh, parted, states) + max(at_end, 1 / parts + moved / parted)
            for states, moved in zip(self._states, self._moved, strict=True)
        )
        return float(even * min(copies))

    def _of(self, mesh: Mesh, plans: MeshPlans, within: float) -> Floats:
        """Of a mesh's plans."""
        kinds = [(self._choices.schedules[schedule], again) for schedule, again in plans.kinds]
        bounds, least = np.full(len(plans.counts), -np.inf), np.full(len(kinds), -np.inf)
        for tightness in range(3 if mesh.zero > 1 and mesh.stages == 1 else 2):
            # Of a kind that surely does not fit, no tighter bound is looked for.
            left = least <= within
            if not left.any():
                break
            find = self._of_stages if tightness else self._parameters_alone
            some = [(kinds[at], find(mesh, kinds[at])) for at in np.flatnonzero(left).tolist()]
            rows = np.flatnonzero(left[plans.kind])
            kind = (np.cumsum(left) - 1)[plans.kind[rows]]
            units = self._units(mesh) if tightness == 2 else _Units()
            bounds[rows] = self._peaks(mesh, plans.counts[rows], kind, some, units)
            least = np.full(len(kinds), np.inf)
            np.minimum.at(least, plans.kind, bounds)
        return bounds

    def _peaks(self, mesh: Mesh, counts: Ints, kind: Ints, kinds: _StagesOfKinds, units: _Units) -> Floats:
        """The larger of what the first rank holds in backward, and of what any does when that is over, or updates.

        Args:
            kind: of each plan, index in ``kinds``.
        """
        local, parted = self._choices.settings.batch // mesh.samplers, mesh.parted
        in_buffers = 0 if self._framework.drops_messages else local
        # Of shape (kinds, ranks), or with an entry for each kind.
        parameters, received, sent = (
            np.array([getattr(stages, name) for _, stages in kinds]) for name in ("parameters", "received", "sent")
        )
        again = [which for (_, which), _ in kinds]
        copies = np.array([self._copies(mesh, parted, self._states[which]) for which in again])[:, None]
        moved = np.array(self._moved, float)[again, None]
        drops = np.array([schedule_of(name).drops_messages for (name, _), _ in kinds])[:, None]
        held = parameters * copies * units.padding + in_buffers * received
        parts, piped = parted if mesh.zero > 1 else 1, mesh.stages > 1
        # What replicas share out of stages is whole from the first forward to the last backward.
        gathered = parameters * (piped and mesh.zero > 1)
        gradients = parameters / (1 if piped else parts) * units.padding
        # When the last backward begins, or the update.
        at_end = gathered + gradients + np.where(drops, 0.0, in_buffers * sent)
        if mesh.zero == 2 and not piped:
            # Gathered from forward to backward.
            at_end = np.maximum(at_end, parameters)
        updating = parameters * (1 / parts + moved / parted) * units.padding
        active = self._active(mesh, counts, kind, kinds, units, gradients[:, 0])
        first = (held + gathered)[kind, 0] + local * self._input_bytes + active
        return np.asarray(np.maximum(first, (held + np.maximum(at_end, updating)).max(axis=1)[kind]))

    def _active(
        self, mesh: Mesh, counts: Ints, kind: Ints, kinds: _StagesOfKinds, units: _Units, gradients: Floats
    ) -> Floats:
        """What the first rank has of activations, and of gradients beside them from the second micro-batch on."""
        at_once = (self._choices.settings.batch // mesh.samplers // counts)[:, None, None]
        parts = mesh.sharers * mesh.replicas // mesh.samplers
        # Of shape (kinds, whole or own, after forward or at most), by the first sample and by every other.
        amounts = np.array([(stages.active, stages.own) for _, stages in kinds], float)[kind]
        whole, own = np.moveaxis(amounts[..., 0] + (at_once - 1) * amounts[..., 1], 1, 0)
        kept, most = np.maximum(self._held_whole(mesh, whole) / parts, own).T
        # Where ranks swap samples, those that one has when activations are most are not known beside gradients.
        beside_them = 0.0 if self._swaps(mesh) else gradients[kind]
        if mesh.stages == 1:
            # Stage 2 gathers all in forward, and frees it as backward goes on.
            gathered = np.array([float(stages.parameters[0]) if mesh.zero == 2 else 0.0 for _, stages in kinds])
            left = np.maximum(units.left, gathered)[kind]
            return np.asarray(np.maximum(np.maximum(kept + left, most), units.most) + beside_them * (counts > 1))
        at_first, later = self._under_way.most([name for (name, _), _ in kinds], kind, mesh.stages, counts)
        one = np.maximum(kept, most)
        beside = np.where(later > 0, (later - 1) * kept + one + beside_them, 0.0)
        return np.asarray(np.maximum((at_first - 1) * kept + one, beside))

    def _swaps(self, mesh: Mesh) -> bool:
        """Whether ranks that share layers see samples of their own, and swap them."""
        return any(axis.has(Trait.DIVIDES_BATCH) for axis in mesh.shared)

    def _held_whole(self, mesh: Mesh, activations: Floats) -> Floats:
        """What a rank that sees samples of its own has of activations, where it may hold a part of the parameters."""
        if not self._swaps(mesh):
            return activations
        # Autocast's copies of parameters count as activations, and grow with no sample.
        copies = self._costs.network.parameter_bytes if self._costs.dtype != "fp32" else 0
        return np.asarray(np.maximum(activations - copies, activations / mesh.sharers))

    def _copies(self, mesh: Mesh, parted: int, states: int) -> float:
        """Of parameters, with the optimizer's state and exchange buckets."""
        if mesh.zero > 1:
            # Shards that are fp32 take the place of the optimizer's copies.
            return (states + (not self._masters)) / parted
        # A bound from below: who holds some parameters alone exchanges the others only.
        has_buckets = mesh.exchanges and not mesh.holds_alone and not self._framework.gradient_dtype
        return 1 + states / parted + has_buckets

    def _units(self, mesh: Mesh) -> _Units:
        """What ranks hold of units under stages 2 and 3, without a pipeline."""
        work = self.shared.of(mesh.sharing)
        kinds = (mesh.parted, False), (mesh.parted_apart, True)
        of_kinds = [unit_bytes(self.shared, mesh.sharing, ranks, of_apart=kind) for ranks, kind in kinds]
        wholes = np.array([ranks * gathered for (ranks, _), (gathered, _) in zip(kinds, of_kinds, strict=True)])
        # The unit at work lies in the buffer that it was received in as well, where it was received.
        received = wholes[[ranks > 1 for ranks, _ in kinds]].sum(axis=0)
        *units, root = wholes.sum(axis=0).tolist()
        even = work.gradient_bytes.sum() / mesh.parted
        padding = max(float(sum(reduced.sum() for _, reduced in of_kinds) / max(even, 1)), 1.0)
        if mesh.zero == 2:
            return _Units(padding, sum(units) + root, sum(units) + root)
        return _Units(padding, root + (wholes.sum(axis=0) + received)[:-1].max(initial=0.0))

    def _parts_alone(self, mesh: Mesh) -> int:
        """Over how many ranks shared axes part parameters at most: nobody has to say what an axis does to layers."""
        # Ranks that cut positions or tokens hold all parameters; those that hold experts each, some.
        return math.prod(
            axis.degree for axis in mesh.shared if axis.has(Trait.DIVIDES_BATCH) or not axis.has(Trait.REPLICATES)
        )

    def _parameters_alone(self, mesh: Mesh, kind: _Kind) -> _Stages:
        """Parameters of every rank's stages, at least."""
        parts, stages = self._parts_alone(mesh), self._stages_of(mesh, kind[0])

        def find() -> _Stages:
            first_layers = self._bounds(mesh.stages, kind[0])[:-1]
            whole = sums_of_ranks(np.add.reduceat(self.shared.of_all.gradient_bytes, first_layers), stages)
            none = np.zeros(mesh.stages)
            return _Stages(whole / parts, none, none)

        return self._found.once(("parameters", parts, stages), find)

    def _of_stages(self, mesh: Mesh, kind: _Kind) -> _Stages:
        """What every rank's stages hold, without what axes beside share of activations."""
        schedule, again = kind
        stages, alike_again = self._stages_of(mesh, schedule), self._alike[again]
        first = mesh.stages, schedule, alike_again

        def find() -> _Stages:
            shared, bounds = self.shared.of(mesh.sharing), self._bounds(mesh.stages, schedule)
            whole, made, largest = self._crossing(shared, stages, bounds)
            places = stages[1].ranks_of_stages(stages[0])
            handed = np.equal(places[:-1], places[1:])
            # What a rank hands to itself is no message; what it only passes on stays, and gradients may be one tensor.
            forward, back, sent = (np.where(handed, *way) for way in ((made, whole), (largest, whole), (0.0, made)))
            active = self._found.once(("first", stages, alike_again), partial(self._first_stage, *first))
            return _Stages(
                sums_of_ranks(np.add.reduceat(shared.gradient_bytes, bounds[:-1]), stages),
                sums_of_ranks(np.append(0.0, forward) + np.append(back, 0.0), stages),
                sums_of_ranks(np.append(sent, 0.0), stages),
                active.whole,
                active.in_parts(shared.kept) if mesh.shared else Activations(),
            )

        return self._found.once((mesh.sharing, stages, alike_again), find)

    def _stages_of(self, mesh: Mesh, schedule: str) -> tuple[int, Placement]:
        """What decides a pipeline's cuts: its ranks, and how stages lie over them."""
        return mesh.stages, schedule_of(schedule).placement if mesh.stages > 1 else ONE_STAGE

    def _bounds(self, ranks: int, schedule: str) -> tuple[int, ...]:
        """The first layer of each stage, and the end."""
        if ranks == 1:
            return 0, len(self._costs.network.layers)
        settings = self._choices.settings.changed(PipelineOptions, schedule=schedule)
        stages = ranks, schedule_of(schedule).placement
        return self._found.once(("bounds", stages), partial(stage_bounds, self._costs.network, ranks, settings))

    def _crossing(self, shared: SharedWork, stages: tuple[int, Placement], bounds: Sequence[int]) -> Floats:
        """Bytes a sample across each cut: all, what the stage in front has made, and the largest tensor; (3, cuts)."""
        values = self._found.once(("crossing", stages), partial(self._values_crossing, bounds))
        share = shared.held[values.layer]
        # Further outputs may be cut smaller.
        share = np.where(values.further & (share < 1), 0.0, share)
        of_cuts = (np.bincount(values.cut, share * sizes, len(bounds) - 2) for sizes in (values.bytes, values.made))
        largest = np.zeros(len(bounds) - 2)
        np.maximum.at(largest, values.cut, share * values.bytes)
        return np.array([*of_cuts, largest])

    def _values_crossing(self, bounds: Sequence[int]) -> _Values:
        network, flow = self._costs.network, data_flow(self._costs.network)
        rows: list[tuple[int, int, bool, int, int]] = []
        for cut, (start, end) in enumerate(itertools.pairwise(bounds[:-1])):
            for value in flow.crossing[end]:
                # What holds no batch does not grow with it.
                if network.layers[value.layer].batchless:
                    continue
                size = elements(network, value) * self._widths[value.layer].runs
                made = flow.made_by(value, end) == value.layer >= start
                own = made and not value.output and not self._aliases[value.layer]
                rows.append((cut, value.layer, bool(value.output), size, size * own))
        cut_of, layer, further, sizes, own_sizes = np.array(rows, float).reshape(-1, 5).T
        return _Values(cut_of.astype(np.int64), layer.astype(np.int64), further > 0, sizes, own_sizes)

    def _first_stage(self, ranks: int, schedule: str, again: int) -> ActivationsByLayer:
        """What the first of a pipeline's stages has of activations; the whole network on one rank."""
        network, held = self._costs.network, self._choices.held[again]
        settings = msgspec.structs.replace(self._choices.settings.changed(PipelineOptions, schedule=schedule), **held)
        run = RankRun(
            samples=1,
            dtype=self._costs.dtype,
            device=self._costs.device_kind,
            framework=self._framework,
            widths=self._widths,
        )
        if ranks == 1:
            run = replace(run, recomputed=run_again(self._network, settings))
            return ActivationsByLayer.of(self._network, run, self.shared.places)
        first = first_stage(network, ranks, settings)
        run = replace(
            run,
            outputs=first.outputs,
            kept_outputs=() if self._framework.drops_messages else first.outputs,
            widths=widths_inside(network, first, self._widths),
            recomputed=parts_within(network, settings, first.layers),
        )
        return ActivationsByLayer.of(first.network, run, self.shared.places)


def bounds_of(costs: CostModel, choices: Choices) -> MemoryBounds:
    """Bounds of candidates with such choices, which searches on other links or devices share."""
    shared = partial(SharedWorks, as_held(costs.network, costs.dtype), choices.settings)
    held = tuple(tuple(chosen.items()) for chosen in choices.held)
    known = "memory bounds", choices.settings, choices.schedules, held
    return costs.plans.found.once(known, lambda: MemoryBounds(costs, choices, shared()))
