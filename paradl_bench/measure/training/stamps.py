"""Stamps of one training iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch


class Stamps(msgspec.Struct, frozen=True):
    """One iteration: stamps at its start and end and at the end of backward, and the loss, still on the device.

    Layer-wise communication is (what, begin, end) in the order of issue; so are the turns at forward and backward
    (``FW``, ``BW``) of micro-batches, or of a pipeline's stages. The loss is None where another stage computes it.
    """

    begin: Any
    last_gradient: Any
    backward_end: Any
    end: Any
    loss: torch.Tensor | None
    fw_communication: list[tuple[str, Any, Any]]
    bw_communication: list[tuple[str, Any, Any]]
    turns: list[tuple[str, Any, Any]]


@dataclass(slots=True)
class Arrival:
    """When the last gradient of an iteration arrived."""

    stamp: Any = None
