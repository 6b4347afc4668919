"""What a parallel training may suffer from: Table 6 of ParaDL (arXiv:2104.09075), with what the text adds to it.

The table parts *limitations*, which a strategy has by itself, from *bottlenecks*, which come of the framework or the
system. Its pipelines' idle time, contention of groups and input stand in the text alone (sections 3.3, 4.3 and 5.3).
Host dispatch is no limitation of the paper.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AT_LEAST = 0.05
"""Share of an iteration from which on a limitation is present unless told, as ``predict diagnose`` takes it."""
Category = Literal["communication", "memory", "computation", "scaling", "input"]


class Limitation(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        kind: whether the strategy has it by itself (limitation), or by the framework or the system (bottleneck).
        comes_of: ``strategy``, ``framework`` or ``system``.
        phases: of training in which it is seen: IO, FB (forward and backward), GE (gradient exchange), WU.
        inference: whether distributed inference has it too.
        measure: what has to be measured where a prediction can't tell; empty where it can.
    """

    name: str
    kind: Literal["limitation", "bottleneck"]
    category: Category
    comes_of: Literal["strategy", "framework", "system"]
    phases: tuple[str, ...]
    inference: bool
    measure: str = ""


GRADIENT_EXCHANGE = "gradient exchange"
LAYER_WISE = "layer-wise communication"
HALO = "halo exchange"
PIPELINE_MESSAGES = "pipeline communication"
BUBBLES = "pipeline bubbles"
CONTENTION = "contention of groups"
CONGESTION = "network congestion"
REDUNDANT_MEMORY = "redundant memory"
MEMORY_STALLS = "memory stalls"
WEIGHT_UPDATE = "weight update"
IMBALANCE = "workload imbalance"
REDUNDANT_COMPUTE = "redundant computation"
SPLIT_AND_CONCATENATE = "split and concatenation"
SLOWER_LAYERS = "slower layers"
HOST_DISPATCH = "host dispatch"
RANKS = "number of ranks"
INPUT = "input"

_RUN = "a run to compare with: predict diagnose --run DIR"


def _limitation(name: str, category: Category, *phases: str, inference: bool = True) -> Limitation:
    return Limitation(
        name=name, kind="limitation", category=category, comes_of="strategy", phases=phases, inference=inference
    )


def _bottleneck(
    name: str, category: Category, comes_of: Literal["framework", "system"], *phases: str, measure: str = ""
) -> Limitation:
    return Limitation(
        name=name,
        kind="bottleneck",
        category=category,
        comes_of=comes_of,
        phases=phases,
        inference=True,
        measure=measure,
    )


LIMITATIONS = (
    _limitation(GRADIENT_EXCHANGE, "communication", "GE", inference=False),
    _limitation(LAYER_WISE, "communication", "FB"),
    _bottleneck(HALO, "communication", "framework", "FB", "GE"),
    _bottleneck(PIPELINE_MESSAGES, "communication", "framework", "FB", "GE"),
    _limitation(BUBBLES, "computation", "FB"),
    _bottleneck(CONTENTION, "communication", "system", "FB", "GE"),
    _bottleneck(CONGESTION, "communication", "system", "FB", "GE", measure=_RUN),
    _bottleneck(REDUNDANT_MEMORY, "memory", "system", "IO", "FB", "GE", "WU"),
    _bottleneck(MEMORY_STALLS, "memory", "framework", "IO", "FB", "GE", "WU", measure=_RUN),
    _limitation(WEIGHT_UPDATE, "computation", "WU", inference=False),
    _limitation(IMBALANCE, "computation", "FB", "WU"),
    _bottleneck(REDUNDANT_COMPUTE, "computation", "framework", "FB", "WU"),
    _bottleneck(SPLIT_AND_CONCATENATE, "computation", "framework", "FB", measure=_RUN),
    _bottleneck(SLOWER_LAYERS, "computation", "system", "FB", measure=_RUN),
    _bottleneck(HOST_DISPATCH, "computation", "framework", "FB"),
    _limitation(RANKS, "scaling", "IO", "FB", "GE", "WU"),
    _bottleneck(INPUT, "input", "system", "IO"),
)
"""In the order of the table: communication, memory, computation, scaling; then input."""
