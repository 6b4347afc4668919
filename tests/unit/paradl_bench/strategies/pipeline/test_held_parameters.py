"""What a rank of a pipeline lists of a model's parameters, and what takes their place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from paradl_bench.strategies.pipeline.running.held_parameters import all_registered, hold_only


class TwoOfItsOwn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))


def test_shards_stay_where_all_parameters_are_listed() -> None:
    module = TwoOfItsOwn()
    networks = [SimpleNamespace(network=SimpleNamespace(parameters=[SimpleNamespace(name="second")], buffers=[]))]
    missing = hold_only(module, networks)
    shard = module.second = torch.nn.Parameter(torch.zeros(2))
    with all_registered(missing):
        assert list(module._parameters) == ["first", "second"]
        assert module.second is shard
        gathered = module.second = torch.nn.Parameter(torch.zeros(4))
    assert list(module._parameters) == ["second"]
    assert module.second is gathered
