"""Contexts of profiles before version 6, which held a list a context, each with names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradl_bench.core.statistics import IQR_TO_SD, Z90

_NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "behind_compute": ("after-compute", {"compute_s": "neighbour_s", "lag_s": ""}),
    "interference": (
        "with-compute",
        {
            "message_bytes": "bytes_range",
            "compute_slowdown": "neighbour_factor",
            "communication_slowdown": "factor",
            "kernels": "neighbours",
            "compute_slowdown_iqr": "",
            "communication_slowdown_iqr": "",
        },
    ),
    "beside_all_reduce": (
        "with-all-reduce",
        {"queued": "waiting", "exchange_level": "neighbour_level", "exchange_bytes": ""},
    ),
    "contention": ("groups", {"concurrent": "groups", "factor_interval": "", "points": ""}),
}
"""By list: the context of its entries, and fields that have another name now, or none."""
_POINT = {"back_to_back_s": "idle_s", "apart_s": "idle_s", "behind_s": "in_context_s", "beside_s": "in_context_s"}


def in_one_list(profile: Any) -> Any:
    """A profile of version 5 (decoded JSON) with its four lists as one; what is no entry is left to be refused."""
    if not isinstance(profile, dict):
        return profile
    contexts: list[Any] = []
    for name in _NAMES:
        entries = profile.get(name, [])
        contexts += [_converted(name, entry) for entry in (entries if isinstance(entries, list) else [entries])]
    fits = profile.get("communication")
    if isinstance(fits, list):
        # Of calls far above the usual ones; no prediction became better by it.
        fits = [_renamed(fit, {"congestion": ""}) if isinstance(fit, dict) else fit for fit in fits]
        profile = {**profile, "communication": fits}
    return {**{field: value for field, value in profile.items() if field not in _NAMES}, "contexts": contexts}


def _converted(name: str, entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    context, names = _NAMES[name]
    converted = {**_renamed(entry, names), "context": context}
    if isinstance(points := converted.get("points"), list):
        converted["points"] = [_renamed(point, _POINT) if isinstance(point, dict) else point for point in points]
    if name == "interference":
        converted |= {"ranks": [entry.get("ranks")] * 2, "neighbour_sd": _scaled(entry.get("compute_slowdown_iqr"))}
        converted |= _of_factor(_scaled(entry.get("communication_slowdown_iqr")))
    if name == "contention":
        converted |= _of_factor(_half_width(entry.get("factor_interval")))
    return converted


def _renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {new: value for label, value in fields.items() if (new := names.get(label, label))}


def _of_factor(sd: float | None) -> dict[str, Any]:
    """Of an entry that had no latency."""
    return {"added_s": 0.0, "covariance": [[0.0, 0.0], [0.0, None if sd is None else sd * sd]]}


def _scaled(iqr: Any) -> float | None:
    number = _number(iqr)
    return None if number is None else number * IQR_TO_SD


def _half_width(interval: Any) -> float | None:
    """The standard deviation of a 90% interval."""
    if not isinstance(interval, list) or len(interval) != 2:
        return None
    low, high = map(_number, interval)
    return None if low is None or high is None else (high - low) / (2 * Z90)


def _number(value: Any) -> float | None:
    """What is a number; what is none is refused as the field that is made of it."""
    return float(value) if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 60) else None
