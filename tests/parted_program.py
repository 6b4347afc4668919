"""A rank of a sweep by the ranks of each pair among themselves: parted_program.py DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from paradl_bench.measure.collective_request import CollectivesRequest
from paradl_bench.measure.collectives import measure_collectives
from paradl_bench.measure.process_groups import join_ranks

REQUEST = CollectivesRequest(
    ranks=2,
    backend="gloo",
    device="cpu",
    operations=("all_reduce", "send_recv"),
    sizes=(1024, 4096),
    blocks=2,
    point_s=0.001,
    seed=0,
    beside_compute=False,
    behind_compute=True,
    beside_all_reduce=True,
)


def main() -> None:
    """Sweep, both pairs at once; each pair's first rank writes."""
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        pair = context.beside(2)
        first = 2 * (context.rank // 2)
        assert (pair.rank, pair.ranks) == (context.rank - first, 2)
        assert pair.share(context.rank) == first
        assert pair.gather(context.rank) == [first, first + 1]
        measure_collectives(REQUEST, pair, Path(sys.argv[1]) / f"pair{context.rank // 2}", ("parted",))
        context.barrier()
        dist.destroy_process_group(pair.group)
        assert context.share(context.rank) == 0


if __name__ == "__main__":
    main()
