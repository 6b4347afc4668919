"""The profile: one JSON file with statistics, fits and their provenance, that a person can read and diff.

Format history (this file owns it):

    1  first format
    2  summaries carry typical_s, which adds up over layers where medians do not; it was the median before
    3  shard_times: what belongs to a model as one rank of a strategy runs it; there was none before. Networks say what
       their input consists of (numbers before) and which tensors hold no batch (none before). Fits of communication
       may be logarithmic (doubling_s) or hierarchical (inner) and say what else was considered; none did before
    4  what a profile of before lacks and reads as empty: regressors of kernels, the input side, contention, memory
       factors, what compute adds to collectives
    5  times of layers and iterations are keyed by kernel settings; there were none before
    6  what surrounds collectives is one list, contexts; behind_compute, interference, beside_all_reduce and contention
       were four, each with names of its own

A new version adds a line here and a function to ``MIGRATIONS``; a test case of the old one is kept under tests/data.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec

from calibrate.kernels.model import KernelModel
from calibrate.profile.collectives.communication import CommunicationChoice, CommunicationFit
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.collectives.older_contexts import in_one_list
from calibrate.profile.compared_runs import ComparedRun
from calibrate.profile.entries import IDENTITIES, key
from calibrate.profile.input_side import InputSide
from calibrate.profile.memory_factors import MemoryFactor, MemoryReuse, MemoryRun
from calibrate.profile.roofline_rates import DeviceRate, RatesFrom
from calibrate.profile.shipped.catalog import profile_file
from calibrate.profile.shipped.published import Published
from paradl_bench.core.bounds import (
    Bytes,
    Count,
    Index,
    PositiveCount,
    Ranks,
    Rate,
    Ratio,
    Relative,
    SchemaVersion,
    Seconds,
    SecondsPerByte,
    SignedRelative,
)
from paradl_bench.core.checks import check_distinct, check_rises
from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.documents import validation_text
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.statistics import Summary
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.works.moving import COPY_WORDS
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.hosts.host_load import HostLoad
from paradl_bench.records.kernel_settings import settings_of_label
from paradl_bench.records.measurement import Environment, Migration, Mode, PhaseName, load_versioned

SCHEMA_VERSION = 6


def _typical_is_median(value: Any) -> Any:
    """Version 1 to 2: every summary's typical time is its median, which predictions added up before."""
    if isinstance(value, list):
        return [_typical_is_median(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _typical_is_median(item) for name, item in value.items()}
    return {**fields, "typical_s": fields["median_s"]} if {"median_s", "iqr_s"} <= fields.keys() else fields


def _as_it_is(value: Any) -> Any:
    """Versions from 2 on: what was added may be empty."""
    return value


MIGRATIONS: dict[int, Migration] = {1: _typical_is_median, 2: _as_it_is, 3: _as_it_is, 4: _as_it_is, 5: in_one_list}
"""By version n: makes a profile of version n + 1 of one of version n (decoded JSON)."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where numbers of the profile come from: a measurement directory, its command and its hash.

    Attributes:
        environment: index into the profile's ``environments``.
        sha256: over the directory's files, to find out later whether they are the same.
        host_load: what else the host's cores did meanwhile, in the mean; None where nobody looked.
    """

    path: str
    kind: str
    command_line: tuple[str, ...]
    created_utc: str
    sha256: str
    environment: Index
    complete: bool
    host_load: HostLoad | None = None


SHORTEST_KERNEL_S = 1e-6
"""What takes less on a GPU runs no kernel: a view, a size."""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host takes to dispatch one operation that runs a kernel: framework, autograd, launches.

    Attributes:
        forward_s, backward_s: of one operation. relative_sd: of both together.
        runs: training runs that they were fitted to, which nothing may be judged by.
        timed: whether they are of a host that was timed; neither that nor fitted, they are somebody's guess.
    """

    forward_s: Seconds
    backward_s: Seconds
    relative_sd: Relative
    runs: tuple[str, ...] = ()
    timed: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that was measured.

    Attributes:
        peak_flops, memory_bandwidth_bytes_per_s: the roofline's basis, in fp32 with one rank on the host.
        rates_from: where these two come from; empty where there are none, or in a profile of before (from layers then).
            Kernels swept alone say them where no layer did. With a data sheet, ``rates`` are its as well.
        layers_reached: the most FLOP/s and bytes/s of any measured layer, beside what doctor measured.
        rates: that doctor measured, by dtype and ranks on the host.
        time_factor: of a device that computes nothing: it takes so many times the profile's seconds, neither more nor
            less (:mod:`~calibrate.profile.emulated_profile`). Its host copies gradients. Not in a file of one that
            computes.
        dispatch: of its host; unset where nothing was fitted of it.
    """

    name: str
    kind: str
    memory_bytes: Bytes
    devices_per_host: PositiveCount
    peak_flops: Rate | None = None
    memory_bandwidth_bytes_per_s: Rate | None = None
    rates_from: RatesFrom = ""
    layers_reached: tuple[Rate | None, Rate | None] = (None, None)
    rates: tuple[DeviceRate, ...] = ()
    time_factor: Ratio | msgspec.UnsetType = msgspec.UNSET
    dispatch: Dispatch | msgspec.UnsetType = msgspec.UNSET


class LayerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one operation and phase at one local batch.

    Attributes:
        operation: operation key (``Layer.operation``).
        shard: which part of the operation a rank runs (``f2``); empty for the whole.
        ranks_on_host: how many ranks ran it at once on the host.
        time: means, over the places where the operation occurs, of each place's statistics; ``typical_s`` is over the
            iterations whose total lies in the middle half, so that a model's layers add up.
        block_relative_sd: standard deviation of the medians of blocks spread over time, over the median.
        blocks: how many those are; of three or more measurements those count, since blocks of one are alike. 0 where it
            is not known, in profiles of before.
        kernel_settings: label of :class:`~paradl_bench.records.kernel_settings.KernelSettings`; empty for none.
    """

    operation: str
    phase: PhaseName
    mode: Mode
    batch: PositiveCount
    dtype: str
    ranks_on_host: Ranks
    time: Summary
    block_relative_sd: Relative
    shard: str = ""
    blocks: Count = 0
    kernel_settings: str = ""

    def __post_init__(self) -> None:
        settings_of_label(self.kernel_settings)


class ModelTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What belongs to a whole model at one local batch: optimizer, time between operations, closure, spread.

    Attributes:
        shard: the strategy whose rank ran its part of the model (``f2``); empty for the whole.
        fw, bw, iteration: uninstrumented, for closure and reports; predictions add up layers instead.
        fw_between, bw_between: framework, engine and allocator between operations, whole phase.
        wu: optimizer step and zero_grad.
        remainder_relative: 1 - (layers + between + WU) / iteration, median over A-B pairs; with its 90% interval, and
            the noise floor (median relative difference of the halves of the same uninstrumented iterations).
        common_relative_sd: standard deviation of the iteration's median between blocks, or between measurements where
            there are at least three, over the median of all: what all layers share. blocks: how many of either; 0 where
            it is not known.
        iteration_relative_quantiles: quantiles of single iterations over their median, at evenly spaced probabilities
            from 0 to 1: how far the slowest of several ranks falls behind.
        kernel_settings: as of layers.
        dispatch: of the host, timed phase by phase beside iterations of a GPU; else unset.
    """

    model: str
    batch: PositiveCount
    dtype: str
    optimizer: str
    ranks_on_host: Ranks
    fw: Summary
    bw: Summary
    wu: Summary
    iteration: Summary
    fw_between: Summary
    bw_between: Summary
    remainder_relative: SignedRelative
    remainder_interval: tuple[SignedRelative, SignedRelative]
    noise_floor_relative: Relative
    common_relative_sd: Relative
    iteration_relative_quantiles: tuple[Ratio, ...]
    shard: str = ""
    blocks: Count = 0
    kernel_settings: str = ""
    dispatch: Dispatch | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        settings_of_label(self.kernel_settings)
        check_rises(self, "remainder_interval")
        quantiles = self.iteration_relative_quantiles
        if len(quantiles) < 2 or any(upper < lower for lower, upper in itertools.pairwise(quantiles)):
            raise ValueError("iteration_relative_quantiles has to hold at least two numbers that do not fall")
        if not self.iteration.typical_s:
            raise ValueError("iteration.typical_s is 0: an iteration takes time")


class CopyTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of moving tensors of the sizes of gradients, per tensor and per byte, fitted over models.

    Attributes:
        direction: one of :data:`~paradl_bench.plan.works.moving.CopyDirection`; older measurements hold but the first
            two.
    """

    direction: str
    ranks_on_host: Ranks
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerByte
    relative_sd: Relative
    models: tuple[str, ...]

    @property
    def what(self) -> str:
        """What was timed, in words."""
        return COPY_WORDS.get(self.direction, self.direction)

    def seconds(self, bytes_moved: float, tensors: int) -> float:
        """Of so many bytes in so many tensors."""
        return tensors * self.alpha_s + bytes_moved * self.beta_s_per_byte


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that predictions read.

    Attributes:
        environments: distinct ones of the sources; several where they were merged by force, or differ in what leaves
            them alike (how many nodes were emulated).
        network: by model name.
        shard_times: as model_times, of what one rank of a strategy runs of a model.
        memory_runs: training runs whose peaks of memory, and nothing else, the memory factors were fitted to.
        input_side: by source of samples.
        kernel_models: regressors, by kernel kind, stage, settings and dtype.
        notes: what was left out of the profile or merged by force, in words.
        published: of a profile made of published measurements: whose they are; unset where all was measured.
        compared_runs: that its predictions were held against, which its intervals count; unset where none was.
    """

    schema_version: SchemaVersion
    created_utc: str
    command_line: tuple[str, ...]
    environments: tuple[Environment, ...]
    sources: tuple[Source, ...]
    devices: tuple[Device, ...]
    cluster: Cluster
    network: dict[str, ModelGraph] = {}
    layer_times: tuple[LayerTime, ...] = ()
    model_times: tuple[ModelTime, ...] = ()
    shard_times: tuple[ModelTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    communication: tuple[CommunicationFit, ...] = ()
    communication_choices: tuple[CommunicationChoice, ...] = ()
    contexts: tuple[InContext, ...] = ()
    memory_runs: tuple[MemoryRun, ...] = ()
    memory_factors: tuple[MemoryFactor, ...] = ()
    memory_reuse: tuple[MemoryReuse, ...] = ()
    input_side: tuple[InputSide, ...] = ()
    kernel_models: tuple[KernelModel, ...] = ()
    notes: tuple[str, ...] = ()
    published: Published | msgspec.UnsetType = msgspec.UNSET
    compared_runs: tuple[ComparedRun, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        placed: tuple[Source | MemoryRun, ...] = (*self.sources, *self.memory_runs)
        for source in placed:
            if source.environment >= len(self.environments):
                raise ValueError(
                    f"source {source.path} names environment {source.environment}, which the profile does not hold"
                )
        for name, network in self.network.items():
            if network.name != name:
                raise ValueError(f"network {name!r} has the name {network.name!r} inside; both have to be the same")
        for field in IDENTITIES:
            check_distinct(field, (key(field, entry) for entry in getattr(self, field)))
        check_distinct("compared_runs", (run.sha256 for run in self.runs_compared))
        if self.layer_times and not any(entry.time.typical_s for entry in self.layer_times):
            raise ValueError("every time in layer_times is 0: layers take time")

    @property
    def runs_compared(self) -> tuple[ComparedRun, ...]:
        """``compared_runs``; empty where none was compared."""
        return () if self.compared_runs is msgspec.UNSET else self.compared_runs

    @property
    def host_loads(self) -> tuple[tuple[str, HostLoad | None], ...]:
        """What else hosts did during the measurements, each with its directory."""
        return tuple((source.path, source.host_load) for source in self.sources)

    @property
    def time_factor(self) -> float | None:
        """That of the device; None where it computes."""
        factor = self.devices[0].time_factor if self.devices else msgspec.UNSET
        return None if factor is msgspec.UNSET else factor


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and validate a profile of this or an older version: a file, or a name of those that come with the tool.

    Raises:
        UserError: unreadable, truncated, of a newer version, or a wrong field, named by its path.
    """
    path = profile_file(path)
    raw = load_versioned(path, SCHEMA_VERSION, what="profile", migrations=MIGRATIONS)
    try:
        profile = msgspec.convert(raw, Profile)
    except msgspec.ValidationError as error:
        raise UserError(f"profile {path}: {validation_text(error, Profile)}") from None
    # Files lie beside the profile, wherever it was moved to.
    models = tuple(_beside(model, path) for model in profile.kernel_models)
    return msgspec.structs.replace(profile, kernel_models=models)


def _beside(model: KernelModel, path: Path) -> KernelModel:
    if Path(model.file).name != model.file or model.file in ("", ".."):
        raise UserError(
            f"profile {path}: kernel_models name {model.file!r}, which has to be the plain name of a file beside the"
            " profile"
        )
    return msgspec.structs.replace(model, file=str(path.parent / model.file))


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile atomically.

    Raises:
        WorkError: it can't be written, or holds a number that its format refuses, named by its path.
    """
    write_bytes_atomically(Path(path), encode_profile(profile))


def encode_profile(profile: Profile) -> bytes:
    """A profile as in its file: what lies beside it by name alone.

    Raises:
        WorkError: a number that the format refuses, named by its path.
    """
    models = tuple(msgspec.structs.replace(model, file=Path(model.file).name) for model in profile.kernel_models)
    content = encode_pretty(msgspec.structs.replace(profile, kernel_models=models))
    try:
        msgspec.json.decode(content, type=Profile)
    except msgspec.ValidationError as error:
        raise WorkError(f"this profile could not be read again: {error}") from None
    return content
