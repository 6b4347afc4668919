"""Parameters that a rank holds a shard of, and who shares out the optimizer's state of parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

WHOLE_SHAPE = "_paradl_whole_shape"


class StateGroups(NamedTuple):
    """Whose ranks share out the optimizer's state.

    Attributes:
        everyone: of all parameters but some. apart: the others, which fewer ranks hold alike. alike: these ranks; None
            where no other rank holds what this one holds of them.
    """

    everyone: dist.ProcessGroup
    apart: tuple[torch.nn.Parameter, ...] = ()
    alike: dist.ProcessGroup | None = None


def replace_parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a shard in the place of a parameter, everywhere that the module holds it.

    A walk of the model answers for the whole one where its extents are asked.
    """
    old = module.get_parameter(name)
    shard = torch.nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad)
    setattr(shard, WHOLE_SHAPE, getattr(old, WHOLE_SHAPE, old.shape))
    for owner in module.modules():
        for attribute in [attribute for attribute, held in owner._parameters.items() if held is old]:
            owner.register_parameter(attribute, shard)
