"""Seconds of a network's layers as ``paradl-bench layers`` measured them, and the cut into stages that balances these.

What a layer counts is its forward and backward inside real iterations, and its share of the time between operations.
Only what layers take against each other decides a cut, so a measurement of another batch will do: the nearest one is
taken, of the nearest number of ranks on the host. Layers count whole where an axis inside of the pipeline shares them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axis_planner import samples_at_once
from paradl_bench.records.measurement import ITERATIONS_FILE, LAYERS_FILE, read_manifest, read_records
from paradl_bench.records.samples import IterationSamples, LayerSamples
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.stages import balanced_stages


def with_measured_stages(request: TrainingRequest, network: ModelGraph) -> TrainingRequest:
    """The request with the stages that balance what it names; as it is where it names nothing.

    Raises:
        UserError: a directory of something else, of another model or other layers, or a network that cannot be cut.
    """
    if request.balance is None:
        return request
    directory, strategy = Path(request.balance), request.strategy
    batch = samples_at_once(strategy, request.settings)
    records = _nearest(
        _layers(directory, network, (request.dtype, request.kernel_settings.label)), batch, strategy.ranks
    )
    seconds = measured_seconds(directory, network, records)
    on_host = records[0].ranks_on_host
    at = f"{request.balance}, batch {records[0].batch}, {on_host} rank{'s' * (on_host > 1)} on the host"
    return msgspec.structs.replace(
        request,
        axes=request.settings.changed(
            PipelineOptions,
            stages=balanced_stages(network, strategy, request.settings, seconds),
            cut_by=f"measured seconds of {at}",
        ).axes,
        balance=None,
    )


def _layers(directory: Path, network: ModelGraph, computed_in: tuple[str, str]) -> list[LayerSamples]:
    if directory.is_file():
        raise UserError(
            f"--balance {directory} is a file: give a directory of paradl-bench layers, or as --stages what predict"
            " --stages measured says of a profile"
        )
    manifest = read_manifest(directory)
    if manifest.kind != "layers":
        raise UserError(f"--balance {directory} holds {manifest.kind}: give a directory of paradl-bench layers")
    records = [
        record
        for record in read_records(directory, LAYERS_FILE, LayerSamples)
        if record.mode == "in_situ" and not record.shard and (record.dtype, record.kernel_settings) == computed_in
    ]
    of_model = [record for record in records if record.model == network.name]
    if not of_model:
        models = ", ".join(sorted({record.model for record in records})) or "no model"
        within = " ".join(computed_in).rstrip()
        raise UserError(f"--balance {directory} holds layers in {within} of {models}, none of {network.name}")
    return of_model


def _nearest(records: list[LayerSamples], batch: int, ranks: int) -> list[LayerSamples]:
    """Those of the nearest number of ranks on the host, and of these the nearest batch, both by ratio."""
    on_host = min(sorted({r.ranks_on_host for r in records}), key=lambda count: abs(math.log(count / ranks)))
    near = [record for record in records if record.ranks_on_host == on_host]
    at = min(sorted({record.batch for record in near}), key=lambda count: abs(math.log(count / batch)))
    return [record for record in near if record.batch == at]


def measured_seconds(directory: Path, network: ModelGraph, records: list[LayerSamples]) -> tuple[float, ...]:
    """Seconds of every layer: medians of forward and backward, and its share of what passes between operations.

    Args:
        records: of one batch and number of ranks on the host, from the directory.

    Raises:
        UserError: a layer was measured in other shapes, or not at all.
    """
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    operations = {}
    for record in records:
        samples[record.layer][record.phase].extend(record.samples_s)
        operations[record.layer] = record.operation
    for layer in network.layers:
        measured = operations.get(layer.name)
        if measured != layer.operation:
            what = "holds no time of it" if measured is None else f"measured {measured}"
            raise UserError(
                f"--balance {directory}: layer {layer.name} of {network.name} is {layer.operation} here, and it"
                f" {what}; measure it with the same --input-shape"
            )
    between = _between(directory, records[0])
    of_phase = {phase: sum(phase in phases for phases in samples.values()) for phase in between}
    return tuple(
        sum(
            float(np.median(values)) + between.get(phase, 0.0) / max(of_phase.get(phase, 1), 1)
            for phase, values in samples[layer.name].items()
        )
        for layer in network.layers
    )


def _between(directory: Path, like: LayerSamples) -> dict[str, float]:
    """Seconds between all operations of each phase; nothing where only layers were kept."""
    iterations = [
        record
        for record in read_records(directory, ITERATIONS_FILE, IterationSamples)
        if not record.shard
        and (record.model, record.batch, record.ranks_on_host) == (like.model, like.batch, like.ranks_on_host)
    ]
    if not iterations:
        return {}
    forward = np.median(np.concatenate([record.fw_between_s for record in iterations]))
    backward = np.median(np.concatenate([record.bw_between_s for record in iterations]))
    return {"FW": max(0.0, float(forward)), "BW": max(0.0, float(backward))}
