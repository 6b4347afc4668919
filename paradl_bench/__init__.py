"""Measures: layer times, collective sweeps, real training runs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paradl_bench.api.measuring import measure_collectives as measure_collectives
    from paradl_bench.api.measuring import measure_layers as measure_layers
    from paradl_bench.api.measuring import train as train
    from paradl_bench.api.raw_samples import read as read

__all__ = ["measure_collectives", "measure_layers", "read", "train"]


def __getattr__(name: str) -> Any:
    # Only where it is asked for: a program starts by taking the working directory off the path of imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paradl_bench.api import measuring

    return getattr(measuring, name)
