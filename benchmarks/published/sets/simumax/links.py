"""Collectives of SimuMax's system file: its fits of NVLink, as sweeps that ``calibrate fit`` reads, and a cluster file.

The file has a fit an operation: hops of so many ranks, a latency each, a fixed one, and a share of the bandwidth.
Sweeps say what these say, in each size. No fit is of broadcasts; these take a hop of the ring that scatters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sets.measured_layers import Place, environment_of

from paradl_bench.importers.importer import Imported, Importer, load_file
from paradl_bench.importers.writing import FileRead, write_import
from paradl_bench.records.samples import CollectiveSamples

GIB = 2**30
RANKS = (2, 4, 8)
SIZES = tuple(4**power for power in range(6, 18))
"""Bytes that a rank has of a message, from 4 KiB to 16 GiB."""
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all2all",
    "send_recv": "p2p",
}
"""By the tool's name, the file's."""
_OF_A_PART = ("all_gather", "reduce_scatter", "all_to_all")
"""The tool counts a part of what their ranks have."""


def seconds(link: dict[str, Any], operation: str, ranks: int, size_bytes: float) -> float:
    """What the file says of a collective in which a rank has so many bytes.

    Args:
        operation: by the file's name.
    """
    fit, peak = link["op"][operation], link["bandwidth"]["gbps"] * GIB
    fixed_us = (fit.get("fixed_latency_us_by_comm_num") or {}).get(str(ranks), fit.get("fixed_latency_us", 0.0))
    hops = 1 if operation == "p2p" else fit["scale"] * (ranks + fit["offset"])
    moved = size_bytes if operation == "p2p" else size_bytes * hops / ranks
    return float((fit["latency_us"] * hops + fixed_us) * 1e-6 + moved / (fit["efficient_factor"] * peak))


def sweep(link: dict[str, Any], operation: str) -> list[CollectiveSamples]:
    """Every size on each number of ranks, by the tool's name of the operation."""
    pair = operation == "send_recv"
    return [
        CollectiveSamples(
            library="nccl",
            tool="nccl-tests",
            operation=operation,
            level="node",
            ranks=ranks,
            message_bytes=size // ranks if operation in _OF_A_PART else size,
            dtype="bf16",
            block=0,
            samples_s=((seconds(link, OPERATIONS[operation], ranks, size),),) * ranks,
            verified=True,
            ranks_per_node=ranks,
        )
        for ranks in (RANKS[:1] if pair else RANKS)
        for size in SIZES
    ]


def write_sweeps(folder: Path, source: Path, system: dict[str, Any], place: Place) -> None:
    """A measurement directory with the sweeps of all operations."""
    link = system["networks"]["high_intra_node"]
    records = [record for operation in OPERATIONS for record in sweep(link, operation)]
    form = Importer(name="fits of links", reads="fits of collectives", kind="collectives", reader=_nothing)
    files = [FileRead(log=load_file(source), held=Imported(rows=len(records), collectives=records))]
    about = environment_of(place, device_count=max(RANKS))
    write_import(folder, form, files, environment=about, command_line=("published",), arguments={})


def link_file(system: dict[str, Any], ranks: int, path: Path) -> Path:
    """A cluster file with the fit of reduce-scatters, as a ring's hops over so many ranks: for what no sweep is of."""
    link = system["networks"]["high_intra_node"]
    fit, peak = link["op"]["reduce_scatter"], link["bandwidth"]["gbps"] * GIB
    hops = fit["scale"] * (ranks + fit["offset"])
    alpha_s = (fit["latency_us"] + fit["fixed_latency_us"] / hops) * 1e-6
    level = {"name": "node", "ranks": 8, "alpha_s": alpha_s, "beta_s_per_byte": 1 / (fit["efficient_factor"] * peak)}
    path.write_text(json.dumps({"name": "b200", "levels": [level]}))
    return path


def _nothing(*_: object) -> Imported:
    return Imported()
