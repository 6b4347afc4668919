"""What a search makes of predictions that were longer than their estimates, and which settings lie next to others."""

from __future__ import annotations

import numpy as np
import pytest
from profile_factory import make_network

from paradl_bench.plan.settings import PlanSettings
from predict.search.candidates.space import Space, find_space
from predict.search.pricing.corrections import Corrections, next_to


@pytest.fixture(scope="module")
def space() -> Space:
    return find_space(make_network((64, 512, 256, 512, 32)), PlanSettings(batch=16), 4, (1, 4, 25))


def some(space: Space, strategy: str, schedule: str = "gpipe") -> np.ndarray:
    """Candidates of a strategy and a schedule."""
    index = [str(each) for each in space.strategies].index(strategy)
    return np.flatnonzero((space.strategy == index) & (space.schedule == space.schedules.index(schedule)))


def test_a_schedule_on_a_mesh_uses_its_own_least_correction(space: Space) -> None:
    corrections, ones = Corrections(space), np.ones(len(space))
    assert np.array_equal(corrections.of(ones), ones)
    own, other = some(space, "p4"), some(space, "p4", "zb")
    for factor in (3.0, 2.0, 5.0):
        corrections.learn(int(own[0]), 1.0, factor)
    assert set(corrections.of(ones)[own]) == {2.0}
    corrections.learn(int(other[0]), 1.0, 1.5)
    assert set(corrections.of(ones)[own]) == {2.0}
    assert set(corrections.of(ones)[other]) == {1.5}


def test_an_unpredicted_mesh_takes_the_least_correction_until_known(space: Space) -> None:
    corrections, ones = Corrections(space), np.ones(len(space))
    untried = some(space, "p2d2")
    corrections.learn(int(some(space, "d4")[0]), 1.0, 1.25)
    corrections.learn(int(some(space, "p4")[0]), 1.0, 4.0)
    assert set(corrections.of(ones)[untried]) == {1.25}
    for strategy in ("d2p2", "f2p2"):
        corrections.learn(int(some(space, strategy)[0]), 1.0, 3.0)
    # Data parallelism tells nothing of pipelines, nor pipelines of it.
    assert set(corrections.of(ones)[untried]) <= {1.25, 3.0}
    assert set(corrections.of(ones)[some(space, "d2p2", "zb")]) <= {1.25, 3.0}


def test_each_kind_is_tried_before_others_correct_it(space: Space) -> None:
    corrections, ones = Corrections(space), np.ones(len(space))
    corrections.learn(int(some(space, "d4")[0]), 1.0, 1.25)
    corrections.learn(int(some(space, "z3d4")[0]), 1.0, 1.5)
    assert set(corrections.of(ones)[some(space, "f4")]) == {1.0}
    corrections.learn(int(some(space, "d2f2")[0]), 1.0, 3.0)
    # A third of the way from 1 for its axes, another third for their ZeRO stage, and another one for its options.
    assert corrections.of(ones)[some(space, "f4")] == pytest.approx(5 / 3 + 4 / 9 + 8 / 27)
    # Two thirds of the way to the least of other stages.
    assert corrections.of(ones)[some(space, "z2d4")] == pytest.approx(7 / 6)


def test_axes_that_were_tried_with_other_zero_stages_wait(space: Space) -> None:
    """All stages of f2 were tried one after the other, since each was taken to be as fast as its estimate."""
    corrections, ones = Corrections(space), np.ones(len(space))
    for strategy in ("d2f2", "z2d2f2"):
        corrections.learn(int(some(space, strategy)[0]), 1.0, 3.0)
    untried = corrections.of(ones)
    assert untried[some(space, "z3d2f2")].min() > 2.0
    assert untried[some(space, "d4")].max() == 1.0


def test_a_few_meshes_speak_for_their_kind() -> None:
    space = find_space(make_network((64, 512, 256, 512, 32)), PlanSettings(batch=16), 16, (1,))
    corrections, ones = Corrections(space), np.ones(len(space))
    for strategy, factor in (("d2f8", 3.0), ("d4f4", 2.0), ("d8f2", 4.0)):
        before = corrections.of(ones)[some(space, "f16")].max()
        corrections.learn(int(some(space, strategy)[0]), 1.0, factor)
    assert before < 2.0
    assert set(corrections.of(ones)[some(space, "f16")]) == {2.0}


def test_what_was_never_tried_takes_the_median_when_following(space: Space) -> None:
    corrections, ones = Corrections(space), np.ones(len(space))
    for strategy, factor in (("d4", 1.25), ("z3d4", 1.5), ("d2f2", 4.0)):
        corrections.learn(int(some(space, strategy)[0]), 1.0, factor)
    following = corrections.when_tried()
    # Two of three stages without other axes were tried: a third of the median is left.
    assert following.of(ones)[some(space, "z2d4")] == pytest.approx(1.5 / 3 + 1.25 * 2 / 3)
    following.learn(int(some(space, "d4")[0]), 1.0, 1.125)
    assert set(following.of(ones)[some(space, "d4")]) == {1.125}
    assert set(corrections.of(ones)[some(space, "d4")]) == {1.25}


def test_neighbours_differ_in_one_setting_by_one_step(space: Space) -> None:
    own = some(space, "p4")
    candidate = int(own[np.flatnonzero(space.micro_batches[own] == 4)[0]])
    found = next_to(space, candidate)
    assert candidate not in found
    assert set(space.strategy[found]) == {space.strategy[candidate]}
    for other in found.tolist():
        differing = [
            getattr(space, name)[other] != getattr(space, name)[candidate]
            for name in ("micro_batches", "schedule", "cap", "again")
        ]
        assert sum(differing) == 1
    assert set(space.micro_batches[found]) == {2, 4, 8}
    assert {space.schedules[index] for index in space.schedule[found].tolist()} >= {"gpipe", "1f1b", "zb"}
    exchanged = some(space, "d4")
    smallest = int(exchanged[np.flatnonzero(space.cap[exchanged] == space.caps_mb.index(1))[0]])
    sizes = {space.caps_mb[space.cap[other]] for other in next_to(space, smallest).tolist()}
    # Torch's default is next to all, 25 MiB two steps away.
    assert sizes == {None, 1, 4}
