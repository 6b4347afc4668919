"""Measurement directories made from known times, alpha and beta, as the commands would write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    COPIES_FILE,
    ITERATIONS_FILE,
    LAYERS_FILE,
    Environment,
)
from paradl_bench.records.samples import (
    CollectiveSamples,
    CopySamples,
    IterationSamples,
    LayerSamples,
)

ENVIRONMENT = Environment(
    device="cpu",
    device_name="Example CPU",
    device_count=2,
    memory_bytes=16 * 1024**3,
    hostname="node1",
    kernel="6.1.0",
    versions={"python": "3.11.7", "torch": "2.13.0", "paradl": "0.1.0"},
    settings={"threads": "1", "cpu_capability": "AVX2"},
    variables={"OMP_NUM_THREADS": "1"},
    commit="0123456789ab",
)

SIZES = tuple(1024 * 2**power for power in range(14))


def network(name: str = "toy", width: int = 8) -> ModelGraph:
    """A convolution, two equal activations, a linear layer and a loss."""
    conv = Layer(
        name="conv",
        kind="conv",
        attributes={"kernel": (3, 3)},
        inputs=("input",),
        input_shapes=((3, 16, 16),),
        output_shape=(width, 16, 16),
        parameters=("conv.weight",),
        fw_flops=2 * 27 * width * 256,
        bw_input_flops=2 * 27 * width * 256,
        bw_weight_flops=2 * 27 * width * 256,
        fw_bytes=4 * (3 + width) * 256,
    )

    def relu(label: str, reads: str) -> Layer:
        return Layer(
            name=label,
            kind="activation",
            attributes={"function": "relu"},
            inputs=(reads,),
            input_shapes=((width, 16, 16),),
            output_shape=(width, 16, 16),
            fw_flops=width * 256,
            bw_input_flops=width * 256,
            fw_bytes=8 * width * 256,
        )

    linear = Layer(
        name="fc",
        kind="linear",
        inputs=("relu2",),
        input_shapes=((width * 256,),),
        output_shape=(10,),
        parameters=("fc.weight",),
        fw_flops=20 * width * 256,
        bw_input_flops=20 * width * 256,
        bw_weight_flops=20 * width * 256,
        fw_bytes=4 * (width * 256 + 10),
    )
    loss = Layer(name="loss", kind="loss", inputs=("fc",), input_shapes=((10,),), fw_flops=50, fw_bytes=44)
    return ModelGraph(
        name=name,
        input_shape=(3, 16, 16),
        layers=(conv, relu("relu1", "conv"), relu("relu2", "relu1"), linear, loss),
        parameters=(
            Tensor(name="conv.weight", shape=(width, 3, 3, 3)),
            Tensor(name="fc.weight", shape=(10, width * 256)),
        ),
        gradient_order=("fc.weight", "conv.weight"),
    )


@dataclass(frozen=True, kw_only=True)
class LayersSpec:
    """What a synthetic layer profile holds.

    Attributes:
        layer_s: seconds of forward of each layer for one sample; backward takes twice that.
        unexplained_s: part of every uninstrumented iteration that no layer accounts for.
        noise: relative standard deviation of every sample; drift: of every block.
    """

    networks: Sequence[ModelGraph] = field(default_factory=lambda: (network(),))
    batches: Sequence[int] = (4,)
    ranks_on_host: int = 1
    blocks: int = 5
    pairs: int = 4
    layer_s: float = 1e-4
    between_s: float = 2e-5
    wu_s: float = 5e-5
    unexplained_s: float = 0.0
    noise: float = 0.01
    drift: float = 0.0
    seed: int = 0
    dtype: str = "fp32"


def write_layers(
    path: Path, spec: LayersSpec | None = None, *, environment: Environment = ENVIRONMENT, complete: bool = True
) -> Path:
    """Write a measurement directory of kind layers."""
    spec = spec or LayersSpec()
    names = ",".join(each.name for each in spec.networks)
    directory = MeasurementDirectory.open(
        path,
        kind="layers",
        arguments={"models": names, "batches": ",".join(map(str, spec.batches)), "seed": str(spec.seed)},
        command_line=("paradl-bench", "layers", names, "--batch", ",".join(map(str, spec.batches)), "-o", path.name),
        environment=environment,
    )
    generator = np.random.default_rng(spec.seed)
    for each in spec.networks:
        write_bytes_atomically(path / f"network-{each.name}.json", encode_pretty(each))
    for block in range(spec.blocks):
        slow = float(np.exp(spec.drift * generator.standard_normal()))
        for each in spec.networks:
            for batch in spec.batches:
                for rank in range(spec.ranks_on_host):
                    _write_block(directory, spec, each, batch, rank, block, slow, generator)
    if complete:
        directory.finish()
    return path


def _write_block(
    directory: MeasurementDirectory,
    spec: LayersSpec,
    net: ModelGraph,
    batch: int,
    rank: int,
    block: int,
    slow: float,
    generator: np.random.Generator,
) -> None:
    def samples(seconds: float) -> tuple[float, ...]:
        return tuple(map(float, slow * seconds * np.exp(spec.noise * generator.standard_normal(spec.pairs))))

    common = {"model": net.name, "ranks_on_host": spec.ranks_on_host, "rank": rank, "block": block}
    forward_s = spec.layer_s * batch
    count = len(net.layers)
    records = [
        LayerSamples(
            **common,
            layer=layer.name,
            operation=layer.operation,
            phase=phase,
            mode="in_situ",
            batch=batch,
            dtype=spec.dtype,
            samples_s=samples(factor * forward_s),
        )
        for layer in net.layers
        for phase, factor in (("FW", 1.0), ("BW", 2.0))
    ]
    directory.append(LAYERS_FILE, records)
    copied = [
        CopySamples(
            **common,
            direction=direction,
            tensors=len(net.parameters),
            bytes=net.parameter_bytes,
            samples_s=samples(len(net.parameters) * 2e-6 + net.parameter_bytes * 1e-9),
        )
        for direction in ("into", "out")
    ]
    directory.append(COPIES_FILE, copied)
    iteration = IterationSamples(
        **common,
        batch=batch,
        dtype=spec.dtype,
        optimizer="sgd",
        fw_s=samples(count * forward_s + spec.between_s + spec.unexplained_s),
        bw_s=samples(2 * count * forward_s + spec.between_s),
        wu_s=samples(spec.wu_s),
        fw_layers_s=samples(count * forward_s),
        bw_layers_s=samples(2 * count * forward_s),
        fw_between_s=samples(spec.between_s),
        bw_between_s=samples(spec.between_s),
        fw_instrumented_s=samples(count * forward_s + 2 * spec.between_s),
        bw_instrumented_s=samples(2 * count * forward_s + 2 * spec.between_s),
        wu_instrumented_s=samples(spec.wu_s),
    )
    directory.append(ITERATIONS_FILE, [iteration])


@dataclass(frozen=True, kw_only=True)
class CollectivesSpec:
    """What a synthetic sweep holds: times of the operations' default algorithms under one alpha and beta.

    Attributes:
        slow: sizes measured in a slow spell, by how many times.
        noise: relative standard deviation of a call; drift: of a block, common to all sizes.
    """

    operations: Sequence[str] = ("all_reduce", "broadcast")
    sizes: Sequence[int] = SIZES
    ranks: Sequence[int] = (2,)
    library: str = "gloo"
    tool: str = "torch"
    level: str = "node"
    alpha_s: float = 2e-5
    beta_s_per_byte: float = 1e-9
    noise: float = 0.02
    drift: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    blocks: int = 5
    calls: int = 8
    seed: int = 0
    slowdowns: tuple[float, float] | None = None


def collective_samples(spec: CollectivesSpec) -> list[CollectiveSamples]:
    """Records of a sweep."""
    generator = np.random.default_rng(spec.seed)
    records = []
    for block in range(spec.blocks):
        slow = float(np.exp(spec.drift * generator.standard_normal()))
        for name in spec.operations:
            operation = operations()[name]
            algorithm = operation.algorithms[operation.algorithm_of(spec.library)]
            for ranks in spec.ranks:
                for size in spec.sizes:
                    seconds = (
                        slow
                        * spec.slow.get(size, 1.0)
                        * float(
                            algorithm.seconds(
                                ranks,
                                size,
                                alpha_s=spec.alpha_s,
                                beta_s_per_byte=spec.beta_s_per_byte,
                                gamma_s_per_byte=0.0,
                            )
                        )
                    )
                    calls = seconds * np.exp(spec.noise * generator.standard_normal(spec.calls))
                    records.append(_collective(spec, name, ranks, size, block, calls, generator, operation.ends_with))
    return records


def _collective(
    spec: CollectivesSpec,
    name: str,
    ranks: int,
    size: int,
    block: int,
    calls: np.ndarray,
    generator: np.random.Generator,
    ends_with: str,
) -> CollectiveSamples:
    # One rank takes exactly the call's time, where a message is received its receiver; the others less.
    sides = 2 if ends_with == "receiver" else ranks
    factors = 1 - 0.3 * generator.random((sides, len(calls)))
    factors[-1 if ends_with == "receiver" else generator.integers(sides)] = 1.0
    return CollectiveSamples(
        library=spec.library,
        tool=spec.tool,
        operation=name,
        level=spec.level,
        ranks=ranks,
        message_bytes=size,
        dtype="fp32",
        block=block,
        samples_s=tuple(tuple(map(float, row)) for row in factors * calls),
        verified=True,
    )


def with_compute_samples(spec: CollectivesSpec, sizes: Sequence[int] = (65536, 1048576)) -> list[ContextSamples]:
    """Records beside compute, slowed by ``spec.slowdowns`` (compute, communication)."""
    generator = np.random.default_rng(spec.seed + 1)
    compute, communication = spec.slowdowns or (1.0, 1.0)

    def around(value: float, ranks: int) -> tuple[tuple[float, ...], ...]:
        values = value * np.exp(spec.noise * generator.standard_normal((ranks, spec.calls)))
        return tuple(map(tuple, values.tolist()))

    return [
        ContextSamples(
            library=spec.library,
            operation="all_reduce",
            level=spec.level,
            ranks=ranks,
            message_bytes=size,
            dtype="fp32",
            context="with-compute",
            neighbour=kernel,
            block=block,
            one_clock=True,
            idle_end_s=around(size * 1e-9, ranks),
            start_s=((0.0,) * spec.calls,) * ranks,
            end_s=around(size * 1e-9 * communication, ranks),
            neighbour_s=around(1e-3 * compute, ranks),
            neighbour_idle_s=around(1e-3, ranks),
        )
        for block in range(spec.blocks)
        for ranks in spec.ranks
        for size in sizes
        for kernel in ("conv", "elementwise")
    ]


def write_collectives(
    path: Path, spec: CollectivesSpec | None = None, *, environment: Environment = ENVIRONMENT, complete: bool = True
) -> Path:
    """Write a measurement directory of kind collectives."""
    spec = spec or CollectivesSpec()
    directory = MeasurementDirectory.open(
        path,
        kind="collectives",
        arguments={"ranks": ",".join(map(str, spec.ranks)), "backend": spec.library, "seed": str(spec.seed)},
        command_line=("paradl-bench", "collectives", "--ranks", "2", "--backend", spec.library, "-o", path.name),
        environment=msgspec.structs.replace(environment, settings={**environment.settings, "backend": spec.library}),
    )
    directory.append(COLLECTIVES_FILE, collective_samples(spec))
    if spec.slowdowns:
        directory.append(CONTEXTS_FILE, with_compute_samples(spec))
    if complete:
        directory.finish()
    return path
