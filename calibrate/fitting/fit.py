"""From measurement directories to a profile."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec

from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.fitting.contexts.context_fit import fit_contexts
from calibrate.fitting.copy_fit import fit_copies
from calibrate.fitting.disagreement import disagreements
from calibrate.fitting.input_fit import fit_input
from calibrate.fitting.kernels.kernel_fit import fit_kernels
from calibrate.fitting.kernels.kernel_rates import kernel_rates
from calibrate.fitting.layer_fit import Reached, layer_times, model_times, rates_reached
from calibrate.fitting.memory.memory_fit import fit_memory
from calibrate.fitting.memory.memory_runs import read_memory_runs
from calibrate.fitting.reading import Measurements, read_measurements
from calibrate.kernels.files import archive_beside, write_arrays
from calibrate.kernels.model import KernelModel
from calibrate.profile.profile import SCHEMA_VERSION, Device, LayerTime, Profile
from calibrate.profile.roofline_rates import RatesFrom, fit_rates, rate_of
from calibrate.profile.unlike_parts import unlike_parts
from paradl_bench.core.errors import UserError
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.cluster import NODE, RACK, Cluster, Level, nested
from paradl_bench.records.emulation import emulated_nodes


def fit_profile(
    directories: Sequence[Path],
    *,
    command_line: tuple[str, ...],
    force: bool,
    memory_runs: Sequence[Path] = (),
    beside: Path | None = None,
) -> Profile:
    """Fit a profile to directories of ``paradl-bench layers``, ``collectives`` and ``kernels``.

    Args:
        command_line: kept in the profile.
        force: merge directories that were measured in different environments.
        memory_runs: training runs, or directories of them, of which peaks of memory are used and nothing else.
        beside: where the profile will be written: regressors of kernels are written beside it.

    Raises:
        UserError: no or a wrong directory, a training run, different environments, nothing measured, a wrong record;
            kernels, but no place to keep their regressors.
        WorkError: LightGBM is missing, or the regressors can't be written.
    """
    measured = read_measurements(directories, force=force)
    of_memory = read_memory_runs(memory_runs, measured.environments, measured.networks, force=force)
    memory = fit_memory(of_memory.runs)
    times = layer_times(measured.layers, measured.iterations, imported=measured.imported)
    fitted = fit_communication((record for _, record in measured.collectives), operations())
    contexts, context_notes = fit_contexts(measured.contexts, fitted.fits, operations())
    kernel_models, regressor_notes = _kernel_models(measured, beside)
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        created_utc=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command_line=command_line,
        environments=of_memory.environments,
        sources=measured.sources,
        devices=_devices(measured, times),
        cluster=_cluster(measured),
        network=measured.networks,
        layer_times=times,
        model_times=model_times(measured.iterations, measured.layers),
        shard_times=model_times(measured.iterations, measured.layers, shards=True),
        copies=fit_copies(measured.copies),
        memory_runs=of_memory.runs,
        memory_factors=memory.factors,
        memory_reuse=memory.reuse,
        input_side=fit_input(measured.input),
        kernel_models=kernel_models,
        communication=fitted.fits,
        communication_choices=fitted.choices,
        contexts=contexts,
        notes=(
            *measured.notes,
            *disagreements(measured),
            *fitted.notes,
            *context_notes,
            *regressor_notes,
            *of_memory.notes,
            *memory.notes,
            *_incomplete(measured),
        ),
    )
    profile = msgspec.structs.replace(profile, notes=(*profile.notes, *unlike_parts(profile)))
    others = (profile.communication, profile.model_times, profile.kernel_models, measured.rates, measured.input)
    if not (profile.layer_times or any(others)):
        more = f" ({'; '.join(profile.notes)})" if profile.notes else ""
        raise UserError(f"{', '.join(map(str, directories))}: no measurements that can be fitted{more}")
    return profile


def _kernel_models(measured: Measurements, beside: Path | None) -> tuple[tuple[KernelModel, ...], tuple[str, ...]]:
    if not measured.kernels:
        return (), ()
    if beside is None:
        raise UserError("regressors of kernels lie in a file beside the profile; give -o PROFILE, not -")
    fitted = fit_kernels([record for _, record in measured.kernels])
    if not fitted.models:
        return (), fitted.notes
    archive = archive_beside(beside)
    sha256 = write_arrays(archive, fitted.arrays)
    named = (msgspec.structs.replace(model, file=archive.name, sha256=sha256) for model in fitted.models)
    return tuple(named), fitted.notes


def _devices(measured: Measurements, times: Sequence[LayerTime]) -> tuple[Device, ...]:
    reached = rates_reached(times, measured.networks, measured.environments[0].device)
    devices: dict[str, Device] = {}
    for index, environment in enumerate(measured.environments):
        if environment.device_name in devices:
            continue
        alike = {i for i, other in enumerate(measured.environments) if other.device_name == environment.device_name}
        rates = fit_rates(record for place, record in measured.rates if measured.sources[place].environment in alike)
        device = Device(
            name=environment.device_name,
            kind=environment.device,
            memory_bytes=environment.memory_bytes,
            devices_per_host=environment.device_count,
            rates=rates,
        )
        # Of devices merged by force nobody can say which of them layers reached it on.
        devices[device.name] = _rated(device, reached if index == 0 else Reached(), _kernels_on(measured, alike))
    return tuple(devices.values())


def _kernels_on(measured: Measurements, environments: set[int]) -> Reached:
    records = (record for place, record in measured.kernels if measured.sources[place].environment in environments)
    return Reached(*kernel_rates(records))


def _rated(device: Device, reached: Reached, by_kernels: Reached) -> Device:
    """The device with peak and bandwidth measured by doctor, else as its layers or kernels reached them; it says which.

    Kernels answer where layers reached neither: rates of both would mix what is measured alone and in an iteration.
    """
    peak, bandwidth = (rate_of(device.rates, resource, "fp32", 1) for resource in ("compute", "memory"))
    measured = peak is not None and bandwidth is not None
    source: RatesFrom = "measured by doctor" if measured else "reached by layers" if any(reached) else ""
    rates = Reached(peak, bandwidth) if measured else reached
    if not source and any(by_kernels):
        source, rates = "reached by kernels", by_kernels
    return msgspec.structs.replace(
        device,
        peak_flops=rates.peak_flops,
        memory_bandwidth_bytes_per_s=rates.memory_bandwidth_bytes_per_s,
        rates_from=source,
        layers_reached=tuple(reached),
    )


def _cluster(measured: Measurements) -> Cluster:
    """The cluster that was measured: a host with its devices, and outer levels as far as collectives spanned them."""
    environment = measured.environments[0]
    emulated = [nodes for env in measured.environments if (nodes := emulated_nodes(env.emulated)) is not None]
    # Emulated nodes share one host, and hold what they were asked to.
    on_node = max((nodes.ranks_per_node for nodes in emulated), default=environment.device_count)
    largest: dict[str, int] = {NODE: on_node}
    for _, record in measured.collectives:
        largest[record.level] = max(largest.get(record.level, 1), record.ranks)
    node_ranks = largest.pop(NODE)
    in_rack = max((nodes.nodes_per_rack for nodes in emulated), default=0) * node_ranks
    if in_rack > node_ranks:
        largest[RACK] = in_rack
    outer = [Level(name=name, ranks=ranks) for name, ranks in largest.items()]
    shared = environment.device == "cpu"
    # Logs of other tools don't say how much memory there was.
    sharing = max((nodes.ranks for nodes in emulated), default=node_ranks) if shared else 1
    memory_bytes = environment.memory_bytes / sharing if environment.memory_bytes else None
    return Cluster(
        name=environment.hostname or "measured",
        levels=nested(Level(name=NODE, ranks=node_ranks), outer),
        memory_bytes_per_rank=memory_bytes,
    )


def _incomplete(measured: Measurements) -> list[str]:
    """Models without a network, and imported ones without iterations."""
    timed = {record.model for _, record in measured.iterations}
    models = {record.model for _, record in measured.layers} | timed
    imported = {record.model for index, record in measured.layers if index in measured.imported}
    untraced = sorted(models - measured.networks.keys())
    return [f"{model} was measured, but no directory holds its network file" for model in untraced] + [
        f"{model}: layer times were imported without the time between layers and the weight update: predict takes"
        " these as none, or from the memory's bandwidth, and says so"
        for model in sorted(imported - timed)
    ]
