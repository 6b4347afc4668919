"""A module under rules: each of forward's calls is one layer, by its order, and forward may not call anything else."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.strategies.running.sharded_module import Rule, ShardedModule, Sharding


def network_of(*functions: str) -> ModelGraph:
    """As many layers as functions, and a loss."""
    names = [f"{function}{index}" for index, function in enumerate(functions)]
    layers = [
        Layer(
            name=name,
            kind="opaque",
            attributes={},
            inputs=(),
            input_shapes=(),
            output_shape=(3,),
            parameters=(),
            fw_flops=0,
            bw_input_flops=0,
            bw_weight_flops=0,
            fw_bytes=0,
        )
        for name in (*names, "loss.cross_entropy")
    ]
    return ModelGraph(name="some network", input_shape=(3,), layers=tuple(layers), parameters=())


class TwoCalls(nn.Module):
    """Two operations, and questions that are none."""

    extra = False
    other = False

    def forward(self, x: Any) -> Any:
        self.asked = (x.shape, x.size(), x.size(1), x.size(dim=0), x.dim(), x.requires_grad)
        x = torch.tanh(x) if self.other else F.relu(x)
        if self.extra:
            x = x + 1
        return x * 2


def doubled(function: Any, args: Any, kwargs: Any) -> Any:
    # What a rule calls is no layer.
    return function(*args, **kwargs) + torch.zeros(1)


RULE = Rule(frozenset({"relu"}), doubled)
NETWORK = network_of("relu", "mul")
X = torch.tensor([[-1.0, 2.0, 3.0]])


def test_a_layer_runs_by_its_rule_and_others_run_unchanged() -> None:
    marks: list[Any] = []
    rule = Rule(frozenset({"relu"}), lambda f, args, kwargs: marks.append(args) or f(*args, **kwargs) + 10)
    sharded = ShardedModule(TwoCalls(), Sharding({0: rule}, NETWORK))
    assert sharded(X).tolist() == [[20.0, 24.0, 26.0]]
    assert len(marks) == 1


def test_what_is_done_first_and_last_is_no_layer() -> None:
    sharding = Sharding({0: RULE}, NETWORK, lambda x: (x + 1) * 1, lambda x: x / 2)
    assert ShardedModule(TwoCalls(), sharding)(X).tolist() == [[0.0, 3.0, 4.0]]


def test_an_observer_sees_the_modules_own_calls_alone() -> None:
    seen: list[str] = []

    class Observer(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    sharded = ShardedModule(TwoCalls(), Sharding({0: RULE}, NETWORK))
    sharded.observer = Observer()
    sharded(X)
    assert [name for name in seen if name not in ("__get__", "size", "dim")] == ["relu", "mul"]


@pytest.mark.parametrize(
    ("change", "message"),
    [("extra", "called 3 operations and 2 when it was traced"), ("other", "called tanh where relu0 was when it was")],
)
def test_other_calls_than_those_traced_are_refused(change: str, message: str) -> None:
    module = TwoCalls()
    sharded = ShardedModule(module, Sharding({0: RULE}, NETWORK))
    sharded(X)
    setattr(module, change, True)
    with pytest.raises(WorkError, match=f"some network {message}.*its control flow varies"):
        sharded(X)


def test_the_module_is_told_the_shapes_of_the_whole() -> None:
    module = TwoCalls()
    sharding = Sharding({0: RULE}, NETWORK, whole_shape=lambda x: torch.Size((5, 7)) if x is X else None)
    ShardedModule(module, sharding)(X)
    assert module.asked == ((5, 7), (5, 7), 7, 5, 2, False)
    ShardedModule(module, sharding)(X + 0)
    assert module.asked == ((1, 3), (1, 3), 3, 1, 2, False)
