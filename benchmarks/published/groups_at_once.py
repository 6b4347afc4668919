"""The bandwidth of whole nodes over that of one rank a node: phi of as many groups at once as a node has ranks.

    python benchmarks/published/groups_at_once.py [--data ../shared/data]

Groups of one rank a node use a node's links together as one group of whole nodes does. So phi, by which a sweep of
whole nodes is too fast for each of them, is the ratio of both bandwidths. It was published for ten nodes of eight H100
(nccl-tests-cluster) and two nodes of four A100 (estimate-train-time, Perlmutter).
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

LEAST_BYTES = 512 * 1024**2
"""Smaller messages take their start-up times, which phi does not multiply."""
_H100 = "nccl-logs/xxrjun-h100__multi-node__20260129-180219__without-debug__nccl_N10_G{}.log"
_A100 = "transformer-operators/Perlmutter/nccl/NVIDIAA100-SXM4-80GB_allreduce_large_fp16_2_{}.csv"
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+sum\s+-1\s+[\d.]+\s+[\d.]+\s+([\d.]+)", re.MULTILINE)


def main() -> None:
    """Print a row for each system."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    data = parser.parse_args().data
    print("| system | all-reduces from 512 MiB | bandwidth of whole nodes over that of one rank a node |")
    print("| --- | --- | --- |")
    h100 = {ranks: dict(_of_log(data / _H100.format(ranks))) for ranks in (1, 8)}
    a100 = {ranks: dict(_of_table(data / _A100.format(ranks), 2 * ranks)) for ranks in (1, 4)}
    for name, of_nodes in (("10 nodes of 8 H100", h100), ("2 nodes of 4 A100", a100)):
        one, whole = (statistics.median(of_nodes[ranks].values()) for ranks in sorted(of_nodes))
        counts = " and ".join(str(len(found)) for found in of_nodes.values())
        print(f"| {name} | {counts} | {whole / one:.2f} of {max(of_nodes)} |")


def _of_log(path: Path) -> Iterator[tuple[int, float]]:
    """Bytes, and GB/s of the bus, of the all-reduces in a log of nccl-tests, which come first and in whole MiB."""
    found: dict[int, float] = {}
    for size, bandwidth in _ROW.findall(path.read_text(encoding="utf-8")):
        found.setdefault(int(size), float(bandwidth))
    yield from ((size, found[size]) for size in found if size >= LEAST_BYTES and size % 1024**2 == 0)


def _of_table(path: Path, ranks: int) -> Iterator[tuple[int, float]]:
    """Likewise, of a table of elements of two bytes, nodes, ranks a node and time (of several calls: for ratios)."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            try:
                elements, _, _, seconds = map(float, row)
            except ValueError:
                continue
            if 2 * elements >= LEAST_BYTES:
                yield int(2 * elements), 2 * (ranks - 1) / ranks * 2 * elements / seconds


if __name__ == "__main__":
    main()
