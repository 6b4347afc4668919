"""What a sweep is asked for, how it is ordered, and what its summary shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import click
import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.commands.collectives import COMMAND
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.measure.collectives import beside_compute
from paradl_bench.measure.collectives import sweep as collectives
from paradl_bench.measure.collectives.context_summary import context_rows
from paradl_bench.measure.collectives.request import CollectivesRequest, parse_contexts
from paradl_bench.measure.collectives.summary import (
    CollectivesSummary,
    print_collectives,
    sweep_rows,
)
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE
from paradl_bench.records.samples import CollectiveSamples


def request(**changes: object) -> CollectivesRequest:
    plain = CollectivesRequest(
        ranks=4,
        backend="gloo",
        device="cpu",
        operations=("all_reduce", "all_gather"),
        sizes=(1024, 4096, 65536),
        blocks=3,
        point_s=0.1,
        seed=0,
    )
    values = {**msgspec.structs.asdict(plain), **changes}
    return CollectivesRequest(**values)


def sample(
    size: int = 1000, *, operation: str = "all_gather", block: int = 0, verified: bool = True
) -> CollectiveSamples:
    return CollectiveSamples(
        library="gloo",
        tool="torch",
        operation=operation,
        level="node",
        ranks=2,
        message_bytes=size,
        dtype="fp32",
        block=block,
        samples_s=((1e-3, 2e-3, 4e-3), (2e-3, 1e-3, 3e-3)),
        verified=verified,
    )


def beside(block: int) -> ContextSamples:
    return ContextSamples(
        library="gloo",
        operation="all_reduce",
        level="node",
        ranks=2,
        message_bytes=1 << 20,
        dtype="fp32",
        context="with-compute",
        neighbour="conv2d",
        block=block,
        one_clock=True,
        idle_end_s=((1e-3, 1e-3),) * 2,
        start_s=((0.0, 0.0),) * 2,
        end_s=((4e-3, 4e-3),) * 2,
        neighbour_s=((2e-3, 4e-3),) * 2,
        neighbour_idle_s=((1e-3, 2e-3),) * 2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "at least 2 ranks"),
        ({"operations": ("all_reduce", "all_redcue")}, "did you mean all_reduce"),
        ({"sizes": (1024, 1026)}, "1026 bytes are not a multiple of an fp32 element"),
    ],
)
def test_what_can_not_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(**changes)


def test_every_block_visits_each_point_once_in_its_own_order() -> None:
    orders = [request().order(block) for block in range(3)]
    points = {(name, size) for name in request().operations for size in request().sizes}
    for order in orders:
        assert len(order) == len(points)
        assert set(order) == points
    assert len({tuple(order) for order in orders}) == 3
    assert request().order(1) == orders[1]
    assert request(seed=1).order(1) != orders[1]


def test_buffers_hold_the_largest_message_of_any_operation() -> None:
    assert request().pool_elements() == (65536 // 4, 4 * 65536 // 4)
    assert request(operations=("reduce_scatter", "broadcast")).pool_elements() == (4 * 65536 // 4, 65536 // 4)


def test_a_sweep_that_would_fill_the_host_is_refused() -> None:
    needed = 2 * 5 * 65536 * 4
    request().check_memory(ranks_on_host=4, memory_bytes=2 * needed)
    with pytest.raises(UserError, match=r"messages of 64\.0 KiB on 4 ranks a host need 2\.50 MiB of its 2\.50 MiB"):
        request().check_memory(ranks_on_host=4, memory_bytes=needed)


@given(call_s=st.floats(1e-7, 10), longer=st.floats(1, 100))
def test_repetitions_fill_the_time_between_their_bounds(call_s: float, longer: float) -> None:
    count = collectives.repetitions(call_s, 0.1)
    assert collectives.MIN_REPETITIONS <= count <= collectives.MAX_REPETITIONS
    assert collectives.repetitions(call_s * longer, 0.1) <= count
    if collectives.MIN_REPETITIONS < count < collectives.MAX_REPETITIONS:
        assert count * call_s == pytest.approx(0.1, abs=call_s)


def test_refusals_are_told_from_failures() -> None:
    assert collectives.is_refusal(RuntimeError("ProcessGroup gloo does not support reduce_scatter"))
    assert collectives.is_refusal(NotImplementedError())
    assert not collectives.is_refusal(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))


def test_every_kernel_runs_and_is_visited_at_every_size() -> None:
    order = beside_compute.order_beside_compute(0, 0)
    assert {kernel for kernel, _ in order} == set(beside_compute.KERNELS)
    assert {size for _, size in order} == set(beside_compute.MESSAGE_BYTES)
    for build in beside_compute.KERNELS.values():
        build(torch.device("cpu"))()


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_work_in_a_window_is_counted_in_parts(lengths: list[float], first: float, second: float) -> None:
    """Over the whole span all calls are counted; in a part of it, what falls there; parts add up."""
    ends = [0.0, *np.cumsum(lengths).tolist()]
    start, end = sorted((first * ends[-1], second * ends[-1]))
    count = beside_compute._finished_between
    assert count(ends, 0.0, ends[-1]) == pytest.approx(len(lengths))
    assert count(ends, 0.0, start) + count(ends, start, end) + count(ends, end, ends[-1]) == pytest.approx(len(lengths))
    assert count([0.0, 2.0, 3.0], 1.0, 2.5) == pytest.approx(1.0)


def test_rows_hold_medians_over_blocks_and_nccl_tests_bandwidths() -> None:
    (row,) = sweep_rows([sample(block=0), sample(block=1)])
    assert (row.message_bytes, row.size_bytes, row.calls) == (1000, 2000, 6)
    assert row.median_s == pytest.approx(2e-3)
    assert row.algbw_bytes_per_s == pytest.approx(2000 / 2e-3)
    assert row.busbw_bytes_per_s == pytest.approx(1000 / 2e-3)
    assert row.verified
    (direct,) = sweep_rows([sample(operation="send_recv")])
    assert direct.median_s == pytest.approx(2e-3)


def test_one_wrong_block_makes_the_row_wrong() -> None:
    (row,) = sweep_rows([sample(), sample(block=1, verified=False)])
    assert not row.verified


def test_rows_of_contexts_hold_both_slowdowns() -> None:
    (row,) = context_rows([beside(0), beside(1)])
    assert (row.neighbour_ratio, row.ratio) == (2.0, 4.0)
    assert row.calls == 4


def test_groups_that_an_older_sweep_timed_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "of_first", lambda _context, values: values)
    alone = [sample(1024), sample(1024)]
    at_once = [msgspec.structs.replace(each, concurrent=2, group=group) for group, each in enumerate(alone)]
    asked = request(ranks=2, concurrent=2, sizes=(1024,), operations=("all_gather",), blocks=1)
    steps = collectives._steps(asked, asked.operations)
    assert [step.sort for step in steps] == ["sweep", "groups"]
    for held, left in ((alone, ["groups"]), ([*alone, *at_once[:1]], ["groups"]), ([*alone, *at_once], [])):
        directory = SimpleNamespace(resumed=True, records=lambda name, _, held=held: held if "coll" in name else [])
        found = collectives._unmeasured(asked, steps, directory, None)  # type: ignore[arg-type]
        assert [step.sort for step in found] == left


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("after-compute", (("after-compute",), 1)),
        ("with-all-reduce, with-compute", (("with-all-reduce", "with-compute"), 1)),
        ("groups=4", ((), 4)),
        ("behind", "unknown context 'behind'"),
        ("groups", "say how many groups run at once"),
        ("groups=1", "at least 2"),
    ],
)
def test_contexts_are_named_or_refused(text: str, found: object) -> None:
    if not isinstance(found, str):
        assert parse_contexts(text) == found
        return
    with pytest.raises(UserError, match=found):
        parse_contexts(text)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_summary_is_printed_as_table_or_json(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], as_json: bool
) -> None:
    append_lines(tmp_path / COLLECTIVES_FILE, [sample(1000), sample(4000, verified=False)])
    append_lines(tmp_path / CONTEXTS_FILE, [beside(0)])
    print_collectives(tmp_path, as_json=as_json)
    printed = capsysbinary.readouterr().out
    if as_json:
        summary = msgspec.json.decode(printed, type=CollectivesSummary)
        assert [row.message_bytes for row in summary.collectives] == [1000, 4000]
        assert summary.contexts[0].ratio == 4.0
    else:
        assert b"all_gather" in printed
        assert b"WRONG" in printed
        assert b"conv2d" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks"),
        ([], "--ranks is missing"),
        (["--ranks", "2", "--backend", "nclc"], "'gloo', 'nccl'"),
        (["--ranks", "2", "--ops", "all_reduce,gather"], "choices are all_gather, all_reduce, all_to_all, broadcast"),
        (["--ranks", "2", "--sizes", "1K:64X:2"], "size '64X' is not a size: write a number with K, M, G"),
        (["--ranks", "2", "--sizes", "2M:1M:2"], "the last size is smaller than the first"),
        (["--ranks", "2", "--sizes", "1K:4K:1"], "factor"),
        (["--ranks", "2", "--backend", "nccl", "--device", "cpu"], "give --device cuda, or --backend gloo"),
        (["--ranks", "2", "--device", "cuda", "--contexts", "with-compute"], "give --backend nccl"),
        (["--ranks", "4097", "--backend", "nccl"], "4097 ranks need one GPU each"),
    ],
)
def test_wrong_input_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def no_ranks(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("paradl_bench.ranks.launcher.launch_ranks", no_ranks)
    with pytest.raises((UserError, click.UsageError)) as raised:
        COMMAND.main(args=[*arguments, "-o", str(tmp_path / "out")], prog_name="collectives", standalone_mode=False)
    error = raised.value
    assert message in (error.format_message() if isinstance(error, click.UsageError) else str(error))
    assert not (tmp_path / "out").exists()


def test_help_names_what_can_be_chosen() -> None:
    printed = CliRunner().invoke(COMMAND, ["--help"]).output
    for word in ("--contexts", "all_reduce", "gloo", "1K:64M:2"):
        assert word in printed
