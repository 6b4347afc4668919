"""Memory of pipelines against sums by hand."""

from __future__ import annotations

import itertools

import pytest
from network_factory import NetworkFactory
from profile_factory import make_network

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.memory.peak import per_phase_memory
from paradl_bench.strategies.memory.repeated_passes import Walks
from paradl_bench.strategies.pipeline import memory
from paradl_bench.strategies.pipeline.memory import pipelined_memory


def chain() -> ModelGraph:
    factory = NetworkFactory(16)
    for number in range(4):
        factory.linear(f"fc{number}", 16)
    factory.loss()
    return factory.network("chain")


def use(text: str, schedule: str, micro_batches: int, batch: int = 16) -> dict[str, int]:
    settings = plan_settings(batch=batch, micro_batches=micro_batches, schedule=schedule)
    return pipelined_memory(chain(), parse_strategy(text), settings).parts_bytes


def test_a_rank_holds_its_own_stages() -> None:
    whole = per_phase_memory(chain(), 16, PlanSettings(batch=1), exchanged=False).parts_bytes
    parts = use("p2", "gpipe", 4)
    assert parts["parameters"] == parts["optimizer"] == whole["parameters"] / 2
    # A later micro-batch makes the gradients of a layer, one of two, beside those that are there.
    assert parts["gradients"] == parts["parameters"] * 3 / 2
    assert parts["buckets"] == 0
    assert use("d2p2", "gpipe", 4, batch=32)["buckets"] == parts["parameters"]


def test_a_buffer_for_every_micro_batch_and_value_that_crosses() -> None:
    # 16 samples of 16 elements in all; a stage of two receives on one side, one in the middle on both.
    assert use("p2", "gpipe", 4)["communication"] == 16 * 16 * 4
    assert use("p4", "gpipe", 4)["communication"] in (16 * 16 * 4, 2 * 16 * 16 * 4)


def test_the_first_rank_that_needs_too_much_is_the_answer() -> None:
    factory = NetworkFactory(16)
    factory.linear("narrow", 16)
    factory.linear("wide", 256)
    factory.loss()
    network, strategy = factory.network("chain"), parse_strategy("p2")
    settings = plan_settings(batch=4, micro_batches=2, schedule="gpipe")
    most = pipelined_memory(network, strategy, settings)
    first = pipelined_memory(network, strategy, settings, within=0)
    assert 0 < first.peak_bytes < most.peak_bytes
    assert pipelined_memory(network, strategy, settings, within=first.peak_bytes) == most


@pytest.mark.parametrize("count", [4, 8])
def test_gpipe_keeps_all_micro_batches_and_1f1b_only_following_stages(count: int) -> None:
    gpipe, alternating = (use("p4", schedule, count)["activations"] for schedule in ("gpipe", "1f1b"))
    sample = 16 * 4
    # Each stage is one layer, which sends its output on and its input's gradient back. GPipe keeps all of both.
    assert gpipe == 16 * sample + 16 * sample
    # The second stage: three micro-batches under way, the gradient that is made, the one that was sent last, and the
    # output that was sent last before the first backward, which is under way itself until the third.
    assert alternating == (3 + 2 + (count > 4)) * (16 // count) * sample


@pytest.mark.parametrize("count", [4, 8])
def test_zero_bubble_keeps_micro_batches_until_the_weights_turn(count: int) -> None:
    sample = 16 * 4
    under_zb, under_1f1b = (use("p4", schedule, count)["activations"] for schedule in ("zb", "1f1b"))
    # torch holds all that a stage has sent, outputs and gradients of inputs. The third stage lets two micro-batches
    # wait for the weights' turn, each with the gradient of its output, whose buffer is counted as communication.
    assert under_zb == 16 * sample + 16 * sample
    assert under_1f1b < under_zb


@pytest.mark.parametrize(("schedule", "count"), [("interleaved", 8), ("zb", 8), ("zbv", 8), ("dualpipev", 8)])
def test_what_the_last_stage_returns_is_held_to_its_backward(schedule: str, count: int) -> None:
    factory, classes, sample = NetworkFactory(16), 4096, 16 * 4
    for number in range(8):
        factory.linear(f"fc{number}", 16)
    factory.linear("head", classes)
    factory.loss()
    network, strategy = factory.network("wide"), parse_strategy("p2")

    def held(more: int) -> int:
        settings = plan_settings(batch=more * count, micro_batches=more * count, schedule=schedule)
        return pipelined_memory(network, strategy, settings).parts_bytes["activations"]

    # As many are under way. What the rank sends stays: its two stages send three tensors of a sample at most.
    assert held(2) - held(1) <= 3 * count * sample < classes * 4


@pytest.mark.parametrize("text", ["p4", "d2p4", "f2p4"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
@pytest.mark.parametrize("widths", [(32,) * 9, (32, 64, 32, 64, 32, 64, 32, 64, 16)])
def test_stages_alike_share_a_walk_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, text: str, schedule: str, widths: tuple[int, ...]
) -> None:
    network, walked = make_network(widths, buffers=True), []
    settings = plan_settings(batch=32, micro_batches=8, schedule=schedule)
    monkeypatch.setattr(memory, "_LATEST", Answers())
    monkeypatch.setattr(memory, "Walks", lambda *given, **named: walked.append(1) or Walks(*given, **named))
    together = pipelined_memory(network, parse_strategy(text), settings)
    shared = len(walked)
    # Another plan has the same stages.
    assert pipelined_memory(network, parse_strategy(text), settings) == together
    assert len(walked) == shared
    numbers = itertools.count()
    monkeypatch.setattr(memory, "likeness", lambda _: str(next(numbers)).encode())
    assert pipelined_memory(network, parse_strategy(text), settings) == together
    assert shared < len(walked) - shared
