"""What ``--vary`` takes: factors on what was measured, or numbers of ranks and of samples of the global mini-batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.units import LARGEST_FACTOR, MAX_SWEEP_POINTS, parse_count, parse_counts, parse_ranks
from paradl_bench.records.devices.sheet import device_sheets
from predict.costs.hardware.what_if_hardware import Hardware

FACTORS = ("bandwidth", "latency", "peak-flops", "memory-bandwidth")
COUNTS = ("ranks", "batch")
DEVICE = "device"
QUANTITIES = (*FACTORS, *COUNTS, DEVICE)
OF_LEVELS = ("bandwidth", "latency")
DEFAULT_POINTS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """One quantity and the values that it takes.

    Attributes:
        level: of the network, for bandwidth and latency; empty for all.
        values: factors, whole numbers for ranks and batch, or names of devices.
    """

    quantity: str
    level: str
    values: tuple[float, ...] | tuple[str, ...]

    @property
    def name(self) -> str:
        """As it was given: ``bandwidth@node``."""
        return f"{self.quantity}@{self.level}" if self.level else self.quantity


Setting = dict[str, float | str]
"""A value for each varied quantity, by the name as given."""


def parse_varied(text: str) -> Varied:
    """A quantity of ``bandwidth=0.1:10:log``, ``latency@rack=1,2,4``, ``peak-flops=1:8:x2``, ``ranks=2:64:x2``.

    Raises:
        UserError: the quantity is unknown, or its values do not parse; the message shows what would.
    """
    name, given, values = text.partition("=")
    quantity, at, level = name.strip().partition("@")
    if quantity not in QUANTITIES:
        raise unknown_choice("--vary quantity", quantity, QUANTITIES)
    if at and (quantity not in OF_LEVELS or not level):
        raise UserError(f"--vary {text!r}: only bandwidth and latency take a level, as bandwidth@node=1,2,4")
    if not given or not values.strip():
        raise UserError(f"--vary {text!r} has no values: write {_EXAMPLES.get(quantity, _FACTORS_AS)}")
    parse = _PARSERS.get(quantity, _parse_factors)
    return Varied(quantity=quantity, level=level, values=parse(values.strip(), f"--vary {text!r}"))


def settings_of(varied: Sequence[Varied], *, grid: bool) -> tuple[Setting, ...]:
    """Every combination of values, or each quantity by itself while the others stay as they are.

    Raises:
        UserError: a quantity is there twice, or a grid is too large.
    """
    names = [quantity.name for quantity in varied]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"--vary {twice} is given twice: give all its values at once, separated by commas")
    if not grid:
        return tuple({quantity.name: value} for quantity in varied for value in quantity.values)
    if math.prod(len(quantity.values) for quantity in varied) > MAX_SWEEP_POINTS:
        raise UserError(f"--grid: the values of --vary make more than {MAX_SWEEP_POINTS} combinations")
    # Typed here: mypy takes the values of a union of tuples for any object.
    values: list[tuple[float | str, ...]] = [quantity.values for quantity in varied]
    return tuple(dict(zip(names, row, strict=True)) for row in itertools.product(*values))


def doubled(ranks: int, batch: int, levels: Sequence[str]) -> tuple[Setting, ...]:
    """Twice as much of every number that has one, each by itself; half of latencies.

    Args:
        ranks, batch: of the point, global.
        levels: of the network; where there are several, each is tried too.
    """
    of_levels = ["", *(f"@{level}" for level in levels if len(levels) > 1)]
    twice = {"peak-flops": 2.0, "memory-bandwidth": 2.0, "batch": float(2 * batch)}
    if ranks > 1:
        twice |= {f"bandwidth{at}": 2.0 for at in of_levels} | {f"latency{at}": 0.5 for at in of_levels}
        twice["ranks"] = float(2 * ranks)
    return tuple({name: value} for name, value in twice.items())


def shown_value(name: str, value: float | str) -> str:
    """A value for a person: names and counts in full, factors to four digits."""
    if isinstance(value, str):
        return value
    return str(round(value)) if name in COUNTS else f"{value:.4g}"


def number_of(setting: Setting, name: str, otherwise: float) -> float:
    """The number that a setting has for a quantity."""
    return float(setting.get(name, otherwise))


def hardware_of(setting: Setting) -> Hardware:
    """The factors of a setting on links and device; what it leaves out is as measured, and so is a named device."""
    of_levels: dict[str, dict[str, float]] = {name: {} for name in OF_LEVELS}
    for name, value in setting.items():
        quantity, _, level = name.partition("@")
        if level:
            of_levels[quantity][level] = float(value)
    return Hardware(
        bandwidth=number_of(setting, "bandwidth", 1.0),
        latency=number_of(setting, "latency", 1.0),
        bandwidth_at=of_levels["bandwidth"],
        latency_at=of_levels["latency"],
        peak_flops=number_of(setting, "peak-flops", 1.0),
        memory_bandwidth=number_of(setting, "memory-bandwidth", 1.0),
    )


def _parse_factors(text: str, where: str) -> tuple[float, ...]:
    if ":" not in text:
        return tuple(dict.fromkeys(_factor(part, where) for part in text.split(",")))
    first, last, spacing, points = _parts(text, where)
    low, high = _factor(first, where), _factor(last, where)
    if spacing.startswith("x") and not points:
        ratio = _factor(spacing[1:], where)
        if ratio < 1.01 or high < low:
            raise UserError(f"{where}: first:last:x2 has to rise by a factor of at least 1.01")
        steps = math.floor(math.log(high / low) / math.log(ratio) + 1e-9) + 1
        _check_points(steps, where)
        return tuple(_rounded(low * ratio**step) for step in range(steps))
    return _logarithmic(low, high, _points_of(spacing, points, where))


def _parse_whole(text: str, where: str) -> tuple[float, ...]:
    if ":" not in text:
        return parse_counts(text, where)
    first, last, spacing, points = _parts(text, where)
    if spacing != "log":
        if points:
            raise UserError(f"{where}: write first:last:x2, first:last:step or first:last:log:points")
        return parse_ranks(text, where)
    low, high = parse_count(first, where), parse_count(last, where)
    values = _logarithmic(low, high, _points_of(spacing, points, where))
    return tuple(dict.fromkeys(round(value) for value in values))


def _parts(text: str, where: str) -> tuple[str, str, str, str]:
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise UserError(f"{where}: write first:last:log, first:last:log:points, first:last:x2, or a list as 1,2,4")
    first, last, spacing, *points = parts
    return first, last, spacing, "".join(points)


def _points_of(spacing: str, points: str, where: str) -> int:
    if spacing != "log":
        raise UserError(f"{where}: the spacing {spacing!r} is not known; write log, log:21 or x2")
    count = parse_count(points, where) if points else DEFAULT_POINTS
    _check_points(count, where)
    return count


def _check_points(count: int, where: str) -> None:
    if not 2 <= count <= MAX_SWEEP_POINTS:
        raise UserError(f"{where}: {count} points; a range has 2 to {MAX_SWEEP_POINTS}")


def _logarithmic(low: float, high: float, points: int) -> tuple[float, ...]:
    return tuple(dict.fromkeys(_rounded(low * (high / low) ** (step / (points - 1))) for step in range(points)))


def _rounded(value: float) -> float:
    """Twelve digits, so that the middle of 0.1 to 10 is 1."""
    return float(f"{value:.12g}")


def _factor(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR:
        raise UserError(
            f"{where}: {text.strip()!r} is not a factor between 1e-9 and 1e9 on the measured value; write values"
            " as 1,2,4, or a range as 0.1:10:log"
        )
    return value


def _parse_devices(text: str, where: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in device_sheets():
            raise unknown_choice("device", name, list(device_sheets()))
    return names


_PARSERS: dict[str, Callable[[str, str], tuple[float, ...] | tuple[str, ...]]] = {
    **dict.fromkeys(COUNTS, _parse_whole),
    DEVICE: _parse_devices,
}
_FACTORS_AS = "values as 1,2,4, or a range as 0.1:10:log"
_EXAMPLES = {
    **dict.fromkeys(COUNTS, "values as 2,4,8, or a range as 2:64:x2"),
    DEVICE: "names as a100-sxm-80gb,h100-sxm",
}
