"""Two profiles held against each other: what moved, what would have by chance, and what differs around them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from profile_factory import ENVIRONMENT, make_profile, summary

from calibrate.cli import group
from calibrate.profile.profile import LayerTime, Profile, write_profile
from calibrate.report.diff import compare
from calibrate.statistics.blocks import block_sd

LAYERS = 400


def drawn(seed: int, *, blocks: int = 8, moved: dict[int, float] | None = None, noise: float = 0.02) -> Profile:
    """A profile of so many layers of 1 ms, each the median of so many blocks; some take another share of that."""
    draw = np.random.default_rng(seed)
    times = []
    for layer in range(LAYERS):
        values = 1e-3 * (moved or {}).get(layer, 1.0) * (1 + draw.normal(0, noise, blocks))
        median = float(np.median(values))
        times.append(
            LayerTime(
                operation=f"layer{layer}",
                phase="FW",
                mode="in_situ",
                batch=8,
                dtype="fp32",
                ranks_on_host=1,
                time=summary(median),
                block_relative_sd=block_sd(values) / median,
                blocks=blocks,
            )
        )
    return make_profile(layer_times=tuple(times), model_times=(), copies=(), communication=(), contexts=())


@pytest.mark.parametrize("blocks", [3, 5, 10])
def test_as_many_exceed_their_interval_by_chance_as_is_said(blocks: int) -> None:
    counts = [len(compare(drawn(seed, blocks=blocks), drawn(1000 + seed, blocks=blocks)).moved) for seed in range(8)]
    share = sum(counts) / (LAYERS * len(counts))
    # Welch's degrees of freedom are cautious where blocks are few.
    assert 0.06 <= share <= 0.12
    found = compare(drawn(1, blocks=blocks), drawn(2, blocks=blocks))
    assert found.expected_by_chance == pytest.approx(0.1 * found.compared)
    assert found.stand_out <= 2


def test_what_moved_stands_out_among_what_moved_by_chance() -> None:
    moved = {7: 1.2, 30: 0.8, 211: 1.3}
    found = compare(drawn(1), drawn(2, moved=moved))
    names = {m.what.rpartition(" ")[2] for m in found.moved if m.stands_out}
    assert names >= {"layer7", "layer30", "layer211"}
    assert len(names) <= 5
    assert {m.what.rpartition(" ")[2] for m in found.moved[:3]} == {"layer7", "layer30", "layer211"}
    by_share = compare(drawn(1), drawn(2, moved=moved), order="relative").moved
    assert [m.what.rpartition(" ")[2] for m in by_share[:1]] == ["layer211"]
    (layers,) = (each for each in found.groups if each.group == "layer_times")
    assert layers.median_relative == pytest.approx(0, abs=0.003)
    slower = compare(drawn(1), drawn(2, moved=dict.fromkeys(range(LAYERS), 1.05)))
    assert slower.groups[-1].median_relative == pytest.approx(0.05, abs=0.005)


def test_where_blocks_are_not_known_the_spread_of_one_counts() -> None:
    known = drawn(1, blocks=9)
    times = tuple(msgspec.structs.replace(time, blocks=0) for time in known.layer_times)
    unknown = msgspec.structs.replace(known, layer_times=times)
    later = drawn(2, blocks=9)
    wide, narrow = (
        np.median([m.interval_relative for m in compare(each, later).moved if m.interval_relative])
        for each in (unknown, known)
    )
    assert wide > 1.5 * narrow


def test_what_differs_between_the_environments_is_said_first(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(
        ENVIRONMENT,
        versions={**ENVIRONMENT.versions, "driver": "570"},
        variables={"NCCL_ALGO": "Ring"},
        commit="0a1b2c3d",
    )
    first, second = drawn(1), msgspec.structs.replace(drawn(2), environments=(newer,))
    changes = {change.what: (change.first, change.second) for change in compare(first, second).changes}
    assert changes == {
        "version of driver": ((), ("570",)),
        "variable NCCL_ALGO": ((), ("Ring",)),
        "commit": ((), ("0a1b2c3d",)),
    }
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, profile in zip(paths, (first, second), strict=True):
        write_profile(path, profile)
    out = CliRunner().invoke(group, ["diff", *map(str, paths)]).output
    assert out.index("version of driver") < out.index("numbers moved")


def test_the_exit_code_says_whether_something_stands_out_if_asked(tmp_path: Path) -> None:
    names = {"a": drawn(1), "b": drawn(2, moved={7: 1.5})}
    for name, profile in names.items():
        write_profile(tmp_path / name, profile)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(group, ["diff", *arguments])
        return result.exit_code, result.output

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run(a, b)[0] == 0
    assert run(a, b, "--exit-code")[0] == 1
    assert run(a, a, "--exit-code")[0] == 0
    code, text = run(a, b, "--json", "--sort", "relative")
    assert code == 0
    assert json.loads(text)["moved"][0]["what"].endswith("layer7")


def test_numbers_without_a_spread_are_listed_apart() -> None:
    device = make_profile().devices[0]
    faster = msgspec.structs.replace(device, peak_flops=2e11)
    found = compare(drawn(1), msgspec.structs.replace(drawn(1), devices=(faster,)))
    assert found.moved == ()
    assert [round(m.relative, 6) for m in found.without_spread] == [1.0]
