"""Parameters and buffers that a rank holds of a pipeline's model: those of its own stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from paradl_bench.strategies.pipeline.stages import Stage


class Registered(NamedTuple):
    """A module whose parameters other ranks' stages hold, at least in part, and all of them in the model's order."""

    owner: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter | None]


def hold_only(module: torch.nn.Module, stages: Sequence[Stage]) -> list[Registered]:
    """Put tensors without memory in the place of the parameters and buffers that other ranks' stages hold.

    Networks list trained parameters; frozen ones stay on every rank.

    Returns:
        what :func:`all_registered` takes.
    """
    names = {tensor.name for stage in stages for tensor in (*stage.network.parameters, *stage.network.buffers)}
    held = {id(t) for name, t in (*module.named_parameters(), *module.named_buffers()) if name in names}
    missing: list[Registered] = []
    for owner in module.modules():
        whole = dict(owner._parameters)
        for attribute, parameter in whole.items():
            if parameter is not None and id(parameter) not in held and parameter.requires_grad:
                del owner._parameters[attribute]
                whole[attribute] = torch.nn.Parameter(parameter.detach().to("meta"))
                object.__setattr__(owner, attribute, whole[attribute])
        if len(whole) > len(owner._parameters):
            missing.append(Registered(owner, whole))
        for attribute, buffer in list(owner._buffers.items()):
            if buffer is not None and id(buffer) not in held:
                del owner._buffers[attribute]
                object.__setattr__(owner, attribute, buffer.detach().to("meta"))
    return missing


@contextlib.contextmanager
def all_registered(missing: Sequence[Registered]) -> Iterator[None]:
    """Let the model's code list all its parameters: it may add up their squares.

    What is put in the place of one meanwhile, as what is gathered of it, stays there.
    """
    held = [item.owner._parameters for item in missing]
    for item, parameters in zip(missing, held, strict=True):
        # Those that the rank holds may have been replaced by shards.
        item.owner.__dict__["_parameters"] = item.parameters | parameters
    try:
        yield
    finally:
        for item, parameters in zip(missing, held, strict=True):
            listed = item.owner._parameters
            parameters |= {name: listed[name] for name in parameters}
            item.owner.__dict__["_parameters"] = parameters
