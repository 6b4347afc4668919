"""Seconds of a layer's forward or backward: measured, else regressed, else scaled from a neighbour, else a roofline.

The order for one operation, phase and local batch:

1. Its own times with as many ranks on the host, at that batch or by others
   (:mod:`predict.costs.compute.batch_scaling`).
2. Its own times with another number of ranks on the host, times the ratio that the operations measured at both show.
3. A regressor of the kernel kind and stage (:mod:`predict.costs.compute.kernel_costs`).
4. A measured call of the same kind, scaled by the ratio of their rooflines, each at its own local batch
   (:class:`predict.costs.compute.layer_roofline.LikeCalls`). How far that is off is read from the measured calls, each
   predicted from the others.
5. The roofline. How far layers stay above it is read from the measured ones.

Where something else is asked for (``--layers``, :mod:`predict.costs.compute.layer_source`), the profile comes without
measured layers: what is left of the order is the third, or the fifth alone.

An operation whose forward was measured inside an iteration and whose backward was not seen there has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial

import numpy as np

from calibrate.profile.profile import LayerTime, Profile
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import IQR_TO_SD
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import computed_in
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.records.measurement import PhaseName
from predict.costs.compute.backward_split import BackwardPart, BackwardSplit, MeasuredParts
from predict.costs.compute.batch_scaling import Knot, at_batch
from predict.costs.compute.kernel_costs import KernelCosts, Pair, in_situ_of, regressed_cost
from predict.costs.compute.layer_roofline import Call, LikeCalls, Roofline, kind_of, nearest_count
from predict.costs.compute.layer_source import (
    MEASURED_FIRST,
    LayersFrom,
    nothing_for,
    roofline_cost,
    roofline_of_kind,
)
from predict.costs.compute.layer_spread import (
    HostRatio,
    added_up,
    isolated_remark,
    of_single_samples,
    own_sd,
    ratio_of_hosts,
)
from predict.costs.compute.summed_phases import parted, parted_cost
from predict.costs.sourced import UNKNOWN_RELATIVE_SD, Cost, Remark, Source

Key = tuple[str, PhaseName, str]
"""(operation, phase, shard)."""

Series = dict[int, dict[int, LayerTime]]
"""By ranks on the host, then by local batch."""


class LayerCosts:
    """Costs of layers from a profile, for the layers of one network. Answers are kept.

    Args:
        layers_from: what they are taken from; for other than measured times the profile holds no measured layers
            (:func:`predict.costs.compute.layer_source.of_layers_from`).
    """

    def __init__(
        self, profile: Profile, network: ModelGraph, dtype: str, layers_from: LayersFrom = MEASURED_FIRST
    ) -> None:
        self._from = layers_from
        self._profile = profile
        self._network = network
        self._own_layers = {layer.name: layer.operation for layer in network.layers}
        self._own_operations = frozenset(self._own_layers.values())
        self._dtype = dtype
        self._in_situ: dict[Key, Series] = {}
        self._isolated: dict[Key, Series] = {}
        for time in profile.layer_times:
            if time.dtype == dtype and time.phase != "FWBW":
                self._take(time)
        self._parted: set[Key] = set()
        self._part_sums([time for time in profile.layer_times if time.dtype == dtype and time.phase == "FWBW"])
        keys = (*self._in_situ, *self._isolated)
        self._as = frozenset((of, shard) for of, phase, shard in keys if phase in ("FW", "BW", "BW_weight"))
        self._shares: dict[str, tuple[str, float]] = {}
        self._learnt: dict[str, tuple[Layer, int]] = {}
        self._shard_of: dict[str, str] = {}
        self._known: dict[tuple[str, PhaseName, str, int, int, str], Cost] = {}
        self._ratios: dict[tuple[int, int, str, str, bool, int | None], HostRatio | None] = {}
        self._kernels = KernelCosts(profile.kernel_models, computed_in(dtype))
        self._kernel_pairs: dict[tuple[PhaseName, int], tuple[Pair, ...]] = {}
        self._like_calls: dict[tuple[str, PhaseName, int, int], LikeCalls | None] = {}
        self._errors = Answers()

    def _take(self, time: LayerTime) -> None:
        table = self._in_situ if time.mode == "in_situ" else self._isolated
        series = table.setdefault((time.operation, time.phase, time.shard), {})
        series.setdefault(time.ranks_on_host, {})[time.batch] = time

    def _part_sums(self, sums: Sequence[LayerTime]) -> None:
        """Take sums of forward and backward in parts, where neither was measured by itself."""
        if not sums:
            return
        networks = (*self._profile.network.values(), self._network)
        layers = {layer.operation: layer for network in networks for layer in network.layers}
        apart = {(time.operation, time.shard) for time in self._profile.layer_times if time.phase in ("FW", "BW")}
        for time in parted([time for time in sums if (time.operation, time.shard) not in apart], layers):
            self._take(time)
            self._parted.add((time.operation, time.phase, time.shard))

    @cached_property
    def _roofline(self) -> Roofline:
        # Only where something was not measured: to go through all networks takes as long as a prediction.
        return Roofline(self._profile, self._network, computed_in(self._dtype))

    def learn(self, layers: Sequence[tuple[Layer, int]]) -> None:
        """Operations that the network lacks, with the bytes of their parameters: shards of a plan's layers.

        Where another plan has the same operation of another layer, this one's stands for it from now on.
        """
        self._learnt |= {layer.operation: (layer, parameter_bytes) for layer, parameter_bytes in layers}
        self._shard_of |= {layer.operation: layer.name for layer, _ in layers}

    def share_out(self, shares: Mapping[str, tuple[str, float]]) -> None:
        """Take operations as a share of another's time from now on: (operation, share) by operation."""
        self._shares.update(shares)

    def cost(self, operation: str, phase: PhaseName, shard: str, batch: int, ranks_on_host: int) -> Cost:
        """Seconds of one operation and phase on a local batch.

        Raises:
            UserError: the profile holds neither the operation, nor a neighbour, nor what a roofline needs.
        """
        if operation in self._shares:
            whole, share = self._shares[operation]
            cost = self.cost(whole, phase, "", batch, ranks_on_host)
            part = cost.times(share)
            return part._replace(adjustments=cost.adjusted("share of the whole layer", part.seconds).adjustments)
        # Blocks repeat their operations: what is asked for again is looked up as it was asked for.
        key = operation, phase, self._measured_as(operation, shard)
        asked = *key, batch, ranks_on_host, self._shard_of.get(operation, "")
        known = self._known.get(asked)
        if known is None:
            known = self._known[asked] = self._find(key, batch, ranks_on_host)
        return known

    def relative_spread(self, operation: str, phase: PhaseName, shard: str, batch: int, ranks_on_host: int) -> float:
        """How single times of an operation spread (standard deviation over median); 0 where that was not measured.

        A shard that was not measured spreads as the operation that it is scaled from, a part of backward as the whole.
        """
        phase = "BW" if phase in ("BW_input", "BW_weight") else phase
        series = self._in_situ.get((operation, phase, self._measured_as(operation, shard)))
        if not series and operation in self._learnt:
            self._roofline.learn(*self._learnt[operation])
            layer = self._roofline.layers[operation]
            likes = self._likes(layer.kind, phase, batch, ranks_on_host)
            like = likes.nearest(Call(layer, batch), self._whole_of(operation))[0].layer.operation if likes else ""
            series = self._in_situ.get((like, phase, ""))
        if not series:
            return 0.0
        times = series[nearest_count(series, ranks_on_host)]
        time = times[nearest_count(times, batch)].time
        return time.iqr_s * IQR_TO_SD / time.median_s if time.median_s else 0.0

    def part_of_backward(
        self, operation: str, phase: PhaseName, shard: str, batch: int, ranks_on_host: int
    ) -> BackwardPart:
        """Seconds of backward of an operation's input, or of its parameters, on a local batch."""
        whole = self.cost(operation, "BW", shard, batch, ranks_on_host)
        if operation in self._learnt:
            self._roofline.learn(*self._learnt[operation])
        layer = self._roofline.layers[operation]
        return self._split.part(whole, layer, phase, self._measured_as(operation, shard), batch, ranks_on_host)

    @cached_property
    def _split(self) -> BackwardSplit:
        return BackwardSplit(self._parts_alone, lambda: tuple(self._roofline.layers.values()))

    def _parts_alone(self, operation: str, shard: str, batch: int, ranks_on_host: int) -> MeasuredParts | None:
        keys: list[Key] = [(operation, "BW_input", shard), (operation, "BW_weight", shard)]
        if not all(key in self._isolated for key in keys):
            return None
        of_input, of_weight = (self._own(self._isolated[key], batch, ranks_on_host) for key in keys)
        return MeasuredParts(of_input.seconds, of_input.independent_sd_s, of_weight.seconds, of_weight.independent_sd_s)

    def _measured_as(self, operation: str, shard: str) -> str:
        """The shard as which an operation was measured: this one, or the axis whatever layers it split; else none."""
        return next((known for known in (shard, shard.partition("[")[0]) if (operation, known) in self._as), "")

    def _find(self, key: Key, batch: int, ranks_on_host: int) -> Cost:
        operation, phase, shard = key
        if key in self._in_situ:
            cost = self._own(self._in_situ[key], batch, ranks_on_host)
            return parted_cost(cost, operation) if key in self._parted else cost
        if phase == "BW" and (operation, "FW", shard) in self._in_situ:
            return Cost(0.0, Source.MEASURED)
        if key in self._isolated:
            cost = self._own(self._isolated[key], batch, ranks_on_host)
            return cost._replace(remarks=(*cost.remarks, isolated_remark(operation)))
        halves: tuple[Key, ...] = ((operation, "BW_input", shard), (operation, "BW_weight", shard))
        parts = [half for half in halves if phase == "BW" and half in self._isolated]
        if parts:
            cost = added_up([self._own(self._isolated[part], batch, ranks_on_host) for part in parts])
            return cost._replace(remarks=(*cost.remarks, isolated_remark(operation)))
        return self._derived(operation, phase, batch, ranks_on_host)

    def _own(self, series: Series, batch: int, ranks_on_host: int) -> Cost:
        measured = ranks_on_host if ranks_on_host in series else nearest_count(series, ranks_on_host)
        knots = [
            Knot(at, time.time.typical_s, time.time.typical_s * own_sd(time))
            for at, time in sorted(series[measured].items())
        ]
        cost = at_batch(knots, batch, proportional=True)
        cost = cost._replace(remarks=(*cost.remarks, *of_single_samples(series[measured])))
        return cost if measured == ranks_on_host else self._on_other_host(cost, measured, ranks_on_host)

    def _on_other_host(self, cost: Cost, measured: int, ranks_on_host: int) -> Cost:
        ratio = self.host_ratio(measured, ranks_on_host)
        beside = f"with {measured} rank{'s' * (measured > 1)} on a host"
        if ratio is None:
            text = f"compute was measured {beside}, and is used for {ranks_on_host}; the interval does not cover this"
            return cost._replace(source=Source.SCALED, remarks=(*cost.remarks, Remark(text, True)))
        text = f"compute measured {beside} is scaled to {ranks_on_host} by {ratio.value:.3f}, the ratio of the others"
        return cost.adjusted("ranks on the host", cost.seconds * ratio.value)._replace(
            source=Source.SCALED,
            independent_sd_s=cost.independent_sd_s * ratio.value,
            batch_sd_s=cost.batch_sd_s * ratio.value,
            method_sd_s=cost.seconds * ratio.value * ratio.relative_sd,
            remarks=(*cost.remarks, Remark(text, True)),
        )

    def host_ratio(
        self,
        measured: int,
        wanted: int,
        kind: str = "",
        phase: str = "",
        *,
        of_model: bool = False,
        batch: int | None = None,
    ) -> HostRatio | None:
        """How much longer operations take with ``wanted`` ranks on the host than with ``measured``, over their sum.

        Args:
            kind, phase, of_model, batch: of these operations alone, of this network's own, at this local batch alone.

        Returns:
            None where no such operation was measured with both, on one local batch.
        """
        key = measured, wanted, kind, phase, of_model, batch
        if key not in self._ratios:
            pairs = [
                (series[measured][at].time.typical_s, series[wanted][at].time.typical_s)
                for (operation, of_phase, _), series in self._in_situ.items()
                if measured in series and wanted in series
                if (not kind or kind_of(operation) == kind) and (not phase or of_phase == phase)
                if not of_model or operation in self._own_operations
                for at in series[measured].keys() & series[wanted].keys()
                if batch in (None, at)
            ]
            self._ratios[key] = ratio_of_hosts(pairs)
        return self._ratios[key]

    def alone_on_host(self, ranks_on_host: int, operation: str, phase: str, batch: int) -> HostRatio | None:
        """An operation's seconds while the host's other ranks do not compute over those while all do.

        Of all operations of its kind and phase that were measured both ways, since the ratio of a single one is lost in
        noise: of this network at this batch, else of this network, else of any; else of all kinds.
        """
        kind = kind_of(operation)
        choices = (
            self.host_ratio(ranks_on_host, 1, kind, phase, of_model=of_model, batch=at)
            for of_model, at in ((True, batch), (True, None), (False, None))
        )
        return next((choice for choice in choices if choice is not None), None) or self.host_ratio(ranks_on_host, 1)

    def _derived(self, operation: str, phase: PhaseName, batch: int, ranks_on_host: int) -> Cost:
        if operation in self._learnt:
            self._roofline.learn(*self._learnt[operation])
        layer = self._learnt[operation][0] if operation in self._learnt else self._roofline.layers.get(operation)
        if layer is None:
            raise UserError(f"the profile holds no time of {operation}, and no network that describes it")
        likes = self._likes(layer.kind, phase, batch, ranks_on_host)
        answers = [] if likes is None else [self._scaled(layer, phase, batch, ranks_on_host, likes)]
        regressed = self._kernels.estimate(layer, phase, batch)
        if regressed is not None:
            in_situ = in_situ_of(layer.kind, self._regressed_pairs(phase, ranks_on_host))
            answers.append(regressed_cost(regressed, layer, in_situ, asked=self._from.asked))
        if answers:
            return min(answers, key=lambda cost: cost.method_relative_sd)
        bound_s = self._roofline.seconds(layer, phase, batch, ranks_on_host)
        if not self._from.measured:
            if bound_s is None:
                raise nothing_for(self._from, self._network, self._unanswered(batch), batch)
            return roofline_cost(self._from, self._network, layer, bound_s)
        if bound_s is None:
            raise UserError(
                f"the profile holds no time of layer {layer.name!r} ({operation}), none of its kind, and no device "
                f"rates for a roofline; measure it: paradl-bench layers {self._network.name} --batch {batch} -o DIR"
            )
        error = self._errors.once((phase, len(self._roofline.layers)), partial(self._roofline_error, phase))
        return roofline_of_kind(layer, bound_s, error, self._profile.devices, computed_in(self._dtype))

    def _unanswered(self, batch: int) -> set[str]:
        """Kinds of the network's layers that take time, and that no regressor answers for at a local batch."""
        layers: tuple[tuple[Layer, PhaseName], ...] = tuple(
            (layer, phase) for layer in self._network.layers for phase in ("FW", "BW")
        )
        return {
            layer.kind
            for layer, phase in layers
            if any(self._roofline.demand(layer, phase, batch)) and self._kernels.estimate(layer, phase, batch) is None
        }

    def _regressed_pairs(self, phase: PhaseName, ranks_on_host: int) -> tuple[Pair, ...]:
        """Layers measured inside an iteration at their largest batch, beside what regressors say of them."""
        if (phase, ranks_on_host) not in self._kernel_pairs:
            pairs = []
            for layer in self._roofline.layers.values():
                series = self._in_situ.get((layer.operation, phase, ""))
                if series is None:
                    continue
                times = series[nearest_count(series, ranks_on_host)]
                measured_s = times[max(times)].time.typical_s
                regressed = self._kernels.estimate(layer, phase, max(times))
                if regressed is not None and measured_s and regressed.seconds:
                    pairs.append(Pair(layer.kind, regressed.seconds, measured_s))
            self._kernel_pairs[phase, ranks_on_host] = tuple(pairs)
        return self._kernel_pairs[phase, ranks_on_host]

    def _scaled(self, layer: Layer, phase: PhaseName, batch: int, ranks_on_host: int, likes: LikeCalls) -> Cost:
        call = Call(layer, batch)
        like, distance = likes.nearest(call, self._whole_of(layer.operation))
        cost = self.cost(like.layer.operation, phase, "", like.batch, ranks_on_host)
        factor = likes.ratio(call, like)
        seconds = max(cost.seconds * factor, likes.floor_s(call))
        how = "; paradl-bench layers --shards measures it" if layer.operation in self._learnt else ""
        remark = Remark(f"not measured, scaled from the nearest operation of the kind{how}", True, layer.name)
        return cost.adjusted("scaled from a like operation", seconds)._replace(
            source=Source.SCALED,
            independent_sd_s=cost.independent_sd_s * factor,
            batch_sd_s=cost.batch_sd_s * factor,
            method_sd_s=math.hypot(cost.method_sd_s * factor, seconds * likes.relative_sd(distance)),
            remarks=(*cost.remarks, remark),
        )

    def _whole_of(self, operation: str) -> str:
        """The operation of the network's own layer that a shard is of."""
        return self._own_layers.get(self._shard_of.get(operation, ""), "")

    def _likes(self, kind: str, phase: PhaseName, batch: int, ranks_on_host: int) -> LikeCalls | None:
        """Calls of a kind that were measured whole, with as many ranks on the host if any were.

        For a shard, the operation that it is a shard of is among them. Shards that are learnt later are none of them.
        What was measured at several batches is known at the one that is asked for as well, by its own slope.
        """
        kernel = _kernel_of(kind)
        key = kernel, phase, batch, ranks_on_host
        if key not in self._like_calls:
            measured = []
            for operation, layer in self._roofline.layers.items():
                of = operation, phase, ""
                series = self._in_situ.get(of) or self._isolated.get(of)
                if _kernel_of(layer.kind) == kernel and series:
                    times = series[nearest_count(series, ranks_on_host)]
                    at = {*times, batch} if len(times) > 1 else times
                    costs = {size: self.cost(operation, phase, "", size, ranks_on_host) for size in at}
                    measured += [(Call(layer, size), cost.seconds) for size, cost in costs.items()]
            self._like_calls[key] = LikeCalls(self._roofline, phase, ranks_on_host, measured) if measured else None
        return self._like_calls[key]

    def _any_seconds(self, layer: Layer, phase: PhaseName) -> float:
        """Seconds a sample of a measured operation, at its largest batch; 0 where it was not measured."""
        key: Key = (layer.operation, phase, "")
        series = self._in_situ.get(key) or self._isolated.get(key)
        if not series:
            return 0.0
        times = series[min(series)]
        return times[max(times)].time.typical_s / max(times)

    def _roofline_error(self, phase: PhaseName) -> float:
        """Root mean square of (measured - roofline) / roofline over measured layers."""
        layers = self._roofline.layers.values()
        pairs = [(self._any_seconds(layer, phase), self._roofline.seconds(layer, phase, 1)) for layer in layers]
        excess = [measured_s / bound_s - 1 for measured_s, bound_s in pairs if measured_s and bound_s]
        return float(np.sqrt(np.mean(np.square(excess)))) if excess else UNKNOWN_RELATIVE_SD


@cache
def _kernel_of(kind: str) -> str:
    """The kind that kernels of a kind are known by: its own, or one that the same kernels run."""
    known = layer_kinds().get(kind)
    return known.like or kind if known else kind
