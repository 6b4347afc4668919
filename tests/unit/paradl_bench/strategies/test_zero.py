"""ZeRO's units, plans and memory, against what is known by hand."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from network_factory import NetworkFactory
from profile_factory import make_network, make_profile, ring_fit

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, Phase, Plan, Role, WeightUpdate
from paradl_bench.strategies.data.zero.memory import ZeroState
from paradl_bench.strategies.data.zero.sharing import Shares
from paradl_bench.strategies.data.zero.units import optimizer_parts, units_of
from paradl_bench.strategies.memory import peak
from paradl_bench.strategies.memory.liveness import Liveness
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse, per_phase_memory
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

# 5 -> 6 -> 7, with relu in place after both; rows do not part evenly over 4 ranks.
CHAIN = make_network((5, 6, 7))
E = 4
OF_FOUR = Shares(4)


def network_of(*layers: tuple[str, str, tuple[str, ...]], parameters: dict[str, int]) -> ModelGraph:
    """A chain of (name, kind, parameters), and the parameters' numbers of elements."""
    made: list[Layer] = []
    for name, kind, reads in layers:
        source = made[-1].name if made else "input"
        in_place = {"in_place": True} if kind == "relu" else {}
        made.append(Layer(name=name, kind=kind, inputs=(source,), parameters=reads, attributes=in_place))
    tensors = tuple(Tensor(name=name, shape=(size,)) for name, size in parameters.items())
    return ModelGraph(name="n", input_shape=(1,), layers=tuple(made), parameters=tensors)


def names(network: ModelGraph) -> dict[str, list[str]]:
    return {unit.name: [parameter.name for parameter in unit.parameters] for unit in units_of(network)}


def test_blocks_of_a_sequence_are_units_and_large_modules_split() -> None:
    network = network_of(
        ("stem.conv", "conv2d", ("stem.conv.w",)),
        ("body.0.a", "conv2d", ("body.0.a.w",)),
        ("body.0.b", "conv2d", ("body.0.b.w",)),
        ("body.1.a", "conv2d", ("body.1.a.w",)),
        ("neck.one.a", "conv2d", ("neck.one.a.w",)),
        ("neck.two.a", "conv2d", ("neck.two.a.w",)),
        ("head", "linear", ("head.w",)),
        parameters={
            "token": 1,
            "stem.conv.w": 10,
            "body.0.a.w": 20,
            "body.0.b.w": 20,
            "body.1.a.w": 10,
            "neck.one.a.w": 10,
            "neck.two.a.w": 25,
            "head.w": 60,
        },
    )
    assert names(network) == {
        "stem": ["stem.conv.w"],
        "body.0": ["body.0.a.w", "body.0.b.w"],
        "body.1": ["body.1.a.w"],
        # An eighth of all is 19.5: the neck is parted, and so is its larger half.
        "neck.one": ["neck.one.a.w"],
        "neck.two.a": ["neck.two.a.w"],
        "head": ["head.w"],
        "": ["token"],
    }


@pytest.mark.parametrize(
    ("middle", "units"),
    [
        # Read outside of its module, reading what lies outside, read twice, run in two pieces, changed in place what it
        # was given.
        ([("b", "linear", ("b.w",)), ("linear", "linear", ("b.w",))], ["a", "c", ""]),
        ([("b", "linear", ("free", "b.w"))], ["a", "c", ""]),
        ([("b", "linear", ("b.w",)), ("b#2", "linear", ("b.w",))], ["a", "c", ""]),
        ([("b.x", "linear", ("b.w",)), ("add", "elementwise", ()), ("b.y", "elementwise", ())], ["a", "c", ""]),
        ([("b.relu", "relu", ()), ("b.x", "linear", ("b.w",))], ["a", "c", ""]),
        ([("b.x", "linear", ("b.w",)), ("b.relu", "relu", ())], ["a", "b", "c", ""]),
    ],
)
def test_modules_sharing_parameters_or_memory_belong_to_the_whole_model(
    middle: list[tuple[str, str, tuple[str, ...]]], units: list[str]
) -> None:
    network = network_of(
        ("a", "linear", ("a.w",)),
        *middle,
        ("c", "linear", ("c.w",)),
        parameters={"free": 1, "a.w": 2, "b.w": 2, "c.w": 2},
    )
    assert list(names(network)) == units


def test_an_optimizer_is_parted_largest_first() -> None:
    parts = optimizer_parts(network_of(parameters={"a": 1, "b": 5, "c": 3, "d": 3, "e": 4}).parameters, 2)
    assert [[parameter.name for parameter in part] for part in parts] == [["b", "d"], ["e", "c", "a"]]


def plan(text: str, network: ModelGraph = CHAIN, *, blocking: bool = False) -> Plan:
    settings = PlanSettings(batch=8, blocking=blocking)
    return planner_for(parse_strategy(text)).plan(network, parse_strategy(text), settings)


def story(found: Plan) -> list[str]:
    """What a rank does, in order, without the time between operations."""
    role, told = found.roles[0], []
    for index, phase in zip(role.work, role.phase, strict=True):
        work = found.works[index]
        if isinstance(work, Compute):
            told.append(f"{work.phase} {work.layer}")
        elif isinstance(work, Collective):
            told.append(f"{Phase(phase).name} {work.operation} {work.message_bytes}")
    return told


# Rows a rank sends over 4: 2 of 6 x 5 with bias, 2 of 7 x 6 with bias.
FIRST, SECOND = E * (2 * 5 + 2), E * (2 * 6 + 2)


def test_stage_3_gathers_each_unit_twice_with_one_backward_prefetch() -> None:
    told = story(plan("z3d4"))
    assert told[: told.index("FW fc1") + 1] == [
        f"FW all_gather {FIRST}",
        "FW fc0",
        "FW relu0",
        f"FW all_gather {SECOND}",
        "FW fc1",
    ]
    assert told[told.index("BW relu1") + 1 :] == [
        # No parameter is the model's own, so nothing is gathered before the last unit asks; then the one before it.
        f"BW all_gather {SECOND}",
        f"BW all_gather {FIRST}",
        "BW fc1",
        f"GE reduce_scatter {SECOND}",
        "BW relu0",
        "BW fc0",
        # Nothing before it needs a gradient: reduced at the end.
        f"GE reduce_scatter {FIRST}",
    ]


def test_stage_2_keeps_what_it_gathered() -> None:
    three, two = (plan(text).collectives() for text in ("z3d4", "z2d4"))
    assert two == {
        ("all_gather", FIRST, 4): 1,
        ("all_gather", SECOND, 4): 1,
        ("reduce_scatter", FIRST, 4): 1,
        ("reduce_scatter", SECOND, 4): 1,
    }
    assert three - two == {("all_gather", FIRST, 4): 1, ("all_gather", SECOND, 4): 1}


def test_stage_1_updates_a_part_and_broadcasts_it() -> None:
    found = plan("z1d2")
    (update,) = [work for work in found.works if isinstance(work, WeightUpdate)]
    # fc1.weight of 42; fc0.weight of 30, then fc1.bias of 7 and fc0.bias of 6, each to whoever has less.
    assert (update.elements, update.tensors) == (30 + 7 + 6, 3)
    sent = {size: count for (operation, size, _), count in found.collectives().items() if operation == "broadcast"}
    assert sum(size * count for size, count in sent.items()) == CHAIN.parameter_bytes
    assert story(found)[-2:] == [f"WU broadcast {size}" for size in sent]


@pytest.mark.parametrize("text", ["z2d2", "z3d2"])
def test_calls_that_block_hold_up_what_is_computed_next(text: str) -> None:
    """Every task behind a collective waits for it, directly or not; on streams of their own some need not."""

    def waits_for_all_before(found: Plan) -> bool:
        role = found.roles[0]
        before: list[set[int]] = []
        last_of_stream: dict[int, int] = {}
        for task, row in enumerate(rows_of(role)):
            lane = int(role.stream[task])
            direct = {*row, *([last_of_stream[lane]] if lane in last_of_stream else [])}
            before.append(direct.union(*(before[source] for source in direct)))
            last_of_stream[lane] = task
        computing = [t for t, index in enumerate(role.work) if isinstance(found.works[index], Compute | WeightUpdate)]
        sent = [task for task, index in enumerate(role.work) if isinstance(found.works[index], Collective)]
        return all(collective in before[task] for task in computing for collective in sent if collective < task)

    assert waits_for_all_before(plan(text, blocking=True))
    assert not waits_for_all_before(plan(text))


def rows_of(role: Role) -> list[list[int]]:
    starts, dependencies = role.dependency_start.tolist(), role.dependencies.tolist()
    return [dependencies[start:stop] for start, stop in itertools.pairwise(starts)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z3d2s2", "every unit of torch's fully_shard has tensors of its own; write z1d2s2"),
        ("d2z3d1", "one rank has nothing to shard; d2 is the same"),
        ("z2d1", "one rank has nothing to shard; d1 is the same"),
        ("z3d3", "batch 8 does not split evenly over 3 ranks"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(text)


def test_parameters_that_torch_cannot_shard_are_named() -> None:
    scalar = network_of(("a", "linear", ("a.w", "a.s")), parameters={"a.w": 2})
    frozen = pytest.raises(UserError, match=r"parameter a\.s of a is frozen, which z1d2 allows")
    with frozen:
        plan("z2d2", scalar)
    without_dims = msgspec.structs.replace(scalar, parameters=(*scalar.parameters, Tensor(name="a.s", shape=())))
    with pytest.raises(UserError, match=r"parameter a\.s has no dim to shard"):
        plan("z3d2", without_dims)
    with pytest.raises(UserError, match="synchronised batch norm"):
        planner_for(parse_strategy("z2d2")).plan(
            CHAIN, parse_strategy("z2d2"), PlanSettings(batch=8, batch_norm="sync")
        )


def test_a_module_without_operations_is_no_unit() -> None:
    network = network_of(
        ("body.0.a", "linear", ("body.0.a.w",)),
        ("body.2.a", "linear", ("body.2.a.w",)),
        parameters={"body.0.a.w": 10, "body.1.a.w": 10, "body.2.a.w": 10},
    )
    assert names(network) == {"body.0": ["body.0.a.w"], "body.2": ["body.2.a.w"], "": ["body.1.a.w"]}


def test_a_parameter_held_outside_of_its_unit_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from paradl_bench.strategies.data.zero.module import check_holders

    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in ("a", "b", "other")})
    model["b"].weight = model["a"].weight
    check_holders(model, model)
    check_holders(model, model["other"])
    with pytest.raises(ValueError, match="its weight is held by b too"):
        check_holders(model, model["a"])


def test_memory_falls_stage_by_stage() -> None:
    network = make_network((400, 400, 400, 400))
    whole = network.parameter_bytes
    peaks = []
    for stage in range(4):
        found = per_phase_memory(
            network, 2, PlanSettings(batch=1), exchanged=stage < 2, parted=ZeroState(stage, OF_FOUR)
        )
        assert sum(found.parts_bytes.values()) == found.peak_bytes
        peaks.append(found.peak_bytes)
        parts = found.parts_bytes
        assert parts["parameters"] == (whole if stage < 2 else whole / 4)
        assert parts["optimizer"] == pytest.approx(whole if not stage else whole / (2 if stage == 1 else 4), rel=0.4)
    assert peaks == sorted(peaks, reverse=True)


def test_stage_3_holds_one_unit_and_the_next_units_buffer() -> None:
    """Three equal units of w bytes over 4 ranks, next to no activations."""
    network = make_network((400, 400, 400, 400))
    w = E * (400 * 400 + 400)
    found = per_phase_memory(
        network, 1, PlanSettings(batch=1), exchanged=False, parted=ZeroState(3, OF_FOUR)
    ).parts_bytes
    # Backward of the middle unit: it, the buffer of the first, its gradients, those of the last as sent and as kept.
    assert found["gradients"] == pytest.approx(w + w + w + w + w / 4, rel=0.02)
    kept = per_phase_memory(
        network, 1, PlanSettings(batch=1), exchanged=False, parted=ZeroState(2, OF_FOUR)
    ).parts_bytes
    # Forward, while the last unit is copied out: all three, its buffer and that of the one before.
    assert kept["gradients"] == pytest.approx(5 * w, rel=0.02)


def test_stage_2_holds_gradients_twice_while_they_are_reduced() -> None:
    """A last unit of more than four times the one before, which forward then holds less of than backward."""
    first, second, last = (E * (x * y + y) for x, y in ((400, 40), (40, 40), (40, 800)))
    found = per_phase_memory(
        make_network((400, 40, 40, 800)), 1, PlanSettings(batch=1), exchanged=False, parted=ZeroState(2, OF_FOUR)
    )
    assert found.parts_bytes["gradients"] == pytest.approx(first + second + 2 * last + last / 4, rel=0.02)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_plans_of_other_shards_share_a_walk_to_the_byte(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    network, walked, forward = make_network((400, 40, 40, 800), buffers=True), [], Liveness.forward
    monkeypatch.setattr(Liveness, "forward", lambda *given: walked.append(1) or forward(*given))

    def found(text: str) -> MemoryUse:
        settings = plan_settings(batch=24 * parse_strategy(text).ranks, accumulate=accumulate)
        return memory_of_plan(network, parse_strategy(text), settings)

    monkeypatch.setattr(peak, "_WALKED", Answers())
    strategies = "z2d4", "z3d4", "z3d8", "d2z3d4"
    together = [found(text) for text in strategies]
    assert len(walked) == min(accumulate, 2)
    for text, use in zip(strategies, together, strict=True):
        monkeypatch.setattr(peak, "_WALKED", Answers())
        assert found(text) == use


def test_predictions_know_the_stages() -> None:
    network = make_network()
    fits = tuple(ring_fit(operation) for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    profile = make_profile(network, communication=fits)
    model = CostModel(profile=profile, network=network)
    predictor = Predictor(model, evaluator_named("simulate"))

    def predicted(text: str, *, blocking: bool = False) -> float:
        settings = PlanSettings(batch=8, blocking=blocking)
        return predictor.predict(Configuration(strategy=parse_strategy(text), settings=settings)).iteration_s

    two, three = predicted("z2d2"), predicted("z3d2")
    waiting = {text: predicted(text, blocking=True) for text in ("z2d2", "z3d2")}
    # On streams of its own the second gather hides behind what is computed.
    assert two == pytest.approx(three)
    assert three < waiting["z2d2"] < waiting["z3d2"]
    with pytest.raises(UserError, match="not for z3d2: give --evaluator simulate"):
        Predictor(model, evaluator_named("paradl")).predict(
            Configuration(strategy=parse_strategy("z3d2"), settings=PlanSettings(batch=8))
        )


def test_the_factory_names_modules_that_can_be_units() -> None:
    factory = NetworkFactory(8, 12, 12)
    factory.conv("conv1", 8)
    factory.relu("relu1")
    factory.flatten("flatten")
    factory.linear("fc", 10)
    factory.loss()
    assert list(names(factory.network("plain"))) == ["conv1", "fc", ""]


def test_a_module_that_changes_its_inputs_view_is_no_unit() -> None:
    view = Layer(name="view", kind="view", inputs=("first",))
    changing = Layer(name="body.add", kind="opaque", inputs=("view",), parameters=("body.w",))
    for writes, unit in (((("first", 0), ("view", 0)), False), ((), True)):
        layers = (
            Layer(name="first", kind="linear", inputs=("input",), parameters=("first.w",)),
            view,
            msgspec.structs.replace(changing, writes=writes),
        )
        parameters = (Tensor(name="first.w", shape=(4,)), Tensor(name="body.w", shape=(4,)))
        network = ModelGraph(name="n", input_shape=(1,), layers=layers, parameters=parameters)
        assert ("body" in names(network)) is unit


def issued(text: str, network: ModelGraph = CHAIN) -> list[tuple[str, int, int, tuple[int, ...]]]:
    found = plan(text, network, blocking=True)
    works = [work for work in found.communication() if isinstance(work, Collective)]
    return [(work.operation, work.message_bytes, work.ranks, work.axes) for work in works]


@pytest.mark.parametrize(("text", "outer", "inner"), [("d2z3d4", 0, 1), ("z3d4d2", 1, 0)])
def test_replicas_of_shards_reduce_what_was_scattered(text: str, outer: int, inner: int) -> None:
    """Gathers and reduce-scatters are those of the shards alone; an all-reduce of as many bytes follows each."""
    alone = issued("z3d4")
    expected = []
    for operation, size, ranks, _ in alone:
        expected.append((operation, size, ranks, (inner,)))
        if operation == "reduce_scatter":
            expected.append(("all_reduce", size, 2, (outer,)))
    assert issued(text) == expected
    assert len(expected) > len(alone)


def test_only_shards_part_an_optimizers_state() -> None:
    broadcasts = [call for call in issued("d2z1d2") if call[0] == "broadcast"]
    assert [(ranks, axes) for _, _, ranks, axes in broadcasts] == [(2, (1,))] * 2
    exchanged = [call for call in issued("d2z1d2") if call[0] == "all_reduce"]
    assert all((ranks, axes) == (4, (0, 1)) for _, _, ranks, axes in exchanged)


def test_shards_of_shared_layers_are_parted_along_data_alone() -> None:
    """Under z3d2f2 each rank has half of the filters, and rows of that half."""
    of_shards = [call for call in issued("z3d2f2") if call[3] == (0,)]
    whole = [call for call in issued("z3d2") if call[0] == "reduce_scatter"]
    scattered = [call for call in of_shards if call[0] == "reduce_scatter"]
    assert len(scattered) == len(whole)
    assert sum(size for _, size, *_ in scattered) < sum(size for _, size, *_ in whole)
