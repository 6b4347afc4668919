"""Time slices of ranks that share a core are short while emulated nodes are up, and as before after them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paradl_bench.ranks.emulated_nodes import time_slices
from paradl_bench.ranks.emulated_nodes.time_slices import SHORT_MS, short_time_slices
from paradl_bench.records.emulation import EmulatedNodes


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of the kernel's."""
    file = tmp_path / "sched_rr_timeslice_ms"
    file.write_text("100\n")
    monkeypatch.setattr(time_slices, "_SYSCTL", file)
    return file


def test_time_slices_are_short_until_the_body_ends(setting: Path) -> None:
    with short_time_slices() as held_ms:
        assert (held_ms, setting.read_text()) == (SHORT_MS, str(SHORT_MS))
    assert setting.read_text() == "100"


def test_short_time_slices_are_left_to_who_made_them(setting: Path) -> None:
    setting.write_text("1\n")
    with short_time_slices() as held_ms:
        assert held_ms == 1
    assert setting.read_text() == "1\n"


def test_a_forbidden_time_slice_stays(setting: Path) -> None:
    setting.unlink()
    setting.mkdir()
    with short_time_slices() as held_ms:
        assert held_ms == 100


def test_other_time_slices_are_another_cluster() -> None:
    long = EmulatedNodes(nodes=2, ranks_per_node=1, link_bytes_per_s=125e6, shaping="tbf")
    short = msgspec.structs.replace(long, time_slice_ms=4)
    assert long.kind == "nodes with links of 125 MB/s (tbf)"
    assert short.kind == "nodes with links of 125 MB/s (tbf), time slices of 4 ms"
