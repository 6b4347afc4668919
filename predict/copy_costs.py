"""Which measurement of copying gradients stands for a number of ranks on the host."""

from __future__ import annotations

from calibrate.profile import CopyTime, Profile
from predict.layer_costs import nearest_count


def nearest_copy(profile: Profile, direction: str, ranks_on_host: int) -> CopyTime | None:
    """The copies into or out of buckets that were measured with the nearest number of ranks; None where none were."""
    copies = [copy for copy in profile.copies if copy.direction == direction]
    if not copies:
        return None
    measured = nearest_count([copy.ranks_on_host for copy in copies], ranks_on_host)
    return next(copy for copy in copies if copy.ranks_on_host == measured)
