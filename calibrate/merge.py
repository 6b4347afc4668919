"""Partial calibrations put together: profiles, where the measurements themselves are no longer at hand.

Statistics of one thing from two profiles cannot be pooled without their samples. Where both hold the same model, fit or
slow-down this refuses: ``calibrate fit`` takes the directories of both. An operation's time that both hold is taken
from the profile with more samples of it, since layers of equal shape occur in many models.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from calibrate.profile import SCHEMA_VERSION, LayerTime, Profile, Source
from calibrate.reading import same_work, unlike
from calibrate.roofline_fit import merged_devices
from paradl_bench.spec.cluster import Cluster, Level
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.measurement import Environment

T = TypeVar("T", bound=msgspec.Struct)

_SHOWN = 3


def merge_profiles(
    profiles: Sequence[Profile], names: Sequence[str], *, command_line: tuple[str, ...], force: bool
) -> Profile:
    """One profile of several, which keeps every source and environment.

    Args:
        names: of the profiles, for messages.
        force: merge unlike environments, and take from the first what several hold; both are noted.

    Raises:
        UserError: fewer than two, unlike environments, the same measurement or model or fit in two, unlike networks.
    """
    if len(profiles) < 2:
        raise UserError("merging takes at least two profiles; write calibrate merge A B -o PROFILE")
    notes = [note for profile in profiles for note in profile.notes]
    notes += _check_alike(profiles, names, force=force)
    _check_distinct(profiles, names)
    _check_networks(profiles, names)

    def joined(label: str, key: Callable[[T], tuple[object, ...]]) -> tuple[T, ...]:
        found, more = _joined([getattr(profile, label) for profile in profiles], names, label, key, force=force)
        notes.extend(more)
        return found

    environments = list(dict.fromkeys(_hashable(each) for profile in profiles for each in profile.environments))
    by_text = {_hashable(each): each for profile in profiles for each in profile.environments}
    return Profile(
        schema_version=SCHEMA_VERSION,
        created_utc=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command_line=command_line,
        environments=tuple(by_text[text] for text in environments),
        sources=tuple(_moved(source, profile, environments) for profile in profiles for source in profile.sources),
        devices=merged_devices([profile.devices for profile in profiles]),
        cluster=_cluster(profiles),
        network={name: network for profile in profiles for name, network in profile.network.items()},
        layer_times=_layer_times(profiles),
        model_times=joined("model_times", lambda t: (t.model, t.batch, t.dtype, t.optimizer, t.ranks_on_host, t.shard)),
        shard_times=joined("shard_times", lambda t: (t.model, t.batch, t.dtype, t.optimizer, t.ranks_on_host, t.shard)),
        copies=joined("copies", lambda copy: (copy.direction, copy.ranks_on_host)),
        communication=joined("communication", _communication_key),
        communication_choices=joined("communication_choices", _communication_key),
        input_side=joined("input_side", lambda side: (side.source,)),
        interference=joined("interference", lambda entry: (entry.library, entry.operation, entry.level, entry.ranks)),
        contention=joined("contention", lambda entry: (*_communication_key(entry), entry.concurrent)),
        behind_compute=joined("behind_compute", _communication_key),
        notes=tuple(dict.fromkeys(notes)),
    )


def _communication_key(entry: msgspec.Struct) -> tuple[str, ...]:
    return tuple(str(getattr(entry, label)) for label in ("library", "operation", "level"))


def _hashable(environment: Environment) -> bytes:
    return msgspec.json.encode(environment, order="deterministic")


def _moved(source: Source, profile: Profile, environments: Sequence[bytes]) -> Source:
    own = profile.environments[source.environment]
    return msgspec.structs.replace(source, environment=environments.index(_hashable(own)))


def _check_alike(profiles: Sequence[Profile], names: Sequence[str], *, force: bool) -> list[str]:
    """Notes of what was merged by force."""
    notes = []
    first = profiles[0].environments
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        # Layers and collectives record settings of their own: each is held against the one that it is most like.
        found = [min((unlike(one, other) for one in first), key=len) for other in profile.environments if first]
        worst = max(found, key=len, default=[])
        if not worst:
            continue
        shown = ", ".join(worst[:_SHOWN]) + (f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else "")
        text = f"{names[0]} and {name} were measured in unlike environments ({shown})"
        if not force:
            raise UserError(f"{text}; give --force to merge them all the same")
        notes.append(f"{text}; merged by --force")
    return notes


def _check_distinct(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for profile, name in zip(profiles, names, strict=True):
        for source in profile.sources:
            if source.sha256 in seen:
                raise UserError(f"{seen[source.sha256]} and {name} both hold the measurement {source.path}")
        seen |= {source.sha256: name for source in profile.sources}


def _check_networks(profiles: Sequence[Profile], names: Sequence[str]) -> None:
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        for model, network in profile.network.items():
            for other, where in zip(profiles, names, strict=True):
                if other is profile:
                    break
                if model in other.network and not same_work(network, other.network[model]):
                    raise UserError(f"{where} and {name} hold unlike networks of {model}; a profile holds one")


def _joined(
    parts: Sequence[Iterable[T]],
    names: Sequence[str],
    label: str,
    key: Callable[[T], tuple[object, ...]],
    *,
    force: bool,
) -> tuple[tuple[T, ...], list[str]]:
    """Entries of all, those of one key from one profile."""
    owner: dict[tuple[object, ...], str] = {}
    kept: list[T] = []
    notes = []
    for entries, name in zip(parts, names, strict=True):
        for entry in entries:
            where = owner.setdefault(key(entry), name)
            if where == name:
                kept.append(entry)
                continue
            text = f"{where} and {name} both hold {label.replace('_', ' ')} of {' '.join(map(str, key(entry)))}"
            if not force:
                raise UserError(f"{text}: fit their directories together (calibrate fit), or give --force")
            notes.append(f"{text}: taken from {where} by --force")
    return tuple(kept), list(dict.fromkeys(notes))


def _layer_times(profiles: Sequence[Profile]) -> tuple[LayerTime, ...]:
    best: dict[tuple[object, ...], LayerTime] = {}
    for profile in profiles:
        for time in profile.layer_times:
            key = time.operation, time.phase, time.mode, time.batch, time.dtype, time.ranks_on_host, time.shard
            if key not in best or time.time.samples > best[key].time.samples:
                best[key] = time
    return tuple(best.values())


def _cluster(profiles: Sequence[Profile]) -> Cluster:
    """The first profile's, with every level that any of them was measured at."""
    levels: dict[str, Level] = {}
    for profile in profiles:
        for level in profile.cluster.levels:
            if level.name not in levels or level.ranks > levels[level.name].ranks:
                levels[level.name] = level
    innermost = profiles[0].cluster.levels[0].name
    ordered = sorted(levels.values(), key=lambda level: (level.name != innermost, level.ranks))
    return msgspec.structs.replace(profiles[0].cluster, levels=tuple(ordered))
