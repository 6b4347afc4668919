"""What buffers hold to be checked: a pattern of whole numbers, different on every rank, whose sums are exact.

Element i of rank r's data is (i + 7 r) mod 509. The period is prime, so that a piece which an algorithm put at another
place (pieces start at powers of two) is seen. Sums over r stay below 508 r: exact in fp32 up to 33,000 ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PERIOD = 509
RANK_STRIDE = 7


def rank_period(rank: int, *, start: int = 0) -> torch.Tensor:
    """One period, shape (509,), of rank ``rank``'s data from element ``start`` on."""
    import torch

    return ((torch.arange(PERIOD) + start + RANK_STRIDE * rank) % PERIOD).to(torch.float32)


def sum_period(ranks: Iterable[int], *, start: int = 0) -> torch.Tensor:
    """One period, shape (509,), of the sum over ``ranks`` of their data from element ``start`` on."""
    import torch

    total = torch.zeros(PERIOD)
    for rank in ranks:
        total += rank_period(rank, start=start)
    return total


def write_period(target: torch.Tensor, period: torch.Tensor) -> None:
    """Fill a flat tensor with a period repeated."""
    whole = target.numel() // PERIOD * PERIOD
    period = period.to(target)
    target[:whole].view(-1, PERIOD).copy_(period)
    target[whole:].copy_(period[: target.numel() - whole])


def holds_period(tensor: torch.Tensor, period: torch.Tensor) -> bool:
    """Whether a flat tensor is, to the bit, a period repeated."""
    whole = tensor.numel() // PERIOD * PERIOD
    period = period.to(tensor)
    rows = tensor[:whole].view(-1, PERIOD)
    return bool((rows == period).all()) and bool((tensor[whole:] == period[: tensor.numel() - whole]).all())
