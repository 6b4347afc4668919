"""What belongs to a whole model: weight update, time between operations, and how iterations spread.

From the model's own measurement, at the nearest number of ranks on the host and over its measured batches; else (a
network that was described and not measured) from the profile's other models, by operations and by parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from calibrate.profile.profile import Dispatch, ModelTime, Profile
from calibrate.statistics.blocks import next_block_stretch
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.statistics import IQR_TO_SD, Summary
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import TRAINED_DTYPES
from paradl_bench.network.optimizers import OPTIMIZERS
from predict.costs.compute.batch_scaling import Knot, at_batch
from predict.costs.compute.host_dispatch import dispatch_of
from predict.costs.compute.layer_roofline import nearest_count
from predict.costs.compute.layer_source import MEASURED_FIRST, LayersFrom
from predict.costs.compute.unmeasured_costs import UnmeasuredCosts
from predict.costs.sourced import MEDIAN_ERROR, UNKNOWN_RELATIVE_SD, Cost, Floats, Remark, Source
from predict.costs.spread.stragglers import RankSpread, part_spread


class Spread(NamedTuple):
    """How iterations of the model spread, and what its parts left unexplained.

    Attributes:
        common_relative_sd: what all layers share, of a further block of time.
        remainders: 1 - parts / iteration: as closure found it pair by pair, and of the medians that predictions add up,
            where this model was measured. Medians do not add up where noise falls on one layer at a time.
    """

    common_relative_sd: float
    remainders: tuple[float, ...]


class ModelCosts:
    """Costs that a model has as a whole.

    Args:
        network: of the model; where the profile has no times of a model of this name, other models stand for it.
        layers_from: where that is not measured times, a weight update is regressed or at the bandwidth of memory too.

    A profile with no iteration in any dtype holds layers alone (an imported trace): what is no layer's is estimated, or
    taken as none, and said to be (:mod:`predict.costs.compute.unmeasured_costs`).

    Raises:
        UserError: the profile holds iterations, and none in this dtype.
    """

    def __init__(
        self,
        profile: Profile,
        network: ModelGraph,
        *,
        dtype: str,
        optimizer: str,
        layers_from: LayersFrom = MEASURED_FIRST,
    ) -> None:
        self._profile, self._dtype, self._from = profile, dtype, layers_from
        self._network = network
        self._networks = profile.network
        self._optimizer = optimizer
        # A network that was changed since, or another one of that name, is another model.
        known = profile.network.get(network.name)
        self._own_name = network.name if known is network or known is None or known.digest == network.digest else ""
        self._times = [time for time in profile.model_times if time.dtype == dtype]
        self._shards = [time for time in profile.shard_times if time.dtype == dtype]
        self._rank_spreads: dict[int, RankSpread] = {}
        if profile.model_times and not self._times:
            if dtype not in TRAINED_DTYPES:
                raise unknown_choice("dtype", dtype, {*TRAINED_DTYPES, *(time.dtype for time in profile.model_times)})
            raise UserError(
                f"the profile holds no iterations in {dtype}; measure some: "
                f"paradl-bench layers {network.name} --batch N --dtype {dtype} -o DIR"
            )

    @cached_property
    def unmeasured(self) -> UnmeasuredCosts:
        """What stands for iterations where the profile has none."""
        return UnmeasuredCosts(self._profile, self._network, self._dtype, self._from)

    def between(self, phase: Literal["FW", "BW"], batch: int, ranks_on_host: int, shard: str = "") -> Cost:
        """Seconds between operations in the whole phase (framework, engine, allocator), of a shard if measured."""

        if not self._times:
            return self.unmeasured.between()

        def summary(time: ModelTime) -> Summary:
            return time.fw_between if phase == "FW" else time.bw_between

        times = self._of_shard(shard) or self._of_model(self._own_name)
        if times:
            return self._own(times, summary, batch, ranks_on_host, f"time between operations ({phase})")
        return self._from_others(
            self._times, summary, lambda network: len(network.layers), batch, ranks_on_host, "time between operations"
        )

    def dispatch(self, batch: int, ranks_on_host: int) -> Dispatch | None:
        """What the host of a GPU takes for each operation; None where nothing waits for it."""
        return dispatch_of(self._profile, self.nearest(batch, ranks_on_host), self._dtype)

    def shard_update(self, batch: int, ranks_on_host: int, shard: str) -> Cost | None:
        """Seconds of the optimizer step and zero_grad over what a rank holds of the model; None where not measured."""
        if not self._from.measured:
            return None
        updated = [time for time in self._of_shard(shard) if time.optimizer == self._optimizer]
        return self._own(updated, lambda time: time.wu, batch, ranks_on_host, "weight update") if updated else None

    def weight_update(self, batch: int, ranks_on_host: int) -> Cost:
        """Seconds of the optimizer step and zero_grad over the whole model.

        Raises:
            UserError: the optimizer was not measured for any model.
        """
        if not (self._times and self._from.measured):
            return self.unmeasured.weight_update(self._optimizer, ranks_on_host)
        updated = [time for time in self._times if time.optimizer == self._optimizer]
        if not updated:
            measured = ", ".join(sorted({time.optimizer for time in self._times}))
            if self._optimizer not in OPTIMIZERS:
                raise unknown_choice("optimizer", self._optimizer, {*OPTIMIZERS, *measured.split(", ")})
            raise UserError(
                f"the profile holds no weight update of {self._optimizer!r}, only of {measured}; measure it:"
                f" paradl-bench layers {self._network.name} --optimizer {self._optimizer} --batch {batch} -o DIR"
            )
        of_model = [time for time in updated if time.model == self._own_name]
        if of_model:
            return self._own(of_model, lambda time: time.wu, batch, ranks_on_host, "weight update")
        return self._from_others(
            updated,
            lambda time: time.wu,
            lambda network: network.parameter_elements,
            batch,
            ranks_on_host,
            "weight update",
        )

    def spread(self, batch: int, ranks_on_host: int, shard: str = "") -> Spread:
        """Spread at the nearest measured batch, of a shard if measured; of the median model where neither was."""
        of_shard = self.nearest_shard(batch, ranks_on_host, shard)
        if of_shard is not None:
            return Spread(_common_sd(of_shard), (of_shard.remainder_relative,))
        near = self._near(batch, ranks_on_host)
        if near is None:
            return Spread(self.unmeasured.common_relative_sd, (0.0,))
        if near.model == self._own_name:
            return Spread(_common_sd(near), (near.remainder_relative,))
        others = [_nearest(self._of_model(model), batch, ranks_on_host) for model in self._models()]
        return Spread(_common_sd(near), (median([time.remainder_relative for time in others]),))

    def _near(self, batch: int, ranks_on_host: int) -> ModelTime | None:
        """The measurement that tells of spread: the model's own, else that of the median model; None without any."""
        nearest = self.nearest(batch, ranks_on_host)
        if nearest is not None or not self._times:
            return nearest
        others = [_nearest(self._of_model(model), batch, ranks_on_host) for model in self._models()]
        return sorted(others, key=lambda time: time.common_relative_sd)[len(others) // 2]

    def nearest(self, batch: int, ranks_on_host: int) -> ModelTime | None:
        """The model's own measurement that is nearest in ranks on the host, then in batch."""
        times = self._of_model(self._own_name)
        return _nearest(times, batch, ranks_on_host) if times else None

    def nearest_shard(self, batch: int, ranks_on_host: int, shard: str) -> ModelTime | None:
        """As :meth:`nearest`, of what a rank of a strategy runs of the model."""
        times = self._of_shard(shard)
        return _nearest(times, batch, ranks_on_host) if times else None

    def rank_spread(self, batch: int, ranks_on_host: int) -> RankSpread:
        """How single iterations of a rank spread, and how much of that is tied, where :meth:`spread` reads it."""
        near = self._near(batch, ranks_on_host)
        if near is None:
            return RankSpread()
        # What its measurement says of every batch: going through its events takes as long as to price a plan.
        key = id(near)
        if key not in self._rank_spreads:
            quantiles = near.iteration_relative_quantiles
            parting = part_spread(quantiles, *self._events(near))
            self._rank_spreads[key] = RankSpread(
                quantiles=quantiles, samples=near.iteration.samples, **parting._asdict()
            )
        return self._rank_spreads[key]

    def relative_spread_of_update(self, batch: int, ranks_on_host: int) -> float:
        """How single weight updates spread (standard deviation over median), where :meth:`spread` reads; 0 unknown."""
        near = self._near(batch, ranks_on_host)
        return near.wu.iqr_s * IQR_TO_SD / near.wu.median_s if near is not None and near.wu.median_s else 0.0

    def _events(self, near: ModelTime) -> tuple[Floats, Floats, float]:
        """Seconds and own deviations of the events of a measured iteration, and the iteration's seconds."""
        network = self._networks.get(near.model)
        times = {
            (time.operation, time.phase): time.time
            for time in self._profile.layer_times
            if (time.batch, time.ranks_on_host, time.dtype) == (near.batch, near.ranks_on_host, near.dtype)
            and time.mode == "in_situ"
            and not time.shard
        }
        layers = network.layers if network else ()
        timed_layers = [times.get((layer.operation, phase)) for layer in layers for phase in ("FW", "BW")]
        events = [near.fw_between, near.bw_between, near.wu, *(time for time in timed_layers if time is not None)]
        return (
            np.array([event.typical_s for event in events]),
            np.array([event.iqr_s * IQR_TO_SD for event in events]),
            near.iteration.median_s,
        )

    def host_ratio(self, phase: Literal["FW", "BW", "WU"], measured: int, wanted: int) -> float | None:
        """Time between operations of a phase, or of the weight update, over that with another number of ranks.

        None where no model was measured with both, on one local batch.
        """
        times = self._of_model(self._own_name) or self._times
        pairs = [
            (_of_phase(time, phase), _of_phase(other, phase))
            for time in times
            for other in times
            if (time.ranks_on_host, other.ranks_on_host) == (measured, wanted)
            if (time.model, time.batch, time.optimizer) == (other.model, other.batch, other.optimizer)
        ]
        base, beside = map(sum, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        return beside / base if base else None

    def _of_model(self, model: str) -> list[ModelTime]:
        """Times of a model; those with the optimizer asked for, if there are any."""
        times = [time for time in self._times if time.model == model]
        return [time for time in times if time.optimizer == self._optimizer] or times

    def _of_shard(self, shard: str) -> list[ModelTime]:
        times = [time for time in self._shards if shard and time.model == self._own_name and time.shard == shard]
        return [time for time in times if time.optimizer == self._optimizer] or times

    def _models(self) -> list[str]:
        return sorted({time.model for time in self._times})

    def _own(
        self,
        times: Sequence[ModelTime],
        summary: Callable[[ModelTime], Summary],
        batch: int,
        ranks_on_host: int,
        what: str,
    ) -> Cost:
        measured = nearest_count([time.ranks_on_host for time in times], ranks_on_host)
        knots = _knots([time for time in times if time.ranks_on_host == measured], summary)
        cost = at_batch(knots, batch, proportional=False, what=what)
        if measured == ranks_on_host:
            return cost
        text = f"{what} was measured with {measured} ranks on a host, and is used for {ranks_on_host}"
        return cost._replace(source=Source.SCALED, remarks=(*cost.remarks, Remark(text, True)))

    def _from_others(
        self,
        times: Sequence[ModelTime],
        summary: Callable[[ModelTime], Summary],
        units: Callable[[ModelGraph], int],
        batch: int,
        ranks_on_host: int,
        what: str,
    ) -> Cost:
        per_unit = []
        for model in sorted({time.model for time in times} & self._networks.keys()):
            of_model = [time for time in times if time.model == model]
            cost = self._own(of_model, summary, batch, ranks_on_host, what)
            per_unit.append(cost.seconds / max(units(self._networks[model]), 1))
        if not per_unit:
            raise UserError(
                f"the profile holds no {what} of any model whose network it describes: run calibrate fit again"
            )
        middle = median(per_unit)
        seconds = middle * units(self._network)
        relative_sd = float(np.std(per_unit, ddof=1)) / middle if len(per_unit) > 1 and middle else UNKNOWN_RELATIVE_SD
        remark = Remark(f"{what} from the profile's other models: {self._network.name} as it is was not measured", True)
        return Cost(seconds, Source.SCALED, method_sd_s=seconds * relative_sd, remarks=(remark,))


def _common_sd(time: ModelTime) -> float:
    """What all layers share, of a further block of time: a run."""
    return time.common_relative_sd * next_block_stretch(time.blocks)


def _of_phase(time: ModelTime, phase: Literal["FW", "BW", "WU"]) -> float:
    return {"FW": time.fw_between, "BW": time.bw_between, "WU": time.wu}[phase].typical_s


def _knots(times: Sequence[ModelTime], summary: Callable[[ModelTime], Summary]) -> list[Knot]:
    knot_of = {time.batch: Knot(time.batch, summary(time).typical_s, _standard_error(summary(time))) for time in times}
    return [knot_of[batch] for batch in sorted(knot_of)]


def _standard_error(summary: Summary) -> float:
    """Standard error of the median."""
    return MEDIAN_ERROR * summary.iqr_s * IQR_TO_SD / math.sqrt(summary.samples)


def _nearest(times: Sequence[ModelTime], batch: int, ranks_on_host: int) -> ModelTime:
    measured = nearest_count([time.ranks_on_host for time in times], ranks_on_host)
    near = [time for time in times if time.ranks_on_host == measured]
    at = nearest_count([time.batch for time in near], batch)
    return next(time for time in near if time.batch == at)
