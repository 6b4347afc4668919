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
        stepped = {parameter: master for parameter, master in self._masters.items() if parameter.grad is not None}
        lowered = {parameter: master for parameter, master in stepped.items() if master is not parameter}
        for parameter, master in lowered.items():
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._inner.step()
        for parameter, master in lowered.items():
            master.grad = None
            parameter.copy_(master)
        for parameter, master in stepped.items():
            kept = {} if master is parameter else {"master": master}
            self.state[parameter] = kept | self._inner.state[master]

    def _adopt(self) -> None:
        """Copy the parameters whose first gradient has arrived."""
        new = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter not in self._masters
        ]
        if not new:
            return
        made = {
            parameter: parameter.detach().float() if parameter.dtype == torch.bfloat16 else parameter
            for parameter in new
        }
        self._masters |= made
        if self._inner is None:
            self._inner = self._of(list(made.values()), **self._arguments)
        else:
            self._inner.add_param_group({"params": list(made.values())})
