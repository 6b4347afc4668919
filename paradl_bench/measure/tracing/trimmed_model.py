"""A model with most of its equal blocks taken out, which is traced in the place of the whole one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from paradl_bench.network.equal_blocks import KEPT, TEMPLATE, Stretch
from paradl_bench.network.models.catalog import LoadedModel, load_model

_SETTINGS = (bool, int, float, str, tuple, type(None), torch.dtype)
_OF_PLACE = ("layer_idx",)
"""Attributes that say where a block stands; of the families that name equal blocks, they index caches alone."""


@dataclass(slots=True)
class TrimmedModel(LoadedModel):
    """A model on the meta device, and what was taken out of it."""

    stretches: tuple[Stretch, ...] = ()

    def fresh(self, device: str) -> TrimmedModel:
        """Another one, which has not run; always on the meta device."""
        return replace(self, module=copy.deepcopy(self.module))


def trim(model: LoadedModel) -> TrimmedModel | None:
    """The model with a few of each run of equal blocks; None where it names none, or all runs are short.

    Blocks are equal that have the same modules, settings, and shapes of parameters and buffers. Only models that say
    so (``equal_blocks``) are taken to run what is in a list one after the other, whatever its index; those are
    transformers' own. The model itself is not changed.
    """
    paths = getattr(model.module, "equal_blocks", ())
    if all(len(model.module.get_submodule(path)) <= KEPT for path in paths):  # type: ignore[arg-type]
        return None
    source = (
        model if next(model.module.parameters()).is_meta else load_model(model.name, model.input_shape, device="meta")
    )
    kept, stretches = {}, []
    for path in paths:
        blocks: Any = source.module.get_submodule(path)
        kept[path], left_out = _kept(path, list(blocks))
        stretches += left_out
    if not stretches:
        return None
    with _with_blocks(source.module, kept):
        module = copy.deepcopy(source.module)
    return TrimmedModel(source.name, module, source.input_shape, source.task, stretches=tuple(stretches))


def _kept(path: str, blocks: list[torch.nn.Module]) -> tuple[list[torch.nn.Module], list[Stretch]]:
    kept: list[torch.nn.Module] = []
    stretches = []
    for _, run in groupby(blocks, _described):
        equal = list(run)
        if len(equal) > KEPT:
            stretches.append(Stretch(path, len(kept) + TEMPLATE, len(equal) - KEPT))
            equal = equal[: TEMPLATE + 1] + equal[TEMPLATE + 1 - KEPT :]
        kept += equal
    return kept, stretches


def _described(block: torch.nn.Module) -> list[Any]:
    """Everything by which two blocks might run other operations."""
    described: list[Any] = []
    for name, module in block.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS) and key not in _OF_PLACE
        }
        shapes = [(key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for key, tensor in tensors]
        described.append((name, type(module), settings, shapes))
    return described


@contextmanager
def _with_blocks(module: torch.nn.Module, blocks: dict[str, list[torch.nn.Module]]) -> Iterator[None]:
    """While the body runs, the lists of modules at these paths hold these blocks."""
    whole = {path: module.get_submodule(path) for path in blocks}

    def put(path: str, listed: torch.nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, listed)

    try:
        for path, kept in blocks.items():
            put(path, torch.nn.ModuleList(kept))
        yield
    finally:
        for path, listed in whole.items():
            put(path, listed)
