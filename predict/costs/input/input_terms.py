"""What reading a mini-batch and copying it to the device take, for an evaluator that knows the input side.

From options, else from the profile's ``input_side``: the entry of the model (an imported trace), else the only one that
any model may be fed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from calibrate.profile.input_side import InputSide, InputTime, h2d_seconds, io_seconds, process_seconds
from calibrate.profile.profile import Profile
from paradl_bench.core.bounds import LONGEST_S
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import check_bounds
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import given_dtype
from paradl_bench.plan.tasks import InputCopy, InputRead
from paradl_bench.strategies.frameworks.presets import DEFAULT_PRESET, preset_named
from paradl_bench.strategies.passes.input_tasks import Fetch, Fetched
from predict.costs.sourced import Cost, Costs, Remark, Source
from predict.costs.spread.assembly import Priced, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """What the command line says of the input side; None where it leaves it to the profile.

    Attributes:
        prefetch: mini-batches that are fetched ahead. source: which of the profile's sources.
        io_s, h2d_s: reading one rank's mini-batch, and copying it to its device.
        workers: that load for all ranks of one host; without any each rank reads its own. rank_workers: the same, of
            each rank. from_disk: past the page cache.
    """

    preset: str = DEFAULT_PRESET
    prefetch: int | None = None
    io_s: float | None = None
    h2d_s: float | None = None
    workers: int | None = None
    rank_workers: int | None = None
    from_disk: bool = False
    source: str | None = None


NO_INPUT = InputOptions(io_s=0.0, h2d_s=0.0)
"""Nothing is read or copied, whatever a profile knows of it."""
KNOWN_BY = ("simulate", "dag")
"""Evaluators that know an input side."""
OF_INPUT = {
    "preset": "--preset",
    "prefetch": "--prefetch",
    "io_seconds": "--io-seconds",
    "h2d_seconds": "--h2d-seconds",
    "io_workers": "--io-workers",
    "from_disk": "--from-disk",
    "input_source": "--input",
}
"""Options of the command line on the input side, by parameter."""


def input_options(evaluator_name: str, options: Mapping[str, Any]) -> InputOptions:
    """The command line's options; a UserError of those that the evaluator does not know, or that are no seconds."""
    # 0 seconds is something that was given.
    given = {name: options[name] for name in OF_INPUT if options.get(name) is not None and options[name] is not False}
    if given and evaluator_name not in KNOWN_BY:
        first, known = OF_INPUT[next(iter(given))], " and ".join(KNOWN_BY)
        raise UserError(f"{first} is for --evaluator {known}; {evaluator_name} does not predict the input")
    for name in ("io_seconds", "h2d_seconds"):
        check_bounds(given.get(name), OF_INPUT[name], "give a finite number of seconds", most=LONGEST_S)
    return InputOptions(
        preset=_of_input(given.get("preset", DEFAULT_PRESET)),
        prefetch=given.get("prefetch"),
        io_s=given.get("io_seconds"),
        h2d_s=given.get("h2d_seconds"),
        workers=given.get("io_workers"),
        from_disk=given.get("from_disk", False),
        source=given.get("input_source"),
    )


def _of_input(preset: str) -> str:
    """The preset, or the default where both read input alike and differ in what they hold, add up and send."""
    default = preset_named(DEFAULT_PRESET)
    return DEFAULT_PRESET if preset_named(preset)._replace(memory=default.memory) == default else preset


def fetch_of(options: InputOptions, *, in_process: bool = False) -> Fetch:
    """What the options let be fetched ahead: without workers (``in_process``), as in a DataLoader of 0, nothing.

    Raises:
        UserError: there is no such preset, or it fetches nothing ahead while some is asked for.
    """
    preset = preset_named(options.preset)
    without = 0 in (options.workers, options.rank_workers)
    alone = "--preset naive" if not preset.reads_ahead else "--io-workers 0" if without else ""
    alone = alone or ("a loader without workers, the only one measured," if in_process else "")
    if alone and options.prefetch:
        raise UserError(
            f"--prefetch {options.prefetch}: {alone} fetches nothing ahead; give another preset, or --prefetch 0"
        )
    ahead = 1 if options.prefetch is None else options.prefetch
    return Fetch(0 if alone else ahead, preset.copies_ahead)


class InputTerms(NamedTuple):
    """t_io and t_h2d as two parts of a prediction's costs, in this order; both occur 0 times in sums over parts.

    Attributes:
        works: what the two parts are of. parts: what their costs are made of. known: whether either was measured or
            stated.
        process_s: that one process takes to read what all ranks of a host do, on cores that they compute on as well;
            0 where they have devices of their own, or it is not known.
    """

    costs: Costs
    remarks: tuple[Remark, ...]
    works: tuple[InputRead, InputCopy]
    parts: Sequence[Priced]
    known: bool
    fetch: Fetch
    process_s: float = 0.0

    @property
    def fetched(self) -> Fetched:
        """As a plan takes it."""
        read_s, copy_s = self.costs.seconds.tolist()
        return Fetched(self.works, (read_s > 0, copy_s > 0), self.fetch)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the mini-batches that are copied to a device before the iteration that computes them."""
        fetch = self.fetch
        return fetch.ahead * self.works[1].bytes if fetch.to_device and self.costs.seconds.any() else 0


class HostBatch(NamedTuple):
    """Samples of one rank, and how many ranks of its host read theirs at the same time."""

    local_batch: int
    ranks_on_host: int


def input_terms(
    profile: Profile, network: ModelGraph, dtype: str, batch: HostBatch, options: InputOptions
) -> InputTerms:
    """The two terms of one iteration.

    Raises:
        UserError: options name a source that the profile lacks, or it holds several and they name none; or they
            contradict each other (:func:`fetch_of`).
    """
    ahead = preset_named(options.preset).reads_ahead and options.prefetch != 0
    side = _chosen(profile.input_side, network.name, options.source)
    sample_bytes = _sample_bytes(side, network, dtype)
    reading = _io(side, batch, options, ahead=ahead)
    copying = _h2d(side, batch.local_batch * sample_bytes, options)
    remarks = []
    for what, time in (("reading a mini-batch", reading), ("copying it to the device", copying)):
        if time is None:
            remarks.append(Remark(f"{what} was not measured and is taken to need no time", True))
        else:
            remarks.append(Remark(f"{what}: {1e3 * time.seconds:.4g} ms ({time.words})", time.extrapolated))
    parts = [_priced("io", reading, options.io_s), _priced("h2d", copying, options.h2d_s)]
    works = (
        InputRead(samples=batch.local_batch * batch.ranks_on_host),
        InputCopy(bytes=batch.local_batch * sample_bytes),
    )
    known = reading is not None or copying is not None
    fetch = fetch_of(options, in_process=reading is not None and reading.in_process)
    process_s = process_seconds(side, batch.local_batch * batch.ranks_on_host) if options.io_s is None and side else 0.0
    return InputTerms(assemble(parts, 0.0), tuple(remarks), works, parts, known, fetch, process_s)


def _io(side: InputSide | None, batch: HostBatch, options: InputOptions, *, ahead: bool) -> InputTime | None:
    if options.io_s is not None:
        return InputTime(options.io_s * batch.ranks_on_host, 0.0, f"--io-seconds, of {batch.ranks_on_host} ranks")
    if side is None:
        return None
    workers = options.workers if options.rank_workers is None else options.rank_workers * batch.ranks_on_host
    time = io_seconds(side, batch.local_batch * batch.ranks_on_host, workers, cold=options.from_disk, ahead=ahead)
    # Ranks that read by themselves do so at once, each its own.
    return time._replace(seconds=time.seconds / batch.ranks_on_host) if time and time.in_process else time


def _sample_bytes(side: InputSide | None, network: ModelGraph, dtype: str) -> int:
    """Of a sample as tensors: as the network reads it, else as it was measured."""
    if network.input_shape or side is None:
        return network.input_bytes(1, given_dtype(dtype))
    return side.sample_bytes


def _h2d(side: InputSide | None, message_bytes: int, options: InputOptions) -> InputTime | None:
    if options.h2d_s is not None:
        return InputTime(options.h2d_s, 0.0, "--h2d-seconds")
    return None if side is None else h2d_seconds(side, message_bytes)


def _chosen(sides: Sequence[InputSide], model: str, source: str | None) -> InputSide | None:
    names = ", ".join(side.source for side in sides)
    if source is not None:
        matches = [side for side in sides if side.source == source]
        if not matches:
            held = f"it holds {names}" if sides else "it holds none: paradl-bench io PATH -o DIR, then calibrate fit"
            raise UserError(f"--input {source}: the profile does not hold this input; {held}")
        return matches[0]
    of_model = [side for side in sides if side.model == model]
    of_any = [side for side in sides if not side.model]
    matches = of_model or of_any
    if len(matches) > 1:
        raise UserError(f"the profile holds several inputs ({names}): say which by --input")
    return matches[0] if matches else None


def _priced(name: str, time: InputTime | None, stated_s: float | None) -> Priced:
    if time is None:
        return Priced(Cost(0.0, Source.STATED), 0, name)
    source = Source.MEASURED if stated_s is None else Source.STATED
    return Priced(Cost(time.seconds, source), 0, name, modes=((f"input, {name}", time.seconds * time.relative_sd),))


def refuse_unknown(options: InputOptions) -> None:
    """Raise a UserError where nothing is known of an input that options ask for."""
    if options != InputOptions():
        raise UserError(
            "the profile holds no times of reading and copying this model's input: run paradl-bench io PATH -o"
            " DIR, then calibrate fit; or give --io-seconds and --h2d-seconds"
        )
