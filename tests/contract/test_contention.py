"""Groups that share a link: the simulation takes the closed form's phi, for as long as its collective lasts."""

from __future__ import annotations

import pytest
from profile_factory import in_context, make_network, make_profile, ring_fit

from calibrate.profile.profile import Profile
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

NETWORK = make_network((64, 128, 256, 32))
GRADIENT_BYTES = 4 * (64 * 128 + 128 + 128 * 256 + 256 + 256 * 32 + 32)
ALPHA_S, BETA_S = 50e-6, 1e-9
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
ONE_BUCKET = 1 << 40


def profile_with(phi: float) -> Profile:
    """Nodes of four ranks; four groups at once between nodes take phi times the beta of one."""
    measured = [in_context("groups", operation, level="system", groups=4, factor=phi) for operation in OPERATIONS]
    levels = (Level(name="node", ranks=4), Level(name="system", ranks=4096))
    return make_profile(
        NETWORK,
        cluster=Cluster(name="test", levels=levels, memory_bytes_per_rank=8e9),
        communication=tuple(ring_fit(name, level=level.name) for name in OPERATIONS for level in levels),
        contexts=tuple(measured),
    )


def predicted(profile: Profile, text: str, evaluator: str, *, stated: float | None = None, **how: object) -> Prediction:
    wanted = {"batch": 16, "first_bucket_bytes": ONE_BUCKET, "bucket_cap_bytes": ONE_BUCKET} | how
    levels = (Level(name="node", ranks=4), Level(name="system", ranks=4096, contention=stated))
    cluster = None if stated is None else Cluster(name="given", levels=levels, memory_bytes_per_rank=8e9)
    costs = CostModel(profile=profile, network=NETWORK, cluster=cluster)
    point = Configuration(strategy=parse_strategy(text), settings=plan_settings(**wanted))  # type: ignore[arg-type]
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


@pytest.mark.parametrize("phi", [1.0, 1.7, 4.0])
def test_exchanges_of_replicas_that_share_layers_share_a_nodes_link(phi: float) -> None:
    """d4f4: each node's four ranks are in an exchange of their own; 2 (p1 - 1) (alpha + W / p phi beta)."""
    exchange_s = 2 * 3 * (ALPHA_S + GRADIENT_BYTES / 4 / 4 * phi * BETA_S)
    for stated in (None, phi):
        measured = profile_with(phi if stated is None else 1.0)
        simulated, paradl = (predicted(measured, "d4f4", name, stated=stated) for name in ("simulate", "paradl"))
        assert paradl.time.breakdown_s["GE"] == pytest.approx(exchange_s)
        assert simulated.time.breakdown_s["GE"] == pytest.approx(exchange_s)


@pytest.mark.parametrize("phi", [1.0, 1.7, 4.0])
def test_concurrent_segments_share_links_between_nodes_only(phi: float) -> None:
    """Segmented: reduce-scatter in the node, p2 all-reduces at once of m / p2 between nodes, all-gather."""
    segment = GRADIENT_BYTES / 4
    within_s = 2 * 3 * (ALPHA_S + segment * BETA_S)
    between_s = 2 * 3 * (ALPHA_S + segment / 4 * phi * BETA_S)
    found = predicted(profile_with(phi), "d16", "simulate", exchange="segmented", ranks_per_node=4)
    assert found.time.breakdown_s["GE"] == pytest.approx(within_s + between_s)


def test_one_leader_a_node_has_the_link_to_itself() -> None:
    few, many = (
        predicted(profile_with(phi), "d16", "simulate", exchange="leader", ranks_per_node=4).iteration_s
        for phi in (1.0, 4.0)
    )
    assert few == many
