"""Fits: alpha/beta per level and library, layer statistics, contexts -> one profile."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrate.api import diff as diff
    from calibrate.api import fit as fit
    from calibrate.api import merge as merge

__all__ = ["diff", "fit", "merge"]


def __getattr__(name: str) -> Any:
    # Only where it is asked for: a program starts by taking the working directory off the path of imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from calibrate import api

    return getattr(api, name)
