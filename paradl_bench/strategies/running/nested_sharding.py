"""What two axes together make of a module: each layer that both have a rule for runs by one inside of the other.

The outer axis leaves a rank a part of every tensor, as some heads. The inner one cuts that again, as by tokens, or
sends rows of it to ranks that hold their experts. In the place of a layer's function the outer axis' rule calls the
inner one's, which calls the function itself. Where the outer axis cuts tokens too, it takes its part of those that the
inner one leaves, by rules inside of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.running.sharded_module import Call, Rule, Sharding, Substitute, beside, instead


def nest(outer: Sharding, inner: Sharding, network: ModelGraph, parts: int = 1) -> Sharding:
    """Both.

    Args:
        network: with the shapes that both leave parameters in.
        parts: that the inner axis cuts the tokens into; 1 where it leaves a rank all of them.
    """
    assert outer.loss is None or inner.loss is None
    outer = outer.within(parts) if outer.within and parts > 1 else outer
    rules = one_inside(outer.rules, inner.rules)
    return inner._replace(
        rules=one_inside(rules, outer.inside) if parts > 1 else rules,
        network=network,
        enter=_in_turn(outer.enter, inner.enter),
        leave=_in_turn(inner.leave, outer.leave),
        whole_shape=_WholeShape(outer, inner),
        whole=_in_turn(inner.whole, outer.whole),
        receive=_in_turn(inner.receive, outer.receive),
        forget=_one_by_one(outer.forget, inner.forget),
        randomness=(*outer.randomness, *inner.randomness),
        own_part=_OwnPart(outer, inner),
        loss=outer.loss or inner.loss,
        apart=outer.apart | inner.apart,
    )


def one_inside(outer: Mapping[int, Rule], inner: Mapping[int, Rule]) -> dict[int, Rule]:
    """All rules, by index of the layer; where a layer has one of either, the outer one calls the inner one."""
    both = outer.keys() & inner.keys()
    return {**outer, **inner} | {index: _rule(outer[index], inner[index]) for index in both}


def _in_turn(first: Callable[..., Any] | None, second: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What the second makes of what the first makes of the last argument."""
    if first is None or second is None:
        return first or second
    return lambda *given: second(*given[:-1], first(*given))


def _one_by_one(*functions: Callable[[], None] | None) -> Callable[[], None]:
    def call() -> None:
        for function in functions:
            if function is not None:
                function()

    return call


class _Inner(Substitute):
    """A layer's function under the inner rule, as the outer one calls it."""

    def __init__(self, rule: Rule, function: Call) -> None:
        self._rule, self._function = rule, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rule.run(self._function, args, kwargs)

    def instead(self, function: Call, *, rounds: int = 1, backward: bool = False) -> Call:
        return _Inner(self._rule, instead(self._function, function, rounds=rounds, backward=backward))

    def beside(self, function: Call) -> Call:
        return beside(self._function, function)


def _rule(outer: Rule, inner: Rule) -> Rule:
    if inner.around:
        outer, inner = inner, outer

    def run(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = outer.run(_Inner(inner, function), args, kwargs)
        return inner.mark(result) if inner.mark else result

    return Rule(outer.functions, run)


class _WholeShape:
    """The shape that the serial model has, of a tensor of which either axis may have left a part, or both."""

    def __init__(self, *shardings: Sharding) -> None:
        self._of_axes = [sharding.whole_shape for sharding in shardings if sharding.whole_shape]

    def __call__(self, tensor: torch.Tensor) -> torch.Size | None:
        known = [shape for shape in (of_axis(tensor) for of_axis in self._of_axes) if shape is not None]
        if len(known) < 2:
            return known[0] if known else None
        # Each says how many times as large a dim is.
        sizes = zip(*known, tensor.shape, strict=True)
        return torch.Size(one * other // size if size else 0 for one, other, size in sizes)


class _OwnPart:
    """This rank's part of a whole tensor: of the inner axis' tokens, the outer axis' part."""

    def __init__(self, *shardings: Sharding) -> None:
        self._of_axes = [sharding.own_part for sharding in reversed(shardings) if sharding.own_part]

    def __call__(self, tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        times = 1.0
        for of_axis in self._of_axes:
            found = of_axis(tensor, whole)
            if found is None:
                return None
            whole, times = found[0], times * found[1]
        return whole, times
