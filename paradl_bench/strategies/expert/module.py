"""Experts of a layer on several ranks: rows go to the ranks of their experts, and what was made of them comes back.

The module's code runs as it is, on all rows of this rank's experts where :mod:`~paradl_bench.strategies.expert.routes`
says so. Rows arrive by rank and expert; they are put in the order of experts, as the product needs them.

Every rank's loss is the mean over its own samples. Gradients that arrive at an expert are those of all ranks' losses,
where other parameters' gradients are averaged: they are divided by the number of ranks on their way there, and
multiplied again on the way to the tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paradl_bench.network.graph import RETURNS_INPUT, Layer, ModelGraph
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.expert.plan import PLANNER, routes_of
from paradl_bench.strategies.expert.routes import Routes
from paradl_bench.strategies.running.group_functions import Group, move_rows
from paradl_bench.strategies.running.parameters import replace_parameter
from paradl_bench.strategies.running.sharded_module import Call, Rule, Sharding, functions_of
from paradl_bench.strategies.splitting.blocks_of_rows import in_columns, rows_by_group
from paradl_bench.strategies.splitting.grouped_products import Product, ends_given, rows_given, with_ends, with_rows

_MARK = "_paradl_rows_of_experts"


class ExpertRunner:
    """Runs a module with this rank's experts alone.

    Outputs are the serial model's on this rank's samples. Gradients of experts are the serial model's after the mean
    over ranks that hold the same ones, those of other parameters after the mean over all.
    """

    name = "expert"

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.axis_runners.AxisRunner`."""
        for name, (part, *_) in PLANNER.parts_held(network, axis, group.rank, settings).items():
            replace_parameter(module, name, module.get_parameter(name)[part])
        sharded = PLANNER.shard(network, AxisPlace(axis, 0, group.rank, 1), settings)
        rules = _rules(network, routes_of(network), group)
        return Sharding(rules, sharded.network, own_part=_own_part, apart=sharded.apart)


RUNNER = ExpertRunner()


def _own_part(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    return None if hasattr(tensor, _MARK) else (whole, 1.0)


def _rules(network: ModelGraph, routes: Routes, group: Group) -> dict[int, Rule]:
    counted = {product.ends: _Counts(group) for product in routes.products.values()}
    back = {source for sources in routes.returned.values() for source in sources}
    # The last product that reads rows lets go of them.
    last = {(product.rows, product.ends): index for index, product in routes.products.items()}
    ends_of: dict[str, str] = {}
    rules = {}
    for index in sorted(routes.routed):
        layer, product, takes = network.layers[index], routes.products.get(index), None
        ends = product.ends if product else ends_of[layer.inputs[0]]
        if product is not None:
            sends, again = ends_of.get(product.rows) != ends, last[product.rows, ends] != index
            takes = _Takes(counted[ends], product, index in routes.counted, sends, again)
        ends_of[layer.name] = ends
        if layer.attributes.get(RETURNS_INPUT):
            continue
        rules[index] = Rule(functions_of(layer), _Routed(layer, counted[ends], takes, index in back))
    return rules


class _Sizes(NamedTuple):
    """Rows of one forward.

    Attributes:
        sent: per expert, those of this rank. received: per rank, per expert of this rank, those that come.
        ends: where each own expert's rows end.
    """

    sent: list[int]
    received: list[list[int]]
    ends: torch.Tensor

    @property
    def by_rank(self) -> tuple[list[int], list[int]]:
        """Rows from each rank, and to each."""
        experts = len(self.received[0])
        return [sum(row) for row in self.received], [
            sum(self.sent[start : start + experts]) for start in range(0, len(self.sent), experts)
        ]


class _Counts:
    """How many rows go where, for the layers with the same ends; and rows that several products read."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sizes: _Sizes | None = None
        self._there: dict[str, torch.Tensor] = {}

    def exchange(self, ends: torch.Tensor) -> None:
        """Ranks tell each other how many rows come; the host waits for the numbers."""
        sent = rows_by_group(ends)
        # Over groups that move nothing a rank receives what it sends, and not whatever memory held.
        received = sent.clone()
        self.group.all_to_all(received, sent)
        by_rank = received.view(self.group.size, -1)
        numbers = torch.cat([sent, received]).tolist()
        experts, size = len(sent) // self.group.size, len(sent)
        rows = [numbers[start : start + experts] for start in range(size, 2 * size, experts)]
        self.sizes = _Sizes(numbers[:size], rows, by_rank.sum(0).cumsum(0).to(ends.dtype))
        self._there.clear()

    def send(self, name: str, rows: torch.Tensor, *, again: bool) -> torch.Tensor:
        """Rows of all ranks for this one's experts, in their order; kept by name where another product reads them."""
        if name not in self._there:
            self._there[name] = self._send(rows)
        return self._there[name] if again else self._there.pop(name)

    def _send(self, rows: torch.Tensor) -> torch.Tensor:
        group, sizes = self.group, self._known()
        return move_rows(
            rows,
            lambda tensor: _there(tensor, sizes, group),
            lambda gradient: _back(gradient, sizes, group, group.size),
            group,
        )

    def take_back(self, rows: torch.Tensor) -> torch.Tensor:
        """What was made of this rank's rows, where these were."""
        group, sizes = self.group, self._known()
        return move_rows(
            rows,
            lambda tensor: _back(tensor, sizes, group),
            lambda gradient: _there(gradient, sizes, group, 1 / group.size),
            group,
        )

    def _known(self) -> _Sizes:
        assert self.sizes is not None
        return self.sizes


def _there(rows: torch.Tensor, sizes: _Sizes, group: Group, scale: float = 1.0) -> torch.Tensor:
    received, sent = sizes.by_rank
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    group.all_to_all(arrived, rows.contiguous(), (received, sent))
    by_expert = in_columns(arrived, sizes.received)
    return by_expert if scale == 1 else by_expert.mul_(scale)


def _back(rows: torch.Tensor, sizes: _Sizes, group: Group, scale: float = 1.0) -> torch.Tensor:
    received, sent = sizes.by_rank
    by_expert = [list(numbers) for numbers in zip(*sizes.received, strict=True)]
    arrived = rows.new_empty(sum(sent), *rows.shape[1:])
    group.all_to_all(arrived, in_columns(rows, by_expert), (sent, received))
    return arrived if scale == 1 else arrived.mul_(scale)


class _Takes(NamedTuple):
    """What a product does before it runs.

    Attributes:
        counts: whether it exchanges numbers. sends: whether its rows are sent, or are there. again: whether another
            product reads them too.
    """

    of: _Counts
    product: Product
    counts: bool
    sends: bool
    again: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the rows of this rank's experts, and their ends."""
        rows = rows_given(args, kwargs)
        if self.counts:
            self.of.exchange(ends_given(args, kwargs))
        if self.sends:
            rows = self.of.send(self.product.rows, rows, again=self.again)
        assert self.of.sizes is not None
        return with_ends(*with_rows(args, kwargs, rows), self.of.sizes.ends)


class _Routed:
    """An operation on the rows of this rank's experts."""

    def __init__(self, layer: Layer, counts: _Counts, takes: _Takes | None, back: bool) -> None:
        self._layer, self._counts, self._takes, self._back = layer, counts, takes, back

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._takes is not None:
            args, kwargs = self._takes(args, kwargs)
        result = function(*args, **kwargs)
        if self._back:
            return self._counts.take_back(result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            setattr(tensor, _MARK, True)
        return result
