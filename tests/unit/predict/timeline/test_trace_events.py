"""Traces of ``predict timeline``: valid, complete, and refused where they can't be."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_factory import NetworkFactory
from profile_factory import free_copies, make_profile, ring_fit, with_compute
from trace_format import by_thread, check_trace, complete_events, held_by, imported

from calibrate.profile.profile import write_profile
from paradl_bench.core.terminal.command_line import run_command
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Plan, RoleBuilder
from predict.cli import group
from predict.timeline import trace_events
from predict.timeline.timeline import RoleTimeline
from predict.timeline.trace_arrows import stamps_of

Call = Callable[..., tuple[int, str, str]]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Calls ``predict timeline`` on a small convolutional network; exit code, standard output and error."""
    factory = NetworkFactory(4, 16, 16)
    for index in range(4):
        factory.conv(f"conv{index}", 8)
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    changes = {
        "communication": tuple(map(ring_fit, OPERATIONS)),
        "contexts": (with_compute(1.3, 1.6),),
        "copies": free_copies(beta_s_per_byte=1e-9),
    }
    profile = tmp_path / "profile.json"
    write_profile(profile, make_profile(factory.network("small"), **changes))

    def timeline(*arguments: str) -> tuple[int, str, str]:
        given = ["predict", "timeline", "--from-profile", str(profile), "--model", "small", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return timeline


@pytest.fixture
def trace_of(call: Call) -> Callable[..., dict[str, Any]]:
    """The trace that a call writes to standard output."""

    def trace(*arguments: str) -> dict[str, Any]:
        code, out, err = call(*arguments, "-o", "-")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return trace


@pytest.mark.parametrize(
    "arguments",
    ["serial", "d2", "z3d2", "f2", "c2", "s2", "d2s2", "p2", "p2 1f1b", "p2 interleaved", "d2p2f2 1f1b", "f2p2"],
)
def test_traces_are_valid_and_end_with_the_iteration(trace_of: Callable[..., dict[str, Any]], arguments: str) -> None:
    strategy, *schedule = arguments.split()
    given = ["--strategy", strategy, "--batch", "16", *(["--schedule", *schedule] if schedule else [])]
    trace = trace_of(*given)
    check_trace(trace)
    tasks = complete_events(trace)
    prediction = trace["otherData"]["prediction"]
    end_us = max(event["ts"] + event["dur"] for event in tasks)
    # Stamps are whole nanoseconds.
    assert end_us * 1e-6 == pytest.approx(prediction["iteration_s"], abs=0.51e-9)
    assert trace["otherData"]["strategy"] == prediction["strategy"] == strategy
    assert trace["otherData"]["command"].startswith("predict timeline --from-profile ")
    for event in tasks:
        low, high = event["args"]["interval_us"]
        assert low <= event["args"]["alone_us"] <= high
        assert event["args"]["source"] in prediction["sources"]
        assert event["dur"] >= event["args"]["alone_us"] * (1 - 1e-9) - 1.01e-3


def change(kind: str, place: int, **fields: object) -> Callable[[dict[str, Any]], None]:
    """Changes fields of the n-th event of a kind."""

    def changed(trace: dict[str, Any]) -> None:
        event = [event for event in trace["traceEvents"] if event["ph"] == kind][place]
        for name, value in fields.items():
            event[name] = value(event[name]) if callable(value) else value

    return changed


def without(kind: str, name: str = "") -> Callable[[dict[str, Any]], None]:
    """Takes out the first event of a kind and name."""

    def changed(trace: dict[str, Any]) -> None:
        events = trace["traceEvents"]
        events.remove(next(event for event in events if event["ph"] == kind and event["name"].startswith(name)))

    return changed


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(change("X", 2, dur=lambda dur: dur + 0.001), id="a slice ends a nanosecond too late"),
        pytest.param(change("X", 2, dur=lambda dur: dur + 0.0003), id="a length of a fraction of a nanosecond"),
        pytest.param(change("X", 2, dur=lambda dur: -dur), id="negative length"),
        pytest.param(change("X", 2, ts=lambda ts: -ts - 1), id="negative start"),
        pytest.param(change("X", 2, ts=str), id="a stamp that is text"),
        pytest.param(change("X", 2, name=""), id="no name"),
        pytest.param(change("X", 2, tid=lambda tid: tid + 5), id="a thread without a name"),
        pytest.param(change("X", 2, pid=lambda pid: pid + 77), id="a process without a name"),
        pytest.param(without("M", "thread_name"), id="thread name missing"),
        pytest.param(without("M", "process_name"), id="process name missing"),
        pytest.param(change("M", 0, args={"name": 3}), id="a name that is no text"),
        pytest.param(without("s"), id="an arrow without a start"),
        pytest.param(without("f"), id="an arrow without an end"),
        pytest.param(change("f", 0, id=lambda number: number + 1000), id="ends of an arrow of unlike ids"),
        pytest.param(change("f", 0, cat="other"), id="ends of an arrow of unlike categories"),
        pytest.param(change("f", 0, name="other"), id="ends of an arrow of unlike names"),
        pytest.param(change("f", 0, bp="n"), id="bound to the next slice"),
        pytest.param(change("f", 0, ts=0.0), id="an arrow back in time"),
        pytest.param(change("s", -1, ts=lambda ts: ts + 1e9), id="an arrow from where nothing is"),
        pytest.param(change("s", 0, tid=lambda tid: tid + 3), id="an arrow from another thread"),
    ],
)
def test_the_check_finds_what_perfetto_would_reject_or_draw_wrongly(
    trace_of: Callable[..., dict[str, Any]], spoil: Callable[[dict[str, Any]], None]
) -> None:
    trace = trace_of("--strategy", "p2", "--batch", "16", "--micro-batches", "4")
    check_trace(trace)
    spoil(trace)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        check_trace(trace)


@given(st.lists(st.floats(1e-10, 3e-9), min_size=2, max_size=40))
def test_tasks_of_fractions_of_a_nanosecond_meet(lengths_s: list[float]) -> None:
    ends = np.cumsum(lengths_s)
    plan = Plan(
        strategy=parse_strategy("serial"),
        network="x",
        local_batch=1,
        works=(),
        roles=(RoleBuilder({}).build("all", 1),),
    )
    role = RoleTimeline(plan=plan, role=0, start_s=np.concatenate([[0.0], ends[:-1]]), end_s=ends)
    start, end = stamps_of(role)
    events = [
        {"ph": "X", "name": "x", "pid": 0, "tid": 1, "ts": begin / 1000, "dur": (stop - begin) / 1000}
        for begin, stop in zip(start.tolist(), end.tolist(), strict=True)
    ]
    assert not imported({"traceEvents": events}).dropped
    assert abs(end[-1] - 1e9 * ends[-1]) <= 0.5 + 1e-6


def test_names_categories_and_bytes(trace_of: Callable[..., dict[str, Any]]) -> None:
    tasks = complete_events(trace_of("--strategy", "d2s2", "--batch", "16"))
    found = {event["name"]: event for event in tasks}
    assert found["conv1 FW"]["cat"] == "FW"
    assert found["conv1 BW"]["cat"] == "BW"
    assert found["weight update (sgd)"]["cat"] == "WU"
    assert found["all_reduce"]["cat"] == "GE"
    assert (found["all_reduce"]["args"]["ranks"], found["all_reduce"]["args"]["members"]) == (4, "0, 1, 2, 3")
    assert found["halo exchange"]["cat"] == "halo"
    assert (found["halo exchange"]["args"]["group"], found["halo exchange"]["args"]["members"]) == ("s2", "0, 1")
    # One row of 16 positions in 4 channels of 4 bytes, of each of 8 samples.
    assert {event["args"]["bytes"] for event in tasks if event["cat"] == "halo"} >= {8 * 4 * 16 * 4}
    assert found["all_gather"]["cat"] == "all_gather"


def test_arrows_lead_from_what_was_awaited(trace_of: Callable[..., dict[str, Any]]) -> None:
    trace = trace_of("--strategy", "d2", "--batch", "16", "--bucket-cap-mb", "0.001")
    threads = by_thread(trace)
    starts = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    exchanged = [event for event in complete_events(trace) if event["name"] == "all_reduce"]
    assert len(starts) == len(ends) == len(exchanged) > 1
    for number, start in starts.items():
        (blocking,), (collective,) = held_by(start, threads), held_by(ends[number], threads)
        assert collective["name"] == "all_reduce"
        assert blocking["name"] == "copy into bucket"
        assert blocking["ts"] + blocking["dur"] <= collective["ts"] + 1e-6


@pytest.mark.parametrize("preset", ["naive", "pytorch", "caffe-mpi"])
def test_reading_and_copying_have_threads(trace_of: Callable[..., dict[str, Any]], preset: str) -> None:
    fed = "--io-seconds", "0.5", "--h2d-seconds", "0.0005", "--preset", preset
    trace = trace_of("--strategy", "d2", "--batch", "16", *fed)
    check_trace(trace)
    found = {event["cat"]: event for event in complete_events(trace) if event["cat"] in ("IO", "H2D")}
    assert {cat: (event["name"], event["dur"]) for cat, event in found.items()} == {
        "IO": ("read a mini-batch", 1e6),
        "H2D": ("copy a mini-batch to the device", 500.0),
    }
    assert found["IO"]["args"]["samples_of_host"] == 16
    assert found["H2D"]["args"]["bytes"] == 8 * 4 * 16 * 16 * 4
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert [threads[found[cat]["tid"]] for cat in ("IO", "H2D")] == ["input", "copy_engine"]
    assert trace["otherData"]["prediction"]["breakdown_s"]["input"] > 0


def test_messages_lead_from_stage_to_stage(trace_of: Callable[..., dict[str, Any]]) -> None:
    trace = trace_of("--strategy", "p2", "--batch", "16", "--micro-batches", "4")
    threads = by_thread(trace)
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    assert [events[0]["name"] for events in arrows.values()].count("activations") == 4
    assert [events[0]["name"] for events in arrows.values()].count("gradients") == 4
    for made, sent, used in arrows.values():
        (source,), (message,), (target,) = (held_by(event, threads) for event in (made, sent, used))
        assert source["pid"] == message["pid"] != target["pid"]
        assert message["name"].startswith("send ")
        numbers = {event["args"]["micro_batch"] for event in (source, message, target)}
        assert len(numbers) == 1
        assert {source["args"]["stage"], target["args"]["stage"]} == {0, 1}


def test_every_rank_is_shown_where_asked_for(trace_of: Callable[..., dict[str, Any]]) -> None:
    given = ["--strategy", "d2p2f2", "--batch", "16"]
    roles, ranks = trace_of(*given), trace_of(*given, "--ranks-shown", "all")
    check_trace(ranks)
    assert {event["pid"] for event in roles["traceEvents"]} == {0, 2}
    assert {event["pid"] for event in ranks["traceEvents"]} == set(range(8))
    assert len(complete_events(ranks)) == 4 * len(complete_events(roles))
    names = {event["args"]["name"] for event in roles["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0 (stage 0, stands for 4 ranks)", "rank 2 (stage 1, stands for 4 ranks)"}
    # Messages stay in the replica and at the place along the filter axis that they start from.
    for number in {event["id"] for event in ranks["traceEvents"] if event.get("cat") == "transfer" and "id" in event}:
        found = {event["pid"] for event in ranks["traceEvents"] if event.get("id") == number}
        first = min(found)
        assert found == {first, first + 2}
        assert first % 4 in (0, 1)


def test_more_tasks_than_a_viewer_can_open_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "MOST_TASKS", 100)
    code, out, err = call("--strategy", "d4", "--batch", "16", "--ranks-shown", "all", "-o", "-")
    assert (code, out) == (2, "")
    assert "--ranks-shown roles shows ranks that do the same once" in err


@pytest.mark.parametrize("strategy", ["d2p2f2", "p2d4", "f2d2s2", "s2d3"])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
def test_the_ranks_shown_include_every_roles_first_rank(strategy: str, per_node: int) -> None:
    parsed = parse_strategy(strategy)
    kinds = [axis.kind for axis in parsed.axes]
    exchange = tuple(i for i, kind in enumerate(kinds) if kind in ("data", "spatial"))
    places = per_node * math.prod(axis.degree for axis in parsed.axes if not axis.has(Trait.DIVIDES_BATCH))
    # role_of reads positions alone: a number each tells them apart.
    plan = Plan(
        strategy=parsed,
        network="x",
        local_batch=1,
        works=(),
        roles=(RoleBuilder({}).build("all", parsed.ranks),),
        positions=tuple(range(places)),
        exchange_axes=exchange,
        per_node=per_node,
    )
    first: dict[int, int] = {}
    for rank in range(parsed.ranks):
        first.setdefault(plan.role_of(rank), rank)
    found: dict[int, int] = {}
    for rank in trace_events.ranks_of_each_kind(plan):
        found.setdefault(plan.role_of(rank), rank)
    assert found == first


def test_a_trace_of_roles_does_not_grow_with_the_ranks(trace_of: Callable[..., dict[str, Any]]) -> None:
    few, many = (
        complete_events(trace_of("--strategy", f"d{ranks}", "--batch", str(2 * ranks))) for ranks in (4, 3_000_000)
    )
    assert [event["name"] for event in many] == [event["name"] for event in few]
    exchanged = next(event for event in many if event["name"] == "all_reduce")
    assert exchanged["args"]["members"] == "0, 1, 2, 3, 4, 5, 6, ... 2999999"


def test_efficiency_in_a_trace_follows_the_requested_scaling(
    trace_of: Callable[..., dict[str, Any]],
) -> None:
    given = ["--strategy", "d2", "--batch", "16"]
    for scaling, reference in (("weak", 8), ("strong", 16)):
        found = trace_of(*given, "--scaling", scaling)["otherData"]["prediction"]
        assert found["speedup_batch"] == reference


def test_files_are_kept_unless_forced(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    given = ["--strategy", "p2", "--batch", "16", "-o", str(file)]
    code, out, err = call(*given)
    assert (code, err) == (0, "")
    for text in ("utilisation", "bubble", "stage 0", "stage 1", "F0", "B0"):
        assert text in out
    check_trace(json.loads(file.read_bytes()))
    code, _, err = call(*given)
    assert code == 2
    assert "exists; give --force" in err
    assert call(*given, "--force")[0] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_the_summary_as_json(call: Call) -> None:
    code, out, _ = call("--strategy", "d2p2", "--batch", "16", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["trace"] is None
    assert [(role["role"], role["ranks"]) for role in found["roles"]] == [("stage 0", 2), ("stage 1", 2)]
    assert found["utilisation"] == pytest.approx(sum(role["utilisation"] for role in found["roles"]) / 2)
    low, high = found["interval_s"]
    assert low <= found["iteration_s"] <= high


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategy", "d2", "--batch", "16", "--evaluator", "paradl"], "a timeline needs --evaluator simulate"),
        (["--strategy", "d2,d4", "--batch", "16"], "one strategy and batch, not 2 (d2 on batch 16, d4 on batch 16)"),
        (["--strategy", "d2", "--batch", "16,32"], "one strategy and batch, not 2"),
        (["--strategy", "d2", "--batch", "16", "--json", "-o", "-"], "both write to standard output"),
        (["--strategy", "d2", "--batch", "16", "--ranks-shown", "all"], "is for the trace: name its file by -o FILE"),
        (["--batch", "16"], "Missing option '--strategy'"),
        (["--strategy", "d3", "--batch", "16"], "strategy d3: batch 16 does not split evenly over 3 ranks"),
    ],
)
def test_mistakes_are_one_line(call: Call, arguments: list[str], expected: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
