"""Probes find the time that an operation takes, on the layer that took it, in both directions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.execution.probes import (
    ProbeCost,
    dispatched_iteration,
    measure_probe_cost,
    probed_iteration,
)
from paradl_bench.ranks.clocks import CpuClock

FREE = ProbeCost(fw_inside_s=0, fw_outside_builtin_s=0, fw_outside_python_s=0, bw_inside_s=0, bw_outside_s=0)


class CountingClock(CpuClock):
    """A clock on which every stamp is one second after the last: intervals count the stamps between."""

    def __init__(self) -> None:
        ticks = itertools.count()
        self.stamp: Any = lambda: float(next(ticks))
        self.start: Any = self.stamp


class HeldClock(CountingClock):
    """As of a GPU that is held a hundred seconds before every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[float, float]] = []
        count, passed = self.stamp, [0.0]
        self.stamp = lambda: count() + passed[0]

        def start() -> float:
            before = self.stamp()
            passed[0] += 100
            self._held.append((before, self.stamp()))
            return self._held[-1][1]

        self.start = start

    def take_held(self) -> list[tuple[float, float]]:
        held, self._held = self._held, []
        return held


def test_intervals_do_not_overlap_and_land_on_their_layer() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    inputs = torch.randn(2, 3)

    def forward() -> torch.Tensor:
        hidden = inputs @ weight
        return torch.tanh(hidden).sum()

    found = probed_iteration(forward, lambda: None, CountingClock(), FREE, 3)
    assert found.fw_s.tolist() == [1, 1, 1]
    # One node an operation, and the accumulation of the weight's gradient with the product that reads it.
    assert found.bw_s.tolist() == [2, 1, 1]
    # begin, 3 pairs, end: four gaps; backward has 4 nodes: five gaps.
    assert found.fw_between_s == 4
    assert found.bw_between_s == 5
    assert found.fw_total_s == 7
    assert found.bw_total_s == 9


def test_what_a_device_is_held_counts_in_no_time() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    inputs = torch.randn(2, 3)
    found = probed_iteration(lambda: torch.tanh(inputs @ weight).sum(), lambda: None, HeldClock(), FREE, 3)
    assert found.fw_s.tolist() == [1, 1, 1]
    assert found.bw_s.tolist() == [2, 1, 1]
    # Each start has one stamp more: before the hold, and a second between it and the interval before.
    assert (found.fw_between_s, found.bw_between_s) == (4, 5)
    assert found.bw_total_s > 400


def test_dispatch_waits_for_nothing_that_was_sent_before() -> None:
    weight, events = torch.randn(3, requires_grad=True), []

    class Watched(CpuClock):
        def synchronise(self) -> None:
            events.append("wait")

    def forward() -> torch.Tensor:
        events.append("forward")
        return weight.sum()

    weight.register_hook(lambda _: events.append("backward"))
    forward_s, backward_s = dispatched_iteration(forward, lambda: events.append("update"), Watched())
    assert events == ["wait", "forward", "wait", "backward", "wait", "update", "wait"]
    assert min(forward_s, backward_s) > 0


def test_probe_cost_is_taken_off() -> None:
    weight = torch.randn(3, requires_grad=True)
    cost = ProbeCost(
        fw_inside_s=0.25, fw_outside_builtin_s=0.5, fw_outside_python_s=0.75, bw_inside_s=0.25, bw_outside_s=0.125
    )
    found = probed_iteration(lambda: torch.relu(weight).sum(), lambda: None, CountingClock(), cost, 2)
    assert found.fw_s.tolist() == [0.75, 0.75]
    assert found.fw_between_s == 3 - 2 * 0.5
    assert found.bw_s.tolist() == [1.5, 0.75]
    assert found.bw_between_s == 4 - 3 * 0.125


def test_an_iteration_that_runs_other_operations_is_refused() -> None:
    weight = torch.randn(3, requires_grad=True)
    with pytest.raises(WorkError, match="control flow varies"):
        probed_iteration(lambda: weight.sum(), lambda: None, CpuClock(), FREE, 2)


def test_a_probed_iteration_leaves_the_gradients_alone() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten())
    inputs = torch.randn(4, 2, 5, 5)
    module(inputs).square().mean().backward()
    plain = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    state = {name: b.clone() for name, b in module.named_buffers()}
    probed_iteration(lambda: module(inputs).square().mean(), lambda: None, CpuClock(), FREE, 6)
    for parameter, expected in zip(module.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, expected)
    assert int(dict(module.named_buffers())["1.num_batches_tracked"]) == int(state["1.num_batches_tracked"]) + 1


def test_measured_probe_cost_is_positive_and_small() -> None:
    cost = measure_probe_cost(CpuClock(), torch.device("cpu"), chain=20, repetitions=5)
    values = np.array([getattr(cost, name) for name in cost.__slots__])
    assert np.all(values >= 0)
    # A probe is a few Python calls; a cost of a millisecond would be a blunder in units.
    assert values.max() < 1e-3
