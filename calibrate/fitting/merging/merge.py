"""Partial calibrations put together: profiles, where the measurements themselves are no longer at hand.

Statistics of one thing from two profiles cannot be pooled without their samples, so that other numbers of the same
model, fit or slow-down are refused. An operation's time that both hold is taken from the profile with more samples of
it, since layers of equal shape occur in many models; copies, which a machine makes alike for all models, from the one
that fitted them to more models. Memory factors are fitted anew to the runs of all. Every other list is joined by what
its entries are about (:mod:`calibrate.profile.entries`).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from calibrate.fitting.memory.memory_fit import fit_memory
from calibrate.fitting.merging.published_parts import own_before_published, with_sheet
from calibrate.fitting.reading import first_few, same_work, unlike_nearest
from calibrate.kernels.files import copy_archive
from calibrate.profile.entries import describe, identity
from calibrate.profile.memory_factors import MemoryRun
from calibrate.profile.profile import (
    SCHEMA_VERSION,
    CopyTime,
    Device,
    LayerTime,
    Profile,
    encode_profile,
    read_profile,
)
from calibrate.profile.roofline_rates import DATA_SHEET
from calibrate.profile.unlike_parts import unlike_parts
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
from paradl_bench.records.cluster import Cluster, Level, nested
from paradl_bench.records.measurement import Environment

_COMPARED_LEFT_OUT = (
    "compared runs of {} are left out: they were compared with other predictions; predict validate --profile-out"
    " compares them anew"
)


def merge_profiles(
    profiles: Sequence[Profile], names: Sequence[str], *, command_line: tuple[str, ...], force: bool
) -> Profile:
    """One profile of several, which keeps every source and environment.

    Args:
        names: of the profiles, for messages.
        force: merge different environments, and take from the first what several hold; both are noted.

    Raises:
        UserError: fewer than two, different environments or networks, different numbers of one model or fit.
    """
    if len(profiles) < 2:
        raise UserError("merging takes at least two profiles; write calibrate merge A B -o PROFILE")
    notes = [note for profile in profiles for note in profile.notes]
    notes += _check_alike(profiles, names, force=force)
    _check_networks(profiles, names)
    profiles, names, replaced = own_before_published(profiles, names)
    notes += replaced
    # Predictions of the merged profile are others than those that were compared.
    compared = [name for profile, name in zip(profiles, names, strict=True) if profile.runs_compared]
    notes += [_COMPARED_LEFT_OUT.format(" and ".join(compared))] * bool(compared)

    environments = tuple({_hashable(env): env for profile in profiles for env in profile.environments}.values())
    placed = [_placed(profile, environments) for profile in profiles]
    special: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "created_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command_line": command_line,
        "environments": environments,
        "sources": tuple({source.sha256: source for part in placed for source in reversed(part.sources)}.values()),
        "devices": _devices(profiles),
        "cluster": _cluster(profiles),
        "network": {name: network for profile in profiles for name, network in profile.network.items()},
        "layer_times": _layer_times(profiles),
        "copies": _copies(profiles, names, notes),
    }
    fields: dict[str, object] = {}
    for field in Profile.__struct_fields__:
        if field in special:
            fields[field] = special[field]
        elif field not in ("notes", "memory_factors", "memory_reuse", "compared_runs"):
            fields[field], more = _joined(field, [getattr(part, field) for part in placed], names, force=force)
            notes += more
    runs = cast(tuple[MemoryRun, ...], fields["memory_runs"])
    memory = fit_memory(runs)
    fields |= {"memory_factors": memory.factors, "memory_reuse": memory.reuse}
    merged = Profile(**{**fields, "notes": ()})  # type: ignore[arg-type]
    notes = [*unlike_parts(merged), *notes, *memory.notes]
    return msgspec.structs.replace(merged, notes=tuple(dict.fromkeys(notes)))


def merge_files(paths: Sequence[Path], output: str, *, command_line: tuple[str, ...], force: bool) -> Profile:
    """Merge profiles as :func:`merge_profiles`, and write the result to a file, or ``-`` for standard output.

    Raises:
        UserError: as there; or the file is there, and ``force`` is not given.
    """
    refuse_overwrite(output, force=force)
    merged = merge_profiles(
        [read_profile(path) for path in paths], [str(path) for path in paths], command_line=command_line, force=force
    )
    if merged.kernel_models:
        merged = with_archives_beside(merged, output)
    write_output(output, encode_profile(merged), force=force)
    return merged


def with_archives_beside(profile: Profile, output: str) -> Profile:
    """A merged profile whose regressors' archives were copied beside where it will be written.

    Raises:
        UserError: it goes to standard output, or an archive is missing or another one.
    """
    if output == "-":
        raise UserError("regressors of kernels lie in a file beside the profile; give -o PROFILE, not -")
    copied = (
        msgspec.structs.replace(model, file=str(copy_archive(Path(model.file), model.sha256, Path(output))))
        for model in profile.kernel_models
    )
    return msgspec.structs.replace(profile, kernel_models=tuple(copied))


def _hashable(environment: Environment) -> bytes:
    return msgspec.json.encode(environment, order="deterministic")


def _placed(profile: Profile, environments: Sequence[Environment]) -> Profile:
    """The profile with every number of an environment as the merged profile counts them."""
    order = {_hashable(environment): index for index, environment in enumerate(environments)}
    moved: dict[str, object] = {}
    for field in Profile.__struct_fields__:
        entries = getattr(profile, field)
        if isinstance(entries, tuple) and entries and hasattr(entries[0], "environment"):
            moved[field] = tuple(
                msgspec.structs.replace(entry, environment=order[_hashable(profile.environments[entry.environment])])
                for entry in entries
            )
    # Numbers of the whole list would be refused by the profile that holds its own alone.
    return msgspec.structs.replace(profile, environments=tuple(environments), **moved)


def _check_alike(profiles: Sequence[Profile], names: Sequence[str], *, force: bool) -> list[str]:
    """Notes of what was merged by force."""
    notes = []
    # What was published tells nothing of hosts and versions: whether devices are one is asked apart.
    measured = [(profile, name) for profile, name in zip(profiles, names, strict=True) if not profile.published]
    first = measured[0][0].environments if measured else ()
    for profile, name in measured[1:]:
        # Layers and collectives record settings of their own: each is held against the one that it is most like.
        differences = [unlike_nearest(first, other) for other in profile.environments if first]
        worst = max(differences, key=len, default=[])
        if not worst:
            continue
        text = f"{measured[0][1]} and {name} were measured in different environments ({first_few(worst)})"
        if not force:
            raise UserError(f"{text}; give --force to merge them anyway")
        notes.append(f"{text}; merged because of --force")
    return notes


def _check_networks(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        for model, network in profile.network.items():
            for other, where in zip(profiles, names, strict=True):
                if other is profile:
                    break
                if model in other.network and not same_work(network, other.network[model]):
                    raise UserError(
                        f"{where} and {name} hold different networks of {model}; a profile holds one: fit two profiles"
                    )


def _joined(field: str, parts: Sequence[object], names: Sequence[str], *, force: bool) -> tuple[object, list[str]]:
    """Entries of all, those that are about one thing from one profile; and notes of what was taken by force."""
    if not all(isinstance(part, tuple) for part in parts):
        return _single(field, parts, names, force=force)
    owners: dict[tuple[object, ...], tuple[str, list[msgspec.Struct]]] = {}
    notes = []
    for entries, name in zip(parts, names, strict=True):
        groups = grouped(cast(tuple[msgspec.Struct, ...], entries), lambda entry: identity(field, entry))
        for key, group in groups.items():
            owner, kept = owners.setdefault(key, (name, group))
            if kept != group:
                notes.append(_refuse_or_note(describe(field, group[0]), owner, name, force=force))
    return tuple(entry for _, group in owners.values() for entry in group), notes


def _single(field: str, parts: Sequence[object], names: Sequence[str], *, force: bool) -> tuple[object, list[str]]:
    """A field that is no list: the first profile's that has it."""
    held = [(name, part) for name, part in zip(names, parts, strict=True) if part]
    notes = [
        _refuse_or_note(field.replace("_", " "), held[0][0], name, force=force)
        for name, part in held[1:]
        if part != held[0][1]
    ]
    return (held[0][1] if held else parts[0]), notes


def _refuse_or_note(what: str, owner: str, name: str, *, force: bool) -> str:
    text = f"{owner} and {name} both hold {what}, with different numbers"
    if not force:
        raise UserError(f"{text}: fit their directories together (calibrate fit), or give --force")
    return f"{text}: taken from {owner} because of --force"


def _devices(profiles: Sequence[Profile]) -> tuple[Device, ...]:
    """Each once: the first that doctor measured, else the first; a data sheet's rates where a roofline lacks one."""
    devices: dict[str, Device] = {}
    for device in (device for profile in profiles for device in profile.devices):
        known = devices.setdefault(device.name, device)
        if device.rates_from == DATA_SHEET:
            devices[device.name] = with_sheet(known, device)
        elif device.rates and not known.rates:
            devices[device.name] = device
    return tuple(devices.values())


def _layer_times(profiles: Sequence[Profile]) -> tuple[LayerTime, ...]:
    best: dict[tuple[object, ...], LayerTime] = {}
    for profile in profiles:
        for time in profile.layer_times:
            key = identity("layer_times", time)
            if key not in best or time.time.samples > best[key].time.samples:
                best[key] = time
    return tuple(best.values())


def _copies(profiles: Sequence[Profile], names: Sequence[str], notes: list[str]) -> tuple[CopyTime, ...]:
    """Each from the profile that fitted it to most models, which is noted."""
    best: dict[tuple[object, ...], tuple[str, CopyTime]] = {}
    for profile, name in zip(profiles, names, strict=True):
        for copy in profile.copies:
            key = identity("copies", copy)
            known = best.get(key)
            if known is None or len(copy.models) > len(known[1].models):
                best[key] = name, copy
            if known is not None and known[1] != copy:
                what = f"{describe('copies', copy)} {'rank' if copy.ranks_on_host == 1 else 'ranks'} on the host"
                notes.append(f"{what}: {known[0]} and {name} differ; taken from {best[key][0]}, with most models")
    return tuple(copy for _, copy in best.values())


def _cluster(profiles: Sequence[Profile]) -> Cluster:
    """The first profile's, with every level that any of them was measured at, and the first memory that is known."""
    levels: dict[str, Level] = {}
    for profile in profiles:
        for level in profile.cluster.levels:
            if level.name not in levels or level.ranks > levels[level.name].ranks:
                levels[level.name] = level
    innermost = levels.pop(profiles[0].cluster.levels[0].name)
    memory = next((known for each in profiles if (known := each.cluster.memory_bytes_per_rank)), None)
    return msgspec.structs.replace(
        profiles[0].cluster, levels=nested(innermost, levels.values()), memory_bytes_per_rank=memory
    )
