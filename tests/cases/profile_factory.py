"""Synthetic networks, profiles and training runs with known times, for tests of what reads a profile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import SCHEMA_VERSION, CopyTime, Device, LayerTime, ModelTime, Profile, Source
from calibrate.profile.roofline_rates import DeviceRate
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.statistics import Summary
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.records.contexts.context import Context
from paradl_bench.records.hosts.host_load import HostLoad
from paradl_bench.records.measurement import SCHEMA_VERSION as MEASUREMENT_VERSION
from paradl_bench.records.measurement import Environment, Manifest, write_manifest
from paradl_bench.records.roofline_record import Resource
from paradl_bench.records.training.training_record import RUN_NAME, TRAINING_FILE, TrainingIterations, TrainingRun

LayerSeconds = Callable[[Layer, str, int], float]
"""Seconds of (layer, phase, local batch)."""


def make_network(
    widths: Sequence[int] = (64, 128, 256, 32), *, name: str = "chain", buffers: bool = False
) -> ModelGraph:
    """A chain of linear layers with activations between them: widths[i] to widths[i + 1], then a loss."""
    layers: list[Layer] = []
    parameters: list[Tensor] = []
    source = "input"
    for index, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weight, bias = (
            Tensor(name=f"fc{index}.weight", shape=(columns, rows)),
            Tensor(name=f"fc{index}.bias", shape=(columns,)),
        )
        parameters += [weight, bias]
        layers.append(
            Layer(
                name=f"fc{index}",
                kind="linear",
                attributes={"out_features": columns, "bias": True},
                inputs=(source,),
                input_shapes=((rows,),),
                output_shape=(columns,),
                parameters=(weight.name, bias.name),
                fw_flops=2 * rows * columns,
                bw_input_flops=2 * rows * columns,
                bw_weight_flops=2 * rows * columns,
                fw_bytes=4 * (rows + columns),
            )
        )
        layers.append(
            Layer(
                name=f"relu{index}",
                kind="activation",
                attributes={"function": "relu", "in_place": True},
                inputs=(f"fc{index}",),
                input_shapes=((columns,),),
                output_shape=(columns,),
                fw_flops=columns,
                bw_input_flops=columns,
                fw_bytes=8 * columns,
            )
        )
        source = f"relu{index}"
    return ModelGraph(
        name=name,
        input_shape=(widths[0],),
        layers=tuple(layers),
        parameters=tuple(parameters),
        buffers=(Tensor(name="running_mean", shape=(widths[1],)),) if buffers else (),
        gradient_order=tuple(parameter.name for parameter in reversed(parameters)),
    )


def linear_seconds(layer: Layer, phase: str, batch: int) -> float:
    """Proportional to the batch, and different for every layer."""
    return 1e-6 * (1 + layer.output_elements) * batch * (1 if phase == "FW" else 2)


def affine_seconds(layer: Layer, phase: str, batch: int) -> float:
    """A fixed part and one proportional to the batch."""
    return 1e-5 + 0.5 * linear_seconds(layer, phase, batch)


def summary(seconds: float, *, relative_iqr: float = 0.0, samples: int = 20) -> Summary:
    """A summary of samples with a given median and spread."""
    return Summary(
        median_s=seconds, typical_s=seconds, iqr_s=seconds * relative_iqr, minimum_s=seconds, samples=samples
    )


def layer_times(
    network: ModelGraph,
    *,
    batches: Sequence[int] = (4, 8),
    ranks_on_host: Mapping[int, float] | None = None,
    seconds: LayerSeconds = linear_seconds,
    block_sd: float = 0.0,
) -> tuple[LayerTime, ...]:
    """In-situ times of all layers; ``ranks_on_host`` gives a factor a number of ranks on the host."""
    return tuple(
        LayerTime(
            operation=operation,
            phase=phase,
            mode="in_situ",
            batch=batch,
            dtype="fp32",
            ranks_on_host=on_host,
            time=summary(factor * seconds(layer, phase, batch)),
            block_relative_sd=block_sd,
        )
        for operation, layer in {layer.operation: layer for layer in network.layers}.items()
        for phase in ("FW", "BW")
        for batch in batches
        for on_host, factor in (ranks_on_host or {1: 1.0, 2: 1.0}).items()
    )


def model_times(
    network: ModelGraph,
    *,
    batches: Sequence[int] = (4, 8),
    ranks_on_host: Sequence[int] = (1, 2),
    seconds: LayerSeconds = linear_seconds,
    between_s: float = 0.0,
    wu_s: float = 1e-4,
    common_sd: float = 0.0,
    remainder: float = 0.0,
    quantiles: tuple[float, ...] = (1.0, 1.0, 1.0),
    optimizer: str = "sgd",
    samples: int = 20,
) -> tuple[ModelTime, ...]:
    """Whole-model times at each batch and number of ranks on the host; ``between_s`` is FW's, BW has twice that.

    Layers of ``seconds``, time between them and weight update add up to the iteration but for the remainder.
    """

    def iteration_s(batch: int) -> float:
        layers = sum(seconds(layer, phase, batch) for layer in network.layers for phase in ("FW", "BW"))
        return (layers + 3 * between_s + wu_s) / (1 - remainder)

    return tuple(
        ModelTime(
            model=network.name,
            batch=batch,
            dtype="fp32",
            optimizer=optimizer,
            ranks_on_host=on_host,
            fw=summary(1e-3),
            bw=summary(2e-3),
            wu=summary(wu_s),
            iteration=summary(iteration_s(batch), samples=samples),
            fw_between=summary(between_s),
            bw_between=summary(2 * between_s),
            remainder_relative=remainder,
            remainder_interval=(remainder, remainder),
            noise_floor_relative=0.01,
            common_relative_sd=common_sd,
            iteration_relative_quantiles=quantiles,
        )
        for batch in batches
        for on_host in ranks_on_host
    )


def ring_fit(operation: str = "all_reduce", **changes: object) -> CommunicationFit:
    """alpha 50 us, beta 1 ns a byte, fitted on two ranks at level node; any field can be changed."""
    fit = CommunicationFit(
        library="gloo",
        operation=operation,
        algorithm=operations()[operation].default_algorithm,
        level="node",
        regime="all",
        alpha_s=50e-6,
        beta_s_per_byte=1e-9,
        gamma_s_per_byte=0.0,
        covariance=((0.0, 0.0), (0.0, 0.0)),
        bytes_range=(1, 1 << 30),
        ranks_range=(2, 2),
        residual_relative_median=0.01,
        held_out_relative_error=0.02,
        block_relative_sd=0.0,
        points=10,
    )
    return msgspec.structs.replace(fit, **changes)


def free_copies(
    ranks_on_host: Sequence[int] = (1, 2),
    *,
    beta_s_per_byte: float = 0.0,
    directions: Sequence[str] = ("into", "out"),
) -> tuple[CopyTime, ...]:
    """Bucket copies that take no time, or so much a byte."""
    return tuple(
        CopyTime(
            direction=direction,
            ranks_on_host=on_host,
            alpha_s=0.0,
            beta_s_per_byte=beta_s_per_byte,
            relative_sd=0.0,
            models=("chain",),
        )
        for direction in directions
        for on_host in ranks_on_host
    )


def in_context(context: Context, operation: str = "all_reduce", **changes: object) -> InContext:
    """A context that changes nothing for sure, measured of two ranks; any field can be changed."""
    entry = InContext(
        library="gloo",
        operation=operation,
        level="node",
        context=context,
        groups=2 if context == "groups" else 1,
        ranks=(2, 2),
        bytes_range=(1, 1 << 30),
        added_s=0.0,
        factor=1.0,
        covariance=((0.0, 0.0), (0.0, 0.0)),
        samples=10,
    )
    return msgspec.structs.replace(entry, **changes)


def with_compute(compute: float = 1.0, communication: float = 1.0, *, sd: float = 0.0, **changes: object) -> InContext:
    """Slow-downs of compute and of all_reduce beside each other, each with the same standard deviation."""
    entry = in_context("with-compute", neighbour_factor=compute, neighbour_sd=sd, factor=communication)
    return msgspec.structs.replace(entry, covariance=((0.0, 0.0), (0.0, sd * sd)), **changes)


ENVIRONMENT = Environment(
    device="cpu",
    device_name="test processor",
    device_count=2,
    memory_bytes=16 * 1024**3,
    hostname="test",
    kernel="test",
    versions={"torch": "2.13"},
    settings={"threads": "1"},
)


def source(path: str, load: HostLoad | None = None) -> Source:
    """A measurement directory that a profile was fitted to, and what else its host did."""
    return Source(
        path=path,
        kind="layers",
        command_line=(),
        created_utc="2026-01-01T00:00:00Z",
        sha256="0" * 64,
        environment=0,
        complete=True,
        host_load=load,
    )


def make_profile(chain: ModelGraph | None = None, **changes: object) -> Profile:
    """A profile of one network in which nothing but layers, weight update and messages takes time."""
    chain = chain or make_network()
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        created_utc="2026-01-01T00:00:00Z",
        command_line=("calibrate", "fit"),
        environments=(ENVIRONMENT,),
        sources=(),
        devices=(
            Device(
                name="test processor",
                kind="cpu",
                memory_bytes=16 * 1024**3,
                devices_per_host=2,
                peak_flops=1e11,
                memory_bandwidth_bytes_per_s=1e10,
            ),
        ),
        cluster=Cluster(name="test", levels=(Level(name="node", ranks=2),), memory_bytes_per_rank=8e9),
        network={chain.name: chain},
        layer_times=layer_times(chain),
        model_times=model_times(chain),
        copies=free_copies(),
        communication=(ring_fit(),),
        contexts=(with_compute(),),
    )
    return msgspec.structs.replace(profile, **changes)


def write_training_run(
    directory: Path,
    network: ModelGraph,
    *,
    strategy: str = "d2",
    ranks: int = 2,
    batch: int = 16,
    phases_s: Sequence[Sequence[tuple[float, float, float, float]]],
    complete: bool = True,
    environment: Environment = ENVIRONMENT,
    **changes: object,
) -> Path:
    """A training directory; ``phases_s[rank][iteration]`` are the seconds of FW, BW, exposed GE and WU."""
    manifest = Manifest(
        schema_version=MEASUREMENT_VERSION,
        kind="training",
        command_line=("paradl-bench", "train"),
        arguments={},
        created_utc="2026-01-01T00:00:00Z",
        environment=environment,
        complete=complete,
    )
    run = TrainingRun(
        model=network.name,
        input_shape=network.input_shape,
        strategy=strategy,
        ranks=ranks,
        batch=batch,
        dtype="fp32",
        optimizer="sgd",
        backend="gloo" if ranks > 1 else "none",
        launcher="own",
        iterations=len(phases_s[0]),
        warmup=3,
        bucket_cap_bytes=25 * 1024 * 1024,
        first_bucket_bytes=1024 * 1024,
        network_digest=network.digest,
        issued_equals_plan=True,
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_manifest(directory, manifest)
    write_bytes_atomically(directory / RUN_NAME, encode_pretty(msgspec.structs.replace(run, **changes)))
    records = [
        TrainingIterations(
            rank=rank,
            first_iteration=3,
            iteration_s=tuple(sum(row) for row in rows),
            fw_s=tuple(row[0] for row in rows),
            bw_s=tuple(row[1] for row in rows),
            exposed_ge_s=tuple(row[2] for row in rows),
            wu_s=tuple(row[3] for row in rows),
        )
        for rank, rows in enumerate(phases_s)
    ]
    append_lines(directory / TRAINING_FILE, records)
    return directory


def with_doctor(profile: Profile, *, flops: float = 1e11, bytes_per_s: float = 1e10) -> Profile:
    """The profile with rates of its device as doctor measures them, by default those that it has for a roofline."""
    rates_of: tuple[tuple[Resource, float], ...] = (("compute", flops), ("memory", bytes_per_s))
    rates = tuple(
        DeviceRate(
            resource=resource,
            dtype="fp32",
            ranks_on_host=1,
            per_s=per_s,
            relative_sd=0.0,
            kernel="gemm",
            working_set_bytes=1,
            spread_over_kernels=(per_s, per_s),
        )
        for resource, per_s in rates_of
    )
    devices = tuple(msgspec.structs.replace(device, rates=rates) for device in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)


def noisy_profile(chain: ModelGraph) -> Profile:
    """A profile whose layers, models and fits are all known to vary, with interference and copies of buckets."""
    return make_profile(
        chain,
        layer_times=layer_times(chain, block_sd=0.05),
        model_times=model_times(chain, between_s=1e-3, common_sd=0.02, remainder=0.1),
        communication=tuple(
            ring_fit(operation, covariance=((1e-12, 0.0), (0.0, 1e-20)), block_relative_sd=0.05)
            for operation in ("all_reduce", "all_gather", "send_recv", "broadcast")
        ),
        contexts=(with_compute(1.3, 1.6),),
        copies=free_copies(beta_s_per_byte=1e-10),
    )
