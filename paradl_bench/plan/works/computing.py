"""What computes: layers, the time between operations, and the weight update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from paradl_bench.plan.works.work import Sort, Work

ComputePhase = Literal["FW", "BW", "BW_input", "BW_weight"]
GradientPart = Literal["norm", "scale", "zero", "check"]

_PASS_LABELS: Mapping[GradientPart, str] = {
    "norm": "gradient clipping (norm)",
    "scale": "gradient clipping (scale)",
    "zero": "set gradients to zero",
    "check": "check that gradients are finite",
}


class Compute(Work, frozen=True, kw_only=True, tag="compute"):
    """A layer's forward or backward on the local batch, or the part of backward that a schedule runs by itself: of the
    layer's input, or of its parameters.
    """

    kind: ClassVar[str] = "layer"
    sort: ClassVar[Sort] = Sort.COMPUTE

    layer: str
    operation: str
    phase: ComputePhase
    shard: str = ""

    def on_other_stage(self, layers: Mapping[str, str], cuts: Mapping[int, int]) -> Compute:
        """Of the layer there."""
        return msgspec.structs.replace(self, layer=layers[self.layer])

    @property
    def way(self) -> Literal["FW", "BW"]:
        """Forward or backward, whichever part of it."""
        return "FW" if self.phase == "FW" else "BW"

    @property
    def label(self) -> str:
        """Layer and phase."""
        return f"{self.layer} {self.phase}"

    @property
    def details(self) -> dict[str, str | int]:
        """The operation, and which shard of it."""
        return {"operation": self.operation, **({"shard": self.shard} if self.shard else {})}


class FrameworkOverhead(Work, frozen=True, kw_only=True, tag="between"):
    """One operation's share of the time between operations: framework, engine, allocator."""

    kind: ClassVar[str] = "between operations"
    sort: ClassVar[Sort] = Sort.COMPUTE

    phase: Literal["FW", "BW"]

    @property
    def way(self) -> Literal["FW", "BW"]:
        """Forward or backward."""
        return self.phase

    @property
    def label(self) -> str:
        """With its phase."""
        return f"{self.kind} {self.phase}"


class WeightUpdate(Work, frozen=True, kw_only=True, tag="weight_update"):
    """The optimizer step over ``elements`` parameters in ``tensors`` tensors."""

    kind: ClassVar[str] = "weight update"
    sort: ClassVar[Sort] = Sort.COMPUTE
    sizes: ClassVar[tuple[str, ...]] = ("elements", "tensors")

    optimizer: str
    elements: int
    tensors: int

    @property
    def way(self) -> Literal["WU"]:
        """The weight update."""
        return "WU"

    @property
    def label(self) -> str:
        """With its optimizer."""
        return f"{self.kind} ({self.optimizer})"


class GradientPass(Work, frozen=True, kw_only=True, tag="gradient_pass"):
    """All gradients gone over once where they lie: ``elements`` of them in ``tensors`` tensors.

    Attributes:
        part: reading them for their norm, which clipping needs, and scaling them by it; setting a buffer to zero before
            an iteration; reading it for numbers that are not finite.
    """

    kind: ClassVar[str] = "pass over gradients"
    sort: ClassVar[Sort] = Sort.COMPUTE
    sizes: ClassVar[tuple[str, ...]] = ("elements", "tensors")

    part: GradientPart
    elements: int
    tensors: int

    @property
    def way(self) -> Literal["WU"]:
        """The weight update."""
        return "WU"

    @property
    def label(self) -> str:
        """By its part."""
        return _PASS_LABELS[self.part]
