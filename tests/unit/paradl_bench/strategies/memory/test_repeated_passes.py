"""Memory of micro-batches: what is walked once and repeated is what a walk of every one of them finds."""

from __future__ import annotations

import pytest
from network_factory import NetworkFactory
from profile_factory import make_network

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.schedules.schedule import Direction
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage, hold
from paradl_bench.strategies.memory.liveness import Pass
from paradl_bench.strategies.memory.parted_liveness import PartedLiveness
from paradl_bench.strategies.memory.rank_operations import RankRun
from paradl_bench.strategies.memory.repeated_passes import RepeatedPasses, Walks

SAMPLES, RECEIVED, SENT = 3, 40, 512


def a_stage_with_a_branch() -> ModelGraph:
    factory = NetworkFactory(3, 8, 8)
    factory.conv("a", 8)
    factory.batch_norm("bn")
    factory.relu("relu")
    factory.conv("b", 8)
    factory.add("sum", "relu", "b")
    return factory.network("branch")


def walk_over(network: ModelGraph, ledger: Ledger) -> PartedLiveness:
    last = len(network.layers) - 1
    run = RankRun(samples=SAMPLES, outputs=(last,), kept_outputs=(last,), input_has_gradient=True)
    return PartedLiveness(ledger, network, run)


class EveryOne:
    """Walks every micro-batch anew."""

    def __init__(self, ledger: Ledger, network: ModelGraph) -> None:
        self._ledger, self._walk = ledger, walk_over(network, ledger)
        self._passes: dict[int, Pass] = {}

    def forward(self) -> list[Storage]:
        received = self._ledger.allocate(RECEIVED)
        left = self._walk.forward(received)
        self._ledger.release(received)
        self._passes[id(left.outputs[0])] = left
        return left.outputs

    def backward(self, direction: Direction, outputs: list[Storage]) -> list[Storage]:
        given = [Gradient(Storage(0), SENT)]
        if direction == "BW_input":
            return self._walk.backward_input(self._passes[id(outputs[0])], given)
        left = self._passes.pop(id(outputs[0]))
        if direction == "BW":
            return self._walk.backward(left, given)
        self._walk.backward_weight(left, given)
        return []


# Positive: forward of that micro-batch; negative: backward. Then: how late messages are let go of, in actions.
ORDERS = [[1, 2, 3, -1, -2, -3], [1, 2, -1, 3, -2, 4, -3, -4], [1, -1, 2, -2]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("held_for", [0, 1, 3, 99])
@pytest.mark.parametrize("network", [make_network(), a_stage_with_a_branch()], ids=["chain", "branch"])
def test_repeating_a_pass_is_walking_it_again(network: ModelGraph, order: list[int], held_for: int) -> None:
    ledgers = Ledger(), Ledger()
    passes = (
        EveryOne(ledgers[0], network),
        RepeatedPasses(ledgers[1], Walks(lambda ledger: walk_over(network, ledger), RECEIVED, (SENT,))),
    )
    outputs: list[dict[int, list[Storage]]] = [{}, {}]
    messages: list[list[tuple[int, Storage]]] = [[], []]
    for number, action in enumerate(order):
        for ledger, each, own, held in zip(ledgers, passes, outputs, messages, strict=True):
            if action > 0:
                own[action] = each.forward()
                held += [(number + held_for, hold(storage)) for storage in own[action]]
            else:
                held += [(number + held_for, storage) for storage in each.backward("BW", own.pop(-action))]
            for until, storage in list(held):
                if until <= number:
                    held.remove((until, storage))
                    ledger.release(storage)
        assert ledgers[0] == ledgers[1]
    assert ledgers[0].peak[0] > 0
    assert ledgers[0].gradients > 0


# Positive: forward; negative: the input's part of backward, or the parameters' where that has run.
PARTED_ORDERS = [[1, -1, -1, 2, -2, -2], [1, 2, -1, -2, 3, -1, -3, -2, -3], [1, -1, 2, -2, -1, -2]]


@pytest.mark.parametrize("order", PARTED_ORDERS)
@pytest.mark.parametrize("held_for", [0, 2, 99])
@pytest.mark.parametrize("network", [make_network(), a_stage_with_a_branch()], ids=["chain", "branch"])
def test_repeating_the_parts_of_backward_is_walking_them_again(
    network: ModelGraph, order: list[int], held_for: int
) -> None:
    ledgers = Ledger(), Ledger()
    passes = (
        EveryOne(ledgers[0], network),
        RepeatedPasses(ledgers[1], Walks(lambda ledger: walk_over(network, ledger), RECEIVED, (SENT,))),
    )
    for ledger, each in zip(ledgers, passes, strict=True):
        outputs: dict[int, list[Storage]] = {}
        begun: set[int] = set()
        messages: list[tuple[int, Storage]] = []
        for number, action in enumerate(order):
            if action > 0:
                outputs[action] = each.forward()
                messages += [(number + held_for, hold(storage)) for storage in outputs[action]]
            elif -action in begun:
                each.backward("BW_weight", outputs.pop(-action))
            else:
                begun.add(-action)
                messages += [(number + held_for, storage) for storage in each.backward("BW_input", outputs[-action])]
            for until, storage in [pair for pair in messages if pair[0] <= number]:
                messages.remove((until, storage))
                ledger.release(storage)
        for _, storage in messages:
            ledger.release(storage)
        # All is let go of in the end.
        assert ledger.activations == 0
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].gradients > 0


def test_one_walk_tells_of_first_and_later_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []
    for name in ("forward", "backward"):
        walk = getattr(PartedLiveness, name)
        monkeypatch.setattr(
            PartedLiveness,
            name,
            lambda self, *given, _name=name, _walk=walk: walked.append(_name) or _walk(self, *given),
        )
    ledger = Ledger()
    passes = RepeatedPasses(ledger, Walks(lambda ledger: walk_over(make_network(), ledger), RECEIVED, (SENT,)))
    held = []
    for _ in range(4):
        passes.backward("BW", passes.forward())
        held.append(ledger.gradients)
    assert walked == ["forward", "backward"]
    assert held == [held[0]] * 4
