"""The server of the page answers what the commands answer, to whoever has its address, on this machine."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("uvicorn")

from click.testing import CliRunner
from explored_page import SEARCH, TOKEN, Served

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.keywords import ask
from predict import load_profile
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.evaluators import simulate
from predict.prediction.request import read_model
from predict.search.command import search_command
from predict.search.following import Followed
from predict.search.search import search, whole_search
from predict.validation.report.explore import explorer as explorer_module
from predict.validation.report.explore.explorer import Explorer
from predict.validation.report.explore.server import application, listening
from predict.validation.report.explore.state import Asked, Changed, Searched, commands
from predict.what_if.what_if import changed_hardware


def answered(served: Served, what: str, **asked: object) -> Any:
    status, body = served.ask(what, {"search": SEARCH, **asked})
    assert status == 200, body
    return json.loads(body)


def test_a_search_is_that_of_the_command(served: Served) -> None:
    answered(served, "rows", changed={"bandwidth": 0.5})
    rows = answered(served, "search")["rows"]
    words = [
        "search",
        "--from-profile",
        str(served.profile),
        "--model",
        "chain",
        "--ranks",
        "4",
        "--batch",
        "16",
        "--json",
    ]
    printed = json.loads(CliRunner().invoke(group, words).stdout)
    predicted = [row["prediction"] for row in printed["rows"]][:8]
    for name in ("strategy", "iteration_s", "interval_s", "samples_per_s", "efficiency", "memory_bytes", "fits"):
        assert [row[name] for row in rows] == [prediction[name] for prediction in predicted], name


@pytest.mark.parametrize("changed", [{"bandwidth": 0.05, "latency": 4.0}, {"peak_flops": 2.0}])
def test_all_rows_are_those_of_whole_predictions(served: Served, changed: dict[str, object]) -> None:
    rows = answered(served, "rows", changed=changed)["rows"]
    assert len(rows) == len(answered(served, "search")["rows"])
    for index, row in enumerate(rows):
        look = answered(served, "look", changed=changed, row=index)
        assert row == {name: look[name] for name in row}


@pytest.mark.parametrize("changed", [{}, {"bandwidth": 2.0}, {"bandwidth": 0.5, "latency": 3.0, "peak_flops": 1.25}])
def test_every_view_says_what_gives_the_same(served: Served, changed: dict[str, object]) -> None:
    look = answered(served, "look", changed=changed)
    assert look["iteration_s"] == answered(served, "row", changed=changed)["iteration_s"]
    result = CliRunner().invoke(group, [*shlex.split(look["command"])[1:], "--json"])
    printed = json.loads(result.stdout)
    of_command = printed[-1] if isinstance(printed, list) else printed["predictions"][-1]
    assert of_command["iteration_s"] == pytest.approx(look["iteration_s"], rel=1e-12)
    python = look["python"].removeprefix("from predict import load_profile\n\n")
    given = eval(python, {"load_profile": load_profile})  # noqa: S307
    assert given.to_frame()["iteration_s"].iloc[-1] == pytest.approx(look["iteration_s"], rel=1e-12)
    parts = sum(row["seconds"] for row in look["figures"]["breakdown"])
    assert parts == pytest.approx(look["iteration_s"], rel=1e-9)


def test_sliders_change_what_they_name(served: Served) -> None:
    before = answered(served, "row")["iteration_s"]
    faster = answered(served, "row", changed={"peak_flops": 2.0, "memory_bandwidth": 2.0})["iteration_s"]
    assert faster < before


def test_another_device_computes_as_its_sheet_says() -> None:
    explorer = Explorer([Path("v100")])
    search = Searched(model="gpt2", ranks=1, batch=4)
    before = explorer.row(Asked(search=search))["iteration_s"]
    assert explorer.row(Asked(search=search, changed=Changed(device="h100-sxm")))["iteration_s"] < before


def test_a_search_on_changed_hardware_is_another(served: Served) -> None:
    slow = {"bandwidth": 0.01}
    there = answered(served, "search", found_on=slow)["rows"]
    assert there[0]["iteration_s"] != answered(served, "search")["rows"][0]["iteration_s"]
    assert answered(served, "row", found_on=slow, changed=slow)["iteration_s"] == there[0]["iteration_s"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "bad request"),
        (b"\xff", "bad request"),
        ({"search": SEARCH, "row": -1}, "bad request"),
        ({"search": SEARCH, "row": 99}, "row 99: the search has"),
        ({"search": SEARCH | {"profile": 1}}, "profile 1: give a number below 1"),
        ({"search": SEARCH | {"model": "/etc/passwd"}}, "unknown model '/etc/passwd'"),
        ({"search": SEARCH | {"model": "config.json"}}, "unknown model 'config.json'"),
        ({"search": SEARCH | {"ranks": 0}}, "ranks: give a whole number from 1 to 1,048,576"),
        ({"search": SEARCH | {"ranks": 1.5}}, "ranks: give a whole number"),
        ({"search": SEARCH | {"batch": None}}, "batch: give a whole number"),
        ({"search": SEARCH | {"memory": "8" * 2000}}, "memory: give a size, such as 80GiB"),
        ({"search": SEARCH | {"memory": "-1GiB"}}, "--memory"),
        ({"search": SEARCH | {"speed": 1}}, "bad request"),
        ({"search": SEARCH | {"memory": "much"}}, "--memory"),
        ({"search": SEARCH | {"dtype": "fp4"}}, "fp4"),
        ({"search": SEARCH, "changed": {"bandwidth": 0}}, "bad request"),
        ({"search": SEARCH, "changed": {"device": "abacus"}}, "abacus"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(served: Served, content: object, told: str) -> None:
    status, body = served.ask("look", content)
    assert status == 400
    assert told in json.loads(body)["error"]
    assert "\n" not in json.loads(body)["error"]


def test_a_long_request_is_refused(served: Served) -> None:
    assert served.ask("look", b" " * 100_000)[0] == 413


@pytest.mark.parametrize("what", ["", "files/explore.js"])
def test_only_who_has_the_address_is_answered(served: Served, what: str) -> None:
    assert served.ask(what)[0] == 200
    assert served.ask(what, token="another")[0] == 404
    assert served.ask(what, headers={"Host": f"evil.example:{served.port}"})[0] == 403
    assert served.ask(what, headers={"Origin": "http://evil.example"})[0] == 403


@pytest.mark.parametrize("name", ["nothing.js", "..%2fcommand.py", "%2fetc%2fpasswd", "explore.html.j2"])
def test_no_other_file_is_given(served: Served, name: str) -> None:
    assert served.ask(f"files/{name}")[0] == 404


def test_names_are_text_on_the_page(served: Served) -> None:
    _, page = served.ask("")
    assert b"<img" not in page
    assert b"\\u003cimg src=x" in page


def test_a_port_in_use_is_told() -> None:
    with listening(0) as taken:
        result = CliRunner().invoke(group, ["explore", "h100-sxm", "--port", str(taken.getsockname()[1])])
    assert "cannot be used" in str(result.exception)


SLIDES = (
    Changed(bandwidth=0.05, latency=4.0),
    Changed(peak_flops=2.0, memory_bandwidth=0.5),
    Changed(latency=0.3, memory_bandwidth=3.0),
)


def test_what_searches_share_changes_no_answer(served: Served) -> None:
    """Plans and memory are kept from one search to the next; whoever searches there first finds the same."""
    search = Searched(**SEARCH)
    used, answers = Explorer([served.profile]), []
    for there in (Changed(), *SLIDES):
        used.rows(Asked(search=search, changed=there))
        asked = Asked(search=search, found_on=there, whole=True)
        answers.append(used.search(asked))
        assert answers[-1] == Explorer([served.profile]).search(asked)
    assert len({str(answer) for answer in answers}) == len(answers)


def test_a_search_after_a_slider_follows_the_first(served: Served) -> None:
    """Its rows are what whole predictions give on that hardware; the button searches all."""
    asked = Asked(search=Searched(**SEARCH), found_on=SLIDES[0])
    explorer = Explorer([served.profile])
    explorer.search(Asked(search=asked.search))
    followed = explorer.search(asked)
    assert "families of candidates looked at again" in followed["said"]
    for row, shown in enumerate(followed["rows"]):
        on_there = msgspec.structs.replace(asked, changed=SLIDES[0], row=row)
        looked = explorer.look(on_there)
        assert explorer.row(on_there) == shown == {name: looked[name] for name in shown}
    whole = explorer.search(msgspec.structs.replace(asked, whole=True))
    assert "looked at again" not in whole["said"]
    assert explorer.search(asked) == whole
    assert followed["rows"][0]["iteration_s"] <= 1.05 * whole["rows"][0]["iteration_s"]


def test_rows_are_of_the_last_search(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes another's place may have other rows in the same places."""
    explorer, search = Explorer([served.profile]), Searched(**SEARCH)

    def turned(*given: Any, **named: Any) -> Any:
        answer, rankers = whole_search(*given, **named)
        return msgspec.structs.replace(answer, rows=answer.rows[::-1]), rankers

    def labels(changed: Changed) -> list[str]:
        return [row["label"] for row in explorer.rows(Asked(search=search, changed=changed))["rows"]]

    before = [labels(changed) for changed in (Changed(), SLIDES[1])]
    monkeypatch.setattr(explorer_module, "whole_search", turned)
    explorer.search(Asked(search=search, whole=True))
    assert [labels(changed) for changed in (Changed(), SLIDES[1])] == [there[::-1] for there in before]


def test_without_a_row_predicted_anew_all_is_searched(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, search = Explorer([served.profile]), Searched(**SEARCH)
    explorer.search(Asked(search=search))
    monkeypatch.setattr(Followed, "rank", lambda *_: [])
    assert explorer.search(Asked(search=search, found_on=SLIDES[0]))["rows"]


def test_less_memory_is_another_whole_search(served: Served) -> None:
    explorer, search = Explorer([served.profile]), Searched(**SEARCH)
    explorer.search(Asked(search=search))
    tight = msgspec.structs.replace(search, memory="1GiB")
    assert "looked at again" not in explorer.search(Asked(search=tight, found_on=SLIDES[0]))["said"]


def test_a_search_after_a_slider_is_a_fresh_one() -> None:
    """Every number of every row, of a profile that derives most of them."""
    words = ["--from-profile", "h100-sxm"]
    given = {"model": "gpt2", "ranks": 2, "batch": 8, "memory": "16GiB", "predictions": 8}
    options = ask(search_command, "predict search", words, given).options
    kept = read_model(options, simulate.EVALUATOR)
    for slid in SLIDES[:2]:
        fresh = read_model(options, simulate.EVALUATOR)
        found, wanted = (
            search(options, costs=costs.on(changed_hardware(costs, slid.setting()))) for costs in (kept, fresh)
        )
        assert [row.predict_command for row in found.rows] == [row.predict_command for row in wanted.rows]
        assert found.record() == wanted.record()


def test_a_search_that_nobody_waits_for_is_left_off(served: Served) -> None:
    asked, explorer = Asked(search=Searched(**SEARCH)), Explorer([served.profile])
    explorer.is_left = lambda: True
    with pytest.raises(UserError, match="nobody waits"):
        explorer.search(asked)
    explorer.is_left = lambda: False
    assert explorer.search(asked) == Explorer([served.profile]).search(asked)


def test_a_page_that_is_gone_leaves_its_search_off(served: Served) -> None:
    class Long(Explorer):
        def search(self, asked: Asked) -> dict[str, Any]:
            until = time.monotonic() + 60
            while not self.is_left() and time.monotonic() < until:
                time.sleep(0.01)
            return {"left": self.is_left()}

    told: list[Any] = []
    content = json.dumps({"search": SEARCH}).encode()
    heard = iter([{"type": "http.request", "body": content}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(heard)

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"127.0.0.1:1")]
    scope = {"type": "http", "method": "POST", "path": f"/{TOKEN}/search", "headers": headers, "query_string": b""}
    asyncio.run(application(Long([served.profile]), TOKEN, 1, {})(scope, receive, send))
    assert json.loads(told[-1]["body"]) == {"left": True}


def test_commands_hold_rounded_factors() -> None:
    words = shlex.split("predict --from-profile p --model m --strategy d2 --batch 8")
    changed = Changed(latency=0.1 + 0.2, bandwidth=1.0000000000000002)
    command, python = commands(words, changed)
    assert command.endswith("--vary latency=0.3")
    assert python.endswith("vary=['latency=0.3'])")
    assert changed.setting() == {"latency": 0.3}, "what is predicted is what is said"


def test_python_of_a_view_has_numbers_as_numbers() -> None:
    words = shlex.split("predict --from-profile p --model m --strategy d2e2 --batch 8 --expert-imbalance 1.5")
    _, python = commands([*words, "--bucket-cap-mb", "25", "--sequence-parallel", "on"], Changed())
    assert python.endswith("batch=8, expert_imbalance=1.5, bucket_cap_mb=25, sequence_parallel='on')")


@pytest.mark.parametrize("field", [{"batch": 32}, {"ranks": 2}, {"memory": "1GiB"}])
def test_a_changed_field_reads_no_model_again(
    served: Served, monkeypatch: pytest.MonkeyPatch, field: dict[str, object]
) -> None:
    """Searches for other ranks, batches and limits share the model, and answer as if each had its own."""
    read: list[object] = []

    def counted(*arguments: Any) -> CostModel:
        read.append(arguments)
        return read_model(*arguments)

    monkeypatch.setattr("predict.validation.report.explore.explorer.read_model", counted)
    first, then = (Asked(search=Searched(**SEARCH | more)) for more in ({}, field))
    slid = msgspec.structs.replace(first, changed=Changed(latency=2.0))
    used = Explorer([served.profile])
    answers = [(used.search(asked), used.look(asked)) for asked in (first, then, slid)]
    assert len(read) == 1
    for asked, answer in zip((first, then, slid), answers, strict=True):
        fresh = Explorer([served.profile])
        assert answer == (fresh.search(asked), fresh.look(asked))


def test_a_notebook_serves_the_page(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    page = load_profile(served.profile).explore("chain", ranks=4, batch=16)
    try:
        with urllib.request.urlopen(page.address, timeout=60) as answer:
            shown = answer.read().decode()
        assert '"model":"chain"' in shown
        assert '"ranks":4' in shown
        assert page.address in repr(page)
        assert page.tunnel.startswith("ssh -N -L ")
        assert page.address in page._repr_html_()
    finally:
        page.stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(page.address, timeout=5)
    with pytest.raises(UserError, match="unknown option 'rank'"):
        load_profile(served.profile).explore("chain", rank=4)


def test_an_unknown_model_is_refused_before_a_page_is_served(served: Served) -> None:
    result = CliRunner().invoke(group, ["explore", str(served.profile), "--model", "chian", "--no-browser"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("unknown model 'chian': did you mean chain?")
