"""What a profile says of itself: how layers add up, where it is weak, and which command would help most."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.profile import LayerTime, ModelTime, Profile
from calibrate.report.weakness import (
    Weakness,
    WeaknessKind,
    never_measured,
    only_simulated,
    simulated_libraries,
    sweep_command,
    without_libraries,
)
from paradl_bench.core.files.storage import file_name
from paradl_bench.core.statistics import grouped
from paradl_bench.core.units import format_difference, spell_size
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.cluster import NODE
from paradl_bench.records.kernel_settings import flags_of_label
from paradl_bench.records.measurement import PhaseName

_ORDER: tuple[WeaknessKind, ...] = ("missing", "inaccurate", "untested")


class ModelSums(msgspec.Struct, frozen=True, kw_only=True):
    """How the layers of a model add up at one local batch, in seconds.

    Attributes:
        layers_measured, layers: how many of the network's layers have a forward time, of how many.
        fw_layers_s, bw_layers_s: sums of the layers' medians, in situ.
        sum_s: layers, time between operations and weight update. Its layers are sums of medians; the remainder beside
            it is a median over pairs of iterations, so that the two differ where times are skewed.
    """

    model: str
    batch: int
    dtype: str
    optimizer: str
    ranks_on_host: int
    layers_measured: int
    layers: int
    fw_layers_s: float
    bw_layers_s: float
    fw_between_s: float
    bw_between_s: float
    wu_s: float
    sum_s: float
    iteration_s: float
    remainder_relative: float
    remainder_interval: tuple[float, float]
    noise_floor_relative: float
    common_relative_sd: float
    kernel_settings: str = ""

    @property
    def computed_in(self) -> str:
        """Dtype and kernel settings, in words."""
        return " ".join([self.dtype, *self.kernel_settings.replace("_", " ").split("+")]).strip()

    @property
    def options(self) -> str:
        """What ``paradl-bench layers`` is given to compute as this was, each option behind a space."""
        dtype = f"--dtype {self.dtype}" if self.dtype != "fp32" else ""
        optimizer = f"--optimizer {self.optimizer}" if self.optimizer != "sgd" else ""
        return "".join(f" {option}" for option in (dtype, flags_of_label(self.kernel_settings), optimizer) if option)


def model_sums(profile: Profile) -> tuple[ModelSums, ...]:
    """Sums of the layers of every model and local batch that the profile holds."""
    times = {
        (time.operation, time.phase, time.batch, time.dtype, time.kernel_settings, time.ranks_on_host): time
        for time in profile.layer_times
        if time.mode == "in_situ" and not time.shard
    }
    return tuple(_sums(whole, profile.network.get(whole.model), times) for whole in profile.model_times)


def _sums(
    whole: ModelTime,
    network: ModelGraph | None,
    times: dict[tuple[str, PhaseName, int, str, str, int], LayerTime],
) -> ModelSums:
    layers = network.layers if network else ()

    def medians(phase: PhaseName) -> list[float]:
        like = phase, whole.batch, whole.dtype, whole.kernel_settings, whole.ranks_on_host
        keys = [(layer.operation, *like) for layer in layers]
        return [times[key].time.typical_s for key in keys if key in times]

    fw, bw = medians("FW"), medians("BW")
    between_s = whole.fw_between.typical_s + whole.bw_between.typical_s
    return ModelSums(
        **{field: getattr(whole, field) for field in ModelSums.__struct_fields__ if hasattr(whole, field)},
        layers_measured=len(fw),
        layers=len(layers),
        fw_layers_s=sum(fw),
        bw_layers_s=sum(bw),
        fw_between_s=whole.fw_between.typical_s,
        bw_between_s=whole.bw_between.typical_s,
        wu_s=whole.wu.typical_s,
        sum_s=sum(fw) + sum(bw) + between_s + whole.wu.typical_s,
        iteration_s=whole.iteration.median_s,
    )


def weaknesses(profile: Profile) -> tuple[Weakness, ...]:
    """Where the profile is weak: first what is missing, then what is inaccurate by size, then what is untested."""
    simulated = simulated_libraries(profile)
    measured = without_libraries(profile, simulated)
    weak = [
        *(
            Weakness(kind="missing", text=f"{source.path} was not finished", command=shlex.join(source.command_line))
            for source in profile.sources
            if not source.complete
        ),
        *_weak_models(profile),
        *only_simulated(profile, simulated),
        *(_weak_communication(measured) if measured.communication or not simulated else ()),
        *_weak_overlap(measured),
        *never_measured(measured),
    ]
    return tuple(sorted(weak, key=lambda weakness: (_ORDER.index(weakness.kind), -(weakness.size or 0.0))))


def _weak_models(profile: Profile) -> Iterator[Weakness]:
    if not profile.model_times:
        yield Weakness(
            kind="missing",
            text="no layers were measured, so nothing can be predicted",
            command="paradl-bench layers MODEL --batch N -o layers",
        )
    for sums in model_sums(profile):
        measured = f"{_layers(profile, [sums.model])}{sums.options}"
        again = f"{measured} --batch {sums.batch} --ranks-on-host {sums.ranks_on_host}"
        output = f"-o layers-{file_name(sums.model)}-b{sums.batch}-r{sums.ranks_on_host}{_suffix(sums)}"
        where = f"{sums.model} in {sums.computed_in}, batch {sums.batch}, {sums.ranks_on_host} ranks on the host"
        if sums.layers_measured < sums.layers or not sums.layers:
            text = f"{where}: {sums.layers_measured} of {sums.layers or 'unknown'} layers have a forward time"
            yield Weakness(kind="missing", text=text, command=f"{again} {output}")
        low, high = sums.remainder_interval
        if abs(sums.remainder_relative) > sums.noise_floor_relative and not low <= 0 <= high:
            yield Weakness(
                kind="inaccurate",
                text=f"{where}: {format_difference(sums.remainder_relative)} of the iteration is not explained by its"
                " parts",
                command=f"{again} --blocks 10 {output}-again",
                size=abs(sums.remainder_relative),
            )
        yield Weakness(
            kind="inaccurate",
            text=f"{where}: blocks of iterations differ from each other; measure more blocks, on a quiet machine",
            command=f"{again} --blocks 10 {output}-again",
            size=sums.common_relative_sd,
        )
    for model, times in sorted(grouped(profile.model_times, lambda time: time.model).items()):
        batch = times[0].batch
        if all(time.batch == batch for time in times):
            around = ",".join(str(other) for other in (batch // 2, batch * 2) if other)
            yield Weakness(
                kind="untested",
                text=f"{model}: only local batch {batch} was measured; other batches are scaled from it",
                command=f"{_layers(profile, [model])} --batch {around} -o layers-{file_name(model)}-batches",
            )


def _suffix(sums: ModelSums) -> str:
    """Of a directory's name: what else than fp32 without settings was measured."""
    dtype = [sums.dtype] if sums.dtype != "fp32" else []
    return "".join(f"-{name}" for name in (*dtype, *sums.kernel_settings.split("+")) if name)


def _layers(profile: Profile, models: list[str]) -> str:
    """The command that measured these models; inputs of another shape would be another network."""
    shapes = {"x".join(map(str, profile.network[m].input_shape)) for m in models if m in profile.network}
    shape = f" --input-shape {shapes.pop()}" if len(shapes) == 1 else ""
    on_gpu = " --device cuda" if {environment.device for environment in profile.environments} == {"cuda"} else ""
    return f"paradl-bench layers {shlex.quote(','.join(models))}{shape}{on_gpu}"


def _weak_communication(profile: Profile) -> Iterator[Weakness]:
    if not profile.communication:
        yield Weakness(
            kind="missing",
            text="no collectives were measured, so only serial training can be predicted",
            command=f"{sweep_command(profile, 'gloo', 2, NODE)} -o collectives-gloo-2",
        )
    for fit in profile.communication:
        sizes = ":".join(map(spell_size, fit.bytes_range))
        yield Weakness(
            kind="inaccurate",
            text=f"{fit.library} {fit.operation}, level {fit.level}, {fit.regime}: error at sizes left out of the fit",
            # Regimes of one fit are swept apart, and one directory holds one sweep.
            command=f"{_sweep(profile, fit)} --sizes {sizes}:1.4 {_output(fit)}-{spell_size(fit.bytes_range[0])}",
            size=fit.held_out_relative_error,
        )
    groups = grouped(profile.communication, lambda fit: (fit.library, fit.level, fit.ranks_range[1]))
    for (library, level, ranks), fits in groups.items():
        worst = max(fits, key=lambda fit: fit.block_relative_sd)
        # A log of single blocks tells nothing of how they differ.
        if worst.block_relative_sd:
            yield Weakness(
                kind="inaccurate",
                text=f"{library}, level {level}: blocks of calls differ from each other, most for {worst.operation};"
                " measure more blocks, on a quiet machine",
                command=f"{_sweep(profile, worst)} --blocks 10 {_output(worst)}-again",
                size=worst.block_relative_sd,
            )
        alone = sorted({fit.operation for fit in fits if fit.held_out_ranks_relative_error is None})
        if alone:
            listed = ",".join(alone)
            yield Weakness(
                kind="untested",
                text=f"{library} {listed}, level {level}: one rank count ({ranks}); others are extrapolated",
                command=_other_ranks(profile, fits[0], listed),
            )


def _sweep(profile: Profile, fit: CommunicationFit) -> str:
    return f"{sweep_command(profile, fit.library, fit.ranks_range[1], fit.level)} --ops {shlex.quote(fit.operation)}"


def _output(fit: CommunicationFit) -> str:
    return f"-o {file_name(f'collectives-{fit.library}-{fit.operation}-{fit.ranks_range[1]}-{fit.level}')}"


def _other_ranks(profile: Profile, fit: CommunicationFit, listed: str) -> str:
    """Twice as many ranks, where the host has so many devices or cores; else half of them; else on two hosts."""
    ranks, level = fit.ranks_range[1], fit.level
    most = max((device.devices_per_host for device in profile.devices), default=0)
    count = 2 * ranks
    if level == NODE and most and count > most:
        count, level = (ranks // 2, level) if ranks >= 4 else (count, "system")
    place = file_name(f"collectives-{fit.library}-{listed.replace(',', '-')}-{count}-{level}")
    return f"{sweep_command(profile, fit.library, count, level)} --ops {shlex.quote(listed)} -o {place}"


def _weak_overlap(profile: Profile) -> Iterator[Weakness]:
    on_host = {time.ranks_on_host for time in profile.model_times}
    groups = {point.ranks for fit in profile.communication for point in fit.measured if fit.level == "node"}
    models = sorted({time.model for time in profile.model_times}) or ["MODEL"]
    batches = ",".join(map(str, sorted({time.batch for time in profile.model_times}))) or "N"
    for ranks in sorted(groups - on_host if on_host else ()):
        yield Weakness(
            kind="missing",
            text=f"layers were not measured on {ranks} ranks of one host at once, which slow each other",
            command=f"{_layers(profile, models)} --batch {batches} --ranks-on-host {ranks} -o layers-r{ranks}",
        )
    # Ranks of several nodes are started otherwise: a node's sweep is taken where there is one.
    on_node_last = sorted(profile.communication, key=lambda fit: fit.level == NODE)
    swept = {fit.library: (fit.ranks_range[1], fit.level) for fit in on_node_last}
    with_compute = [entry for entry in profile.contexts if entry.context == "with-compute"]

    def sweep_with_compute(library: str, ranks: int, level: str) -> str:
        place = file_name(f"with-compute-{library}")
        return f"{sweep_command(profile, library, ranks, level)} --contexts with-compute -o {place}"

    for library in sorted(swept.keys() - {entry.library for entry in with_compute}):
        yield Weakness(
            kind="missing",
            text=f"{library}: interference with compute was not measured; the cost of overlap is assumed",
            command=sweep_with_compute(library, *swept[library]),
        )
    beside: dict[tuple[str, str, int, str], float] = {}
    for entry in with_compute:
        key = entry.library, entry.operation, entry.ranks[1], entry.level
        spread = entry.neighbour_sd / entry.neighbour_factor
        beside[key] = max(beside.get(key, 0.0), spread)
    for (library, operation, ranks, level), spread in beside.items():
        yield Weakness(
            kind="inaccurate",
            text=f"{library} {operation} with compute, {ranks} ranks: slow-down of compute varies",
            command=sweep_with_compute(library, ranks, level),
            size=spread,
        )
    for copy in profile.copies:
        yield Weakness(
            kind="inaccurate",
            text=f"{copy.what}, {copy.ranks_on_host} ranks on the host: blocks differ from the fit",
            command=f"{_layers(profile, models)} --batch {batches} --ranks-on-host {copy.ranks_on_host} --blocks 10"
            f" -o layers-copies-r{copy.ranks_on_host}",
            size=copy.relative_sd,
        )
