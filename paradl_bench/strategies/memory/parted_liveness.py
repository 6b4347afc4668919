"""Which tensors a rank holds where backward runs in two parts: that of the stage's input, and that of its parameters.

Between the two autograd keeps what forward left, but for operations behind the last with parameters; and gradients wait
where parameters are used.

Not seen: gradients on the way to parameters that other operations lead to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from paradl_bench.plan.compute import BackwardPart, parts_of_backward
from paradl_bench.strategies.memory.ledger import Gradient, Storage
from paradl_bench.strategies.memory.liveness import Liveness, Pass
from paradl_bench.strategies.memory.rank_operations import RECEIVED

_BY_NONE = -1
"""In the place of a turn: of layers that no turn needs."""


class PartedLiveness(Liveness):
    """A walk whose backward can be run in two parts as well."""

    def backward_input(self, left: Pass, given: Sequence[Gradient] = ()) -> list[Storage]:
        """Run the part that makes gradients of what the network read, which the caller holds."""
        pending: dict[int, list[Gradient]] = dict(zip(self._outputs, ([gradient] for gradient in given), strict=False))
        of_wholes: dict[int, list[Gradient]] = {}
        of_input, _ = self._parts
        for i in of_input.layers:
            for whole in of_wholes.pop(i, ()):
                self._push(pending, i, self._cut_gradient(i, whole))
            for arrived in self._run_apart(i, pending.pop(i, [])):
                upstream = self._part_of_gradient(i, arrived)
                made = self._input_gradients(i, upstream, self._behind)
                for source, gradient in [
                    handed for input_gradient in made for handed in self._hand_on(i, *input_gradient)
                ]:
                    gathered = self._is_cut(source) and not self._is_cut(i)
                    self._push(of_wholes if gathered else pending, source, gradient)
                self._ledger.mark(self._inside_norm(i))
                if self._leads_to_parameters(i):
                    left.waiting.setdefault(i, []).extend(upstream)
                    continue
                for gradient in upstream:
                    self._ledger.release(gradient.storage)
        if of_input.layers:
            self._let_go(left.saved[i] for i in self._last_needed[_BY_NONE])
        return [gradient.storage for gradient in pending.pop(RECEIVED, [])]

    def backward_weight(self, left: Pass, given: Sequence[Gradient] = ()) -> None:
        """Run the part that makes gradients of parameters, in the order of backward.

        Where the input has no gradient, that is all of backward, which ``given`` is for.
        """
        of_input, of_weight = self._parts
        if not of_input.layers:
            self.backward(left, given)
            return
        for number, i in enumerate(of_weight.layers):
            made, kept = self._parameter_gradients(i)
            lowered = self._casts.lowered_gradients(i)
            if lowered:
                self._ledger.mark(sum(size for size, _ in lowered))
                self._gradients_of_lowered(lowered, kept)
            else:
                self._ledger.mark(0, made)
                self._ledger.gradients += kept
            for gradient in left.waiting.pop(i, ()):
                self._ledger.release(gradient.storage)
            self._let_go([left.saved[i]])
            # Autograd's nodes keep those of what they were made of.
            self._let_go(left.saved[layer] for layer in self._last_needed.get(number, ()))
        for gradients in left.waiting.values():
            for gradient in gradients:
                self._ledger.release(gradient.storage)
        left.waiting.clear()
        self._let_go(left.saved)
        for output in left.outputs:
            self._ledger.release(output)

    @functools.cached_property
    def _parts(self) -> tuple[BackwardPart, BackwardPart]:
        return parts_of_backward(self._network, self._order, input_has_gradient=self._input_has_gradient)

    @functools.cached_property
    def _behind(self) -> frozenset[int]:
        return frozenset(self._parts[0].layers)

    def _leads_to_parameters(self, i: int) -> bool:
        """Whether the parameters' part starts from the gradient of this layer's output."""
        sources = (self._index.get(name, RECEIVED) for name in self._layers[i].inputs)
        return i in self._parts[1].layers or any(s in self._reached and s not in self._behind for s in sources)

    @functools.cached_property
    def _last_needed(self) -> dict[int, list[int]]:
        """Layers by the last turn of the parameters' part that runs them, or a layer that was made of them."""
        turns = {layer: turn for turn, layer in enumerate(self._parts[1].layers)}
        last = [turns.get(i, _BY_NONE) for i in range(len(self._layers))]
        by_turn: dict[int, list[int]] = {_BY_NONE: []}
        for i in range(len(self._layers) - 1, -1, -1):
            by_turn.setdefault(last[i], []).append(i)
            for source in (self._index[name] for name in self._layers[i].inputs if name in self._index):
                last[source] = max(last[source], last[i])
        return by_turn

    def _let_go(self, rows: Iterable[list[Storage]]) -> None:
        for saved in rows:
            self._release_all(saved)
