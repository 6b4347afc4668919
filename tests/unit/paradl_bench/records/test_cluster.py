"""Clusters as nested levels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.files import read_cluster

ABCI = Cluster(
    name="abci",
    memory_bytes_per_rank=16e9,
    levels=(
        Level(name="node", ranks=4),
        Level(name="rack", ranks=136),
        Level(name="system", ranks=4096, contention=3),
    ),
)


@pytest.mark.parametrize(
    ("ranks", "level"), [(1, "node"), (4, "node"), (5, "rack"), (136, "rack"), (137, "system"), (4096, "system")]
)
def test_the_slowest_level_that_a_flat_ring_crosses(ranks: int, level: str) -> None:
    assert ABCI.level_of(ranks).name == level


def test_more_ranks_than_the_cluster_holds() -> None:
    with pytest.raises(UserError, match="4097 ranks do not fit cluster 'abci', which holds 4096"):
        ABCI.level_of(4097)


def test_ranks_of_a_node() -> None:
    assert ABCI.ranks_per_node == 4


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(1, 10**6))
def test_the_level_found_is_the_innermost_that_holds_the_ranks(sizes: list[int], ranks: int) -> None:
    levels = tuple(Level(name=f"level{index}", ranks=size) for index, size in enumerate(sorted(sizes)))
    cluster = Cluster(name="any", levels=levels)
    fitting = [level for level in levels if level.ranks >= ranks]
    if fitting:
        assert cluster.level_of(ranks) is fitting[0]
    else:
        with pytest.raises(UserError):
            cluster.level_of(ranks)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ranks": 0}, r">= 1 - at `\$\.ranks`"),
        ({"alpha_s": -1e-6}, r">= 0.0 - at `\$\.alpha_s`"),
        ({"beta_s_per_byte": math.nan}, r">= 0.0 - at `\$\.beta_s_per_byte`"),
        ({"alpha_s": math.inf}, r"<= 1000000000.0 - at `\$\.alpha_s`"),
        ({"contention": 0.5}, r">= 1.0 - at `\$\.contention`"),
        ({"contention": math.inf}, r"<= 1000000000.0 - at `\$\.contention`"),
    ],
)
def test_a_level_is_read_within_bounds(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        msgspec.convert({"name": "node", "ranks": 4} | change, Level)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"levels": ()}, "no levels"),
        (
            {"levels": (Level(name="node", ranks=8), Level(name="rack", ranks=4))},
            "'rack' holds fewer ranks",
        ),
        ({"levels": (Level(name="node", ranks=4), Level(name="node", ranks=8))}, "have one name"),
    ],
)
def test_a_cluster_validates_itself(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Cluster(**({"name": "abci", "levels": ABCI.levels} | change))


def test_a_cluster_survives_json_and_names_wrong_fields_by_path() -> None:
    assert msgspec.json.decode(msgspec.json.encode(ABCI), type=Cluster) == ABCI
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `bandwidth` - at `\$\.levels\[0\]`"):
        msgspec.convert({"name": "x", "levels": [{"name": "node", "ranks": 4, "bandwidth": 1e9}]}, Cluster)


def test_a_duplicate_yaml_key_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: a\nlevels:\n  - name: node\n    ranks: 2\n    ranks: 4\n")
    with pytest.raises(UserError, match=r"line 5: 'ranks' occurs twice in one mapping"):
        read_cluster(path)
