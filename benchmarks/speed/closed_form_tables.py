"""ParaDL's closed forms for many points at once: layers are summed once a local batch, the rest is arrays.

The same rows as the evaluator ``paradl``, in the same seconds (a test holds it); without intervals, memory and limits.
Whether a strategy is possible is for its planner to say: rows are evaluated as they are asked for.

    data        FB(b) + WU + AR(p1, W e); serial is p1 = 1
    filter      FB_split(b) / p2 + FB_rest(b) + WU / p2
                + sum of [AG(p2, b y_l e / p2) + AR(p2, b y_l e)] + AR(p1, W e / p2)
    channel     the same
    spatial     FB_split(b) / p2 + FB_rest(b) + WU + halos + AR(p1 p2, W e)
    pipeline    (p2 + S - 1)(max fw_i + max bw_i) + max wu_i + 2 (p2 + S - 2) max transfer_i

with p1 groups of p2 ranks, b = B / p1 samples a group. See :mod:`predict.closed_forms.shared_closed_form` for the
terms, and :mod:`predict.closed_forms.pipeline_closed_form`; pipelines have one group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from communication_tables import CommunicationTables, across_groups, all_ranks, inside_group
from numpy.typing import ArrayLike

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.graph import DTYPE_BYTES, Layer
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.registry import axis_kind, axis_kinds, kinds_with
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.records.measurement import PhaseName
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.spatial.axis import SpatialOptions
from paradl_bench.strategies.splitting.channel_shards import splittable
from paradl_bench.strategies.splitting.options import SplitOptions
from predict.closed_forms.pipeline_closed_form import LockStep, PipelineClosedForm, lock_step_settings
from predict.closed_forms.shared_closed_form import SHARING, split_layers
from predict.costs.cost_model import CostModel
from predict.costs.kinds.kind_costs import PricingContext
from predict.costs.sourced import Floats, Ints

_ROWS = (Trait.DIVIDES_BATCH, *SHARING, Trait.STAGES)
"""What an axis does that the paper has a row for."""
Operations = Counter[tuple[str, PhaseName]]
_CHUNK = 1 << 14
"""Points at a time: what they need stays in the processor's caches."""


class Sizes(NamedTuple):
    """Numbers of elements that grow with the batch, each with how often it occurs; arrays of shape (sizes,)."""

    fixed: Ints
    of_sample: Ints
    counts: Floats

    def elements(self, samples: Ints) -> Ints:
        """Of shape (sizes, points)."""
        return np.asarray(self.fixed[:, None] + self.of_sample[:, None] * samples)


class Slab(NamedTuple):
    """A halo along one dim: channels times depth, and the extents of all dims, of which that dim counts as 1."""

    channels: int
    extents: tuple[int, ...]
    dim: int


class ClosedFormTables:
    """Closed forms of one model, to be asked for many points.

    Args:
        model: keep it as it is; tables are filled as local batches are asked for, and kept.
        settings: which layers are split, where spatial parallelism ends, and how pipelines are cut; its batch does not
            matter.

    Raises:
        UserError: spatial parallelism is to end before a layer that there is none of; gradients are to be accumulated,
            or activations computed again.
    """

    def __init__(self, model: CostModel, settings: PlanSettings | None = None) -> None:
        self._model = model
        self._settings = settings or PlanSettings(batch=1, optimizer=model.optimizer)
        for option, text in self._settings.simulated_alone.items():
            raise UserError(f"closed forms know no --{option} {text}: simulate it")
        layers, until = [layer.name for layer in model.network.layers], self._settings.of(SpatialOptions).spatial_until
        if until is not None and until not in layers:
            raise unknown_choice(f"layer of {model.network.name} to end spatial parallelism before", until, layers)
        self._element_bytes = DTYPE_BYTES[model.dtype]
        self._communication = CommunicationTables(model.communication)
        self._ranks_per_node = model.communication.cluster.ranks_per_node
        self._forms = {
            kind.name: self._form(kind)
            for kind in axis_kinds().values()
            if any(map(kind.has, (Trait.DIVIDES_BATCH, *SHARING)))
        }
        self._compute: dict[tuple[int, int], tuple[dict[tuple[str, PhaseName], float], float]] = {}
        self._rows: dict[tuple[str, int, int], tuple[float, float, float]] = {}
        self._stages: dict[tuple[int, int], LockStep] = {}

    def iteration_s(
        self,
        kind: str,
        *,
        batch: ArrayLike,
        groups: ArrayLike = 1,
        ranks: ArrayLike | tuple[ArrayLike, ...] = 1,
        micro_batches: ArrayLike | None = None,
    ) -> Floats:
        """Seconds of an iteration at each point; all arguments are broadcast against each other.

        Args:
            kind: of the axis that shares layers; ``data`` where there is none.
            batch: global mini-batch. groups: over which it is split, one group after the other (1 for no data axis).
            ranks: that share layers in a group; of ``spatial`` also a tuple, the parts along each dim.
            micro_batches: of ``pipeline``; None for as many as it has ranks.

        Raises:
            UserError: a kind that has no row, numbers that are not whole or not positive, shapes that do not fit, a
                batch that does not part, a stage count that is not possible, or a profile that lacks a part.
        """
        known = [name for name, each in axis_kinds().items() if any(map(each.has, _ROWS))]
        if kind not in known:
            raise unknown_choice("closed form", kind, known)
        row = axis_kind(kind)
        if micro_batches is not None and not row.has(Trait.STAGES):
            raise UserError(f"micro_batches are of pipelines, not of {kind}")
        cut = ranks if isinstance(ranks, tuple) else (ranks,)
        if not cut:
            raise UserError("ranks are an empty tuple: give the parts along each dim, or a number")
        given = [("batch", batch), ("groups", groups), ("micro_batches", 1 if micro_batches is None else micro_batches)]
        arrays = _broadcast([_whole(name, value) for name, value in (*given, *(("ranks", own) for own in cut))])
        samples, of_groups, of_micro_batches, *parts = (np.ravel(array) for array in arrays)
        _refuse(row, samples, of_groups, of_micro_batches, parts)
        if row.has(Trait.STAGES):
            shared = parts[0]
            found = self._pipelined(samples, shared, shared if micro_batches is None else of_micro_batches)
        else:
            found = np.empty(len(samples))
            for start in range(0, len(samples), _CHUNK):
                at = slice(start, start + _CHUNK)
                found[at] = self._shared(row, samples[at] // of_groups[at], of_groups[at], [own[at] for own in parts])
        return found.reshape(arrays[0].shape)

    def _shared(self, kind: AxisKind, samples: Ints, groups: Ints, parts: Sequence[Ints]) -> Floats:
        ranks = np.prod(parts, axis=0) if len(parts) > 1 else parts[0]
        split, rest, update = self._compute_seconds(
            kind.name, samples, np.minimum(groups * ranks, self._ranks_per_node)
        )
        seconds = split / ranks + rest
        if kind.has(Trait.SPLITS_OUTPUTS) or kind.has(Trait.SPLITS_INPUTS):
            return seconds + update / ranks + self._channels(kind.name, samples, groups, ranks)
        seconds = seconds + update
        if kind.has(Trait.CUTS_POSITIONS):
            seconds = seconds + self._halos(self._forms[kind.name], samples, groups, ranks, parts)
        everyone = all_ranks(groups * ranks, self._ranks_per_node)
        weights = np.full((1, len(samples)), float(self._model.network.parameter_bytes))
        return seconds + self._communication.seconds("all_reduce", everyone, weights)

    def _compute_seconds(self, kind: str, samples: Ints, on_host: Ints) -> tuple[Floats, Floats, Floats]:
        """Seconds of layers that are split, of the others, and of the weight update; whole, each of shape (points,)."""
        keys, place = np.unique(samples * (self._ranks_per_node + 1) + on_host, return_inverse=True)
        rows = [self._row(kind, *divmod(key, self._ranks_per_node + 1)) for key in keys.tolist()]
        split, rest, update = np.array(rows, float).T
        return split[place], rest[place], update[place]

    def _row(self, kind: str, samples: int, on_host: int) -> tuple[float, float, float]:
        key = kind, samples, on_host
        if key not in self._rows:
            if key[1:] not in self._compute:
                sums = self._model.sums(PricingContext(samples, on_host))
                self._compute[key[1:]] = sums.seconds_of_operations(), float(sums.seconds[-1])
            (seconds, update), form = self._compute[key[1:]], self._forms[kind]
            split, rest = (
                sum(count * seconds[operation] for operation, count in own.items()) for own in (form.split, form.rest)
            )
            self._rows[key] = split, rest, update
        return self._rows[key]

    def _channels(self, kind: str, samples: Ints, groups: Ints, ranks: Ints) -> Floats:
        """An all-gather and an all-reduce a layer, and the exchange of each shard's gradients between groups."""
        sizes = self._forms[kind].sizes
        whole = sizes.elements(samples) * self._element_bytes
        counts = np.broadcast_to(sizes.counts[:, None], whole.shape)
        inside = inside_group(groups, ranks, self._ranks_per_node)
        gathered = self._communication.seconds("all_gather", inside, np.rint(whole / ranks), counts)
        reduced = self._communication.seconds("all_reduce", inside, whole.astype(float), counts)
        weights = np.ceil(self._model.network.parameter_bytes / ranks)[None, :]
        across = across_groups(groups, ranks, self._ranks_per_node)
        return gathered + reduced + self._communication.seconds("all_reduce", across, weights)

    def _halos(self, form: _Form, samples: Ints, groups: Ints, ranks: Ints, parts: Sequence[Ints]) -> Floats:
        """Messages of two neighbours along each dim that is cut, and the gather where the region was ended."""
        inside = inside_group(groups, ranks, self._ranks_per_node)
        slabs = [(slab, count) for slab, count in form.slabs.items() if slab.dim < len(parts)]
        of_pair = np.full_like(ranks, min(2, self._ranks_per_node))
        pair = inside._replace(ranks=np.where(ranks > 1, 2, 1), per_node=of_pair)
        found = np.zeros(len(samples))
        if slabs:
            sizes = np.array([self._slab_bytes(slab, samples, parts) for slab, _ in slabs])
            counts = np.array([2.0 * count * (parts[slab.dim] > 1) for slab, count in slabs])
            found += self._communication.seconds("send_recv", pair, sizes, counts)
        whole = form.sizes.elements(samples) * self._element_bytes
        return found + self._communication.seconds("all_gather", inside, np.rint(whole / ranks))

    def _slab_bytes(self, slab: Slab, samples: Ints, parts: Sequence[Ints]) -> Floats:
        others = np.ones(len(samples))
        for dim, extent in enumerate(slab.extents):
            if dim != slab.dim:
                others = others * (extent / parts[dim] if dim < len(parts) else extent)
        return np.rint(slab.channels * others * samples * self._element_bytes)

    def _pipelined(self, batch: Ints, ranks: Ints, micro_batches: Ints) -> Floats:
        """One stage alone is a pipeline of one rank: nothing is sent, nobody waits."""
        if (batch % micro_batches).any():
            at = int(np.flatnonzero(batch % micro_batches)[0])
            raise UserError(f"batch {batch[at]} does not split evenly into {micro_batches[at]} micro-batches")
        points, place = np.unique(np.stack([ranks, batch // micro_batches]), axis=1, return_inverse=True)
        rows = np.array([self._lock_step(*point) for point in points.T.tolist()]).reshape(-1, 4)
        forward, backward, transfer, update = rows[place.ravel()].T
        steps = ranks + micro_batches - 1
        return np.asarray(steps * (forward + backward) + update + 2 * (steps - 1) * transfer)

    def _lock_step(self, ranks: int, samples: int) -> LockStep:
        """The largest stage's forward and backward, transfer and update, of one micro-batch."""
        if (ranks, samples) not in self._stages:
            strategy = Strategy(axes=(Axis(kind=kinds_with(Trait.STAGES)[0].name, extents=(ranks,)),))
            planner = planner_for(strategy)
            own = lock_step_settings(self._settings)
            settings = msgspec.structs.replace(own.changed(PipelineOptions, micro_batches=1), batch=samples)
            planner.check(self._model.network, strategy, settings)
            plan = planner.plan(self._model.network, strategy, settings)
            form = PipelineClosedForm(plan)
            self._stages[ranks, samples] = form.of_micro_batch(self._model.price(plan, as_swept=True).costs.seconds)
        return self._stages[ranks, samples]

    def _form(self, kind: AxisKind) -> _Form:
        network, settings = self._model.network, self._settings
        if kind.has(Trait.DIVIDES_BATCH):
            return _Form(Counter(), Counter(self._model.operations), _sizes([]), Counter())
        communicating = split_layers(network, kind, settings)
        if kind.has(Trait.CUTS_POSITIONS):
            until = [layer for layer in network.layers if layer.name == settings.of(SpatialOptions).spatial_until]
            gathered = _sizes([(layer.input_elements_of(0), layer.input_elements_of(1)) for layer in until])
            return _Form(*_operations(network.layers, communicating), gathered, _slabs(communicating))
        patterns = settings.of(SplitOptions).split
        shared = splittable(network, patterns) if patterns else network.layers
        outputs = [(layer.output_elements_of(0), layer.output_elements_of(1)) for layer in communicating]
        return _Form(*_operations(network.layers, shared), _sizes(outputs), Counter())


class _Form(NamedTuple):
    """What a row sums over.

    Attributes:
        split, rest: how often each operation and phase of layers that are shared out, and of the others, is run.
        sizes: of what layers send whole to the others. slabs: of halos.
    """

    split: Operations
    rest: Operations
    sizes: Sizes
    slabs: Counter[Slab]


def _whole(name: str, value: ArrayLike) -> Ints:
    """The numbers as integers; rounding one would answer another question.

    Raises:
        UserError: one is no whole number.
    """
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise UserError(f"{name}: rows of unlike lengths are no array") from error
    if given.dtype.kind in "iu":
        return given.astype(np.int64)
    # No further than where a float holds every integer; what is not finite is above that, or NaN.
    if given.dtype.kind != "f" or not ((given == np.rint(given)) & (np.abs(given) <= 2.0**53)).all():
        raise UserError(f"{name} has to be of whole numbers")
    return given.astype(np.int64)


def _broadcast(arrays: Sequence[Ints]) -> Sequence[Ints]:
    try:
        return np.broadcast_arrays(*arrays)
    except ValueError as error:
        shapes = ", ".join(dict.fromkeys(str(array.shape) for array in arrays if array.shape))
        raise UserError(f"arrays of the shapes {shapes} do not broadcast against each other") from error


def _refuse(kind: AxisKind, batch: Ints, groups: Ints, micro_batches: Ints, parts: Sequence[Ints]) -> None:
    if min(int(own.min(initial=1)) for own in (batch, groups, micro_batches, *parts)) < 1:
        raise UserError("batches, groups, ranks and micro-batches have to be at least 1")
    if len(parts) > kind.dims:
        several = " and ".join(each.name for each in axis_kinds().values() if each.dims > 1)
        raise UserError(f"{several} parallelism alone parts several dims, not {kind.name}")
    if kind.has(Trait.STAGES) and (groups > 1).any():
        raise UserError("paradl has closed forms of pipelines alone, not of several groups of one: take simulate")
    if kind.has(Trait.DIVIDES_BATCH) and (parts[0] > 1).any():
        raise UserError("ranks of data parallelism are groups: give groups, and ranks where they share layers")
    if (batch % groups).any():
        at = int(np.flatnonzero(batch % groups)[0])
        raise UserError(f"batch {batch[at]} does not split evenly over {groups[at]} groups")


def _operations(layers: Iterable[Layer], shared: Iterable[Layer]) -> tuple[Operations, Operations]:
    """Operations and phases of layers that are shared, and of the others."""
    names = {layer.name for layer in shared}
    split: Operations = Counter()
    rest: Operations = Counter()
    for layer in layers:
        operation = layer.operation
        (split if layer.name in names else rest).update([(operation, "FW"), (operation, "BW")])
    return split, rest


def _sizes(elements: Sequence[tuple[int, int]]) -> Sizes:
    """Equal sizes once.

    Args:
        elements: for mini-batches of 0 and of 1 sample; they grow straight on.
    """
    counts = Counter((none, one - none) for none, one in elements)
    fixed, of_sample = (np.array([key[i] for key in counts], np.int64) for i in range(2))
    return Sizes(fixed, of_sample, np.array(list(counts.values()), float))


def _slabs(layers: Iterable[Layer]) -> Counter[Slab]:
    """Halos of inputs and of outputs' gradients, for every dim that could be cut."""
    found: Counter[Slab] = Counter()
    for layer in layers:
        kind = layer_kinds().get(layer.kind)
        windows = kind.windows(layer.attributes) if kind is not None and kind.windows is not None else ()
        for dim, window in enumerate(windows):
            depth = window.kernel // 2
            if depth:
                for shape in (layer.input_shapes[0], layer.output_shape):
                    found[Slab(math.prod((shape[0], depth)), tuple(shape[1:]), dim)] += 1
    return found
