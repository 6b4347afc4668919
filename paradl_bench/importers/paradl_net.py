"""The ParaDL paper's own files: a network (``.net``) and a platform (``.plat``), told apart by what they hold.

    Model|Tiny
    CONV_1|3x226x226|3x64x7x7|64x113x113|0.0031        name | x | w = C x F x K x K | y | seconds per sample, FW + BW
    MPOOL|64x113x113|0x0x3x3|64x56x56|0

    BANDWIDTH|12.5e9|bytes/s

Numbers may be followed by spaces; ``#`` starts a comment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paradl_bench.core.bounds import MOST_BYTES, MOST_ELEMENTS, MOST_RANKS
from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat, times_in_situ
from paradl_bench.importers.plausible import FASTEST_BYTES_PER_S, LONGEST_CALL_S
from paradl_bench.importers.tables.numbers_read import decimal, whole
from paradl_bench.network.graph import Attribute, Layer, ModelGraph, Tensor
from paradl_bench.records.cluster import Cluster, Level

_PLATFORM_KEYS = ("MEM_PER_NODE", "NODE_SPEED", "BANDWIDTH", "LATENCY", "MAX_NODE", "GPU_PER_NODE")
_SMALLEST_BANDWIDTH = 1.0
_LARGEST: dict[str, float] = {
    "MEM_PER_NODE": MOST_BYTES,
    "BANDWIDTH": FASTEST_BYTES_PER_S,
    "LATENCY": LONGEST_CALL_S,
    "MAX_NODE": MOST_RANKS,
    "GPU_PER_NODE": MOST_RANKS,
}
_HEADS = ("Dataset", "Input", "Model")
_KIND = re.compile(r"(CONV|FC|BNORM|RELU|MPOOL|APOOL|ADD|DROPOUT)")
_SPLIT_LAYERS = re.compile(r"\s{0,40}\d{1,9}\s{1,40}\S{1,80}\s{0,40}\|\s{0,40}[01]\s{0,40}")
_MAX_EXTENT = 10**9
_ELEMENT_BYTES = 4
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetLine:
    """A layer's line: shapes of x, w and y; seconds of FW and BW together per sample, None where none are given."""

    name: str
    kind: str
    x: Shape
    w: Shape
    y: Shape
    seconds: float | None


def read(log: LogFile, options: ImportOptions) -> Imported:
    """Read a network with its times, or a platform.

    Raises:
        UserError: the file is neither.
    """
    lines = [
        (number, [field.strip() for field in line.split("|")], line)
        for number, line in enumerate(log.text.split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if lines and all(_SPLIT_LAYERS.fullmatch(line) for _, _, line in lines):
        raise UserError(f"{log.path} lists which layers a strategy splits; predict takes that from --strategy instead")
    if any(fields[0] in _PLATFORM_KEYS for _, fields, _ in lines):
        return _read_platform(log, lines, options)
    return _read_network(log, lines, options)


def _read_platform(log: LogFile, lines: list[tuple[int, list[str], str]], options: ImportOptions) -> Imported:
    result = Imported()
    values: dict[str, float] = {}
    for number, fields, line in lines:
        value = _platform_value(fields)
        if isinstance(value, str):
            result.drop(number, line, value)
            continue
        values[fields[0]] = value
        result.rows += 1
    if "NODE_SPEED" in values:
        result.notes.append(
            f"{log.path}: NODE_SPEED is not used, because layer times are measured, not derived from FLOP/s"
        )
    if values.get("BANDWIDTH", 0.0) <= _SMALLEST_BANDWIDTH:
        result.notes.append(f"{log.path}: it gives no cluster, because it has no readable BANDWIDTH above 1 byte/s")
        return result
    result.clusters.append(_cluster(log, values, options))
    if len(result.clusters[-1].levels) > 1:
        result.notes.append(
            f"{log.path}: it has no network inside of a node: set alpha_s and beta_s_per_byte of level node in"
            " the cluster file, or measure collectives on a node"
        )
    return result


def _platform_value(fields: list[str]) -> float | str:
    """A value in bytes, seconds and their quotient, or in words why it is none."""
    key = fields[0]
    if key not in _PLATFORM_KEYS:
        return f"no KEY|value|unit with a key of {', '.join(_PLATFORM_KEYS)}"
    value = decimal(fields[1]) if len(fields) > 1 else None
    if value is None or value < 0:
        return f"the value of {key} is no number from 0 on"
    unit = fields[2] if len(fields) > 2 else ""
    factor = _UNITS[key](unit) if key in _UNITS and unit else 1.0
    if factor is None:
        return f"the unit of {key}, {unit[:40]!r}, is not known: {_UNITS_SHOWN[key]}"
    if value * factor > _LARGEST.get(key, math.inf):
        return f"no {key} is that large"
    return value * factor


def _bytes_of(unit: str) -> float | None:
    """Bytes that a unit of memory is: ``GB`` 1e9, ``GiB`` 2**30."""
    match = _MEMORY_UNIT.fullmatch(unit)
    return None if match is None or match["bit"] else _prefix(match)


def _bytes_a_second(unit: str) -> float | None:
    """Bytes a second that a unit of bandwidth is; ``Gb/s``, ``Gbit/s`` and ``Gbps`` are bits."""
    match = _MEMORY_UNIT.fullmatch(_A_SECOND.sub("", unit)) if _A_SECOND.search(unit) else None
    return None if match is None else _prefix(match) / (8 if match["bit"] else 1)


def _prefix(match: re.Match[str]) -> float:
    power = " kmgt".index((match["prefix"] or " ").lower())
    return float((1024 if match["binary"] else 1000) ** power)


def _flops_of(unit: str) -> float | None:
    match = _SPEED_UNIT.fullmatch(unit)
    return None if match is None else float(1000.0 ** " kmgtp".index((match["prefix"] or " ").lower()))


_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    "ms": 1e-3,
    **dict.fromkeys(("us", "\u00b5s", "\u03bcs"), 1e-6),
    "ns": 1e-9,
}
_A_SECOND = re.compile(r"(?:/s(?:ec|econd)?|ps)$")
# A lone small b is a bit, as in Gb/s.
_MEMORY_UNIT = re.compile(r"(?:(?P<prefix>[kKMGT])(?P<binary>i)?)?(?:B|[Bb]ytes?|(?P<bit>b|[Bb]its?))")
_SPEED_UNIT = re.compile(r"(?P<prefix>[kKMGTP])?(?:FLOPS|FLOPs|flops|Flops|FLOPs?/s(?:ec|econd)?|flops?/s)")
_UNITS: dict[str, Callable[[str], float | None]] = {
    "MEM_PER_NODE": _bytes_of,
    "BANDWIDTH": _bytes_a_second,
    "LATENCY": _SECONDS.get,
    "NODE_SPEED": _flops_of,
}
_UNITS_SHOWN = {
    "MEM_PER_NODE": "bytes, KB, MB, GB, TB, KiB, MiB, GiB, TiB are",
    "BANDWIDTH": "bytes/s, KB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s, Gbit/s are",
    "LATENCY": "s, second, ms, us, ns are",
    "NODE_SPEED": "FLOPS, FLOP/s, GFLOPS, TFLOPS are",
}


def _cluster(log: LogFile, values: dict[str, float], options: ImportOptions) -> Cluster:
    ranks_per_node = max(1, round(values.get("GPU_PER_NODE", 1.0)))
    ranks = min(MOST_RANKS, max(1, round(values.get("MAX_NODE", 1.0))) * ranks_per_node)
    memory = values.get("MEM_PER_NODE", 0.0) / ranks_per_node
    level = Level(
        name=options.level or "system",
        ranks=ranks,
        alpha_s=values.get("LATENCY"),
        beta_s_per_byte=1 / values["BANDWIDTH"],
    )
    name = log.name.rsplit(".", 1)[0] or "platform"
    # The file has one network; inside a node there may be another, which it says nothing of.
    inner = (
        (Level(name="node", ranks=ranks_per_node),)
        if ranks_per_node > 1 and level.name != "node" and ranks_per_node <= ranks
        else ()
    )
    return Cluster(name=name, levels=(*inner, level), memory_bytes_per_rank=memory if memory > 0 else None)


def _read_network(log: LogFile, lines: list[tuple[int, list[str], str]], options: ImportOptions) -> Imported:
    result = Imported()
    heads: dict[str, str] = {}
    rows: list[NetLine] = []
    for number, fields, line in lines:
        if fields[0] in _HEADS and len(fields) >= 2:
            heads[fields[0]] = fields[1]
            continue
        row = _row(fields, {row.name for row in rows})
        if isinstance(row, str):
            result.drop_layer(number, line, row)
        else:
            rows.append(row)
            result.rows += 1
    if not rows:
        raise NotOfFormat(f"{log.path} is neither a .net (NAME|x|w|y|seconds) nor a .plat (KEY|value|unit)")
    model = options.model or heads.get("Model") or log.name.rsplit(".", 1)[0] or "net"
    network = _network(model, rows)
    result.networks.append(network)
    _add_times(result, log, network, rows)
    samples = whole(heads.get("Input", "").split("x")[0])
    if samples:
        result.notes.append(f"{log.path}: {samples} samples an epoch: predict --dataset-samples {samples}")
    result.notes.append(
        f"{log.path}: layers are taken to form a chain, with the smallest strides and paddings that fit"
    )
    return result


def _row(fields: list[str], names: set[str]) -> NetLine | str:
    kind = _KIND.match(fields[0])
    if kind is None:
        return f"no layer: names begin with {_KIND.pattern.strip('()').replace('|', ', ')}"
    if not 4 <= len(fields) <= 5:
        return f"{len(fields)} of 5 fields"
    shapes = [_shape(field) for field in fields[1:4]]
    seconds = decimal(fields[4]) if len(fields) == 5 and fields[4] else 0.0
    if None in shapes or seconds is None or seconds < 0:
        return "a shape or the time is no number, or is larger than any"
    if seconds > LONGEST_CALL_S:
        return "no layer takes that long"
    x, w, y = (shape for shape in shapes if shape is not None)
    if kind.group() in ("CONV", "FC") and len(w) < 2:
        return "weights need channels and filters"
    name, again = fields[0], 1
    while name in names or name == "input":
        again += 1
        name = f"{fields[0]}_{again}"
    return NetLine(name=name, kind=kind.group(), x=x, w=w, y=y, seconds=seconds or None)


def _shape(text: str) -> Shape | None:
    parts = [whole(part.strip()) for part in text.split("x")]
    if len(parts) > 8 or any(part is None or not 0 <= part <= _MAX_EXTENT for part in parts):
        return None
    shape = tuple(part for part in parts if part is not None)
    return shape if math.prod(shape) <= MOST_ELEMENTS else None


def _network(model: str, rows: list[NetLine]) -> ModelGraph:
    layers: list[Layer] = []
    parameters: list[Tensor] = []
    for row in rows:
        tensors = _parameters(row)
        parameters += tensors
        kind, attributes = _kind_and_attributes(row)
        products = 2 * math.prod(row.w[:1] + row.w[2:]) * math.prod(row.y) if row.kind in ("CONV", "FC") else 0
        layers.append(
            Layer(
                name=row.name,
                kind=kind,
                attributes=attributes,
                inputs=(layers[-1].name if layers else "input",),
                input_shapes=(_features(row, row.x),),
                output_shape=_features(row, row.y),
                parameters=tuple(tensor.name for tensor in tensors),
                fw_flops=products,
                bw_input_flops=products,
                bw_weight_flops=products,
                fw_bytes=_ELEMENT_BYTES * (math.prod(row.x) + math.prod(row.y)),
            )
        )
    return ModelGraph(
        name=model,
        input_shape=rows[0].x,
        layers=tuple(layers),
        parameters=tuple(parameters),
        gradient_order=tuple(tensor.name for tensor in reversed(parameters)),
    )


def _features(row: NetLine, shape: Shape) -> Shape:
    """A fully connected layer reads and makes features in a row, which the file has as channels by extents."""
    return (math.prod(shape),) if row.kind == "FC" else shape


def _parameters(row: NetLine) -> list[Tensor]:
    """Weights in the file: a bias is not in it; a batch norm has its scale and shift."""
    if row.kind in ("CONV", "FC"):
        channels, filters, *kernel = row.w
        return [Tensor(name=f"{row.name}.weight", shape=(filters, channels, *kernel))]
    if row.kind == "BNORM":
        filters = row.y[0] if row.y else 0
        return [Tensor(name=f"{row.name}.{part}", shape=(filters,)) for part in ("weight", "bias")]
    return []


def _kind_and_attributes(row: NetLine) -> tuple[str, dict[str, Attribute]]:
    """Our kind and its attributes where the file says enough for it, else a kind of its own, which nothing splits.

    Of an ADD it does not say what is added, of a DROPOUT not with which probability.
    """
    kernel = row.w[2:]
    windows = _windows(row, kernel)
    if row.kind == "CONV" and windows is not None:
        return "conv", {"kernel": kernel, "out_channels": row.w[1], "groups": 1, "bias": False, **windows}
    if row.kind in ("MPOOL", "APOOL") and windows is not None:
        function = f"{'max' if row.kind == 'MPOOL' else 'avg'}_pool{len(kernel)}d"
        return "pool", {"function": function, "kernel": kernel, "ceil_mode": False, **windows}
    if row.kind == "FC":
        return "linear", {"out_features": row.w[1], "bias": False}
    if row.kind == "BNORM":
        return "batch_norm", {"affine": True, "running": True, "training": True}
    if row.kind == "RELU":
        return "activation", {"function": "relu", "in_place": False}
    return f"paradl.{row.kind.lower()}", {"line": row.name}


def _windows(row: NetLine, kernel: Shape) -> dict[str, Attribute] | None:
    """Stride and padding that give y's extents from x's, the least of each; None where none do."""
    if not (1 <= len(kernel) <= 3 and len(row.x) == len(row.y) == len(kernel) + 1 and min(kernel) > 0):
        return None
    strides, paddings = [], []
    for before, size, after in zip(row.x[1:], kernel, row.y[1:], strict=False):
        window = next(
            (
                (stride, padding)
                for stride in range(max(1, before // (after + 1)), min(before // max(after, 1) + 2, 4096))
                for padding in range(min(size, 64))
                if before + 2 * padding >= size and (before + 2 * padding - size) // stride + 1 == after
            ),
            None,
        )
        if window is None:
            return None
        strides.append(window[0])
        paddings.append(window[1])
    return {"stride": tuple(strides), "padding": tuple(paddings), "dilation": (1,) * len(kernel)}


def _add_times(result: Imported, log: LogFile, network: ModelGraph, rows: list[NetLine]) -> None:
    timed = [row for row in rows if row.seconds]
    seconds = {row.name: row.seconds or 0.0 for row in rows}
    if not timed:
        result.notes.append(f"{log.path}: no layer has a time")
        return
    flops = sum(layer.fw_flops for layer in network.layers)
    if timed == rows[:1] and len(rows) > 1 and flops:
        # So says the file's format: a lone time, the first, is the whole model's.
        seconds = {layer.name: seconds[rows[0].name] * layer.fw_flops / flops for layer in network.layers}
        result.notes.append(
            f"{log.path}: the file has one time for the whole model, which is split over layers by FLOPs: layers were"
            " not measured"
        )
    times_of = partial(times_in_situ, model=network.name, batch=1, dtype="fp32", rank=0)
    result.layers += [
        times_of(layer=layer.name, operation=layer.operation, phase="FWBW", samples_s=(seconds[layer.name],))
        for layer in network.layers
    ]
    result.notes.append(f"{log.path}: FW and BW are one time per sample, and the file does not say which part is which")


IMPORTER = Importer(
    name="paradl-net", reads="the ParaDL paper's files: networks (.net), platforms (.plat)", kind="layers", reader=read
)
