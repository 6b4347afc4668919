"""A weakness of a profile, and those of measurements that were not made at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from calibrate.profile import Profile

WeaknessKind = Literal["missing", "inaccurate", "untested"]


class Weakness(msgspec.Struct, frozen=True, kw_only=True):
    """Where a profile is weak.

    Attributes:
        kind: ``missing`` (a prediction fails without, or assumes), ``inaccurate`` by ``size`` (relative), or
            ``untested``.
        command: what would help, ready to be run but for words in capitals.
    """

    kind: WeaknessKind
    text: str
    command: str
    size: float | None = None


def never_measured(profile: Profile) -> Iterator[Weakness]:
    """Kinds of measurements that a profile of this program's own lacks, and what is assumed without them."""
    device = profile.devices[0].kind if profile.devices else "cpu"
    if profile.communication:
        library = profile.communication[0].library
        sweep = f"paradl-bench collectives --ranks 2 --backend {library}"
        if not profile.behind_compute:
            yield Weakness(
                kind="missing",
                text="collectives behind compute were not measured; those between layers count as in a loop",
                command=f"{sweep} --behind-compute -o collectives-behind-{library}",
            )
        if not profile.contention:
            yield Weakness(
                kind="missing",
                text="groups at once were not measured; without a cluster file that states it, they share no link",
                command=f"{_four_ranks(profile, library)} --concurrent 2 -o collectives-concurrent-{library}",
            )
    if profile.devices and not profile.devices[0].rates:
        yield Weakness(
            kind="untested",
            text="peak and bandwidth of the device are those that layers reached; rooflines stand on them",
            command=f"paradl-bench doctor --measure --device {device} -o doctor",
        )
    if not profile.kernel_models:
        yield Weakness(
            kind="untested",
            text="no regressors: layers that were not measured are scaled from a neighbour",
            command=f"paradl-bench kernels --device {device} -o kernels",
        )
    if not profile.input_side:
        yield Weakness(
            kind="untested",
            text="reading, decoding and copying of inputs were not measured; iterations are predicted without them",
            command=f"paradl-bench io synthetic --device {device} -o io",
        )


def _four_ranks(profile: Profile, library: str) -> str:
    """A sweep by two groups of two; started by srun on several hosts where this one has too few devices or cores."""
    if max((device.devices_per_host for device in profile.devices), default=4) >= 4:
        return f"paradl-bench collectives --ranks 2 --backend {library}"
    return f"srun --ntasks 4 paradl-bench collectives --launcher srun --backend {library}"
