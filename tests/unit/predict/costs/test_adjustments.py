"""What effects add to a cost stays with it through everything that is done with costs."""

from __future__ import annotations

import pytest

from predict.costs.compute.batch_scaling import Knot, at_batch
from predict.costs.compute.layer_spread import added_up
from predict.costs.sourced import Adjustment, Cost, Source

COST = Cost(2.0, Source.MEASURED, 0.1).adjusted("local batch", 3.0)._replace(source=Source.SCALED)


def test_an_adjustment_keeps_where_the_base_comes_from() -> None:
    assert (COST.base_s, COST.seconds, COST.origin, COST.source) == (2.0, 3.0, Source.MEASURED, Source.SCALED)
    twice = COST.adjusted("ranks on the host", 3.75)
    assert twice.adjustments == (Adjustment("local batch", 1.0), Adjustment("ranks on the host", 0.75))
    assert (twice.base_s, twice.origin) == (2.0, Source.MEASURED)


def test_an_effect_that_adds_nothing_is_none() -> None:
    assert Cost(2.0, Source.MEASURED).adjusted("contention", 2.0).adjustments == ()


@pytest.mark.parametrize(("part", "share"), [(COST.over(4), 0.25), (COST.times(0.25), 0.25), (COST.times(2.0), 2.0)])
def test_a_share_of_a_cost_shares_all_of_it(part: Cost, share: float) -> None:
    assert (part.seconds, part.base_s, part.independent_sd_s) == (3.0 * share, 2.0 * share, 0.1 * share)
    assert part.adjustments == (Adjustment("local batch", share),)


def test_costs_added_up_keep_the_effects_of_each() -> None:
    both = added_up([COST, Cost(1.0, Source.REGRESSED)])
    assert (both.seconds, both.base_s, both.origin) == (4.0, 3.0, Source.REGRESSED)


@pytest.mark.parametrize(("batch", "measured_s"), [(4, 1.0), (5, 1.0), (7, 3.0), (8, 3.0), (16, 3.0), (2, 1.0)])
def test_the_base_of_a_batch_is_the_nearest_one_measured(batch: int, measured_s: float) -> None:
    cost = at_batch([Knot(4, 1.0, 0.0), Knot(8, 3.0, 0.0)], batch, proportional=True)
    assert cost.origin is Source.MEASURED
    assert cost.base_s == pytest.approx(measured_s)
