"""A measurement directory of layers whose times were published, for a network that the tool traced itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paradl_bench.core.files.json_lines import encode_lines
from paradl_bench.core.files.storage import write_bytes_atomically
from paradl_bench.importers.importer import Imported, Importer, load_file
from paradl_bench.importers.writing import FileRead, write_import
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.records.measurement import Environment, Mode
from paradl_bench.records.roofline_record import RATES_FILE, RateSamples
from paradl_bench.records.samples import LayerSamples


class Place(NamedTuple):
    """What was measured on: the device as its driver calls it, its bytes of memory, and what stands for its host."""

    device_name: str
    memory_bytes: int
    cluster: str


class Timed(NamedTuple):
    """Seconds of forward and backward of a layer on a local batch, whole or as a rank runs it (``t4``)."""

    layer: Layer
    forward_s: float
    backward_s: float
    shard: str = ""


def environment_of(place: Place, device_count: int = 1) -> Environment:
    """As far as anything is known of it."""
    return Environment(
        device="cuda",
        device_name=place.device_name,
        device_count=device_count,
        memory_bytes=place.memory_bytes,
        hostname=place.cluster,
        kernel="",
        versions={},
        settings={},
    )


def write_layers(
    folder: Path,
    source: Path,
    network: ModelGraph,
    timed: Sequence[Timed],
    place: Place,
    dtype: str,
    batch: int = 1,
    mode: Mode = "isolated",
    bytes_per_s: float | None = None,
) -> None:
    """Write times of layers; what the network has beside them took none.

    Args:
        source: the file that they are from.
        mode: of operations that were timed one by one, unless they are parts of an iteration's time.
        bytes_per_s: that kernels reach of the memory's bandwidth, where that was published.
    """
    known = {each.layer.name for each in timed if not each.shard}
    others = [Timed(layer, 0.0, 0.0) for layer in network.layers if layer.name not in known]
    held = Imported(rows=len(timed), networks=[network])
    for layer, forward_s, backward_s, shard in (*timed, *others):
        times_of = partial(LayerSamples, mode=mode, model=network.name, layer=layer.name, operation=layer.operation)
        for phase, seconds in (("FW", forward_s), ("BW", backward_s)):
            held.layers.append(
                times_of(
                    phase=phase,
                    batch=batch,
                    dtype=dtype,
                    rank=0,
                    ranks_on_host=1,
                    block=0,
                    samples_s=(seconds,),
                    shard=shard,
                )
            )
    form = Importer(name="traced operations", reads="times of a network's layers", kind="layers", reader=_nothing)
    files = [FileRead(log=load_file(source), held=held)]
    write_import(folder, form, files, environment=environment_of(place), command_line=("published",), arguments={})
    if bytes_per_s is not None:
        write_bytes_atomically(folder / RATES_FILE, encode_lines([_memory_rate(bytes_per_s)]))


def _memory_rate(bytes_per_s: float) -> RateSamples:
    """As of one copy of a GiB."""
    return RateSamples(
        resource="memory",
        kernel="copy",
        sizes={"bytes": 2**30},
        dtype="fp32",
        work=2 * 2**30,
        working_set_bytes=2 * 2**30,
        ranks_on_host=1,
        rank=0,
        block=0,
        samples_s=(2 * 2**30 / bytes_per_s,),
    )


def _nothing(*_: object) -> Imported:
    return Imported()
