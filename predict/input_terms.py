"""What reading a mini-batch and copying it to the device take, for an evaluator that knows the input side.

From options, else from the profile's ``input_side``: the entry of the model (an imported trace), else the only one that
any model may be fed with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from calibrate.input_side import InputSide, InputTime, h2d_seconds, io_seconds
from calibrate.profile import Profile
from paradl_bench.layers.autocast import kept_dtype
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import DTYPE_BYTES, Network
from predict.assembly import Priced, assemble
from predict.costs import Cost, Costs, Remark, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """What the command line says of the input side; None where it leaves it to the profile.

    Attributes:
        preset: the framework whose way of reading and copying is modelled.
        io_s, h2d_s: reading one rank's mini-batch, and copying it to its device.
        workers: that load for all ranks of one host. from_disk: past the page cache.
        source: which of the profile's sources.
    """

    preset: str = "pytorch"
    io_s: float | None = None
    h2d_s: float | None = None
    workers: int | None = None
    from_disk: bool = False
    source: str | None = None


_OF_INPUT = {
    "preset": "--preset",
    "io_seconds": "--io-seconds",
    "h2d_seconds": "--h2d-seconds",
    "io_workers": "--io-workers",
    "from_disk": "--from-disk",
    "input_source": "--input",
}
"""Options of the command line on the input side, by parameter."""


def input_options(evaluator_name: str, options: Mapping[str, Any]) -> InputOptions:
    """The options of the command line.

    Raises:
        UserError: some were given to an evaluator that does not know the input side.
    """
    # 0 seconds is something that was given.
    given = {name: options[name] for name in _OF_INPUT if options.get(name) is not None and options[name] is not False}
    if given and evaluator_name != "dag":
        raise UserError(f"{_OF_INPUT[next(iter(given))]} is for --evaluator dag; {evaluator_name} knows no input side")
    return InputOptions(
        preset=given.get("preset", InputOptions().preset),
        io_s=given.get("io_seconds"),
        h2d_s=given.get("h2d_seconds"),
        workers=given.get("io_workers"),
        from_disk=given.get("from_disk", False),
        source=given.get("input_source"),
    )


class InputTerms(NamedTuple):
    """t_io and t_h2d as two parts of a prediction's costs, in this order, and what is to be said of them.

    They count neither as compute nor as communication: both occur 0 times in sums over parts.
    """

    costs: Costs
    remarks: tuple[Remark, ...]


class HostBatch(NamedTuple):
    """Samples of one rank, and how many ranks of its host read theirs at the same time."""

    local_batch: int
    ranks_on_host: int


def input_terms(profile: Profile, network: Network, dtype: str, batch: HostBatch, options: InputOptions) -> InputTerms:
    """The two terms of one iteration.

    Raises:
        UserError: options name a source that the profile lacks, or it holds several and they name none.
    """
    side = _chosen(profile.input_side, network.name, options.source)
    reading = _io(side, batch, options)
    copying = _h2d(side, network, dtype, batch, options)
    remarks = []
    for what, time in (("reading a mini-batch", reading), ("copying it to the device", copying)):
        if time is None:
            remarks.append(Remark(f"{what} was not measured, and is taken to need no time", True))
        else:
            remarks.append(Remark(f"{what}: {1e3 * time.seconds:.4g} ms ({time.words})", time.beyond))
    parts = [_priced(name, time) for name, time in (("io", reading), ("h2d", copying))]
    return InputTerms(assemble(parts, 0.0), tuple(remarks))


def _io(side: InputSide | None, batch: HostBatch, options: InputOptions) -> InputTime | None:
    if options.io_s is not None:
        return InputTime(options.io_s * batch.ranks_on_host, 0.0, f"--io-seconds, of {batch.ranks_on_host} ranks")
    if side is None:
        return None
    samples = batch.local_batch * batch.ranks_on_host
    return io_seconds(side, samples, options.workers, cold=options.from_disk)


def _h2d(
    side: InputSide | None, network: Network, dtype: str, batch: HostBatch, options: InputOptions
) -> InputTime | None:
    if options.h2d_s is not None:
        return InputTime(options.h2d_s, 0.0, "--h2d-seconds")
    if side is None:
        return None
    sample = (
        math.prod(network.input_shape) * DTYPE_BYTES.get(kept_dtype(dtype), 4)
        if network.input_shape
        else side.sample_bytes
    )
    return h2d_seconds(side, batch.local_batch * sample)


def _chosen(sides: Sequence[InputSide], model: str, source: str | None) -> InputSide | None:
    names = ", ".join(side.source for side in sides)
    if source is not None:
        found = [side for side in sides if side.source == source]
        if not found:
            held = f"it holds {names}" if sides else "it holds none: paradl-bench io PATH -o DIR, then calibrate fit"
            raise UserError(f"--input {source}: the profile has no such input; {held}")
        return found[0]
    of_model = [side for side in sides if side.model == model]
    of_any = [side for side in sides if not side.model]
    found = of_model or of_any
    if len(found) > 1:
        raise UserError(f"the profile holds the input of {names}: say which by --input")
    return found[0] if found else None


def _priced(name: str, time: InputTime | None) -> Priced:
    if time is None:
        return Priced(Cost(0.0, Source.STATED), 0, name)
    return Priced(
        Cost(time.seconds, Source.MEASURED), 0, name, modes=((f"input, {name}", time.seconds * time.relative_sd),)
    )
