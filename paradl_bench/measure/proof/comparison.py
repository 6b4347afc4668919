"""When two tensors count as equal, and by how much they differ where they do not."""

from __future__ import annotations

import msgspec
import torch

NO_NUMBER = 1e9
"""A difference where there is no number for it: another shape, or a value that is not finite on one side."""


class Tolerance(msgspec.Struct, frozen=True):
    """By how much an element may differ.

    Attributes:
        of_element: times its exact value.
        of_tensor: times the tensor's largest exact value.
        of_all: times the largest exact value of all tensors of its kind: gradients that cancel to nothing, as that of a
            bias before a batch norm, are rounding of much larger numbers.
    """

    of_element: float
    of_tensor: float
    of_all: float
    absolute: float = 0.0


FLOAT64 = Tolerance(of_element=1e-5, of_tensor=1e-5, of_all=1e-8)
"""Batch norms of two values a channel made rounding 4e-8 of a tensor in a MobileNet on images of 32x32; rules
that were made wrong differed by over 1e-3."""
FLOAT32 = Tolerance(of_element=1e-2, of_tensor=1e-2, of_all=1e-5)
"""Of models that compute in fp32 whatever they are given, and have no batch norms."""


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 of nothing."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def difference(parallel: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, scale: float) -> tuple[bool, float]:
    """Whether a tensor differs, and by how much: the largest difference over the largest exact value.

    Args:
        scale: the largest exact value of all tensors of its kind.
    """
    if parallel.shape != exact.shape:
        return True, NO_NUMBER
    if not parallel.numel():
        return False, 0.0
    parallel, exact = parallel.detach(), exact.detach()
    if not (parallel.is_floating_point() or parallel.is_complex()):
        equal = torch.equal(parallel, exact)
        return not equal, 0.0 if equal else NO_NUMBER
    off = (parallel.to(exact.dtype) - exact).abs()
    of_tensor = largest(exact)
    bound = tolerance.absolute + tolerance.of_tensor * of_tensor + tolerance.of_all * scale
    differs = not bool((off <= bound + tolerance.of_element * exact.abs()).all())
    most = float(off.max())
    # Both may hold the same infinity, as a mask does.
    if most != most and torch.equal(parallel.isfinite(), exact.isfinite()):
        finite = exact.isfinite()
        if torch.equal(parallel[~finite].nan_to_num(), exact[~finite].nan_to_num()):
            return difference(parallel[finite], exact[finite], tolerance, scale)
    if not most < float("inf"):
        return True, NO_NUMBER
    floor = max(of_tensor, (tolerance.of_all / tolerance.of_element) * scale, 1e-300)
    return differs, min(most / floor, NO_NUMBER)
