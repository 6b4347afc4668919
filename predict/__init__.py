"""Predicts from a profile, simulates, validates; needs no torch and no GPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predict.api.loaded_profile import load_profile as load_profile

__all__ = ["load_profile"]


def __getattr__(name: str) -> Any:
    # Only where it is asked for: a program starts by taking the working directory off the path of imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from predict.api import loaded_profile

    return getattr(loaded_profile, name)
