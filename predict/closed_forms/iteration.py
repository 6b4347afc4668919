"""Closed forms per iteration: ParaDL's rows for serial and data, and compute followed by one exchange (CSF).

Each reads the same six sums and is written for arrays: ``sums[..., i]`` are the seconds of one point's part i, for the
local batch and the ranks of that point.

    serial    B FB + WU                       ParaDL, Table 3 of the paper
    data      (B/p) FB + WU + AR(p, W e)

FB is the sum of the layers' forward and backward; time between operations is no part of the paper's model. CSF (OSF's
paper) has it in, then one all-reduce of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.tasks import Collective
from predict.costs.sourced import Floats

FW, BW, FW_BETWEEN, BW_BETWEEN, WU, ALL_REDUCE = range(6)

ClosedForm = Callable[[Floats], tuple[Floats, Floats, Floats, Floats]]
"""From sums of shape (..., 6): seconds of FW, BW, GE and WU, each of shape (...); their sum is the iteration."""


def paradl(sums: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """ParaDL's serial and data rows; serial is the case without an all-reduce."""
    return sums[..., FW], sums[..., BW], sums[..., ALL_REDUCE], sums[..., WU]


def csf(sums: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """All of compute, then one all-reduce of everything."""
    forward = np.asarray(sums[..., FW] + sums[..., FW_BETWEEN])
    backward = np.asarray(sums[..., BW] + sums[..., BW_BETWEEN])
    return forward, backward, sums[..., ALL_REDUCE], sums[..., WU]


TERMS: dict[ClosedForm, tuple[str, ...]] = {
    paradl: ("(B/p) FB", "(B/p) FB", "", "", "WU", "AR(p, W e)"),
    csf: ("T_comp", "T_comp", "T_comp", "T_comp", "WU", "t(sum of g)"),
}
"""Of each form, the terms that its sums are in, in the papers' letters; empty where it reads none."""


def gradient_exchange(network: ModelGraph, ranks: int) -> Collective:
    """AR(p, W e): one all-reduce of all gradients."""
    return Collective(operation="all_reduce", message_bytes=network.parameter_bytes, ranks=ranks)
