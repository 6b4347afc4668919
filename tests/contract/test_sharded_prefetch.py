"""ZeRO stages 2 and 3 on streams of their own: starts worked out by hand from what torch's ``fully_shard`` waits for.

Three units of one linear layer each; forward of a unit takes f, backward b, a gather g, a reduce-scatter r; all else
takes nothing. By hand (torch 2.13, ``_fsdp_param_group.py``):

- forward: the streams of gathers wait for the copy-out of the unit before the last (``wait_for_unshard``), the copy-out
  for the gather and for what was computed before it;
- backward: they wait for the last copy-out (``_root_post_forward``, ``wait_for_unshard``); the unit in front is
  gathered when a unit has been copied out (``_backward_prefetch``); a unit's gradients are copied in once the
  reduce-scatter before it is done (``post_backward``, one buffer), and those of the first unit, whose input has no
  gradient, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from profile_factory import make_network

from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, Phase, Plan, WeightUpdate, Work
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.simulation.simulator import simulate, task_graph

NETWORK = make_network((8, 8, 8, 8))


class Seconds(NamedTuple):
    """Of forward and backward of a unit, of a gather and of a reduce-scatter."""

    forward: float
    backward: float
    gather: float
    reduce: float

    def of(self, work: Work) -> float:
        """Of a work."""
        if isinstance(work, Compute) and work.layer.startswith("fc"):
            return self.forward if work.phase == "FW" else self.backward
        if isinstance(work, Collective):
            return self.gather if work.operation == "all_gather" else self.reduce
        return 0.0


def plan(text: str, *, blocking: bool = False) -> Plan:
    strategy = parse_strategy(text)
    return planner_for(strategy).plan(NETWORK, strategy, PlanSettings(batch=4, blocking=blocking))


def starts(found: Plan, seconds: Seconds) -> dict[str, list[float]]:
    """When gathers of either pass, reduce-scatters, and the units' forward and backward start; and the update."""
    (role,) = found.roles
    times = np.array([seconds.of(found.works[index]) for index in role.work])
    ones = np.ones(role.tasks)
    line = simulate(task_graph(role), times, ones, ones)
    told: dict[str, list[float]] = {}
    for index, phase, at in zip(role.work, role.phase, line.start_s.tolist(), strict=True):
        work = found.works[index]
        name = ""
        if isinstance(work, Compute) and work.layer.startswith("fc"):
            name = work.phase
        elif isinstance(work, Collective):
            name = f"{work.operation} {Phase(phase).name}"
        elif isinstance(work, WeightUpdate):
            name = "WU"
        if name:
            told.setdefault(name, []).append(at)
    return told


def test_slow_communication_is_what_each_unit_waits_for() -> None:
    """f=1, b=2, g=1.5, r=2.5: see the comments, in the order of units 1, 2, 3, 3, 2, 1."""
    assert starts(plan("z3d4"), Seconds(1.0, 2.0, 1.5, 2.5)) == {
        # One behind the other: each is asked for as soon as the one before is under way.
        "all_gather FW": [0.0, 1.5, 3.0],
        "FW": [1.5, 3.0, 4.5],
        # Unit 3 again at once; unit 2 when 3 has been copied out at 6; unit 1 is asked for at 8, and stands behind the
        # reduce-scatter that was called just before.
        "all_gather BW": [4.5, 6.0, 10.5],
        "BW": [6.0, 8.0, 12.0],
        # 3 from 8 on; 2 is computed at 10, copied in at 10.5, behind the gather until 12; 1 at 14, copied in at 14.5.
        "reduce_scatter GE": [8.0, 12.0, 14.5],
        "WU": [17.0],
    }


def test_fast_gathers_are_hidden_and_at_most_two_buffers_ahead() -> None:
    """f=2, b=3, g=0.5, r=0.25."""
    assert starts(plan("z3d4"), Seconds(2.0, 3.0, 0.5, 0.25)) == {
        # Of three gathers the last has to wait for the first unit's copy-out, at 0.5, which is no wait.
        "all_gather FW": [0.0, 0.5, 1.0],
        "FW": [0.5, 2.5, 4.5],
        # Not before unit 3 of forward has been copied out at 4.5; for unit 2, of backward at 6.5; the last one stands
        # behind unit 3's reduce-scatter, called at 9.5.
        "all_gather BW": [4.5, 6.5, 9.75],
        "BW": [6.5, 9.5, 12.5],
        "reduce_scatter GE": [9.5, 12.5, 15.5],
        "WU": [15.75],
    }


def test_a_fourth_forward_gather_waits_for_the_second_copy_out() -> None:
    network = make_network((8, 8, 8, 8, 8, 8))
    strategy = parse_strategy("z3d4")
    found = planner_for(strategy).plan(network, strategy, PlanSettings(batch=4))
    # Copied out at 0.5, 2.5, 4.5, ...: unit k is gathered when k - 2 has been copied out.
    assert starts(found, Seconds(2.0, 3.0, 0.5, 0.25))["all_gather FW"] == [0.0, 0.5, 1.0, 2.5, 4.5]


def test_stage_2_gathers_once() -> None:
    found = starts(plan("z2d4"), Seconds(1.0, 2.0, 1.5, 2.5))
    assert "all_gather BW" not in found
    # Forward ends at 5.5; the reduce-scatters stand one behind the other from 7.5 on.
    assert found["BW"] == [5.5, 7.5, 10.0]
    assert found["reduce_scatter GE"] == [7.5, 10.0, 12.5]
    assert found["WU"] == [15.0]


@pytest.mark.parametrize("seconds", [Seconds(1.0, 2.0, 1.5, 2.5), Seconds(2.0, 3.0, 0.5, 0.25)])
def test_calls_that_block_hide_nothing(seconds: Seconds) -> None:
    found = starts(plan("z3d4", blocking=True), seconds)
    in_series = 3 * (seconds.forward + seconds.backward + seconds.reduce) + 6 * seconds.gather
    assert found["WU"] == [pytest.approx(in_series)]
