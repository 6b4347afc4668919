"""The best that ``predict search`` finds is that of predicting every candidate, on spaces small enough for that."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from profile_factory import make_network
from search_cases import exactly, found, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.plan.settings import PlanSettings
from predict.costs.cost_model import CostModel
from predict.search.candidates.space import find_space

WIDTHS = ((64, 512, 256, 512, 32), (256, 128, 64, 32), (128,) * 6, (32, 32, 2048))
"""Of layers in a row: uneven ones, ever narrower ones, equal ones, and one that outweighs all others."""
RANKS_AND_BATCH = ((2, 2), (2, 4), (3, 3), (3, 6), (4, 4))
CAP_MB = 0.25


@pytest.mark.parametrize(("widths", "sizes"), [*product(WIDTHS, RANKS_AND_BATCH)])
def test_the_best_of_twenty_spaces_equals_exhaustive_prediction(
    tmp_path: Path, widths: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    network, (ranks, batch) = make_network(widths), sizes
    profile = profile_of(network)
    write_profile(tmp_path / "p.json", profile)
    costs = CostModel(profile=profile, network=network)
    space = find_space(network, PlanSettings(batch=batch, blocking=True), ranks, (CAP_MB,))
    strategies = [str(space.strategies[index]) for index in space.strategy]
    every = [exactly(costs, space.settings_of(index), strategy) for index, strategy in enumerate(strategies)]
    wanted = ("--ranks", str(ranks), "--batch", str(batch), "--caps", str(CAP_MB), "--predictions", "400")
    answer = found(tmp_path / "p.json", *wanted)
    (searched,) = answer["searched"]
    assert searched["candidates"] == len(every)
    assert answer["rows"][0]["prediction"]["iteration_s"] == pytest.approx(min(every), rel=1e-12)
