"""Which layers tensor parallelism cuts, and what it says of those that it leaves whole."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers")

from network_factory import NetworkFactory

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.pairs import Pairs, find_pairs

ELEMENT_BYTES = 4


def trace(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}" if "-" not in name else name, device="meta"))


def parts(network: ModelGraph, pairs: Pairs) -> Counter[str]:
    return Counter(piece.part for piece in pairs.pieces.values() if piece.part != "inside")


@pytest.mark.parametrize(
    ("name", "columns", "rows", "lookups"),
    [
        # Queries, keys, values and the first layer of the perceptron; GPT-2's are fused; T5's perceptron is gated, and
        # its decoder attends twice.
        ("bert", 2 * 4, 2 * 2, 0),
        ("gpt2", 2 * 2, 2 * 2, 0),
        ("t5", 2 * 5 + 2 * 8, 2 * 2 + 2 * 3, 2),
        ("Own", 1 + 2 + 1, 3, 1),
        ("Split", 1 + 2 + 2 + 1, 4, 0),
        ("gpt2-medium", 24 * 2, 24 * 2, 0),
    ],
)
def test_heads_and_features_are_found(name: str, columns: int, rows: int, lookups: int) -> None:
    network = trace(name)
    found = parts(network, find_pairs(network))
    assert found == +Counter(column=columns, row=rows, lookup=lookups)


def test_fused_queries_keys_and_values_are_cut_separately() -> None:
    network = trace("gpt2")
    pairs = find_pairs(network)
    fused = next(
        i for i in pairs.linear if network.layers[i].output_shape[-1] == 3 * network.layers[i].input_shapes[0][-1]
    )
    assert pairs.pieces[fused].cut == Cut(-1, sections=3)
    assert pairs.pieces[fused].atoms == 4


def test_a_plan_reduces_once_forward_and_once_backward_a_pair() -> None:
    network, strategy = trace("bert"), parse_strategy("d2t2")
    plan = planner_for(strategy).plan(network, strategy, PlanSettings(batch=6))
    size = 3 * 6 * 12 * ELEMENT_BYTES
    works = [work for work in plan.of_layers() if work.axes == (1,)]
    assert Counter((work.operation, work.message_bytes, work.ranks) for work in works) == {("all_reduce", size, 2): 8}  # type: ignore[union-attr]


def test_what_stays_whole_says_why() -> None:
    network = trace("bert-base")
    whole = find_pairs(network).whole
    assert whole["cls.predictions.decoder"] == "it shares a parameter with another layer"
    assert "LayerNorm (layer_norm), which needs all of it" in whole["cls.predictions.transform.dense"]
    assert find_pairs(network, ("*query",)).pieces == {}
    only = find_pairs(network, ("bert.encoder.layer.0.*",))
    assert len(only.linear) == 6
    assert "as chosen, and leaves" in only.notes[0]


def chain(*features: int) -> ModelGraph:
    factory = NetworkFactory(8)
    for number, width in enumerate(features):
        factory.linear(f"fc{number}", width)
        factory.relu(f"relu{number}")
    factory.loss()
    return factory.network("chain")


def test_a_chain_is_taken_two_by_two() -> None:
    network = chain(6, 9, 4, 5, 3)
    pairs = find_pairs(network)
    assert [(network.layers[i].name, pairs.pieces[i].part) for i in pairs.linear] == [
        ("fc0", "column"),
        ("fc1", "row"),
        ("fc2", "column"),
        ("fc3", "row"),
    ]
    assert pairs.whole["fc4"] == "it is in no pair: fc3 is in another one"
    (limit,) = planner_for(parse_strategy("t2")).limits(network, PlanSettings(batch=2))
    assert str(limit) == "p <= 4: fewest features, layer fc2"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("fc0",), "split layers: fc0 of chain can't be: it is in no pair: what it reads comes from the model's input"),
        (("fc9",), "unknown linear layer of chain to split 'fc9'"),
        (("relu*",), "unknown linear layer of chain to split 'relu\\*'"),
    ],
)
def test_a_choice_that_leaves_no_pair_is_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_pairs(chain(6, 9), patterns)


def test_what_is_read_elsewhere_is_not_cut() -> None:
    factory = NetworkFactory(8)
    factory.linear("fc0", 8)
    factory.relu("relu")
    factory.linear("fc1", 8)
    factory.add("add", "fc1", "relu")
    factory.loss()
    assert find_pairs(factory.network("skip")).whole["fc1"] == "relu is read by add as well"


def test_uneven_parts_of_every_layer_add_up() -> None:
    network, strategy = chain(7, 5), parse_strategy("t3")
    planner = planner_for(strategy)
    shares = planner.shards(network, strategy, PlanSettings(batch=2))
    held = [shares.distinct[index].network.parameters for index in shares.positions]
    shapes = [{tensor.name: tensor.shape for tensor in parameters} for parameters in held]
    assert [of["fc0.weight"] for of in shapes] == [(3, 8), (2, 8), (2, 8)]
    assert [of["fc1.weight"] for of in shapes] == [(5, 3), (5, 2), (5, 2)]
    assert [of["fc0.bias"] for of in shapes] == [(3,), (2,), (2,)]
    assert {of["fc1.bias"] for of in shapes} == {(5,)}
