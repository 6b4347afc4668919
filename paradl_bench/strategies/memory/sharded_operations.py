"""What the sharded layers of a rank hold beside their operations, for the sake of communication.

The part and the buffer beside gathered activations, the slice of the input that a channel shard reads, the block with
its halo and the messages, the copy of a gradient that is summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES, Layer
from paradl_bench.plan.compute import LayerShard, Rounds, held_layer
from paradl_bench.plan.tasks import Collective, Communication, HaloExchange
from paradl_bench.strategies.memory.ledger import Gradient, Storage
from paradl_bench.strategies.memory.rank_operations import RECEIVED, RankOperations, of_operation
from paradl_bench.strategies.splitting.grouped_products import GROUPED, numbers_among

_SUMS_WIDTH = DTYPE_BYTES["fp32"]


class Readers(NamedTuple):
    """The first and the last of some layers, by index: in the order of forward, or of backward."""

    first: int
    last: int


class ShardedOperations(RankOperations):
    """Operations, and what goes before and after those that ranks shard."""

    def _gather_inputs(self, i: int, made: Mapping[int, Storage], wholes: dict[int, Storage]) -> None:
        """Blocks become whole where the spatial region ends; each is gathered before its first reader outside."""
        if not self._shards[i].before_fw:
            self._make_once(i)
            return
        gathers = of_operation(self._shards[i].before_fw, "all_gather")
        gathers = gathers[numbers_among(self._layers[i], gathers) :]
        sources = [self._index[name] for name in self._layers[i].inputs if name in self._index]
        blocks = [s for s in sources if self._is_cut(s) and s not in wholes and self._reads_whole(i, s)]
        for source, gather in zip(blocks, gathers, strict=False):
            # Of the heads that another axis leaves on the rank, where it does.
            part, whole = max(self._elements_read(i, source), default=(1, 1))
            wholes[source] = self._ledger.allocate(self._output_bytes(self._layers[source]) * part // whole)
            self._ledger.mark(gather.ranks * gather.message_bytes + self._padding(made[source].size, gather))
        self._move_rows(i, sources, wholes)
        self._make_once(i)
        for gather in gathers[len(blocks) :]:
            # What a stage has received as a block.
            wholes[RECEIVED] = self._ledger.allocate(gather.ranks * gather.message_bytes)
            self._ledger.mark(gather.ranks * gather.message_bytes)

    def _move_rows(self, i: int, sources: Sequence[int], wholes: dict[int, Storage]) -> None:
        """Rows that an all-to-all brings, beside those that were sent, and for a while in the order of their coming."""
        for move in of_operation(self._shards[i].before_fw, "all_to_all"):
            # Rows may have been gathered first.
            sizes = {s: wholes[s].size if s in wholes else self._brought_bytes(s) for s in sources if s >= 0}
            source = next((s for s, size in sizes.items() if _moves(move, size)), None)
            if source is None:
                # Numbers, not rows.
                continue
            if self._shards[i].shard:
                gathered = wholes.pop(source, None)
                wholes[source] = self._ledger.allocate(move.ranks * move.message_bytes)
                self._ledger.mark(move.ranks * move.message_bytes)
                if gathered is not None:
                    self._ledger.release(gathered)
            else:
                self._ledger.mark(move.ranks * move.message_bytes + self._output_bytes(self._layers[source]))

    def _brought_bytes(self, i: int) -> int:
        """Bytes of a layer's output that the rank brings to an all-to-all."""
        return self._held_bytes(i) if self._is_cut(i) else self._output_bytes(self._layers[i])

    def _make_once(self, i: int) -> None:
        """What the rank's part reads beside the layer's own inputs: made once for all layers, and held from then on."""
        run = self._shards[i].layer
        for shape in run.input_shapes[len(self._layers[i].input_shapes) :]:
            if shape not in self._made_once:
                self._made_once[shape] = self._ledger.allocate(math.prod(shape) * self._casts.run_width(i))

    @functools.cached_property
    def _made_once(self) -> dict[tuple[int, ...], Storage]:
        """Masks of a rank's own queries, by shape."""
        return {}

    def _padding(self, part_bytes: int, gather: Collective) -> int:
        """The copy of a part that is shorter than the longest one."""
        return gather.message_bytes if part_bytes < gather.message_bytes else 0

    def _gathered_again_bytes(self, i: int) -> int:
        """Bytes of a linear layer's input that backward gathers again, of which forward left the rank's part."""
        if not (self._framework.gathers_again and self._is_linear(i)):
            return 0
        leader = self._shards[i].leader
        leading = self._shards[i] if leader is None else self._shards[leader]
        return sum(gather.ranks * gather.message_bytes for gather in of_operation(leading.before_fw, "all_gather"))

    def _copy_of_input(self, i: int, read: Sequence[Storage]) -> Storage | None:
        """The block with its halo, or a channel shard's slice; None where the operation reads the tensor itself."""
        shard = self._shards[i]
        if not read or not self._copies_input(i):
            return None
        copied = self._ledger.allocate(self._input_bytes(shard.layer))
        self._ledger.mark(_messages(shard.before_fw))
        return copied

    def _convert_inputs(self, i: int, read: Sequence[Storage]) -> tuple[Sequence[Storage], list[Storage]]:
        """As :meth:`Casts.inputs`; layers whose input's gradient is summed once share what it was converted to."""
        place = self._summed_once.get(i)
        if place is None:
            return self._casts.inputs(i, read, functools.partial(self._read_bytes, i))
        if place.first not in self._converted:
            as_read, made = self._casts.inputs(i, read, functools.partial(self._read_bytes, i))
            if not made or place.last == i:
                return as_read, made
            self._converted[place.first] = made[0]
            return as_read, []
        shared = self._converted[place.first]
        return [shared], [self._converted.pop(place.first)] if place.last == i else []

    def _hand_on(self, i: int, source: int, gradient: Gradient) -> list[tuple[int, Gradient]]:
        """The gradient of a layer's input as it goes to whoever made that: communicated, in the input's dtype.

        Nothing yet where layers that backward comes to later read the same input: their gradients are added first.
        """
        place = self._summed_once.get(i)
        if place is not None:
            earlier = self._sums.pop(place.first, None)
            if earlier is not None:
                self._ledger.release(gradient.storage)
                gradient = earlier
            if place.first != i:
                self._sums[place.first] = gradient
                return []
        return [(source, self._casts.gradient(i, source, self._after_backward(i, source, gradient)))]

    @functools.cached_property
    def _summed_once(self) -> dict[int, Readers]:
        """Per layer of those whose input's gradient is summed over ranks once for all of them: the first and the last.

        They read the same tensor.
        """
        groups: dict[str, list[int]] = {}
        for i, shard in enumerate(self._shards):
            if shard.leader is not None or (self._sums_input(shard) and not shard.after_fw):
                groups.setdefault(self._layers[i].inputs[0], []).append(i)
        return {i: Readers(readers[0], readers[-1]) for readers in groups.values() for i in readers}

    def _sums_input(self, shard: LayerShard) -> bool:
        weighs = shard.layer.parameters or shard.layer.kind == GROUPED
        scatters = of_operation(shard.after_bw, "reduce_scatter") and weighs
        return bool(scatters or of_operation(shard.after_bw, "all_reduce"))

    @functools.cached_property
    def _converted(self) -> dict[int, Storage]:
        """What layers share, by the first of them, while forward is among them."""
        return {}

    @functools.cached_property
    def _sums(self) -> dict[int, Gradient]:
        """Gradients of that, while backward is among them."""
        return {}

    def _combine(self, i: int, part: Storage) -> Storage:
        """What ranks made of a sharded layer, put together."""
        ledger, layer, shard = self._ledger, self._layers[i], self._shards[i]
        if not shard.after_fw and shard.held is None:
            return part
        summed = of_operation(shard.after_fw, "all_reduce")
        whole = self._output_bytes(shard.held or layer)
        for move in of_operation(shard.after_fw, "all_to_all"):
            part = self._taken_back(part, move)
        for gather in of_operation(shard.after_fw, "all_gather"):
            gathered = ledger.allocate(whole)
            ledger.mark(gather.ranks * gather.message_bytes + self._padding(part.size, gather))
            ledger.release(part)
            part = gathered
        if shard.held is not None and not summed:
            return self._scattered(i, part)
        if summed:
            # Ranks of other groups' filters add zeros; the bias comes last, out of place.
            for _ in range((part.size < whole) + bool(layer.attributes.get("bias"))):
                larger = ledger.allocate(whole)
                ledger.mark()
                ledger.release(part)
                part = larger
        return part

    def _taken_back(self, made: Storage, move: Collective) -> Storage:
        """The rows of the rank's own tokens, beside what it made of others' and the copy of that which it sends."""
        back = self._ledger.allocate(move.ranks * (move.known_bytes or move.message_bytes))
        self._ledger.mark(made.size)
        self._ledger.release(made)
        return back

    def _scattered(self, i: int, whole: Storage) -> Storage:
        """The part of the sum of what ranks made, and of that with its bias, which comes last."""
        ledger, layer, size = self._ledger, self._layers[i], self._held_bytes(i)
        part = ledger.allocate(size)
        ledger.mark(whole.size)
        ledger.release(whole)
        if layer.attributes.get("bias"):
            added = ledger.allocate(size)
            ledger.mark()
            ledger.release(part)
            part = added
        return part

    def _part_of_gradient(self, i: int, arrived: Sequence[Gradient]) -> list[Gradient]:
        """What the rank's part of a sharded layer gets of the output's gradient."""
        gathers = of_operation(self._shards[i].before_bw, "all_gather")
        moves = of_operation(self._shards[i].before_bw, "all_to_all")
        if (gathers or moves) and arrived:
            gradient = arrived[0]
            for gather in gathers:
                size = gather.ranks * gradient.size
                gradient = self._replaced(gradient, size, size)
            for _ in moves:
                gradient = self._replaced(gradient, gradient.size, gradient.size)
            return [gradient]
        part = self._output_bytes(self._shards[i].layer)
        is_slice = part < self._output_bytes(held_layer(self._layers[i], self._shards[i]))
        if not is_slice or not arrived or self._samples == 1:
            return list(arrived)
        return [self._replaced(arrived[0], part)]

    def _held_in_rounds(self, i: int) -> int:
        """Beside the output of an attention that runs in rounds: blocks, and what a round makes, to be joined to it.

        Sums are of fp32 at least. Scores that are made apart are there several times, as they are worked on.
        """
        rounds = self._shards[i].rounds_fw
        if len(rounds) == 1:
            return 0
        out = self._output_bytes(self._shards[i].layer)
        block, (wide, rows), scores = _block(rounds), self._in_rounds(i), self._scores_bytes(i)
        more = wide - out if wide > out else 0
        joined = (wide if more else 0) + 4 * rows
        first = _messages(rounds[:1]) + more + 4 * scores
        return max(
            first,
            *(max(_messages([one_round]), block) + more + out + max(joined, 4 * scores) for one_round in rounds[1:]),
        )

    def _held_in_rounds_back(self, i: int) -> int:
        """Beside the gradients that its backward returns: blocks, sums of their gradients, and what a round makes."""
        rounds, layer = self._shards[i].rounds_bw, self._shards[i].layer
        if len(rounds) == 1:
            return 0
        query = math.prod(layer.input_shapes[0]) * self._samples * self._casts.run_width(i)
        block, sums = _block(rounds), _messages(self._shards[i].after_bw) // 2
        wider = sums > block
        kept = (2 if wider else 1) * query + sums - query - block
        seen = max(query + block // 2, query // 2 + block) if layer.attributes.get("causal") else query + block
        # Before the first sums travel, new ones are made.
        made = (query + block, seen + sums, *(seen,) * (len(rounds) - 2))
        last = len(rounds) - 1
        held = [
            _messages([one_round]) + (block if turn == last else 0) + made[turn] + kept
            for turn, one_round in enumerate(rounds)
        ]
        return max(*held, (query if wider else 0) + 2 * sums + kept) + 6 * self._scores_bytes(i)

    def _in_rounds(self, i: int) -> tuple[int, int]:
        """Bytes of an attention's output as parts of it are joined, and of a number a row of it."""
        elements = self._shards[i].layer.output_elements_of(self._samples)
        width = max(self._casts.run_width(i), _SUMS_WIDTH)
        return elements * width, elements // self._shards[i].layer.output_shape[-1] * width

    def _scores_bytes(self, i: int) -> int:
        """Bytes of the scores of a round that has them made apart: with a mask, or on a CPU with dropout."""
        query, key = (shape for shape in self._shards[i].layer.input_shapes[:2])
        elements = math.prod(query[:-1]) * key[-2] * self._samples
        attributes = self._shards[i].layer.attributes
        apart = attributes.get("masked") or (self._is_cpu and attributes.get("dropout"))
        return elements * max(self._casts.run_width(i), _SUMS_WIDTH) if apart else 0

    def _cut_gradient(self, i: int, whole: Gradient) -> Gradient:
        """The rank's block of the gradient of what was gathered."""
        return self._replaced(whole, self._held_bytes(i))

    def _replaced(self, gradient: Gradient, size: int, more: int = 0) -> Gradient:
        """Another tensor made from a gradient, with ``more`` bytes held meanwhile."""
        made = Gradient(self._ledger.allocate(size), size, gradient.output)
        self._ledger.mark(more)
        self._ledger.release(gradient.storage)
        return made

    def _after_backward(self, i: int, source: int, gradient: Gradient) -> Gradient:
        """The gradient of a layer's input after the rank's own was communicated."""
        layer, shard = self._layers[i], self._shards[i]
        if any(_moves(move, gradient.size) for move in of_operation(shard.after_bw, "all_to_all")):
            gradient = self._replaced(gradient, gradient.size, gradient.size)
            # Of rows that are back, ranks along another axis add up what each made of them.
            for _ in of_operation(shard.after_bw, "all_reduce"):
                gradient = self._replaced(gradient, gradient.size)
            for scatter in of_operation(shard.after_bw, "reduce_scatter"):
                gradient = self._replaced(gradient, gradient.size // scatter.ranks, gradient.size)
            return gradient
        if not shard.shard or self._is_of_matrices(i, source):
            return gradient
        gathers = of_operation(shard.before_fw, "all_gather")
        if self._is_cut(i) and gathers:
            if not ((source < 0 or self._is_cut(source)) and self._reads_whole(i, source)):
                return gradient
            # What was gathered for this layer alone gets its part of the gradients' sum.
            size = self._held_bytes(source) if source >= 0 else gradient.size // gathers[0].ranks
            return self._replaced(gradient, size, gradient.size)
        if self._is_cut(i) and self._copies_input(i):
            owned = self._shards[source].layer if source >= 0 else layer
            size = self._output_bytes(owned) if source >= 0 else self._input_bytes(owned)
            return self._replaced(gradient, size, _messages(shard.after_bw))
        whole = self._rows_bytes(layer)
        for gather in of_operation(shard.after_bw, "all_gather"):
            more = gather.ranks * gather.message_bytes + self._padding(gradient.size, gather)
            gradient = self._replaced(gradient, whole, more)
        one = len(layer.input_shapes) == 1
        if one and gradient.size < whole and not (self._is_cut(i) or self._is_cut(source)):
            gradient = self._replaced(gradient, whole)
        # Of several inputs those that are whole have such a sum.
        for _ in of_operation(shard.after_bw, "all_reduce") if one or not self._is_cut(source) else ():
            gradient = self._replaced(gradient, self._rows_bytes(shard.layer) if one else gradient.size)
        for scatter in of_operation(shard.after_bw, "reduce_scatter"):
            gradient = self._replaced(gradient, whole, (scatter.ranks + 1) * scatter.message_bytes)
        return gradient

    def _is_of_matrices(self, i: int, source: int) -> bool:
        """Whether a layer reads another's output beside rows of the batch, as experts' matrices are read."""
        layer, reads = self._layers[i], self._reads[i]
        beside = [at for at in layer.batchless_inputs if at < len(reads)]
        return len(beside) < len(layer.input_shapes) and any(reads[at] == source for at in beside)

    def _rows_bytes(self, layer: Layer) -> int:
        """Bytes that a layer reads, without what it reads beside rows of the batch."""
        beside = [shape for at, shape in enumerate(layer.input_shapes) if at in layer.batchless_inputs]
        whole = self._input_bytes(layer)
        if len(beside) == len(layer.input_shapes):
            return whole
        return whole - sum(map(math.prod, beside)) * self._casts.runs[layer.name]


def _moves(move: Collective, size: int) -> bool:
    """Whether so many bytes are a rank's own rows that an all-to-all sends, or brings back."""
    return (move.known_bytes or move.message_bytes) == size // move.ranks


def _block(rounds: Rounds) -> int:
    """Bytes of what goes round."""
    first = rounds[0]
    return first.sends_bytes[0] if isinstance(first, HaloExchange) else 0


def _messages(works: Sequence[Communication | None]) -> int:
    """Bytes of the messages of halo exchanges: copies of what is sent, and buffers of what comes."""
    halos = (work for work in works if isinstance(work, HaloExchange))
    return sum(sum(halo.sends_bytes) + sum(halo.receives_bytes) for halo in halos)
