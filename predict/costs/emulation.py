"""Costs of an emulated run: layers that sleep for their profiled time (docs/emulation.md).

A sleep takes what it was asked to: it spreads neither from iteration to iteration nor from rank to rank, whatever the
profile's own spread is, unless it was drawn as that has it. What a collective and sleeps side by side cost each other
is what was measured of ghosts (:func:`interference_of`); what compute and collectives do is no part of an emulated run.
What copies gradients does so for real, on the host that emulates, and stays as the profile has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import LARGEST_FACTOR
from paradl_bench.plan.tasks import Work
from paradl_bench.records.emulation import GHOSTS
from predict.costs.compute.model_costs import Spread
from predict.costs.sourced import Remark
from predict.costs.spread.assembly import Priced
from predict.costs.spread.stragglers import RankSpread

NO_SPREAD = Spread(0.0, (0.0,))
"""Of iterations whose layers sleep."""
LEVEL_RANKS = RankSpread()
"""Ranks whose layers sleep, none of which is late by chance."""


def interference_of(profile: Profile, dilate: float | None) -> Profile:
    """A profile with the interference that was measured of ghosts, or of what computes, alone.

    Args:
        dilate: None where layers compute.
    """
    kept = tuple(entry for entry in profile.interference if (GHOSTS in entry.kernels) == (dilate is not None))
    return profile if len(kept) == len(profile.interference) else msgspec.structs.replace(profile, interference=kept)


def sleeping_parts(works: Sequence[Work], parts: Sequence[Priced], dilate: float) -> list[Priced]:
    """Parts of a plan as ghosts take them, in the order of its works.

    Args:
        dilate: how many times as long compute sleeps as the profile says.
    """
    return [_sleeping(work, part, dilate) for work, part in zip(works, parts, strict=True)]


def _sleeping(work: Work, part: Priced, dilate: float) -> Priced:
    if not work.way:
        return part
    remark = Remark(f"compute sleeps, {dilate:g} times as long as the profile says (emulated)", False)
    seconds = part.cost.seconds * dilate
    # The run sleeps these very seconds: however far they are off the device's own, they are not off the run's.
    cost = part.cost._replace(seconds=seconds, independent_sd_s=0.0, batch_sd_s=0.0, method_sd_s=0.0)
    return part._replace(cost=cost._replace(remarks=(*cost.remarks, remark)), modes=())


def check_spread(spread: bool, dilate: float | None) -> None:
    """Refuse drawn sleeps where nothing sleeps.

    Raises:
        UserError: no dilation.
    """
    if spread and dilate is None:
        raise UserError(
            "--spread is of an emulated run's sleeps: give it with --dilate K (1 sleeps as long as measured)"
        )


def check_dilation(dilate: float | None) -> None:
    """Refuse what compute cannot be stretched by.

    Raises:
        UserError: not finite, or not positive.
    """
    if dilate is not None and not 0 < dilate <= LARGEST_FACTOR:
        raise UserError(
            f"--dilate {dilate:g} has to be a positive number up to {LARGEST_FACTOR:g}: 20 sleeps twenty times as long"
        )
