"""Runs attention on all tokens of a share of the heads (:mod:`~paradl_bench.strategies.context.heads`)."""

from __future__ import annotations

from typing import Any

import torch

from paradl_bench.strategies.running.autocast import as_product_reads_it
from paradl_bench.strategies.running.group_functions import Group, move_rows
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.sequence.on_tokens import OwnTokens

_HEADS, _TOKENS = -3, -2


class AttentionByHeads:
    """All tokens of this rank's heads; its own tokens of all heads before and behind."""

    def __init__(self, own_tokens: OwnTokens, random: OwnRandomness) -> None:
        self._own, self._random = own_tokens, random

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As torch's ``scaled_dot_product_attention``."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        group, heads = self._own.group, given["query"].shape[_HEADS]
        for name in ("query", "key", "value"):
            given[name] = _exchanged(as_product_reads_it(given[name]), _HEADS, _TOKENS, group)
        mask = given.get("attn_mask")
        if mask is not None and mask.dim() > 2 and mask.shape[_HEADS] == heads:
            given["attn_mask"] = mask.chunk(group.size, _HEADS)[group.rank]
        if given.get("dropout_p"):
            with self._random.used(given["query"]):
                attended = function(**given)
        else:
            attended = function(**given)
        return self._own.mark(_exchanged(attended, _TOKENS, _HEADS, group), Cut(_TOKENS))


def _exchanged(tensor: torch.Tensor, parted: int, joined: int, group: Group) -> torch.Tensor:
    """A part along the dim ``parted`` to each rank; those that come stand one behind the other along ``joined``."""
    return move_rows(
        tensor,
        lambda whole: _moved(whole, parted, joined, group),
        lambda gradient: _moved(gradient, joined, parted, group),
        group,
    )


def _moved(tensor: torch.Tensor, parted: int, joined: int, group: Group) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(group.size, parted))
    received = torch.empty_like(sent)
    group.all_to_all(received, sent)
    del sent
    return torch.cat(received.unbind(), joined)
