"""Which layers tensor parallelism cuts, and what it says of those that it leaves whole."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers")

from network_factory import NetworkFactory

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.network.partition import Interval
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut, cuts_of_inputs
from paradl_bench.strategies.tensor.pairs import Pairs, find_pairs
from paradl_bench.strategies.tensor.plan import TensorPlanner

ELEMENT_BYTES = 4


def trace(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}" if "-" not in name else name, device="meta"))


def parts(network: ModelGraph, pairs: Pairs) -> Counter[str]:
    of_vocabulary = ("inside", "table", "loss")
    return Counter(piece.part for piece in pairs.pieces.values() if piece.part not in of_vocabulary)


def of_vocabulary(network: ModelGraph) -> dict[str, str]:
    """By name, the layers of the block that the loss ends."""
    pieces = find_pairs(network).pieces
    block = next((piece.block for piece in pieces.values() if piece.part == "loss"), None)
    own = {network.layers[index].name: piece.part for index, piece in pieces.items() if piece.block == block}
    return {name: part for name, part in own.items() if part != "inside"}


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
        # Half as many heads of keys and values in one projection with the queries.
        ("Fused", 1 + 2 + 1, 3, 0),
        ("Scaled", 1 + 2 + 1, 3, 0),
        # The head, behind as many columns as rows.
        ("gpt2-medium", 24 * 2 + 1, 24 * 2, 0),
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
    assert "LayerNorm (layer_norm), which needs all of it" in whole["cls.predictions.transform.dense"]
    assert find_pairs(network, ("*query",)).pieces == {}
    only = find_pairs(network, ("bert.encoder.layer.0.*",))
    assert len(only.linear) == 6
    assert "as chosen, and leaves" in only.notes[0]


@pytest.mark.parametrize(
    ("name", "tables", "head"),
    [
        ("gpt2-medium", ["transformer.wte"], "lm_head"),
        ("bert-base", ["bert.embeddings.word_embeddings"], "cls.predictions.decoder"),
        # The encoder's tokens and the decoder's.
        ("t5-small", ["shared", "shared#2"], "lm_head"),
        ("Tied", ["embedding"], "linear"),
        ("Untied", ["embedding"], "head"),
    ],
)
def test_a_vocabulary_is_cut_with_its_loss(name: str, tables: list[str], head: str) -> None:
    found = of_vocabulary(trace(name))
    assert found == {**dict.fromkeys(tables, "table"), head: "column", "loss.cross_entropy": "loss"}


def test_classes_are_no_vocabulary() -> None:
    for name in ("bert", "Own"):
        assert of_vocabulary(trace(name)) == {}
    assert of_vocabulary(chain(6, 9, 4)) == {}


def test_logits_that_are_read_elsewhere_stay_whole() -> None:
    network = trace("Untied")
    index = next(i for i, layer in enumerate(network.layers) if layer.name == "head")
    other = msgspec.structs.replace(network.layers[index + 1], name="other")
    layers = (*network.layers[: index + 1], other, *network.layers[index + 1 :])
    pairs = find_pairs(msgspec.structs.replace(network, layers=layers))
    assert pairs.whole["head"] == "head is read by other as well"
    assert "table" not in {piece.part for piece in pairs.pieces.values()}
    assert "loss.cross_entropy" not in pairs.whole


def test_a_head_that_is_not_chosen_stays_whole() -> None:
    network = trace("Untied")
    pairs = find_pairs(network, ("ups*", "downs*"))
    assert parts(network, pairs) == Counter(column=1, row=1)
    assert pairs.whole["head"] == "it was not chosen"


@pytest.mark.parametrize(
    ("name", "dtype", "width"), [("Tied", "fp32", 4), ("Untied", "fp32", 4), ("Untied", "bf16", 2)]
)
def test_a_vocabulary_that_ranks_do_not_divide_adds_up(name: str, dtype: str, width: int) -> None:
    network, strategy, batch, tokens = trace(name), parse_strategy("t3"), 5, 6
    settings = plan_settings(batch=batch, dtype=dtype)
    planner = planner_for(strategy)
    shares = planner.shards(network, strategy, settings)
    held = [
        {tensor.name: tensor.shape[0] for tensor in shares.distinct[index].network.parameters}
        for index in shares.positions
    ]
    assert [of["embedding.weight"] for of in held] == [6, 6, 5]
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    head = "head" if name == "Untied" else "linear"
    for position, of in zip(shares.positions, held, strict=True):
        shards = shares.distinct[position].shards
        own = of["embedding.weight"]
        assert of.get("head.weight", own) == of.get("head.bias", own) == own
        assert shards[index[head]].layer.output_shape == (tokens, own)
        assert shards[index["loss.cross_entropy"]].layer.input_shapes == ((tokens, own), (tokens,))
        assert shards[index["embedding"]].layer.output_shape == (tokens, 12)

        def reduced(layer: str, when: str, shards: dict[int, LayerShard] = shards) -> list[int]:
            works = getattr(shards[index[layer]], when)
            assert {work.operation for work in works} <= {"all_reduce"}
            return [work.message_bytes for work in works]

        # The output of the look-up, the gradient of what the head reads, and three numbers a token of the loss.
        assert reduced("embedding", "after_fw") == [batch * tokens * 12 * ELEMENT_BYTES]
        assert reduced("embedding", "after_bw") == reduced(head, "after_fw") == []
        assert reduced(head, "after_bw") == [batch * tokens * 12 * width]
        assert reduced("loss.cross_entropy", "after_fw") == [batch * tokens * ELEMENT_BYTES] * 3
        assert reduced("loss.cross_entropy", "after_bw") == []


def test_unequal_projections_are_cut_by_heads_of_keys() -> None:
    network = trace("Fused")
    pairs = find_pairs(network)
    fused = next(index for index in pairs.linear if network.layers[index].name == "qkv")
    assert pairs.pieces[fused].cut == Cut(-1, unequal=(12, 6, 6))
    assert pairs.pieces[fused].atoms == 2
    assert pairs.pieces[fused].cut.of((24,), Interval(1, 2), 2) == (Interval(6, 12), Interval(15, 18), Interval(21, 24))


def test_gradients_of_what_all_heads_share_are_summed() -> None:
    """Each rank makes a part of them: a sum over its own heads."""
    network = trace("Scaled")
    settings = plan_settings(batch=2)
    shards = TensorPlanner().shard(network, AxisPlace(parse_strategy("t2").axes[0], 0, 0, 2), settings).shards
    sums = {network.layers[i].name: [sum.message_bytes for sum in shard.sums] for i, shard in shards.items()}
    head = 3
    assert {name: sizes for name, sizes in sums.items() if sizes} == {
        "of_both": [2 * head * ELEMENT_BYTES],
        "of_both#2": [2 * head * ELEMENT_BYTES],
        "of_keys": [head * ELEMENT_BYTES],
    }
    whole = {index: piece.whole for index, piece in find_pairs(network).pieces.items() if piece.whole}
    of_whole = {network.layers[i].name: [sum.message_bytes for sum in shards[i].after_bw] for i in whole}
    assert of_whole == {"mul": [head * ELEMENT_BYTES], "mul#2": [ELEMENT_BYTES]}


HEADS = (4, 10, 6)
"""Heads, tokens, features of a head."""


def of_kind(kind: str, output: tuple[int, ...] = HEADS, **attributes: object) -> Layer:
    return Layer(
        name="it",
        kind=kind,
        attributes=attributes,  # type: ignore[arg-type]
        input_shapes=(HEADS,),
        output_shape=output,
        parameters=("weight",),
    )


@pytest.mark.parametrize(
    ("layer", "parameter", "possible"),
    [
        (of_kind("norm", function="rms_norm", size=(6,)), (6,), (-3, -2)),
        (of_kind("norm", function="layer_norm", size=(10, 6)), (10, 6), (-3,)),
        # A channel is normalised with others.
        (of_kind("norm", function="group_norm", size=2), (4,), ()),
        # Backward needs a part of a weight that has an entry for each head.
        (of_kind("elementwise", function="mul"), (4, 1, 1), (-2, -1)),
        (of_kind("elementwise", function="mul"), (6,), (-3, -2)),
        # It has an entry for each position of the second dim, whatever its shape says.
        (of_kind("activation", function="prelu"), (10,), ()),
    ],
)
def test_parameters_are_read_whole_where_they_have_no_part(
    layer: Layer, parameter: tuple[int, ...], possible: tuple[int, ...]
) -> None:
    for dim in (-3, -2, -1):
        with nullcontext() if dim in possible else pytest.raises(CannotCut, match="needs all of it"):
            assert cuts_of_inputs(layer, Cut(dim), [parameter]) == (Cut(dim),)


@pytest.mark.parametrize(("along", "possible"), [(-1, (-3, -2)), ((-2, -1), (-3,)), (None, ())])
def test_means_run_on_parts_of_other_dims(along: object, possible: tuple[int, ...]) -> None:
    dims = along if isinstance(along, tuple) else (along,)
    output = tuple(1 if at in dims else extent for at, extent in zip((-3, -2, -1), HEADS, strict=True))
    layer = of_kind("reduction", output, function="mean", dim=along, keepdim=True)
    for dim in (-3, -2, -1):
        with nullcontext() if dim in possible else pytest.raises(CannotCut, match="needs all of it"):
            assert cuts_of_inputs(msgspec.structs.replace(layer, parameters=()), Cut(dim)) == (Cut(dim),)


def test_heads_of_keys_and_values_limit_the_ranks() -> None:
    (limit,) = planner_for(parse_strategy("t2")).limits(trace("llama-3-8b"), PlanSettings(batch=2))
    assert str(limit) == "p <= 8: fewest heads, layer model.layers.0.self_attn.k_proj"


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


def test_layers_that_ranks_cut_alike_are_cut_once() -> None:
    network, strategy = chain(6, 4, 7, 5), parse_strategy("t2")
    shares = planner_for(strategy).shards(network, strategy, PlanSettings(batch=2))
    first, second = (shares.distinct[index].shards for index in shares.positions)
    alone = TensorPlanner().shard(network, AxisPlace(strategy.axes[0], 0, 1, 2), PlanSettings(batch=2))
    assert second == alone.shards
    same = {network.layers[index].name for index, shard in second.items() if shard is first[index]}
    assert same == {"fc0", "relu0", "fc1"}
