"""Contention comes back from groups at once and one alone, and predictions multiply beta by it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from network_factory import two_convolutions
from profile_factory import in_context, make_profile, ring_fit
from rich.console import Console

from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.fitting.contexts.context_fit import fit_contexts
from calibrate.fitting.merging.merge import merge_profiles
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.contexts import InContext, contention_of
from calibrate.profile.profile import Profile
from calibrate.report.diff import compare
from calibrate.report.sections.contexts_show import print_contexts
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.records.contexts.swept_groups import swept_groups
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

ALPHA_S, BETA_S_PER_BYTE = 50e-6, 1e-9
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


def sweep(
    phi: float,
    *,
    concurrent: int = 2,
    noise: float = 0.05,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
) -> list[Placed[CollectiveSamples]]:
    """All-reduces of groups of two ranks, alone and at once, in blocks that drift."""
    generator = np.random.default_rng(seed)
    found = []
    for block in range(5):
        drift = 1 + 0.05 * generator.standard_normal()
        for size in sizes:
            for groups in (1, concurrent):
                beta = BETA_S_PER_BYTE * (phi if groups > 1 else 1)
                seconds = 2 * (ALPHA_S + size / 2 * beta)
                for group in range(groups):
                    times = drift * seconds * np.exp(noise * generator.standard_normal((2, 12)))
                    record = CollectiveSamples(
                        library="gloo",
                        tool="torch",
                        operation="all_reduce",
                        level="node",
                        ranks=2,
                        message_bytes=size,
                        dtype="fp32",
                        block=block,
                        samples_s=tuple(map(tuple, times.tolist())),
                        verified=True,
                        concurrent=groups,
                        group=group,
                    )
                    found.append(Placed(0, record))
    return found


def fitted(
    records: Sequence[Placed[CollectiveSamples]], *, fits: Sequence[CommunicationFit] = (ring_fit(),)
) -> tuple[tuple[InContext, ...], tuple[str, ...]]:
    return fit_contexts((Placed(*pair) for pair in swept_groups(records)), fits, operations())


def entry(factor: float, groups: int = 2, *, sd: float = 0.0, **more: object) -> InContext:
    found = in_context("groups", groups=groups, factor=factor, covariance=((0.0, 0.0), (0.0, sd * sd)))
    return msgspec.structs.replace(found, **more)


def test_intervals_cover_a_known_phi_as_often_as_stated() -> None:
    """Twelve sweeps of each: a 90% interval has to hold the truth in nearly all of them, and not be wide."""
    for phi in (1.4, 2.0):
        held, widths = 0, []
        for seed in range(12):
            (found,), notes = fitted(sweep(phi, seed=seed))
            assert notes == ()
            assert found.factor == pytest.approx(phi, rel=0.1)
            held += abs(found.factor - phi) <= Z90 * found.factor_sd
            widths.append(2 * Z90 * found.factor_sd)
        assert held >= 9
        assert np.median(widths) < 0.2 * phi


def test_groups_measured_in_pairs_give_the_phi_of_a_sweep() -> None:
    """A sweep has its groups in one record, pairs have one each; the same fit reads both."""
    swept = sweep(2.0, noise=0.01)
    pairs = [
        Placed(directory, msgspec.structs.replace(record, end_s=tuple(row[of_group] for row in record.end_s)))
        for directory, record in swept_groups(swept)
        for of_group in (slice(12), slice(12, 24))
    ]
    (joined,), _ = fitted(swept)
    (found,), notes = fit_contexts(pairs, (ring_fit(),), operations())
    assert notes == ()
    assert found.factor == pytest.approx(joined.factor, rel=0.02)
    assert found.samples == joined.samples


@pytest.mark.parametrize(
    "changes", [{"groups": 1}, {"end_s": ()}, {"neighbour_s": ((1.0,) * 24,) * 2}, {"context": "after-compute"}]
)
def test_records_of_groups_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    _, record = next(iter(swept_groups(sweep(2.0))))
    assert record.groups == 2
    with pytest.raises(ValueError, match=r"not 1|not 2|not as many samples"):
        msgspec.structs.replace(record, **changes)


def test_groups_that_do_not_contend_have_a_phi_of_1() -> None:
    (found,), _ = fitted(sweep(0.9))
    assert found.factor == 1


def test_alpha_and_beta_are_those_of_groups_alone() -> None:
    records = sweep(3.0, noise=0.001)
    (fit,) = fit_communication((record for _, record in records), operations()).fits
    (alone,) = fit_communication((r for _, r in records if r.concurrent == 1), operations()).fits
    assert fit == alone
    assert fit.beta_s_per_byte == pytest.approx(BETA_S_PER_BYTE, rel=0.1)


def test_what_cannot_be_told_is_left_out_and_said() -> None:
    small = sweep(2.0, sizes=(8, 16, 32, 64))
    entries, (note,) = fitted(small)
    assert entries == ()
    assert "sweep larger sizes" in note
    together = [placed for placed in sweep(2.0) if placed.record.concurrent > 1]
    assert "no matching calls ran alone" in fitted(together)[1][0]
    assert "no fit of alpha and beta" in fitted(sweep(2.0), fits=())[1][0]


def test_phi_is_linear_between_group_counts_and_extrapolated_beyond() -> None:
    entries = [entry(3.0, 4), entry(2.0, 2)]
    assert [contention_of(entries, groups)[0] for groups in (1, 2, 3, 4, 6)] == [1, 2, 2.5, 3, 4]


def costs(
    levels: Sequence[Level], contention: Sequence[InContext] = (), given: Sequence[Level] = (), swept: int = 4
) -> CommunicationCosts:
    fits = tuple(ring_fit(level=level.name, ranks_range=(2, swept)) for level in levels)
    profile = make_profile(
        communication=fits, cluster=Cluster(name="measured", levels=tuple(levels)), contexts=tuple(contention)
    )
    return CommunicationCosts(profile, Cluster(name="given", levels=tuple(given)) if given else None, "gloo")


NODES = (Level(name="node", ranks=4), Level(name="system", ranks=64))


@pytest.mark.parametrize(
    ("strategy", "axes", "ranks", "groups"),
    [
        ("d2f2", (0,), 2, 2),  # two exchanges in the node
        ("d2f2", (1,), 2, 2),  # and two groups that share layers
        ("d4f4", (0,), 4, 4),  # of each node's four ranks one belongs to each exchange
        ("d4f4", (1,), 4, 1),  # a node holds one group that shares layers
        ("d16", (0,), 16, 1),
        ("d4p4", (0,), 4, 1),  # stages exchange in turns
        ("p2f2", (0,), 2, 2),  # a message for each of the two ranks of a stage
    ],
)
def test_groups_at_once_are_those_that_share_a_link(
    strategy: str, axes: tuple[int, ...], ranks: int, groups: int
) -> None:
    found, work = costs(NODES), Collective(operation="all_reduce", message_bytes=1 << 20, ranks=ranks, axes=axes)
    parsed = parse_strategy(strategy)
    level, _ = found.level(work, parsed)
    assert found.contention.groups_at_once(work, level, parsed) == groups


def test_segments_leave_a_node_together_and_leaders_alone() -> None:
    found, parsed = costs(NODES), parse_strategy("d16")
    work = Collective(
        operation="all_reduce", message_bytes=1 << 20, ranks=4, axes=(0,), scope="between nodes", per_node=4
    )
    level, _ = found.level(work, parsed)
    assert found.contention.groups_at_once(work, level, parsed) == 4
    measured = costs(NODES, [entry(2.5, 4, level="system")])
    assert measured.contention.sharing(work, level, parsed, 1).factor == 2.5
    assert measured.contention.sharing(work, level, parsed, 1, taking_part=0.25).factor == 1
    assert measured.contention.sharing(work, level, parsed, 1, taking_part=0.5).factor == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("operation", "strategy", "axes", "phi"),
    [
        ("all_reduce", "d4f4", (0,), 4.0),
        ("reduce_scatter", "d4s2f2", (0,), 4.0),
        ("all_gather", "d4f2s2", (0, 1), 2.0),
        # Whole nodes have all of their links, and a group inside of a node needs none between nodes.
        ("all_reduce", "d16", (0,), 1.0),
        ("all_reduce", "d4f4", (1,), 1.0),
        # What each rank sends to others directly passes no other one of its node.
        ("send_recv", "d4f4", (0,), 1.0),
        ("all_to_all", "d4f4", (0,), 1.0),
        # Stages take turns, but a rank alone has its share of the links at any time.
        ("all_gather", "f4p4", (0,), 4.0),
    ],
)
def test_a_group_has_its_share_of_unmeasured_links(
    operation: str, strategy: str, axes: tuple[int, ...], phi: float
) -> None:
    parsed, found = parse_strategy(strategy), costs(NODES, swept=64)
    work = Collective(operation=operation, message_bytes=1 << 20, ranks=4, axes=axes)
    level, _ = found.level(work, parsed)
    sharing = found.contention.sharing(work, level, parsed, found._ranks_per_node(work, parsed))
    assert sharing.factor == phi
    assert sharing.factor_sd == pytest.approx(0.1 * phi if phi > 1 else 0.0)
    if phi > 1:
        assert any(f"contention was not measured and is taken as {phi:g}" in each.text for each in sharing.remarks)


@pytest.mark.parametrize(("swept", "phi"), [(2, 1.0), (4, 2.0), (8, 4.0), (64, 4.0)])
def test_a_sweep_of_few_ranks_had_few_on_each_node(swept: int, phi: float) -> None:
    parsed, found = parse_strategy("d4f4"), costs(NODES, swept=swept)
    work = Collective(operation="all_reduce", message_bytes=1 << 20, ranks=4, axes=(0,))
    assert found.contention.sharing(work, found.level(work, parsed)[0], parsed, 1).factor == phi


@pytest.mark.parametrize(
    ("of_node", "strategy", "per_node", "phi"),
    [(2, "d8f2", 1, 4.0), (2, "d16", 2, 2.0), (4, "d4f4", 1, 4.0), (8, "d2f8", 1, 4.0), (8, "d16", 8, 1.0)],
)
def test_shares_are_of_nodes_that_were_swept(of_node: int, strategy: str, per_node: int, phi: float) -> None:
    given = (Level(name="node", ranks=of_node), NODES[1])
    parsed, found = parse_strategy(strategy), costs(NODES, given=given, swept=64)
    work = Collective(operation="all_reduce", message_bytes=1 << 20, ranks=parsed.axes[0].degree, axes=(0,))
    assert found._ranks_per_node(work, parsed) == per_node
    assert found.contention.sharing(work, found.level(work, parsed)[0], parsed, per_node).factor == phi


def test_one_group_alone_is_not_called_groups_at_once() -> None:
    parsed, found = parse_strategy("f4p4"), costs(NODES, swept=64)
    work = Collective(operation="all_gather", message_bytes=1 << 20, ranks=4, axes=(0,))
    (remark,) = found.contention.sharing(work, found.level(work, parsed)[0], parsed, 1).remarks
    assert remark.text.startswith("1 rank a node in a group, where sweeps had 4, over level 'system': contention")


def test_links_that_a_person_states_are_a_groups_own() -> None:
    stated = (NODES[0], msgspec.structs.replace(NODES[1], alpha_s=1e-5, beta_s_per_byte=1e-9))
    work = Collective(operation="all_reduce", message_bytes=1 << 20, ranks=4, axes=(0,))
    parsed, found = parse_strategy("d4f4"), costs(NODES, given=stated, swept=64)
    assert found.contention.sharing(work, found.level(work, parsed)[0], parsed, 1).factor == 1


def test_phi_multiplies_beta_and_not_alpha() -> None:
    work = Collective(operation="all_reduce", message_bytes=1 << 20, ranks=2, axes=(0,))
    strategy = parse_strategy("d2f2")
    alone = costs(NODES[:1]).cost(work, strategy)
    assert any("contention was not measured and is taken as 1" in remark.text for remark in alone.cost.remarks)
    shared = costs(NODES[:1], [entry(2.0, sd=0.1)]).cost(work, strategy)
    assert shared.cost.seconds - alone.cost.seconds == pytest.approx((1 << 20) * BETA_S_PER_BYTE)
    assert not shared.cost.remarks
    assert dict(shared.modes)["contention at node"] == pytest.approx(0.1 * (1 << 20) * 1e-9)


def test_a_cluster_file_wins() -> None:
    work = Collective(operation="all_reduce", message_bytes=1 << 20, ranks=2, axes=(0,))
    strategy = parse_strategy("d2f2")
    given = costs(NODES, [entry(2.0)], given=[Level(name="node", ranks=4, contention=1.0)]).cost(work, strategy)
    assert given.cost.seconds == pytest.approx(2 * ALPHA_S + (1 << 20) * BETA_S_PER_BYTE)
    silent = costs(NODES, [entry(2.0)], given=[Level(name="node", ranks=4)]).cost(work, strategy)
    assert silent.cost.seconds == pytest.approx(2 * ALPHA_S + 2 * (1 << 20) * BETA_S_PER_BYTE)


def test_more_groups_than_measured_and_other_operations_are_flagged() -> None:
    work = Collective(operation="broadcast", message_bytes=1 << 20, ranks=2, axes=(0,))
    found = costs((Level(name="node", ranks=8),), [entry(2.0)]).contention
    sharing = found.sharing(work, Level(name="node", ranks=8), parse_strategy("d2f4"), 2)
    assert sharing.factor == 4
    assert [remark.text for remark in sharing.remarks] == [
        "broadcast at level 'node' groups at once: as all_reduce at level 'node' groups at once",
        "contention of 4 groups, beyond the 2 that were measured at once",
    ]


NETWORK = two_convolutions()


def profile_with(contention: Sequence[InContext]) -> Profile:
    names = ("all_reduce", "all_gather", "broadcast")
    return make_profile(NETWORK, communication=tuple(map(ring_fit, names)), contexts=tuple(contention))


def test_the_prediction_of_data_and_filter_parallelism_changes_accordingly() -> None:
    """What phi adds to the iteration is its part of the bytes of every collective that the plan holds."""
    everything = [entry(2.0, operation=name) for name in ("all_reduce", "all_gather")]
    asked = Configuration(strategy=parse_strategy("d2f2"), settings=PlanSettings(batch=8))
    seconds = []
    for contention in ((), everything):
        profile = profile_with(contention)
        wide = msgspec.structs.replace(profile, cluster=Cluster(name="host", levels=(Level(name="node", ranks=4),)))
        model = CostModel(profile=wide, network=NETWORK)
        seconds.append(Predictor(model, evaluator_named("simulate")).predict(asked).time.communication_s)
    plan = planner_for(asked.strategy).plan(NETWORK, asked.strategy, asked.settings)
    works = [work for work in plan.communication() if isinstance(work, Collective)]
    moved = sum(work.message_bytes for work in works)
    # A ring over two ranks moves m of an all-reduce, and m of an all-gather.
    assert seconds[1] - seconds[0] == pytest.approx(moved * BETA_S_PER_BYTE, rel=1e-6)


def test_profiles_show_compare_and_merge_it() -> None:
    one, other = profile_with([entry(2.0, sd=0.05)]), profile_with([entry(3.0, sd=0.05)])
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    print_contexts(one, console)
    assert "2.00 ± 0.08" in console.export_text()
    moved = {movement.what: movement for movement in compare(one, other).moved}
    assert moved["slow-down of gloo all_reduce, level node, 2 ranks, groups=2"].relative == pytest.approx(0.5)
    bare = {"network": {}, "layer_times": (), "model_times": (), "communication": (), "copies": ()}
    parts = [msgspec.structs.replace(each, **bare) for each in (one, profile_with([entry(3.0, 4)]))]
    merged = merge_profiles(parts, ["a", "b"], command_line=(), force=False)
    assert [each.groups for each in merged.contexts] == [2, 4]
    assert merge_profiles([parts[0], parts[0]], ["a", "b"], command_line=(), force=False).contexts == one.contexts
    with pytest.raises(UserError, match="both hold contexts of gloo all_reduce node groups 2"):
        merge_profiles([parts[0], msgspec.structs.replace(other, **bare)], ["a", "b"], command_line=(), force=False)


def test_records_of_one_directory_are_held_against_those_of_it() -> None:
    """A slower day, measured in another directory, does not count as contention."""
    slow = [
        Placed(1, msgspec.structs.replace(r, samples_s=tuple(tuple(5 * t for t in row) for row in r.samples_s)))
        for _, r in sweep(2.0, seed=1)
        if r.concurrent == 1
    ]
    (found,), _ = fitted([*slow, *sweep(2.0)])
    assert found.factor == pytest.approx(2.0, rel=0.15)
