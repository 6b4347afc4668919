"""What ``paradl-bench kernels`` is asked for, and what it writes besides its samples. Torch-free."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import Seconds
from paradl_bench.measure.kernels.design import SweptKernel
from paradl_bench.records.measurement import argument_texts

DESIGN_FILE = "design.json"
SKIPPED_FILE = "skipped.jsonl"
PROGRESS_FILE = "progress.jsonl"


class KernelsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to sweep.

    Attributes:
        models: whose shapes are swept; none for the ranges. batches, input_shape: of these.
        budget_s: seconds to take; None where samples decide. samples: kernels; None where the budget decides.
        kernel_s: kernels whose longest stage is estimated to take longer are passed over.
        memory_bytes: of a kernel's tensors; None for half of what is free.
        caches: what a timed call finds in them: ``training`` or ``warm``.
    """

    kinds: tuple[str, ...]
    device: str
    dtypes: tuple[str, ...] = ("fp32",)
    models: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    input_shape: tuple[int, ...] | None = None
    budget_s: float | None = None
    samples: int | None = None
    kernel_s: float = 0.1
    memory_bytes: int | None = None
    blocks: int = 3
    repetitions: int = 4
    caches: str = "training"
    seed: int = 0

    def arguments(self) -> dict[str, str]:
        """Settings that two runs have to share for one to resume the other."""
        return {
            **argument_texts(self, "kinds", "dtypes", "models", "batches"),
            "input_shape": "x".join(map(str, self.input_shape)) if self.input_shape else "default",
            "budget_s": "none" if self.budget_s is None else f"{self.budget_s:g}",
            "samples": str(self.samples),
            "kernel_limit_s": f"{self.kernel_s:g}",
            "memory_bytes": "half of what is free" if self.memory_bytes is None else str(self.memory_bytes),
            **argument_texts(self, "blocks", "repetitions", "caches", "seed"),
        }


class SkippedKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A planned kernel that did not run, and why (file ``skipped.jsonl``)."""

    kernel: SweptKernel
    why: str


class SweepProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that a part of a sweep took, and what it was estimated to take (file ``progress.jsonl``)."""

    wall_s: Seconds
    estimated_s: Seconds
