"""Plans of serial and data parallel training, against torch's own assignment to buckets and against hand-made cases."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph, Tensor
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, Compute, FrameworkOverhead, Plan, Stream, WeightUpdate, Work
from paradl_bench.strategies.exchange.buckets import BROADCAST_BYTES, assign_buckets, broadcast_buckets
from paradl_bench.strategies.exchange.options import bucket_limits
from paradl_bench.strategies.nesting.catalog import planner_for

torch = pytest.importorskip("torch")

TORCH_DTYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "int64": "int64"}

elements = st.integers(0, 60)
limits = st.lists(st.integers(1, 400), min_size=1, max_size=3)


def tensors_of(sizes: list[int], dtypes: list[str]) -> list[Tensor]:
    return [Tensor(name=str(i), shape=(n,), dtype=d) for i, (n, d) in enumerate(zip(sizes, dtypes, strict=True))]


def torch_buckets(tensors: list[Tensor], limits_bytes: list[int], indices: list[int]) -> list[list[int]]:
    """torch's answer: for ``indices`` empty as at construction, otherwise as for rebuilt buckets."""
    import torch.distributed as dist

    real = [torch.empty(t.shape, dtype=getattr(torch, TORCH_DTYPES[t.dtype])) for t in tensors]
    expect_sparse = [False] * len(real)
    buckets, _ = dist._compute_bucket_assignment_by_size(real, limits_bytes, expect_sparse, indices)
    return [list(bucket) for bucket in buckets]


@given(sizes=st.lists(elements, min_size=1, max_size=40), limits_bytes=limits)
def test_rebuilt_buckets_are_those_of_torch(sizes: list[int], limits_bytes: list[int]) -> None:
    tensors = tensors_of(sizes, ["fp32"] * len(sizes))
    ours = assign_buckets(tensors, limits_bytes, in_order_of_arrival=True)
    assert ours == torch_buckets(tensors, limits_bytes, list(range(len(sizes))))


@given(data=st.data(), sizes=st.lists(elements, min_size=1, max_size=40), limits_bytes=limits)
def test_initial_buckets_are_those_of_torch(data: st.DataObject, sizes: list[int], limits_bytes: list[int]) -> None:
    draw = st.lists(st.sampled_from(sorted(TORCH_DTYPES)), min_size=len(sizes), max_size=len(sizes))
    tensors = tensors_of(sizes, data.draw(draw))
    ours = assign_buckets(tensors, limits_bytes, in_order_of_arrival=False)
    assert ours == torch_buckets(tensors, limits_bytes, [])


@given(sizes=st.lists(elements, min_size=1, max_size=30), limits_bytes=limits)
def test_buckets_hold_every_tensor_once_and_close_at_their_limit(sizes: list[int], limits_bytes: list[int]) -> None:
    tensors = tensors_of(sizes, ["fp32"] * len(sizes))
    buckets = assign_buckets(tensors, limits_bytes, in_order_of_arrival=True)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(buckets):
        limit = limits_bytes[min(number, len(limits_bytes) - 1)]
        assert sum(tensors[i].bytes for i in bucket[:-1]) < limit


def test_broadcasts_are_coalesced_by_dtype_up_to_250_mib() -> None:
    big = BROADCAST_BYTES // DTYPE_BYTES["fp32"]
    tensors = [
        Tensor(name="a", shape=(big - 1,)),
        Tensor(name="b", shape=(), dtype="int64"),
        Tensor(name="c", shape=(1,)),
        Tensor(name="d", shape=(5,)),
    ]
    assert broadcast_buckets(tensors) == [(BROADCAST_BYTES, 2), (8, 1), (20, 1)]
    assert broadcast_buckets([]) == []


def test_a_given_bucket_cap_holds_for_the_first_bucket_too() -> None:
    assert bucket_limits(None) == (1024 * 1024, 25 * 1024 * 1024)
    assert bucket_limits(25) == (25 * 1024 * 1024, 25 * 1024 * 1024)
    assert bucket_limits(0.5) == (512 * 1024, 512 * 1024)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="positive number of MiB"):
            bucket_limits(wrong)


def layer(name: str, *inputs: str, parameters: tuple[str, ...] = ()) -> Layer:
    return Layer(name=name, kind="linear", inputs=inputs, output_shape=(4,), parameters=parameters)


def chain(**change: object) -> ModelGraph:
    """Three layers with weights of 400, 800 and 400 bytes, and one batch norm's buffers."""
    fields: dict[str, object] = {
        "name": "chain",
        "input_shape": (4,),
        "layers": (
            layer("one", "input", parameters=("one.weight",)),
            layer("two", "one", parameters=("two.weight",)),
            layer("three", "two", parameters=("three.weight",)),
            layer("loss", "three"),
        ),
        "parameters": (
            Tensor(name="one.weight", shape=(100,)),
            Tensor(name="two.weight", shape=(200,)),
            Tensor(name="three.weight", shape=(10, 10)),
        ),
        "buffers": (Tensor(name="mean", shape=(4,)), Tensor(name="count", shape=(), dtype="int64")),
        "gradient_order": ("three.weight", "two.weight", "one.weight"),
    }
    return ModelGraph(**{**fields, **change})  # type: ignore[arg-type]


def plan(network: ModelGraph, strategy: str, batch: int = 8, first: int = 300, cap: int = 1000) -> Plan:
    parsed = parse_strategy(strategy)
    settings = plan_settings(batch=batch, first_bucket_bytes=first, bucket_cap_bytes=cap)
    return planner_for(parsed).plan(network, parsed, settings)


def spelled(found: Plan) -> list[str]:
    """The tasks in order, but for the time between operations; communication is marked by its stream's ``>``."""

    def spell(work: Work) -> str:
        if isinstance(work, Compute):
            return f"{work.phase} {work.layer}"
        if isinstance(work, BucketCopy):
            return f"{work.direction} {work.bytes}/{work.tensors}"
        if isinstance(work, Collective):
            return f"> {work.operation} {work.message_bytes}"
        assert isinstance(work, WeightUpdate)
        return f"WU {work.elements}/{work.tensors}"

    role = found.roles[0]
    works = [found.works[index] for index in role.work]
    for work, stream in zip(works, role.stream, strict=True):
        assert (stream == Stream.COMMUNICATION) == isinstance(work, Collective)
    return [spell(work) for work in works if not isinstance(work, FrameworkOverhead)]


def waits_of(found: Plan, text: str) -> list[str]:
    """What the task that is spelled ``text`` waits for."""
    role = found.roles[0]
    names = spelled(found)
    kept = [task for task in range(role.tasks) if not isinstance(found.works[role.work[task]], FrameworkOverhead)]
    task = kept[names.index(text)]
    rows = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
    return [names[kept.index(row)] for row in rows]


FORWARD = ["FW one", "FW two", "FW three", "FW loss"]


def test_serial_is_forward_backward_update() -> None:
    found = plan(chain(), "serial")
    assert spelled(found) == [*FORWARD, "BW loss", "BW three", "BW two", "BW one", "WU 400/3"]
    assert (found.local_batch, found.roles[0].setup, found.collectives()) == (8, (), {})


def test_every_operation_has_its_share_of_the_time_between() -> None:
    found = plan(chain(), "serial")
    works = [found.works[index] for index in found.roles[0].work]
    for phase in ("FW", "BW"):
        assert works.count(FrameworkOverhead(phase=phase)) == 4


def test_ddp_exchanges_a_bucket_as_soon_as_it_is_full() -> None:
    found = plan(chain(), "d2")
    assert spelled(found) == [
        *["into 16/1", "> broadcast 16", "into 8/1", "> broadcast 8", "out 16/1", "out 8/1"],
        *FORWARD,
        *["BW loss", "BW three", "into 400/1", "> all_reduce 400"],
        *["BW two", "into 800/1", "BW one", "into 400/1", "> all_reduce 1200"],
        *["out 400/1", "out 1200/2", "WU 400/3"],
    ]
    assert found.local_batch == 4
    assert waits_of(found, "FW one") == ["out 16/1", "out 8/1"]
    assert waits_of(found, "> all_reduce 1200") == ["into 800/1", "into 400/1"]
    assert waits_of(found, "out 1200/2") == ["BW one", "> all_reduce 1200"]
    assert waits_of(found, "WU 400/3") == ["out 400/1", "out 1200/2"]


def test_what_ddp_issues_before_its_steady_state() -> None:
    buffers = {("broadcast", 16): 1, ("broadcast", 8): 1}
    found: dict[str, dict[tuple[str, int], int]] = {when: {} for when in ("setup", "first", "rebuild")}
    for when, operation, size, count in plan(chain(), "d2").roles[0].setup:
        found[when][operation, size] = count
    # Sizes and strides of tensors of 1, 1 and 2 dims, as int64; parameters and float buffers are coalesced.
    shapes = 2 * (1 + 1 + 2) * 8
    assert found["setup"] == {
        ("all_gather", 8): 1,
        ("broadcast", shapes): 1,
        ("broadcast", 1616): 1,
        ("broadcast", 8): 1,
    }
    assert found["first"] == {**buffers, ("all_reduce", 1600): 1}
    # Indices of three gradients and the number of buckets, then the two buckets' lengths, as int32: 16 and 8 bytes.
    assert found["rebuild"] == {
        ("broadcast", 16): 2,
        ("broadcast", 8): 2,
        ("all_reduce", 400): 1,
        ("all_reduce", 1200): 1,
    }


def test_buckets_follow_the_order_of_arrival_and_not_of_registration() -> None:
    found = plan(chain(gradient_order=("two.weight", "one.weight", "three.weight")), "d2", cap=500)
    sent = [name for name in spelled(found) if name.startswith("> all_reduce")]
    # one.weight arrives after three.weight's layer, but its bucket comes before.
    assert sent == ["> all_reduce 800", "> all_reduce 800"]
    names = spelled(found)
    assert names.index("BW one") < names.index("> all_reduce 800", names.index("> all_reduce 800") + 1)


def test_a_full_bucket_waits_for_the_one_before() -> None:
    found = plan(chain(gradient_order=("one.weight", "three.weight", "two.weight")), "d2", first=400, cap=1200)
    names = spelled(found)
    # The second bucket is full with BW two, the first only with BW one: both are sent then, in order.
    assert names[names.index("BW one") :][:4] == ["BW one", "into 400/1", "> all_reduce 400", "> all_reduce 1200"]
    assert waits_of(found, "> all_reduce 1200")[-1] == "into 400/1"


def test_a_shared_parameter_is_ready_after_its_last_backward() -> None:
    layers = (
        layer("one", "input", parameters=("one.weight",)),
        layer("two", "one", parameters=("two.weight",)),
        layer("three", "two", parameters=("one.weight",)),
        layer("loss", "three"),
    )
    parameters = (Tensor(name="one.weight", shape=(100,)), Tensor(name="two.weight", shape=(200,)))
    network = chain(layers=layers, parameters=parameters, gradient_order=("two.weight", "one.weight"))
    names = spelled(plan(network, "d2"))
    backward = names[names.index("BW loss") :]
    assert backward[:4] == ["BW loss", "BW three", "BW two", "into 800/1"]
    assert backward[5:8] == ["BW one", "into 400/1", "> all_reduce 400"]


def test_backward_leaves_out_what_no_gradient_reaches() -> None:
    layers = (
        layer("normalise", "input"),
        layer("one", "normalise", parameters=("one.weight",)),
        layer("head", "one", parameters=("two.weight",)),
        layer("loss", "one"),
    )
    network = chain(layers=layers, gradient_order=("one.weight",))
    names = spelled(plan(network, "serial"))
    assert names == ["FW normalise", "FW one", "FW head", "FW loss", "BW loss", "BW one", "WU 100/1"]


def test_parameters_without_gradient_send_zeros_in_never_rebuilt_buckets() -> None:
    network = chain(gradient_order=("three.weight", "one.weight"))
    found = plan(network, "d2")
    # Registration order closes [one], leaves [two, three]; reversed. The map of used parameters is 3 int32.
    assert {key: count for key, count in found.collectives().items() if key[0] == "all_reduce"} == {
        ("all_reduce", 1200, 2): 1,
        ("all_reduce", 400, 2): 1,
        ("all_reduce", 12, 2): 1,
    }
    setup = found.roles[0].setup
    assert [s for s in setup if s[0] == "first"] == [("first", *s[1:]) for s in setup if s[0] == "rebuild"]
    assert "two.weight" in found.notes[0]
    names = spelled(found)
    assert names[names.index("BW three") + 1] == "into 1200/2"
    assert names[-1] == "WU 200/2"


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    first=st.integers(1, 1000),
    cap=st.integers(1, 2000),
    ranks=st.integers(1, 8),
)
def test_every_gradient_is_copied_in_sent_and_copied_out_once(
    sizes: list[int], order: object, first: int, cap: int, ranks: int
) -> None:
    names = [f"w{i}" for i in range(len(sizes))]
    layers = [layer(f"l{i}", f"l{i - 1}" if i else "input", parameters=(name,)) for i, name in enumerate(names)]
    arrival = list(names)
    order.shuffle(arrival)  # type: ignore[attr-defined]
    network = chain(
        layers=(*layers, layer("loss", layers[-1].name)),
        parameters=tuple(Tensor(name=name, shape=(size,)) for name, size in zip(names, sizes, strict=True)),
        buffers=(),
        gradient_order=tuple(arrival),
    )
    found = plan(network, f"d{ranks}", batch=2 * ranks, first=first, cap=cap)
    total = 4 * sum(sizes)
    works = [found.works[index] for index in found.roles[0].work]
    for direction in ("into", "out"):
        copies = [work for work in works if isinstance(work, BucketCopy) and work.direction == direction]
        assert (sum(work.bytes for work in copies), sum(work.tensors for work in copies)) == (total, len(sizes))
    assert sum(size * count for (_, size, _), count in found.collectives().items()) == total


def test_a_batch_that_does_not_split_names_those_that_do() -> None:
    with pytest.raises(
        UserError, match="batch 10 does not split evenly over 4 ranks; the nearest that do are 8 and 12"
    ):
        plan(chain(), "d4", batch=10)
    with pytest.raises(UserError, match="batch 3 is smaller than 4 ranks"):
        plan(chain(), "d4", batch=3)


def test_kinds_that_do_not_nest_say_which() -> None:
    with pytest.raises(UserError, match="strategy f2s2: filter and spatial both share layers out"):
        planner_for(parse_strategy("f2s2"))


def test_plans_import_no_torch() -> None:
    import subprocess

    program = (
        "import sys; from paradl_bench.strategies.nesting.catalog import planner_for;"
        "from paradl_bench.plan.strategy import parse_strategy; planner_for(parse_strategy('d2'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
