"""Which messages a run exchanges gradients in: by a rule that needs no costs, or as ``predict`` wrote them to a file.

What ada and mg-wfbp send depends on when gradients are there and on what all-reduces take, which a profile knows and a
run does not: ``predict`` writes their messages to a file, and ``paradl-bench train --fusion FILE`` exchanges by it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from paradl_bench.core.bounds import MOST_BYTES, PositiveCount
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_json
from paradl_bench.core.units import counted, format_bytes, parse_size
from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.data.fusion.buffers import backward_order, fused
from paradl_bench.strategies.data.fusion.rules import RULES, Fusion, Rule
from paradl_bench.strategies.exchange.messages import messages_of

_OF_SIZE = ("none", "buffer")
"""Rules that need no costs. A buffer then fills by its size alone: ranks have no common clock for a timeout."""
MessageBytes = Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]


class FusionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that ``predict --fusion-out`` wrote.

    Attributes:
        model, strategy, batch, rule: what they were found for, and by.
        messages_bytes: of each message, in the order in which they are sent.
    """

    model: str
    strategy: str
    batch: PositiveCount
    rule: Rule
    messages_bytes: Annotated[tuple[MessageBytes, ...], msgspec.Meta(min_length=1)]


class AskedFusion(msgspec.Struct, frozen=True, kw_only=True):
    """What ``train --fusion`` asks for.

    Attributes:
        rule: that finds the messages in the network; None where a file has them.
        buffer_bytes: of the rule ``buffer``.
        file: what the messages were read from; None for a rule.
    """

    rule: Rule | None = None
    buffer_bytes: int = Fusion().buffer_bytes
    file: FusionFile | None = None

    def messages(self, network: ModelGraph) -> tuple[int, ...]:
        """Bytes of each message of a network, in order; nothing where there is nothing to train.

        Raises:
            UserError: a file of another network.
        """
        if self.file is not None:
            messages_of(network, self.file.messages_bytes)
            return self.file.messages_bytes
        assert self.rule is not None
        fusion = Fusion(rule=self.rule, buffer_bytes=self.buffer_bytes)
        # All at one moment: the timeout never ends a buffer.
        return fused(network, fusion, dict.fromkeys(backward_order(network), 0.0), lambda _: 0.0).bytes

    def words(self, messages: int) -> str:
        """What found the messages, and how many they are."""
        size = f" of {format_bytes(self.buffer_bytes)}" if self.rule == "buffer" else ""
        rule = f"{self.rule}{size}" if self.file is None else f"{self.file.rule} (file)"
        return f"{rule}, {counted(messages, 'message')}"


def parse_fusion(text: str | None, buffer: str | None) -> AskedFusion | None:
    """What ``--fusion none|buffer|FILE`` and ``--fusion-buffer`` say; None where neither is given.

    Raises:
        UserError: a rule that needs costs, a size without a buffer, or a file that is none of ``--fusion-out``.
    """
    if buffer is not None and text != "buffer":
        raise UserError("--fusion-buffer is for --fusion buffer: give both")
    if text is None:
        return None
    if text in _OF_SIZE:
        size = Fusion().buffer_bytes if buffer is None else parse_size(buffer, "--fusion-buffer")
        return AskedFusion(rule="none" if text == "none" else "buffer", buffer_bytes=size)
    if text == "ddp":
        raise UserError("--fusion ddp is what runs without the option: leave it out; --bucket-cap-mb sets its buckets")
    if text in RULES:
        raise UserError(
            f"--fusion {text} needs costs: write its messages by predict --fusion {text} --fusion-out FILE, and give"
            " --fusion FILE"
        )
    # Not Path's: of a name that no file can have that raises.
    if not os.path.exists(text):
        raise UserError(f"--fusion {text}: no such file; give none, buffer, or a file of predict --fusion-out")
    return AskedFusion(file=read_json(Path(text), FusionFile))
