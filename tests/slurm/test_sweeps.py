"""What the sweeps of a chain measure, by the strategies that are to be predicted."""

from __future__ import annotations

import pytest

from paradl_bench.slurm.chain import chain_of
from paradl_bench.slurm.estimate import Estimate
from paradl_bench.slurm.jobs.job import Word
from paradl_bench.slurm.jobs.request import OPERATIONS, CalibrationRequest, operations_of
from paradl_bench.slurm.jobs.site import Site

CPUS = Site(device="cpu", ranks_per_node=4)
GPUS = Site(device="cuda", gpus_per_node=4, nccl_tests="/opt/nccl-tests")


def sweeps(site: Site, strategies: tuple[str, ...], operations: str) -> list[tuple[Word, ...]]:
    """Words of the commands, of torch's sweeps and of nccl-tests', on one node and on two."""
    request = CalibrationRequest(
        models=("resnet18",), nodes=(1, 2), strategies=strategies, batch=4, operations=operations, sizes="1K:1M:4"
    )
    jobs = chain_of(Estimate(request=request, site=site, works=None))
    return [task.words for job in jobs for task in job.tasks if "collectives" in task.words]


@pytest.mark.parametrize(
    ("strategies", "site", "halos", "in_flight"),
    [
        (("serial", "data"), CPUS, False, False),
        (("filter", "pipeline", "d2p4"), CPUS, False, False),
        (("data", "spatial"), CPUS, True, True),
        (("d2s2x2",), CPUS, True, True),
        (("d4f2",), CPUS, False, True),
        (("d4c2",), GPUS, False, False),
        (("spatial",), GPUS, True, False),
    ],
)
def test_sweeps_measure_what_strategies_wait_for(
    strategies: tuple[str, ...], site: Site, halos: bool, in_flight: bool
) -> None:
    operations = operations_of(strategies)
    assert operations.split(",") == [*OPERATIONS, *(["exchange"] if halos else [])]
    found = sweeps(site, strategies, operations)
    assert len(found) == 2 * (1 + bool(site.nccl_tests))
    for words in found:
        by_tool = "--tool" in words
        asked = str(words[words.index("--ops") + 1]).split(",")
        # nccl-tests have no program for halos, and no compute or gradients beside what they time.
        assert ("exchange" in asked) == (halos and not by_tool)
        assert ("with-all-reduce" in str(words[words.index("--contexts") + 1]) if "--contexts" in words else False) == (
            in_flight and not by_tool
        )


def test_operations_that_were_asked_for_are_swept_and_no_others() -> None:
    for words in sweeps(CPUS, ("spatial",), "all_reduce"):
        assert words[words.index("--ops") + 1] == "all_reduce"
    # Nothing is left for nccl-tests.
    assert not any("--tool" in words for words in sweeps(GPUS, ("spatial",), "exchange"))
