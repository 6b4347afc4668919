"""From a table's row to kernels and calls of collectives, in this project's terms; or in words why not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from paradl_bench.core.bounds import MOST_COUNTED, MOST_ELEMENTS, MOST_RANKS
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.importers.importer import ImportOptions
from paradl_bench.importers.operator_tables.expressions import Expression, NoNumber, Row
from paradl_bench.importers.operator_tables.mapping import (
    CALL,
    OPTIMIZER,
    RATE_UNITS,
    SHARES,
    TIME_UNITS,
    OperatorMapping,
    Prepared,
)
from paradl_bench.importers.operator_tables.patterns import filled
from paradl_bench.importers.plausible import LONGEST_CALL_S, implausible_call, implausible_time
from paradl_bench.network.graph import DTYPE_BYTES
from paradl_bench.network.kernel import KernelSamples, KernelShape
from paradl_bench.network.kinds.kernel_shape import (
    SizedLayer,
    kernel_shape,
    layer_of_sizes,
    optimizer_shape,
)
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.network.optimizers import OPTIMIZERS
from paradl_bench.records.cluster import NODE
from paradl_bench.records.devices.sheet import DeviceSheet
from paradl_bench.records.samples import CollectiveSamples

_BEYOND_PEAK = 2.0
"""Times a device's peak: a causal mask halves the work that is counted; more than that, nothing does."""
_MOST_NAMES = 40
_SYSTEM = "system"
"""The level of ranks on several hosts, where nobody says another."""


class NotTaken(ValueError):
    """A row can't be what its table says; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What holds for all rows of a table in a file.

    Attributes:
        peak_flops: that shares are of, read from the file; None where times are no shares.
        sheet: of the device, where the catalogue has it.
        taken: the kernels of each stage. beyond: per stage, how many times the device can't reach.
    """

    mapping: OperatorMapping
    prepared: Prepared
    options: ImportOptions
    peak_flops: float | None = None
    sheet: DeviceSheet | None = None
    taken: dict[str, list[KernelSamples]] = field(default_factory=dict)
    beyond: dict[str, int] = field(default_factory=dict)

    def dtype(self, row: Row) -> str:
        """Of a row's tensors.

        Raises:
            NotTaken: none that networks have.
        """
        text = self.prepared.table.dtype or self.mapping.dtype
        dtype = filled(text, row, self.mapping.names) if text else self.options.dtype
        if dtype not in DTYPE_BYTES:
            raise NotTaken(
                f"dtype {dtype[:40]!r} is none of {', '.join(DTYPE_BYTES)}; names may say which it stands for,"
                " and nothing stands for fp8"
            )
        return dtype

    @property
    def calls(self) -> int:
        """How many calls a time is the mean of."""
        return self.mapping.calls or self.options.iterations or 1


def kernels_of_row(reading: Reading, row: Row) -> list[KernelSamples]:
    """A row's kernels, a stage each.

    Stages whose time is 0 were not measured. A time that the device can't reach is left out and counted.

    Raises:
        NotTaken: the row does not hold what its table says. UserError: no row could.
    """
    table = reading.prepared.table
    dtype = reading.dtype(row)
    sizes = {name: _size(expression, row) for name, expression in reading.prepared.sizes.items()}
    computed = reading.prepared.computed
    settings = {
        name: str(_size(computed[name], row)) if name in computed else filled(text, row, reading.mapping.names)
        for name, text in table.settings.items()
    }
    shapes = _Shapes(table.kind, sizes, settings, dtype)
    kernels: dict[str, KernelSamples] = {}
    for stage, expression in reading.prepared.times.items():
        shape = shapes.of(stage)
        seconds = _seconds(reading, row, expression, shape)
        if not seconds:
            continue
        why = implausible_time(seconds)
        if why or not math.isfinite(seconds):
            raise NotTaken(f"{seconds:g} s: {why or 'no time'}")
        if _is_beyond_peak(reading.sheet, shape, dtype, seconds):
            reading.beyond[stage] = reading.beyond.get(stage, 0) + 1
            continue
        kernels[stage] = KernelSamples(
            shape=shape, dtype=dtype, block=0, samples_s=(seconds,), calls_per_sample=reading.calls
        )
    if not kernels:
        raise NotTaken(_beyond(reading) if reading.beyond else "all its times are 0: nothing was measured")
    for stage, kernel in kernels.items():
        reading.taken.setdefault(stage, []).append(kernel)
    return list(kernels.values())


def mistimed(reading: Reading) -> Iterator[tuple[str, list[KernelSamples]]]:
    """What to say of each stage with times that the device can't reach, and the kernels that are not to be believed.

    Where such times are more than the others, a stage was not timed to its end, and the others are wrong as well.
    """
    for stage, beyond in reading.beyond.items():
        taken = reading.taken.get(stage, [])
        none = beyond > len(taken)
        others = ", and the others with them" if none and taken else ""
        count = f"{beyond:,} of {beyond + len(taken):,} times of {stage} left out{others}"
        yield f"{reading.prepared.title}: {count}: {_beyond(reading)}", taken if none else []


def _beyond(reading: Reading) -> str:
    assert reading.sheet is not None
    return (
        f"more than {_BEYOND_PEAK:g} times the peak of {reading.sheet.name}: the unit is wrong, or the time is not the"
        " kernel's"
    )


def _size(expression: Expression, row: Row) -> int:
    try:
        value = expression.whole(row)
    except NoNumber as error:
        raise NotTaken(str(error)) from None
    if value > MOST_COUNTED:
        raise NotTaken(f"{expression.text} is {value}: no operand is that large")
    return value


class _Shapes:
    """Shapes of a kind's stages at some sizes."""

    def __init__(self, kind: str, sizes: Mapping[str, int], settings: dict[str, str], dtype: str) -> None:
        self._kind, self._sizes, self._dtype = kind, sizes, dtype
        if kind == OPTIMIZER:
            _check_names(kind, sizes, ("elements", "tensors"))
            self._function = settings.get("function", "adam")
            if self._function not in OPTIMIZERS:
                raise unknown_choice("optimizer", self._function, OPTIMIZERS)
            return
        functions = layer_kinds()[kind].functions
        self._settings = {"function": functions[0], **settings} if len(functions) == 1 else settings
        if self._settings.get("function", functions[0]) not in functions:
            raise unknown_choice(f"function of {kind}", self._settings["function"], functions)
        self._made = _made(kind, sizes, self._settings)

    def of(self, stage: str) -> KernelShape:
        """What is known of a stage; raises NotTaken where nothing runs in it."""
        if self._kind == OPTIMIZER:
            return optimizer_shape(self._function, self._sizes["elements"], self._sizes["tensors"], self._dtype)
        with _refusing(self._kind):
            shape = kernel_shape(self._made.layer, stage, self._made.batch, self._dtype)  # type: ignore[arg-type]
        if shape is None:
            raise NotTaken(f"a layer of kind {self._kind} has no stage {stage} with these sizes")
        if shape.sizes != self._sizes:
            _check_names(self._kind, self._sizes, tuple(shape.sizes))
            wrong = next(name for name, size in shape.sizes.items() if self._sizes[name] != size)
            raise NotTaken(
                f"no {self._kind} has these sizes: {wrong} {self._sizes[wrong]} comes out as {shape.sizes[wrong]}"
            )
        return shape


def _made(kind: str, sizes: Mapping[str, int], settings: dict[str, str]) -> SizedLayer:
    """The layer of these sizes; raises UserError where a name is missing, which no row could mend."""
    if not sizes.get("batch", 1):
        raise NotTaken("a batch of 0 runs nothing")
    if math.prod(max(size, 1) for size in sizes.values()) > MOST_ELEMENTS**2:
        raise NotTaken("its sizes make tensors that no memory holds")
    try:
        with _refusing(kind):
            return layer_of_sizes(kind, sizes, settings)
    except KeyError as error:
        missing = str(error.args[0])
        wanted = _wanted(kind, sizes, settings)
        what = "sizes" if missing in wanted else "settings"
        choices = f": they are {', '.join(wanted)}" if missing in wanted else ""
        raise UserError(f"its {what} lack {missing!r}{choices}") from None


@contextlib.contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Sizes of which no layer can be made leave their row out."""
    try:
        yield
    except (ValueError, ZeroDivisionError, IndexError, OverflowError) as error:
        raise NotTaken(f"no {kind} has these sizes: {error}") from None


def _wanted(kind: str, sizes: Mapping[str, int], settings: dict[str, str]) -> tuple[str, ...]:
    """Names of a kind's sizes, found by giving it one after the other."""
    given = dict.fromkeys(sizes, 1)
    for _ in range(_MOST_NAMES):
        try:
            made = layer_of_sizes(kind, given, {"function": "", **settings})
            shape = kernel_shape(made.layer, "FW", made.batch, "fp32")
            return tuple(given if shape is None else shape.sizes)
        except KeyError as error:
            given[str(error.args[0])] = 1
        except (ValueError, ZeroDivisionError, IndexError):
            break
    return tuple(given)


def _check_names(kind: str, sizes: Mapping[str, int], wanted: tuple[str, ...]) -> None:
    for name in sizes:
        if name not in wanted:
            raise unknown_choice(f"size of {kind}", name, wanted)
    lacking = [name for name in wanted if name not in sizes]
    if lacking:
        raise UserError(f"its sizes lack {lacking[0]!r}: they are {', '.join(wanted)}")


def _seconds(reading: Reading, row: Row, expression: Expression, shape: KernelShape | None) -> float:
    """A time, or what a rate or a share of the peak makes of the FLOPs; 0 for none."""
    unit = reading.prepared.table.unit
    try:
        value = expression.number(row)
        flops = float(reading.prepared.flops.number(row)) if reading.prepared.flops else (shape.flops if shape else 0.0)
    except NoNumber as error:
        raise NotTaken(str(error)) from None
    if value < 0:
        raise NotTaken(f"{expression.text} is {float(value):g}, below 0")
    if unit in TIME_UNITS:
        return _float(value * TIME_UNITS[unit])
    if unit in SHARES:
        share = _float(value * SHARES[unit])
        if share > _BEYOND_PEAK:
            raise NotTaken(f"{expression.text} is {share:g} times the peak: the unit or the peak is wrong")
        rate = share * (reading.peak_flops or 0.0)
    else:
        rate = _float(value * RATE_UNITS[unit])
    if not value:
        return 0.0
    if not flops or not rate:
        raise NotTaken(f"a rate of {rate:g} FLOP/s at {flops:g} FLOPs gives no time")
    return flops / rate


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        raise NotTaken("the number is beyond all times") from None


def _is_beyond_peak(sheet: DeviceSheet | None, shape: KernelShape, dtype: str, seconds: float) -> bool:
    if sheet is None:
        return False
    peak = max(sheet.peak_flops.get(dtype, 0.0), sheet.peak_flops.get("tf32", 0.0) if dtype == "fp32" else 0.0)
    return bool(peak) and shape.flops > _BEYOND_PEAK * peak * seconds


def call_of_row(reading: Reading, row: Row, source: str) -> CollectiveSamples:
    """A row's call of a collective.

    Raises:
        NotTaken: the row does not hold what its table says.
    """
    options, sizes = reading.options, {name: _size(expr, row) for name, expr in reading.prepared.sizes.items()}
    ranks, message_bytes = sizes["ranks"], sizes["message_bytes"]
    on_node = min(sizes.get("ranks_per_node", 0), ranks)
    if not 1 <= ranks <= MOST_RANKS:
        raise NotTaken(f"{ranks} ranks: 1 to {MOST_RANKS} are taken")
    seconds = _seconds(reading, row, reading.prepared.times[CALL], None)
    if not 0 < seconds <= LONGEST_CALL_S:
        raise NotTaken(f"a call of {seconds:g} s is none")
    if why := implausible_call(ranks, message_bytes, seconds):
        raise NotTaken(why)
    level = NODE if on_node == ranks else options.level or (_SYSTEM if on_node else "")
    return CollectiveSamples(
        library=options.library or "nccl",
        tool=reading.mapping.tool,
        operation=reading.prepared.table.collective,
        level=level,
        ranks=ranks,
        message_bytes=message_bytes,
        dtype=reading.dtype(row),
        block=0,
        samples_s=((seconds,),),
        verified=False,
        calls_per_sample=reading.calls,
        source=source,
        ranks_per_node=on_node or options.ranks_on_a_node(ranks, level),
    )
