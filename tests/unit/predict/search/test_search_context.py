"""All exchanges of context parallelism are searched, each priced as itself and where heads allow it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from profile_factory import ring_fit
from search_cases import asked, exactly, found, profile_of

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.context.options import ContextOptions
from predict.costs.cost_model import CostModel
from predict.search.candidates.space import find_space
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.shared_work import SharedWorks


@pytest.fixture(scope="module")
def network() -> ModelGraph:
    """Four heads of queries and two of keys, eight tokens."""
    return trace_network(load_model("transformer_networks:llama_tokens"))


@pytest.fixture(scope="module")
def profile(network: ModelGraph) -> Profile:
    made = profile_of(network)
    return profile_of(network, communication=(*made.communication, ring_fit("all_to_all")))


def test_each_exchange_is_estimated_from_below_where_heads_allow(network: ModelGraph, profile: Profile) -> None:
    costs = CostModel(profile=profile, network=network)
    space = find_space(network, PlanSettings(batch=8, blocking=True), 4, ())
    estimates = Estimates(costs, space, SharedWorks(network, space.settings)).seconds()
    times: dict[str, dict[str, float]] = {}
    for candidate in range(len(space)):
        strategy, settings = str(space.strategies[space.strategy[candidate]]), space.settings_of(candidate)
        if strategy in ("x4", "d2x2", "x2t2", "t2x2", "p2x2") and settings.accumulate == 1 and not settings.recompute:
            exact = exactly(costs, settings, strategy)
            assert estimates[candidate] <= exact * (1 + 1e-9)
            times.setdefault(strategy, {})[settings.of(ContextOptions).context_exchange] = exact
    assert {name: set(each) for name, each in times.items()} == {
        "x4": {"gather", "ring"},
        "d2x2": {"gather", "all-to-all", "ring"},
        # Tensor parallelism leaves a head of keys.
        "x2t2": {"gather", "ring"},
        "t2x2": {"gather", "ring"},
        "p2x2": {"gather", "all-to-all", "ring"},
    }
    assert len(set(times["d2x2"].values())) == 3
    refused = [text for text in space.impossible.counts if text.startswith("context")]
    assert any("p <= 2: 2 heads of keys" in text for text in refused)


def test_a_rings_messages_are_told_by_what_waits_for_them(network: ModelGraph) -> None:
    shared = SharedWorks(network, PlanSettings(batch=8))
    (axis,) = parse_strategy("x4").axes
    work = shared.of(((axis,), (ContextOptions(context_exchange="ring"),)))
    # Of two own tokens: keys and values of two heads, of four features each.
    assert {(each.operation, each.bytes_per_sample) for each in work.messages} == {("send_recv", 2 * 2 * 2 * 4 * 4)}
    counts = Counter[tuple[str, bool]]()
    for each in work.messages:
        counts[each.phase, each.beside] += each.times
    assert counts == {("FW", True): 2 * 3, ("BW", True): 2 * (3 + 2), ("BW", False): 2}
    attention = next(at for at, layer in enumerate(network.layers) if layer.kind == "attention")
    assert work.share[attention] == pytest.approx(1 / 4)


def test_a_row_says_the_exchange_that_it_was_predicted_with(
    tmp_path: Path, network: ModelGraph, profile: Profile
) -> None:
    write_profile(tmp_path / "p.json", profile)
    options = "--ranks", "2", "--batch", "8", "--predictions", "400", "--top", "99"
    rows = found(tmp_path / "p.json", *options, model=network.name)["rows"]
    of_context = [row for row in rows if row["prediction"]["strategy"] == "x2"]
    assert of_context
    for row in of_context:
        _, given, rest = row["predict_command"].partition("--context-exchange ")
        assert (rest.split()[0] if given else None) == row["prediction"]["options"].get("context_exchange")
    given = asked(tmp_path / "p.json", *options, "--context-exchange", "gather", model=network.name)
    assert isinstance(given.exception, UserError)
    assert "tries all there are" in str(given.exception)
