"""Memory by the paper's formula (ParaDL, Table 3).

rho e times the sum over layers of

    serial, pipeline         2 B (x + y)        + 2 w       + bias
    data, data+spatial       2 (B/p) (x + y)    + 2 w       + bias
    spatial                  2 B (x + y) / p    + 2 w       + bias
    filter, channel          2 B (x + y)        + 2 w / p   + bias
    data+filter, +channel    2 (B/p1) (x + y)   + 2 w / p2  + bias

Every tensor counts twice, and the bias once, as printed; of filter and channel parallelism the weights of layers that
are split. Views are no layers to the paper. Optimizer state is not in it.
"""

from __future__ import annotations

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import computed_in
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.memory.peak import MemoryUse, memory_use
from paradl_bench.strategies.splitting.channel_shards import splittable
from paradl_bench.strategies.splitting.options import SplitOptions

_SHARING = (Trait.SPLITS_OUTPUTS, Trait.SPLITS_INPUTS, Trait.CUTS_POSITIONS)


def paradl_memory(
    network: ModelGraph,
    local_batch: int,
    *,
    dtype: str = "fp32",
    positions: int = 1,
    weights: int = 1,
    split: tuple[str, ...] = (),
    rho: float = 1.0,
) -> MemoryUse:
    """The paper's sum for one rank.

    Args:
        positions: parts in which activations are cut. weights: parts in which weights of split layers are.
        split: patterns of the layers that are split, as in :class:`~paradl_bench.plan.settings.PlanSettings`.
        rho: the paper's reuse factor (its gamma), in (0, 1].

    Raises:
        ValueError: rho is outside of that.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"the reuse factor has to be in (0, 1], not {rho}")
    element = DTYPE_BYTES[computed_in(dtype)]
    views = {name for name, kind in layer_kinds().items() if kind.view}
    layers = [layer for layer in network.layers if layer.kind not in views]
    elements = sum(x.input_elements_of(local_batch) + x.output_elements_of(local_batch) for x in layers)
    bias = sum(parameter.bytes for parameter in network.parameters if _is_bias(parameter.name))
    of_split = {name for layer in (splittable(network, split) if weights > 1 else ()) for name in layer.parameters}
    split_weights = sum(p.bytes for p in network.parameters if p.name in of_split and not _is_bias(p.name))
    parts = {
        "activations": 2 * element * elements / positions,
        "weights": 2 * (network.parameter_bytes - bias - split_weights + split_weights / weights),
        "bias": float(bias),
    }
    return memory_use({name: round(rho * size) for name, size in parts.items()})


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def has_papers_row(strategy: Strategy) -> bool:
    """Whether the paper's table has a row for a strategy: one kind, or data outside of one that shards layers."""
    axes = [axis for axis in strategy.axes if axis.degree > 1]
    if zero_stage(strategy):
        return False
    others = [axis for axis in axes if not axis.has(Trait.DIVIDES_BATCH)]
    staged = len(axes) == 1 and axes[0].has(Trait.STAGES)
    return staged or (len(others) <= 1 and all(any(map(axis.has, _SHARING)) for axis in others))


def paradl_memory_of(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str, rho: float = 1.0
) -> MemoryUse:
    """The formula's row of a strategy without a pipeline."""
    return paradl_memory(
        network,
        settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH),
        dtype=dtype,
        positions=degree_of(strategy, Trait.CUTS_POSITIONS),
        weights=degree_of(strategy, Trait.SPLITS_OUTPUTS, Trait.SPLITS_INPUTS),
        split=settings.of(SplitOptions).split,
        rho=rho,
    )
