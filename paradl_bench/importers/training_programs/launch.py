"""A configuration as a program that trains is told it, and how much of it a program has settings for. Torch-free.

Programs nest pipeline, data and tensor parallelism in an order of their own, which decides who is whose neighbour. A
strategy in another order would place other ranks on a node, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

import msgspec

from paradl_bench.core.bounds import MOST_ACCUMULATED, MOST_BYTES, MOST_MICRO_BATCHES, MOST_NORM
from paradl_bench.core.errors import UserError
from paradl_bench.importers.training_programs.degrees import Degrees
from paradl_bench.network.kinds.autocast import WEIGHTS_DTYPE, computed_in, has_masters
from paradl_bench.plan.strategy import Strategy

Settings = dict[str, str | int | float | bool]
"""Of a program, by names whose dots part sections, as ``training.seq_len``."""
FP32_BYTES = 4
MIB = 1024 * 1024
BLOCKS = "all"
"""``--recompute`` of all blocks."""
_HARMLESS = frozenset({"stages", "cut_by", "exchange", "ranks_per_node", "expert_imbalance"})
"""Options that decide how fast a program is, and neither what it computes nor how much memory ranks need by design."""
_UNSET = frozenset({"1", "0", "false", "no", "none"})
_KEPT = {"batch_norm": "local", "recompute": "none", "offload": "none", "sequence_parallel": "off"}
"""Options whose value of these is what every program does."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy, and what stands beside it.

    Attributes:
        batch: global mini-batch. sequence: tokens of a sample.
        bucket_cap_bytes: of buckets of gradients.
        kernels: kernel settings by name, as ``compile``.
        options: all others by name, in words, as in :attr:`~paradl_bench.plan.settings.PlanSettings.options`.

    None of any is not said: a file leaves it to its program, or to its program's script.
    """

    strategy: Strategy
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    bucket_cap_bytes: int | None = None
    kernels: tuple[str, ...] = ()
    options: Mapping[str, str] = {}

    @property
    def as_options(self) -> dict[str, str]:
        """Options of ``predict``, by their names, in the words in which they are typed; what is not said left out."""
        cap = self.bucket_cap_bytes
        values = {
            "strategy": str(self.strategy),
            "batch": self.batch,
            "sequence": self.sequence,
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "bucket_cap_mb": None if cap is None else repr(cap / MIB),
            **dict.fromkeys(self.kernels, "true"),
            **self.options,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


class MicroBatches(NamedTuple):
    """How many of them a rank computes in an iteration, and of how many samples each."""

    number: int
    samples: int


class Wanted:
    """A launch that a program is to be told, and what of it has been told: nothing is left out without a word.

    Attributes:
        notes: what the program's settings don't hold, and what does no harm.
    """

    def __init__(self, launch: Launch, title: str) -> None:
        self.launch, self.title = launch, title
        self.notes: list[str] = []
        self._left = dict(launch.options)
        self._kernels = list(launch.kernels)

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raise the UserError of what can't be told."""
        raise UserError(f"--export: {self.title} {what}; {remedy}")

    def refuse_copies(self) -> None:
        """Refuse fp32 copies of bf16 parameters, of a program that has no setting for them; a UserError."""
        if self.launch.dtype and has_masters(self.launch.dtype):
            remedy = f"predict with --dtype {computed_in(self.launch.dtype)}"
            self.refuse("keeps no fp32 copies of bf16 parameters", remedy)

    def refuse_fp32_reductions(self) -> None:
        """Refuse shards whose bf16 gradients are reduced in fp32, of a program that does not; a UserError."""
        if self.take("reduce_dtype", "own") != "own":
            self.refuse("reduces gradients of bf16 parameters in bf16", "predict without --reduce-dtype")

    def note_gathers(self, degrees: Degrees) -> None:
        """Note that the program gathers and sends in bf16, where autocast with fp32 parameters is predicted."""
        remedy = f": see --dtype {WEIGHTS_DTYPE}" if degrees.stage > 1 else ""
        self.notes.append(
            f"{self.title} gathers and sends in bf16 here; predicted with autocast and fp32 parameters{remedy}"
        )

    def take(self, name: str, default: str) -> str:
        """An option, which the program is told."""
        return self._left.pop(name, default)

    def take_kernel(self, name: str) -> bool:
        """Whether a kernel setting is on, which the program is told."""
        if name not in self._kernels:
            return False
        self._kernels.remove(name)
        return True

    def degrees(self, *orders: tuple[str, ...]) -> Degrees:
        """Degrees of the kinds of axes that the program has, nested in one of its orders.

        Raises:
            UserError: another kind, or another order.
        """
        several = [axis for axis in self.launch.strategy.axes if axis.degree > 1]
        shares = any(axis.kind in ("context", "expert") for axis in several)
        axes = [axis for axis in self.launch.strategy.axes if axis in several or (axis.prefix and shares)]
        kinds = [axis.kind for axis in axes]
        stages = [axis.prefix for axis in axes if axis.kind == "data"]
        if len(stages) == 2 and not stages[0] and stages[1] and "replicas" in orders[0]:
            kinds[kinds.index("data")] = "replicas"
        if unknown := [kind for kind in kinds if kind not in orders[0]]:
            known = ", ".join(kind for kind in orders[0] if kind != "replicas")
            self.refuse(f"has no setting for {unknown[0]} parallelism", f"it takes {known}")
        if len(set(kinds)) < len(kinds):
            self.refuse(f"is told of no two data axes as {self.launch.strategy} has them", "predict one data axis")
        degree_by_kind = {kind: axis.degree for kind, axis in zip(kinds, axes, strict=True)}
        degrees = Degrees(**degree_by_kind, stage=max(stages, default=0))
        if all(kinds != [kind for kind in order if kind in kinds] for order in orders):
            nested = " or ".join(str(degrees.strategy(order)) for order in orders)
            self.refuse(f"does not nest axes as {self.launch.strategy} does", f"predict {nested}")
        return degrees

    def micro_batches(self, degrees: Degrees) -> MicroBatches:
        """Those of a pipeline, or those that gradients are accumulated over.

        Raises:
            UserError: they don't part a rank's samples evenly.
        """
        piped = degrees.pipeline > 1
        name, default = ("micro_batches", degrees.pipeline) if piped else ("accumulate", 1)
        count = int(self.take(name, str(default)))
        local = (self.launch.batch or 1) // degrees.reading
        if local % count:
            flag = f"--{name.replace('_', '-')}"
            self.refuse(f"takes equal micro-batches, not {count} of {local} samples", f"give a {flag} that parts them")
        return MicroBatches(count, local // count)

    def exchange(self, words: Mapping[str, str], degrees: Degrees) -> str:
        """The program's word for how attention gets at other ranks' tokens; a UserError where it has none."""
        chosen = self.take("context_exchange", "gather")
        if degrees.context > 1 and chosen not in words:
            known = " or ".join(words)
            self.refuse(f"has no --context-exchange {chosen}", f"predict with --context-exchange {known}")
        return words.get(chosen, "")

    def recomputes(self) -> bool:
        """Whether all blocks are computed again; a UserError where some modules alone are."""
        modules = self.take("recompute", "none")
        if modules not in ("none", BLOCKS):
            self.refuse(
                f"has no setting to compute {modules} again alone", f"predict with --recompute {BLOCKS} or none"
            )
        return modules == BLOCKS

    def norm(self) -> float | None:
        """The largest norm of gradients; None where they are not clipped."""
        text = self.take("clip_norm", "")
        return float(text) if text else None

    def finish(self) -> tuple[str, ...]:
        """The notes, with what nothing was told of.

        Raises:
            UserError: the program has no setting for an option that changes what it does.
        """
        for name, text in self._left.items():
            if _KEPT.get(name) == text:
                continue
            flag = f"--{name.replace('_', '-')} {text}"
            if name not in _HARMLESS:
                self.refuse(f"has no setting for {flag}", "predict without it")
            self.notes.append(f"predicted with {flag}, which {self.title} decides itself")
        self.notes += [f"predicted with kernels of {name}, which the script sets" for name in self._kernels]
        return tuple(self.notes)


class FileSettings:
    """Settings that a file holds, read with their types and bounds; each error names the file and the setting.

    Attributes:
        notes: what they say, and predictions leave out.
    """

    def __init__(self, settings: Mapping[str, object], where: str, ranks: int | None) -> None:
        self._settings, self._where, self._ranks = settings, where, ranks
        self.notes: list[str] = []

    def wrong(self, what: str) -> UserError:
        """The error of a setting; ``what`` begins with its name."""
        return UserError(f"--strategy @{self._where}: {what}")

    def has(self, name: str) -> bool:
        """Whether it is set: null is as if it were not."""
        return self._settings.get(name) not in (None, "null", "None", "~", "")

    def text(self, name: str, default: str = "") -> str:
        """Of one line."""
        return str(self._settings[name]) if self.has(name) else default

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 20) -> int:
        """A number within bounds, as ``8`` or ``5e8``; the default where it is not set.

        Raises:
            UserError: no number, out of bounds, or not set and without a default.
        """
        if not self.has(name):
            if default is None:
                raise self.wrong(
                    f"{name} is missing, without which the degrees are not known; some follow from --ranks"
                )
            return default
        text = str(self._settings[name])
        try:
            value = int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            value = 0.5
        if not least <= value <= most or value != int(value):
            raise self.wrong(f"{name} is {text[:40]!r}: it has to be a whole number from {least} to {most}")
        return int(value)

    def norm(self, name: str, default: str, *, off: str = "0") -> dict[str, str]:
        """The option that says to which norm gradients are clipped; empty where the setting is ``off``.

        Raises:
            UserError: no number, or one that is no norm.
        """
        text = self.text(name, default)
        if text.lower() == "none":  # accelerate's word
            return {}
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value == float(off):
            return {}
        if not 0 < value <= MOST_NORM:
            raise self.wrong(f"{name} is {text[:40]!r}: it has to be a norm larger than 0, or {off} for none")
        return {"clip_norm": str(value)}

    def sequence_parallel(self, degrees: Degrees, on: bool) -> dict[str, str]:
        """The option, where there is tensor parallelism."""
        return {"sequence_parallel": "on"} if on and degrees.tensor > 1 else {}

    def features_of_experts(self, degrees: Degrees, name: str, default: int) -> None:
        """Refuse experts whose features are cut over other ranks than those of tensor parallelism.

        Args:
            name: of the setting that says over how many; ``default`` where it is not set.
        """
        ranks = self.whole(name, default)
        if degrees.expert > 1 and ranks != degrees.tensor:
            raise self.wrong(
                f"{name} is {ranks}: predict cuts the features of experts among ranks of tensor parallelism, which are"
                f" {degrees.tensor}"
            )

    def context_exchange(self, degrees: Degrees, name: str, words: Mapping[str, str], default: str) -> dict[str, str]:
        """The option, where there is context parallelism and the program's word is no default."""
        if degrees.context == 1:
            return {}
        chosen = self.choice(name, {word: meant for meant, word in words.items()}, default)
        return {} if chosen == "gather" else {"context_exchange": chosen}

    def truth(self, name: str, default: bool = False) -> bool:
        """Yes or no, as ``true`` or a flag alone.

        Raises:
            UserError: neither.
        """
        text = self.text(name, str(default)).lower()
        if text not in ("true", "false"):
            raise self.wrong(f"{name} is {text[:40]!r}: it has to be true or false")
        return text == "true"

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """What the setting's word means; case is ignored.

        Raises:
            UserError: another word; the message names the choices.
        """
        text = self.text(name, default)
        known = {word.lower(): meant for word, meant in choices.items()}
        if text.lower() not in known:
            raise self.wrong(f"{name} is {text[:40]!r}, which predict does not know: it reads {', '.join(choices)}")
        return known[text.lower()]

    def refuse_set(self, names: Mapping[str, str]) -> None:
        """Raise the UserError of the first of these that is set to something, with what it is."""
        for name in self._set(names):
            raise self.wrong(f"{name} is {self.text(name)[:40]}: predict reads none of it from a file: {names[name]}")

    def note_set(self, names: Mapping[str, str]) -> None:
        """Note of each of these that is set, what predictions leave out."""
        self.notes += [f"predictions leave out {names[name]} ({name})" for name in self._set(names)]

    def _set(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.has(name) and self.text(name).lower() not in _UNSET]

    @property
    def knows_ranks(self) -> bool:
        """Whether ``--ranks`` says how many there are."""
        return self._ranks is not None

    def ranks(self, name: str = "") -> int:
        """How many there are in all: of ``--ranks``, else of a setting.

        Raises:
            UserError: nobody says.
        """
        if self._ranks is not None:
            return self._ranks
        if name and self.has(name) and self.text(name) != "-1":
            return self.whole(name)
        raise self.wrong("the file does not say how many ranks there are: give --ranks")

    def replicas(self, ranks: int, others: int) -> int:
        """Ranks of data parallelism, from all ranks and the product of the other degrees; a UserError where uneven."""
        if ranks % others:
            raise self.wrong(f"{ranks} ranks do not part over its degrees, {others} in all")
        return ranks // others

    def micro_batches(self, degrees: Degrees, batch: int, samples: int) -> dict[str, str]:
        """The option that says how many micro-batches of ``samples`` a rank computes of ``batch`` in all.

        Raises:
            UserError: they are not even.
        """
        count, rest = divmod(batch, degrees.reading * samples)
        most = MOST_MICRO_BATCHES if degrees.pipeline > 1 else MOST_ACCUMULATED
        if rest or not 1 <= count <= most:
            raise self.wrong(
                f"a mini-batch of {batch} does not part into micro-batches of {samples} over"
                f" {degrees.reading} ranks of data parallelism, up to {most} each"
            )
        return {"micro_batches" if degrees.pipeline > 1 else "accumulate": str(count)}

    def elements_bytes(self, name: str) -> int | None:
        """Bytes of as many fp32 elements as a setting says; None where it is not set."""
        return self.whole(name, most=MOST_BYTES // FP32_BYTES) * FP32_BYTES if self.has(name) else None
