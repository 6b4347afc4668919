"""What tells nodes apart, and what makes them alike; how many ranks of srun share one."""

from __future__ import annotations

import platform

import pytest

from paradl_bench.ranks.rank_place import cluster_or_host, node_name, ranks_of_node


def test_a_node_is_named_by_slurm_in_a_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert node_name() == platform.node()
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert node_name() == "node7"


def test_a_cluster_stands_for_its_nodes_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.delenv("PARADL_CLUSTER", raising=False)
    assert cluster_or_host() == platform.node()
    monkeypatch.setenv("PARADL_CLUSTER", "abci")
    assert cluster_or_host() == "abci"


def test_srun_ranks_per_node_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROCID", 0), ("NTASKS", 2), ("LOCALID", 0), ("STEP_TASKS_PER_NODE", "1(x2)")):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert ranks_of_node("srun", 2) == 1
