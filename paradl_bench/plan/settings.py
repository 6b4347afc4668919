"""Settings of a plan beside its strategy: of all of it, and what each axis declares of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from paradl_bench.core.bounds import MOST_ACCUMULATED, MOST_NORM, Accumulated, PositiveCount, PositiveNorm, Ranks
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axes.registry import option_types

RECOMPUTE_ALL = ("all",)
"""``PlanSettings.recompute`` of every block that the network's names tell."""

AS_GIVEN = ("batch_norm", "accumulate", "offload", "clip_norm")
"""Settings whose value is that of the option of their name."""
SIMULATED_ALONE = ("accumulate", "recompute", "offload", "clip_norm")
"""Settings that no closed form knows."""
MEMORY_CHOICES: Mapping[str, tuple[object, ...]] = {"recompute": ((), RECOMPUTE_ALL)}
"""Of settings that trade time for memory, the values that a search tries."""
CHOICES_WITHIN_A_LIMIT: Mapping[str, tuple[object, ...]] = {"offload": ("none", "optimizer")}
"""Those that it tries where it is known how much memory there is."""

Options = TypeVar("Options", bound=AxisOptions)


class ChosenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a user chooses besides the network and the strategy: of a plan, of a run, and of what is kept of a run.

    Attributes:
        batch: global mini-batch.
        optimizer: a name among :data:`~paradl_bench.network.optimizers.OPTIMIZERS`.
        batch_norm: statistics of each rank's own samples and positions, or synchronised over all ranks.
        accumulate: micro-batches that a rank goes through before gradients are exchanged and weights updated, where
            there is no pipeline.
        recompute: modules, patterns of them or slices of sequences whose activations are not kept but computed again in
            backward (:mod:`~paradl_bench.strategies.passes.recomputation`); :data:`RECOMPUTE_ALL` for all blocks, empty
            for none.
        offload: whether the ``optimizer``'s state lies in host memory, and is copied to the device for each weight
            update and back; else ``none``.
        clip_norm: the largest norm that the gradients of all parameters together may have; larger ones are scaled to
            it before the weight update. None for no limit.
    """

    batch: PositiveCount
    optimizer: str = "sgd"
    batch_norm: Literal["local", "sync"] = "local"
    accumulate: Accumulated = 1
    recompute: tuple[str, ...] = ()
    offload: Literal["none", "optimizer"] = "none"
    clip_norm: PositiveNorm | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """These settings by name."""
        return {name: getattr(self, name) for name in ChosenSettings.__struct_fields__}


class PlanSettings(ChosenSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What, besides the network and the strategy, decides a plan.

    Attributes:
        blocking: whether a process waits for a collective of ZeRO stages 2 and 3 where it calls it, as on a CPU; else
            these run on streams of their own.
        dtype: that is trained in, which decides what activations are handed on in. device: kind of the device, ``cpu``
            or ``cuda``, which decides what autocast makes of operations.
        preset: name of the framework that holds what its own memory says (:data:`PRESETS
            <paradl_bench.strategies.frameworks.presets.PRESETS>`); empty for torch.
        axes: options of axes, by :meth:`of`; those that are the default are left out, so that equal settings compare
            equal.
    """

    blocking: bool = False
    dtype: str = "fp32"
    device: str = "cpu"
    preset: str = ""
    axes: tuple[AxisOptions, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch has to be at least 1, not {self.batch}")
        if not 1 <= self.accumulate <= MOST_ACCUMULATED:
            raise ValueError(f"accumulate has to be from 1 to {MOST_ACCUMULATED}, not {self.accumulate}")
        if self.clip_norm is not None and not 0 < self.clip_norm <= MOST_NORM:
            raise ValueError(f"clip_norm has to be larger than 0, and at most {MOST_NORM:g}, not {self.clip_norm}")
        if self.axes:
            chosen = sorted(
                (options for options in self.axes if options != type(options)()),
                key=lambda options: type(options).__name__,
            )
            msgspec.structs.force_setattr(self, "axes", tuple(chosen))

    def of(self, options: type[Options]) -> Options:
        """Options of one kind; the default where none were given."""
        for given in self.axes:
            if type(given) is options:
                return given
        return options()

    def having(self, *options: AxisOptions) -> PlanSettings:
        """With these options in the place of those of their kinds."""
        replaced = {type(given) for given in options}
        kept = (given for given in self.axes if type(given) not in replaced)
        return msgspec.structs.replace(self, axes=(*kept, *options))

    def changed(self, options: type[AxisOptions], **fields: object) -> PlanSettings:
        """With other values of some fields of one kind of options."""
        return self.having(msgspec.structs.replace(self.of(options), **fields))

    @property
    def fields(self) -> dict[str, Any]:
        """Every field of every axis' options, by its name, as files hold them."""
        return {name: getattr(self.of(kind), name) for kind in option_types() for name in kind.__struct_fields__}

    @property
    def options(self) -> dict[str, str]:
        """Settings other than batch, optimizer, bucket limits and what follows from the library that are not the
        defaults, in words.
        """
        default = ChosenSettings(batch=self.batch, optimizer=self.optimizer).chosen
        changed = {name: value for name, value in self.chosen.items() if value != default[name]}
        words = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in changed.items()}
        for kind in option_types():
            words |= self.of(kind).words
        return words

    @property
    def simulated_alone(self) -> dict[str, str]:
        """Of the options those that no closed form knows."""
        return {name: text for name, text in self.options.items() if name in SIMULATED_ALONE}


def part_options(given: Mapping[str, Any]) -> tuple[tuple[AxisOptions, ...], dict[str, Any]]:
    """Options of axes from flat names, as files hold them, and whatever else was given.

    Raises:
        ValueError: a value that there is none of.
    """
    axes: list[AxisOptions] = []
    rest = dict(given)
    for kind in option_types():
        fields = {name: rest.pop(name) for name in kind.__struct_fields__ if name in rest}
        axes += [kind(**fields)] if fields else []
    return tuple(axes), rest


def typed_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of axes' options that a file holds in no types of its own, in those of their structs: lists are tuples.

    Raises:
        ValueError: a value of another type, or out of its bounds.
    """
    typed = dict(given)
    for kind in option_types():
        fields = {name: given[name] for name in kind.__struct_fields__ if name in given}
        read = msgspec.convert(fields, kind)
        typed |= {name: getattr(read, name) for name in fields}
    return typed


def from_words(options: Mapping[str, str]) -> dict[str, Any]:
    """Settings in words, as in :attr:`PlanSettings.options`, in the types that commands take."""
    typed: dict[str, Any] = {name: int(text) if text.isdecimal() else text for name, text in options.items()}
    return typed | {name: float(options[name]) for name in ("clip_norm",) if name in options}


def plan_settings(**given: Any) -> PlanSettings:
    """Settings from flat names, as files hold them: the fields of :class:`PlanSettings` and those of axes' options.

    Raises:
        ValueError: a value that there is none of.
    """
    axes, rest = part_options(given)
    return PlanSettings(axes=axes, **rest)


def library_blocks(backend: str) -> bool:
    """Whether a collective that is not asked to be asynchronous keeps its process waiting: NCCL's run on streams."""
    return backend != "nccl"


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest number of PEs along an axis, and what sets it (``p <= 64: fewest filters, layer conv1``)."""

    axis: str
    ranks: Ranks
    reason: str

    def __str__(self) -> str:
        return f"p <= {self.ranks}: {self.reason}"
