"""PipeDream's layer profiles: ``graph.txt`` (msr-fiddle/pipedream, ``profiler/torchmodules/torchgraph``).

    node12 -- Conv2d(128, 256, ...) -- forward_compute_time=10.814, backward_compute_time=18.335,
        activation_size=411041792.000, parameter_size=1180672.000
    \tnode11 -- node12

one node a line, then one edge a line; milliseconds and bytes of a whole mini-batch, whose size the file does not hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from paradl_bench.core.bounds import MOST_ELEMENTS
from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat, times_in_situ
from paradl_bench.importers.plausible import LONGEST_CALL_S
from paradl_bench.importers.tables.numbers_read import decimal
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.records.samples import LayerSamples

_NODE = re.compile(
    r"(node\d{1,9}) -- (.{0,2000}?) -- forward_compute_time=([^,]{1,40}), backward_compute_time=([^,]{1,40}),"
    r" activation_size=(\[[^\]]{0,400}\]|[^,]{1,40}), parameter_size=([^,\s]{1,40})"
)
_EDGE = re.compile(r"\s{1,40}(node\d{1,9}) -- (node\d{1,9})\s{0,40}")
_KIND = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
_MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """One layer: milliseconds and bytes of a mini-batch, as printed."""

    name: str
    description: str
    fw_s: float
    bw_s: float
    activation_bytes: int
    parameter_bytes: int


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """A profile: layer times in situ, and a network of layers without shapes."""
    result = Imported(device="cuda")
    nodes: dict[str, _Node] = {}
    edges: dict[int, re.Match[str]] = {}
    for number, line in enumerate(log.text.split("\n"), start=1):
        match = _NODE.match(line)
        if match:
            node = _node(match)
            if isinstance(node, str):
                result.drop_layer(number, line, node)
                continue
            if node.name in nodes:
                result.drop(number, line, "this node was described before")
                continue
            nodes[node.name] = node
            result.rows += 1
        elif edge := _EDGE.fullmatch(line):
            edges[number] = edge
        elif line.strip():
            lost = result.drop_layer if line.lstrip().startswith("node") else result.drop
            lost(number, line, "neither a node nor an edge")
    if not nodes:
        raise NotOfFormat(f"{log.path} holds no layer of PipeDream: lines of node1 -- Name -- forward_compute_time=...")
    for number, edge in edges.items():
        unknown = next((name for name in edge.groups() if name not in nodes), None)
        if unknown is not None:
            result.drop(number, edge.string, f"no {unknown} is described")
    if options.batch is None:
        raise UserError(f"{log.path}: PipeDream does not write the size of the mini-batch: give --batch")
    model = options.model or log.name.split(".")[0] or "pipedream"
    network = _network(model, log, nodes, [edge.groups() for edge in edges.values()], options)
    result.networks.append(network)
    result.layers = _samples(network, nodes, options)
    result.notes.append(
        f"{log.path}: layers have no shapes, so none can be split. The file does not say how many iterations each"
        " time is the mean of. The time between layers and the weight update were not measured"
    )
    return result


def _samples(network: ModelGraph, nodes: dict[str, _Node], options: ImportOptions) -> list[LayerSamples]:
    times_of = partial(times_in_situ, model=network.name, batch=options.batch or 1, dtype=options.dtype, rank=0)
    forward, backward = [], []
    for layer in network.layers:
        name, node = layer.name, nodes[layer.name]
        forward.append(times_of(layer=name, operation=layer.operation, phase="FW", samples_s=(node.fw_s,)))
        backward.append(times_of(layer=name, operation=layer.operation, phase="BW", samples_s=(node.bw_s,)))
    return forward + backward


def _node(match: re.Match[str]) -> _Node | str:
    times = [decimal(match.group(index)) for index in (3, 4)]
    # A layer with several outputs lists their sizes.
    sizes = [decimal(part.strip()) for part in match.group(5).strip("[]").split(";")]
    parameters = decimal(match.group(6))
    numbers = [*times, *sizes, parameters]
    if any(number is None or not 0 <= number < _MAX_BYTES for number in numbers):
        return "a time or size is no number"
    if any(time is not None and time * 1e-3 > LONGEST_CALL_S for time in times):
        return "no layer takes that long"
    if max(parameters or 0.0, sum(size or 0.0 for size in sizes)) > MOST_ELEMENTS:
        return "no layer is that large"
    activation = sum(size for size in sizes if size is not None)
    return _Node(
        name=match.group(1),
        description=match.group(2).strip(),
        fw_s=(times[0] or 0.0) * 1e-3,
        bw_s=(times[1] or 0.0) * 1e-3,
        activation_bytes=round(activation),
        parameter_bytes=round(parameters or 0.0),
    )


def _network(
    model: str, log: LogFile, nodes: dict[str, _Node], edges: list[tuple[str, ...]], options: ImportOptions
) -> ModelGraph:
    size = options.element_bytes
    reads: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        if source in nodes and target in nodes and source not in reads[target]:
            reads[target].append(source)
    batch = options.batch or 1
    elements = {name: round(node.activation_bytes / batch / size) for name, node in nodes.items()}
    layers, parameters = [], []
    for name in _forward_order(reads, log):
        node = nodes[name]
        held = (f"{name}.parameters",) if node.parameter_bytes else ()
        parameters += [
            Tensor(name=parameter, shape=(node.parameter_bytes // size,), dtype=options.dtype) for parameter in held
        ]
        kind = _KIND.match(node.description)
        layers.append(
            Layer(
                name=name,
                kind=f"pipedream.{kind.group() if kind else 'unnamed'}",
                attributes={"description": node.description, "node": name},
                inputs=tuple(reads[name]) or ("input",),
                input_shapes=tuple((elements[source],) for source in reads[name]),
                output_shape=(elements[name],),
                parameters=held,
            )
        )
    return ModelGraph(name=model, input_shape=(), layers=tuple(layers), parameters=tuple(parameters))


def _forward_order(reads: dict[str, list[str]], log: LogFile) -> list[str]:
    """Layers so that each comes behind those that it reads (Kahn's algorithm)."""
    readers: dict[str, list[str]] = {name: [] for name in reads}
    missing = {name: len(sources) for name, sources in reads.items()}
    for name, sources in reads.items():
        for source in sources:
            readers[source].append(name)
    ready = [name for name, count in missing.items() if count == 0]
    order = []
    while ready:
        name = ready.pop()
        order.append(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    if len(order) < len(reads):
        stuck = min(name for name, count in missing.items() if count)
        raise UserError(f"{log.path}: the edges make a circle that holds {stuck}")
    return order


IMPORTER = Importer(
    name="pipedream", reads="PipeDream's layer profiles (graph.txt): layer times and sizes", kind="layers", reader=_read
)
