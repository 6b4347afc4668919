"""An optimizer of bf16 parameters that keeps fp32 copies of them, as Megatron-LM's and DeepSpeed's bf16 optimizers do.

A step converts each gradient to fp32, steps another optimizer on the fp32 copies, whose state is fp32 too, and writes
these back rounded. Updates too small for a bf16 parameter add up in its copy so.

Source: Float16OptimizerWithFloat16Params (Megatron-LM, megatron/core/optimizer/optimizer.py), BF16_Optimizer
(DeepSpeed, deepspeed/runtime/bf16_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MasterWeights(torch.optim.Optimizer):
    """Steps an optimizer on fp32 copies of parameters; on those that are no bf16, themselves.

    A copy is made when its parameter first has a gradient. It stands in ``state`` as ``master``, with the state that
    the inner optimizer keeps of it.

    Args:
        params: parameters or groups of them. of: class of the inner optimizer, which is given ``arguments``.
    """

    def __init__(self, params: Any, *, of: Callable[..., torch.optim.Optimizer], **arguments: Any) -> None:
        super().__init__(params, arguments)
        self._of, self._arguments = of, arguments
        self._inner: torch.optim.Optimizer | None = None
        self._masters: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        self._adopt()
        if self._inner is None:
            return
        stepped = {own: master for own, master in self._masters.items() if own.grad is not None}
        lowered = {own: master for own, master in stepped.items() if master is not own}
        for own, master in lowered.items():
            assert own.grad is not None
            master.grad = own.grad.float()
        self._inner.step()
        for own, master in lowered.items():
            master.grad = None
            own.copy_(master)
        for own, master in stepped.items():
            kept = {} if master is own else {"master": master}
            self.state[own] = kept | self._inner.state[master]

    def _adopt(self) -> None:
        """Copy the parameters whose first gradient has arrived."""
        found = [
            own
            for group in self.param_groups
            for own in group["params"]
            if own.grad is not None and own not in self._masters
        ]
        if not found:
            return
        made = {own: own.detach().float() if own.dtype == torch.bfloat16 else own for own in found}
        self._masters |= made
        if self._inner is None:
            self._inner = self._of(list(made.values()), **self._arguments)
        else:
            self._inner.add_param_group({"params": list(made.values())})
