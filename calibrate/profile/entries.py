"""What makes two entries of a profile's lists statements about the same thing.

A list that is not named here is known by its entries' texts and by the counts in :data:`_COUNTS`, so that a new one is
compared and merged without being named anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_MODEL = ("model", "batch", "dtype", "optimizer", "ranks_on_host", "shard", "kernel_settings")
_COLLECTIVE = ("library", "operation", "level")

IDENTITIES: Mapping[str, tuple[str, ...]] = {
    "layer_times": ("operation", "phase", "mode", "batch", "dtype", "ranks_on_host", "shard", "kernel_settings"),
    "model_times": _MODEL,
    "shard_times": _MODEL,
    "copies": ("direction", "ranks_on_host"),
    "communication": _COLLECTIVE,
    "communication_choices": _COLLECTIVE,
    "contexts": (*_COLLECTIVE, "context", "groups", "neighbour_level", "ranks"),
    "kernel_models": ("title",),
    "memory_runs": ("sha256",),
    "memory_factors": ("device", "measured"),
    "memory_reuse": ("device", "measured", "model"),
}
"""By field of the profile. Several entries may share an identity, as :data:`_PARTS` says."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "communication": ("regime", "bytes_range", "ranks_range", "step_bytes_range"),
    "contexts": ("bytes_range", "neighbours"),
}
"""By field: what tells entries of one identity apart: regimes of a fit, sizes of a context and what surrounded it."""

_COUNTS = ("batch", "ranks", "ranks_on_host", "ranks_per_node", "concurrent", "workers")


def key(field: str, entry: msgspec.Struct) -> tuple[object, ...]:
    """What no other entry of the list shares."""
    return identity(field, entry) + tuple(getattr(entry, label) for label in _PARTS.get(field, ()))


def identity(field: str, entry: msgspec.Struct) -> tuple[object, ...]:
    """The values that say what an entry of a list is about."""
    named = IDENTITIES.get(field)
    if named is not None:
        return tuple(getattr(entry, label) for label in named)
    return tuple(
        value
        for label in entry.__struct_fields__
        if isinstance(value := getattr(entry, label), str) or label in _COUNTS
    )


def describe(field: str, entry: msgspec.Struct) -> str:
    """The same for a person."""
    return f"{field.replace('_', ' ')} of {' '.join(str(value) for value in identity(field, entry) if value != '')}"
