"""S-SGD traces: one iteration a block, one line a layer (Shi et al. 2018, arXiv:1805.03812).

    id name forward_us backward_us comm_us size_bytes

Layer 0 is ``data``, with the time of reading the mini-batch in the forward column; comm 0: nothing to exchange.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from paradl_bench.core.bounds import MOST_ELEMENTS
from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat, times_in_situ
from paradl_bench.importers.plausible import LONGEST_CALL_S
from paradl_bench.importers.tables.numbers_read import decimal, whole
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.records.input_record import BatchSamples
from paradl_bench.records.samples import CollectiveSamples

DATA_LAYER = "data"
TRACED_KIND = "ssgd"
"""Of layers, whose attributes have the trace's own number and name."""
HEADER = "# id name forward_us backward_us comm_us size_bytes"
_COLUMNS = 6


@dataclass(slots=True, kw_only=True)
class TracedLayer:
    """A layer over all iterations of a trace; one value an iteration in each list, seconds."""

    number: int
    name: str
    size_bytes: int
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """A trace: layer times and input of every iteration, exchanges where ranks and level are given."""
    result = Imported(device="cuda")
    layers = read_layers(log, result)
    if options.batch is None:
        raise UserError(f"{log.path}: a trace does not hold the size of the mini-batch: give --batch")
    model = options.model or log.name.split(".")[0] or "ssgd"
    network = _network(model, layers, options)
    result.networks.append(network)
    operations = {layer.name: layer.operation for layer in network.layers}
    times_of = partial(times_in_situ, model=model, batch=options.batch, dtype=options.dtype, rank=0)
    for layer in layers:
        if layer.name == DATA_LAYER:
            times = tuple(layer.forward_s)
            mean_ms = 1e3 * sum(times) / len(times)
            result.notes.append(f"{log.path}: reading a mini-batch took {mean_ms:.4g} ms, kept as the model's input")
            result.batches.append(
                BatchSamples(block=0, stage="io", batch=options.batch, bytes=0, samples_s=times, model=model)
            )
            continue
        name = _name(layer)
        result.layers.append(
            times_of(layer=name, operation=operations[name], phase="FW", samples_s=tuple(layer.forward_s))
        )
        result.layers.append(
            times_of(layer=name, operation=operations[name], phase="BW", samples_s=tuple(layer.backward_s))
        )
    _add_exchanges(result, layers, options, log)
    result.notes.append(f"{log.path}: layers have no shapes, so none can be split; the weight update has no time")
    return result


@dataclass(slots=True)
class _Block:
    """Rows of one iteration, by line; ``torn``: lines of it that are none."""

    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    torn: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[tuple[str, str, str], ...]:
        """Number, name and size of every layer."""
        return tuple((words[0], words[1], words[5]) for _, words in self.rows)


def read_layers(log: LogFile, result: Imported) -> list[TracedLayer]:
    """Layers with one value an iteration; a block that lacks a layer, or a torn last one, is dropped whole.

    Raises:
        UserError: the file holds no layer.
    """
    blocks: list[_Block] = []
    previous = None
    for number, line in enumerate(log.text.split("\n"), start=1):
        words = line.split()
        if not words or line.lstrip().startswith("#") or words[0].lower() == "id":
            previous = None if not words else previous
            continue
        why = _why_not(words)
        place = whole(words[0])
        if not blocks or (place is not None and (previous is None or place <= previous)):
            blocks.append(_Block())
        previous = previous if place is None else place
        if why is None:
            blocks[-1].rows.append((number, words))
        else:
            blocks[-1].torn.append((number, line, why))
    if not any(block.rows for block in blocks):
        raise NotOfFormat(f"{log.path} holds no layer of an S-SGD trace: lines of {HEADER[2:]}")
    return _aligned(blocks, result)


def _why_not(words: list[str]) -> str | None:
    if len(words) != _COLUMNS:
        return f"{len(words)} of {_COLUMNS} columns"
    place, size = whole(words[0]), decimal(words[5])
    times = [decimal(word) for word in words[2:5]]
    if place is None or place < 0 or size is None or not 0 <= size <= MOST_ELEMENTS or size != int(size):
        return "the number of the layer or its size is no count"
    if any(time is None or time < 0 for time in times):
        return "a time is no number"
    if any(time is not None and time * 1e-6 > LONGEST_CALL_S for time in times):
        return "no layer takes that long"
    return None


def _aligned(blocks: list[_Block], result: Imported) -> list[TracedLayer]:
    untorn = [block for block in blocks if block.rows and not block.torn]
    # Without a whole iteration nothing says which layers there are: what is left may lack some.
    model = Counter(block.shape for block in untorn or [block for block in blocks if block.rows]).most_common(1)[0][0]
    layers = [
        TracedLayer(number=int(number), name=name, size_bytes=int(decimal(size) or 0)) for number, name, size in model
    ]
    for block in blocks:
        for torn in block.torn:
            (result.drop if untorn else result.drop_layer)(*torn)
        if block.shape != model:
            for number, words in block.rows:
                result.drop(number, " ".join(words), "its iteration has not the layers and sizes of the others")
            continue
        result.rows += len(block.rows)
        for layer, (_, words) in zip(layers, block.rows, strict=True):
            layer.forward_s.append((decimal(words[2]) or 0.0) * 1e-6)
            layer.backward_s.append((decimal(words[3]) or 0.0) * 1e-6)
            layer.exchange_s.append((decimal(words[4]) or 0.0) * 1e-6)
    result.dropped.sort(key=lambda item: item.line)
    return layers


def _name(layer: TracedLayer) -> str:
    return f"{layer.number}.{layer.name}"


def _network(model: str, traced: list[TracedLayer], options: ImportOptions) -> ModelGraph:
    size = options.element_bytes
    layers: list[Layer] = []
    parameters: list[Tensor] = []
    for layer in traced:
        if layer.name == DATA_LAYER:
            continue
        name = _name(layer)
        # A trace has the size of what is exchanged: the parameters.
        held = (f"{name}.parameters",) if layer.size_bytes else ()
        parameters += [Tensor(name=key, shape=(layer.size_bytes // size,), dtype=options.dtype) for key in held]
        layers.append(
            Layer(
                name=name,
                kind=TRACED_KIND,
                attributes={"name": layer.name, "number": layer.number},
                inputs=(layers[-1].name,) if layers else ("input",),
                parameters=held,
            )
        )
    return ModelGraph(
        name=model,
        input_shape=(),
        layers=tuple(layers),
        parameters=tuple(parameters),
        gradient_order=tuple(parameter.name for parameter in reversed(parameters)),
    )


def _add_exchanges(result: Imported, layers: list[TracedLayer], options: ImportOptions, log: LogFile) -> None:
    exchanged = [layer for layer in layers if layer.size_bytes and max(layer.exchange_s) > 0]
    if not exchanged:
        return
    if options.ranks is None or options.level is None:
        result.notes.append(
            f"{log.path}: the exchanges of {len(exchanged)} layers are left out; --ranks and --level place them"
        )
        return
    result.collectives += [
        CollectiveSamples(
            library=options.library or "nccl",
            tool="ssgd-trace",
            operation="all_reduce",
            level=options.level,
            ranks=options.ranks,
            message_bytes=layer.size_bytes,
            dtype=options.dtype,
            block=0,
            samples_s=(tuple(layer.exchange_s),),
            verified=False,
            source=f"{log.path}:{layer.name}",
        )
        for layer in exchanged
    ]


IMPORTER = Importer(
    name="ssgd-trace", reads="S-SGD traces: layer and exchange times of every iteration", kind="layers", reader=_read
)
