"""Racks of emulated nodes: their layout, what passes between them, and the three levels of a profile; no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, write_collectives

from calibrate.fitting.fit import fit_profile
from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.profile import Profile
from calibrate.report.weakness import sweep_command
from paradl_bench.core.errors import UserError
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.ranks.emulated_nodes.layout import layout_of_options
from paradl_bench.records.cluster import Cluster, Level, nested
from paradl_bench.records.emulation import EmulatedNodes, EmulatedRacks, Emulation
from paradl_bench.records.measurement import Environment
from predict.costs.communication.communication_costs import CommunicationCosts

LINK, UPLINK = 25e6, 6.25e6
RATES = "200Mbit/s,50Mbit/s"
BETAS = {"node": 1e-9, "rack": 4e-8, "system": 1.6e-7}


@pytest.mark.parametrize(
    ("nodes", "per_node", "ranks", "expected", "switches"),
    [
        ("2x2", 2, None, "2x2x2", ["rack0", "rack0", "rack1", "rack1"]),
        ("2x3", None, 6, "2x3x1", ["rack0"] * 3 + ["rack1"] * 3),
        ("3x1", None, 6, "3x1x2", ["rack0", "rack1", "rack2"]),
        ("1x2", None, 2, "1x2x1", ["rack0", "rack0"]),
    ],
)
def test_nodes_are_shared_out_over_racks(
    nodes: str, per_node: int | None, ranks: int | None, expected: str, switches: list[str]
) -> None:
    layout = layout_of_options(nodes, per_node, RATES, ranks=ranks)
    assert layout is not None
    assert (str(layout), layout.link_bytes_per_s, layout.slowest_bytes_per_s) == (expected, LINK, UPLINK)
    assert layout.racks == EmulatedRacks(count=int(nodes[0]), uplink_bytes_per_s=UPLINK)
    assert [layout.switch_of(node) for node in range(layout.nodes)] == switches


@pytest.mark.parametrize(
    ("nodes", "rates", "message"),
    [
        ("2x2x2", RATES, "--nodes 2x2x2: give how many nodes, as 4, or how many racks and nodes in each, as 2x2"),
        ("0x2", RATES, "--nodes 0x2: give how many nodes"),
        ("2x", RATES, "--nodes 2x: give how many nodes"),
        ("2x-1", RATES, "--nodes 2x-1: give how many nodes"),
        ("", RATES, "--nodes : give how many nodes"),
        (
            "2x2",
            "1Gbit/s",
            "give the rates of each node's link and each rack's uplink, as --link-bandwidth 1Gbit/s,200",
        ),
        (
            "2x2",
            None,
            "give the rates of each node's link and each rack's uplink as well, as --link-bandwidth 1Gbit/s,",
        ),
        (
            "2",
            RATES,
            "--nodes 2: give the rate of each node's link, as --link-bandwidth 1Gbit/s; --link-bandwidth has 2",
        ),
        ("2x2", "1Gbit/s,fast", "--link-bandwidth: 'fast' is no rate"),
        ("2x2", "1Gbit/s,1bit/s", "--link-bandwidth 1Gbit/s,1bit/s: give a rate from 1kB/s to 100GB/s"),
        ("2x4", RATES, "--nodes 2x4: the run has 4 ranks, fewer than nodes"),
        ("3x1", RATES, "--nodes 3x1, which 4 ranks do not fill equally"),
    ],
)
def test_racks_that_cannot_be_laid_out_are_refused(nodes: str, rates: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout_of_options(nodes, None, rates, ranks=4)


def racked(nodes: int, per_node: int, racks: int, *, uplink: float = UPLINK) -> EmulatedNodes:
    of = EmulatedRacks(count=racks, uplink_bytes_per_s=uplink)
    return EmulatedNodes(nodes=nodes, ranks_per_node=per_node, link_bytes_per_s=LINK, racks=of, shaping="tbf")


def test_ranks_of_one_rack_are_known_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from paradl_bench.ranks.groups.teams import level_spanned

    hosts = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    groups: list[Sequence[int]] = [range(2), range(4), range(2, 4), range(4, 8), range(0, 8, 4), range(8)]

    def levels() -> list[str]:
        return [level_spanned(hosts, group) for group in groups]

    flat = msgspec.structs.replace(racked(4, 2, 2), racks=None)
    for record in (None, flat):
        if record is not None:
            monkeypatch.setenv("PARADL_EMULATED_NODES", msgspec.json.encode(record).decode())
        assert levels() == ["node", "system", "node", "system", "system", "system"]
    monkeypatch.setenv("PARADL_EMULATED_NODES", msgspec.json.encode(racked(4, 2, 2)).decode())
    assert levels() == ["node", "rack", "node", "rack", "system", "system"]


def test_racks_that_nodes_do_not_fill_are_no_record() -> None:
    with pytest.raises(ValueError, match="3 nodes do not fill 2 racks equally"):
        racked(3, 1, 2)


def environment(nodes: EmulatedNodes) -> Environment:
    return msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(nodes=nodes))


def sweeps(path: Path) -> dict[str, Path]:
    """Of two ranks inside a node, of four inside a rack, of two in two racks: the farther out, the slower."""
    of = {"node": (racked(1, 2, 1), 2), "rack": (racked(2, 2, 1), 4), "system": (racked(2, 1, 2), 2)}
    return {
        level: write_collectives(
            path / level,
            CollectivesSpec(ranks=(ranks,), level=level, beta_s_per_byte=BETAS[level], noise=0.005),
            environment=environment(nodes),
        )
        for level, (nodes, ranks) in of.items()
    }


def fit(*directories: Path) -> Profile:
    return fit_profile(directories, command_line=("calibrate", "fit"), force=False)


def test_each_group_of_a_strategy_pays_its_own_level(tmp_path: Path) -> None:
    profile = fit(*sweeps(tmp_path).values())
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 2), ("rack", 4), ("system", 4)]
    # As a user's file has it: whole levels, by the names of those that were measured.
    levels = (
        Level(name="node", ranks=2),
        Level(name="rack", ranks=4, contention=1.0),
        Level(name="system", ranks=64, contention=1.0),
    )
    costs = CommunicationCosts(profile, Cluster(name="more racks", levels=levels, memory_bytes_per_rank=1e9), "gloo")
    strategy, size = parse_strategy("d2c2f2"), 1 << 24
    found = {}
    for axis, level in enumerate(("system", "rack", "node")):
        work = Collective(operation="all_reduce", message_bytes=size, ranks=2, axes=(axis,))
        assert costs.level(work, strategy)[0].name == level
        found[level] = costs.cost(work, strategy).cost.seconds
    # Of two ranks each sends and receives as much as the message has.
    assert found == pytest.approx({level: size * beta for level, beta in BETAS.items()}, rel=0.05)
    everyone = Collective(operation="all_reduce", message_bytes=size, ranks=8, axes=(0, 1, 2))
    assert costs.level(everyone, strategy)[0].name == "system"


def test_the_system_contains_racks_whatever_was_swept_first(tmp_path: Path) -> None:
    directories = sweeps(tmp_path)
    expected = [("node", 2), ("rack", 4), ("system", 4)]
    outward = [
        fit(*(directories[name] for name in order)) for order in (("system", "rack", "node"), ("rack", "system"))
    ]
    alone = [fit(directories["system"]), fit(directories["rack"])]
    merged = merge_profiles(alone, names=("system", "rack"), command_line=("calibrate", "merge"), force=False)
    for profile in (*outward, merged):
        assert [(level.name, level.ranks) for level in profile.cluster.levels] == expected
    # Of real clusters an outer level may have any name.
    other = nested(Level(name="node", ranks=4), [Level(name="island", ranks=64), Level(name="system", ranks=16)])
    assert [level.name for level in other] == ["node", "system", "island"]


def test_racks_of_another_rate_are_another_cluster(tmp_path: Path) -> None:
    spec = CollectivesSpec(ranks=(4,), level="rack")
    one = write_collectives(tmp_path / "one", spec, environment=environment(racked(2, 2, 1)))
    for number, nodes in enumerate((racked(2, 2, 1, uplink=1e6), msgspec.structs.replace(racked(2, 2, 1), racks=None))):
        other = write_collectives(tmp_path / f"other{number}", spec, environment=environment(nodes))
        with pytest.raises(UserError, match="different environments"):
            fit(one, other)


def test_commands_that_help_name_racks_again(tmp_path: Path) -> None:
    profile = fit(*sweeps(tmp_path).values())
    rates = f"--link-bandwidth {RATES}"
    for ranks, level, nodes, on_node in (
        (2, "node", "1x1", 2),
        (4, "rack", "1x2", 2),
        (2, "rack", "1x2", 1),
        (8, "system", "2x2", 2),
        (4, "system", "2x1", 2),
        (2, "system", "2x1", 1),
    ):
        command = f"paradl-bench collectives --nodes {nodes} --ranks-per-node {on_node} {rates}"
        assert sweep_command(profile, "gloo", ranks, level) == command
