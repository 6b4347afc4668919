"""What every rank of a proof's test runs: strategies whose rules are made wrong, and what the proof says of them.

Usage: verification_program.py RESULT CASE...; a case is network:strategy:break[:option=value]..., with ``right`` for no
break. Networks are those of this module, or of the one that is named before a dot. The result has, by case, the line of
the verification and what differs first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from shared_traces import trace_together, traced
from torch import nn

from paradl_bench.measure.proof import proving
from paradl_bench.measure.proof.prove import Subject, prove
from paradl_bench.measure.proof.reference import JoinedRanks
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import steps_of
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.strategies.channel import module as channel
from paradl_bench.strategies.data.fusion.fusion_file import parse_fusion
from paradl_bench.strategies.data.zero import module as zero
from paradl_bench.strategies.exchange import fused_module
from paradl_bench.strategies.expert import module as experts
from paradl_bench.strategies.filter import module as filters
from paradl_bench.strategies.nesting import parallel
from paradl_bench.strategies.pipeline import module as pipeline
from paradl_bench.strategies.running import group_functions
from paradl_bench.strategies.spatial import module as spatial
from paradl_bench.strategies.tensor import module as tensor


class Chain(nn.Module):
    """Two convolutions and two linear layers."""

    input_shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x)))).mean((2, 3))
        down: torch.Tensor = self.down(torch.relu(self.up(x)))
        return down


class Mixing(Chain):
    """Subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x))
        x = self.two(x - x.mean(0, keepdim=True))
        return self.down(torch.relu(self.up(x.mean((2, 3)))))  # type: ignore[no-any-return]


class Counting(Chain):
    """Divides by how many samples it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.shape[0]


class Dropping(nn.Sequential):
    """Drops what it made by a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Normed(Chain):
    """Batch norm and dropout, which are known to be other functions of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.inner = Dropping(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.one(x))))
        x = self.two(self.inner(x))
        x = x + torch.randn_like(x)
        return self.down(torch.relu(self.up(x.mean((2, 3)))))  # type: ignore[no-any-return]


class Narrow(Chain):
    """Computes a part of itself in fp32, whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x)))).mean((2, 3)).float().softmax(1).to(x.dtype)
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Drawing(Chain):
    """Draws inside of a function, where nobody sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gumbel_softmax(super().forward(x))


class Returning(Chain):
    """Changes some positions of what it returns beside the classes, behind layers that run on blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) + 1
        x[:, 0] += 0.5
        down = self.down(torch.relu(self.up(torch.tanh(x).amax((2, 3)))))
        return down, x  # type: ignore[return-value]


class InPlace(Chain):
    """Changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(0.1))


def _silent_peers(self: Any, sent: Any, received: Any) -> None:
    for _, buffer in received:
        buffer.zero_()


def _unreduced(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
    output_tensor.copy_(input_tensor.view(self._group.size, -1)[self._group.rank])


def _swapped(part: torch.Tensor, slices: Any, shape: Any, group: Any, **options: Any) -> Any:
    return group_functions.gather(part, tuple(reversed(slices)), shape, group, **options)


def _unscaled(part: torch.Tensor, slices: Any, shape: Any, group: Any, scale: float = 1) -> Any:
    return group_functions.gather(part, slices, shape, group)


def _as_they_come(rows: torch.Tensor, sizes: Any) -> torch.Tensor:
    return rows.clone()


_there = experts._there


def _unscaled_rows(rows: torch.Tensor, sizes: Any, group: Any, scale: float = 1) -> torch.Tensor:
    return _there(rows, sizes, group)


def _whole_loss(self: Any, loss: Any, last: Any, spans: Any) -> Any:
    return lambda outputs, targets: loss(last.as_model_gives_it(outputs), targets)


def _other_rate(kind: Any, parameters: Any, group: Any = None, **options: Any) -> Any:
    # The serial model's optimizer, which has no group, keeps its rate.
    rate = options["lr"] if group is None else options["lr"] / 2
    return torch.optim.SGD(parameters, **options | {"lr": rate})


BREAKS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "right": contextlib.nullcontext,
    "dropped-halo": lambda: mock.patch.object(group_functions.Group, "send_and_receive", _silent_peers),
    "unscaled-blocks": lambda: mock.patch.object(spatial, "gather", _unscaled),
    "no-exchange": lambda: mock.patch.object(parallel, "exchange_gradients", lambda module, *_, **__: module),
    "unsent-messages": lambda: mock.patch.object(fused_module._Message, "send", return_value=None),
    "swapped-slices": lambda: mock.patch.object(filters, "gather", _swapped),
    "no-gradient-sum": lambda: mock.patch.object(filters, "reduce_gradient", lambda whole, _: whole),
    "no-sum": lambda: mock.patch.object(channel, "reduce", lambda part, _: part),
    "no-sum-of-rows": lambda: mock.patch.object(
        tensor._Row, "__call__", lambda _, run, args, kwargs: run(*args, **kwargs)
    ),
    "unordered-rows": lambda: mock.patch.object(experts, "in_columns", _as_they_come),
    "unscaled-rows": lambda: mock.patch.object(experts, "_there", _unscaled_rows),
    "no-shared-input": lambda: mock.patch.object(tensor, "reduce_gradient", lambda whole, _: whole),
    "unreduced-shards": lambda: mock.patch.object(zero._ReduceScatter, "__call__", _unreduced),
    "whole-loss": lambda: mock.patch.object(pipeline.RankPipeline, "_loss_of", _whole_loss),
    "other-rate": lambda: mock.patch.object(proving, "make_optimizer", _other_rate),
}


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"{text}: {error}") from error


def path_of(text: str) -> str:
    """Where the network of a case is found."""
    module, _, name = text.partition(":")[0].rpartition(".")
    return f"{module or 'verification_program'}:{name}"


def run(text: str, context: RankContext) -> dict[str, Any]:
    """What a proof says of one case."""
    _, axes, wrong, *options = text.split(":")
    model = load_model(path_of(text))
    network, strategy = traced(path_of(text)), parse_strategy(axes)
    chosen = {key: int(value) if value.isdigit() else value for key, value in (o.split("=") for o in options)}
    if "recompute" in chosen:
        chosen["recompute"] = (chosen["recompute"],)
    if "fusion" in chosen:
        fusion = parse_fusion(chosen.pop("fusion"), None)
        assert fusion is not None
        chosen |= {"fused_bytes": fusion.messages(network), "fused_by": "a rule"}
    settings = plan_settings(
        **{name: tuple(own) if isinstance(own, list) else own for name, own in {"batch": 1, **chosen}.items()}
    )
    parts = degree_of(strategy, Trait.DIVIDES_BATCH) * steps_of(strategy, settings)
    settings = msgspec.structs.replace(settings, batch=2 * parts)

    def build(copied: LoadedModel) -> parallel.ParallelModule:
        return parallel.build_parallel(copied.module, network, strategy, settings, context.device, copied.loss)

    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    state = torch.get_rng_state()
    subject = Subject(model, network, strategy, settings, context.device, JoinedRanks(context), build)
    with _told(text), BREAKS[wrong]():
        proved = prove(subject)
    # The run that follows finds everything as if nothing had been proved.
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    first = proved.first
    return {
        **msgspec.to_builtins(proved.verification),
        "first": None if first is None else first.what,
        "relative": 0.0 if first is None else first.relative,
    }


def main(result: Path, cases: list[str]) -> None:
    # Models are found by the name of their module, and this one runs as a program.
    sys.modules["verification_program"] = sys.modules[__name__]
    with join_ranks("gloo", "cpu", timeout_s=120) as context:
        names = dict.fromkeys(map(path_of, cases))
        trace_together((functools.partial(traced, name) for name in names), context)
        # What was imported and traced stays: a collection after each case is to be of that case.
        gc.freeze()
        found = {text: run(text, context) for text in cases}
        if context.rank == 0:
            result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
