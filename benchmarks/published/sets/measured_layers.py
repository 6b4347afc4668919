"""A measurement directory of layers whose times were published, for a network that the tool traced itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paradl_bench.importers.importer import Imported, Importer, load_file, times_in_situ
from paradl_bench.importers.writing import FileRead, write_import
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.measurement import Environment


class Place(NamedTuple):
    """What was measured on: the device as its driver calls it, its bytes of memory, and what stands for its host."""

    device_name: str
    memory_bytes: int
    cluster: str


def write_layers(
    folder: Path,
    source: Path,
    network: ModelGraph,
    times_s: Mapping[str, tuple[float, float]],
    place: Place,
) -> None:
    """Write fp32 seconds of forward and backward of one sample, by layers' names; a layer without times took none.

    Args:
        source: the file that they are from.
    """
    held = Imported(rows=len(times_s), networks=[network])
    for layer in network.layers:
        for phase, seconds in zip(("FW", "BW"), times_s.get(layer.name, (0.0, 0.0)), strict=True):
            row = times_in_situ(
                model=network.name,
                layer=layer.name,
                operation=layer.operation,
                phase=phase,
                batch=1,
                dtype="fp32",
                rank=0,
                samples_s=(seconds,),
            )
            held.layers.append(row)
    environment = Environment(
        device="cuda",
        device_name=place.device_name,
        device_count=1,
        memory_bytes=place.memory_bytes,
        hostname=place.cluster,
        kernel="",
        versions={},
        settings={},
    )
    form = Importer(name="traced operations", reads="times of a network's layers", kind="layers", reader=_nothing)
    files = [FileRead(log=load_file(source), held=held)]
    write_import(folder, form, files, environment=environment, command_line=("published",), arguments={})


def _nothing(*_: object) -> Imported:
    return Imported()
