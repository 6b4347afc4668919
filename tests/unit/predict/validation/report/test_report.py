"""The page: its numbers are those of the other commands, nothing in it can break out, and it asks for no network."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from network_factory import NetworkFactory
from predict_caller import Caller
from predicted_runs import PROFILE, run_like
from profile_factory import make_network, make_profile, ring_fit, with_compute

from calibrate.profile.profile import write_profile
from calibrate.report.explanation import weaknesses
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.training_record import TRAINING_FILE, MemoryShortage
from predict.api.loaded_profile import load_profile
from predict.costs.cost_model import CostModel
from predict.costs.sourced import MEANINGS, Source
from predict.ledger.ledger import Ledger, LedgerEntry, RoleLedger
from predict.timeline.timeline_run import predict_timeline
from predict.validation.diagnosis import remedies
from predict.validation.report.page import MOST_BYTES
from predict.validation.report.sections import seconds as seconds_section
from predict.validation.report.sections import timeline as timeline_section
from predict.validation.report.sections.answer import fastest_of, made_of, near_fastest, ranking
from predict.workload import Configuration

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")
FIGURES = {"ranking", "breakdown", "efficiency", "memory", "timeline", "entries", "limitations", "fit_errors"}
FIGURES |= {"waterfall"}


class Page(HTMLParser):
    """What a page's elements are, as a browser would read them."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self.text = ""
        self._script: str | None = None
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._script = (dict(attrs).get("id") or "") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.data[self._script.removeprefix("data-")] = json.loads(data)
        elif self._script == "":
            self.scripts.append(data)
        else:
            self.text += data


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    monkeypatch.chdir(tmp_path)
    return Caller(tmp_path, monkeypatch, capfd)


def report(predict: Caller, *arguments: str) -> Page:
    result = predict.bare("report", "--from-profile", str(predict.profile), *arguments, "-o", "page.html", "--force")
    assert result.code == 0, result.err
    return Page((predict.folder / "page.html").read_text())


def asked(predict: Caller, command: str, *arguments: str) -> Any:
    result = predict.bare(*command.split(), "--from-profile", str(predict.profile), *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


CHAIN = ("--model", "chain", "--batch", "16")


def test_given_strategies_are_predicted_as_predict_does(predict: Caller) -> None:
    strategies = (*CHAIN, "--strategy", "serial,d2,d4")
    page = report(predict, *strategies)
    found = asked(predict, "", *strategies)
    assert page.data["predictions"] == sorted(found, key=lambda each: -each["samples_per_s"])
    best = page.data["predictions"][0]
    assert f"chain: {best['strategy']} on batch 16, the fastest of 3." in page.text
    drawn = page.data["ranking"]["rows"]
    assert [row["iteration_s"] for row in drawn] == [each["iteration_s"] for each in page.data["predictions"]]
    ledgers = asked(predict, "", *CHAIN, "--strategy", best["strategy"], "--explain")
    assert page.data["ledger"]["role"] in ledgers[0]["roles"]
    steps = {step["label"]: step["end_s"] - step["begin_s"] for step in page.data["waterfall"]}
    assert steps == pytest.approx(ledgers[0]["waterfall_s"])
    (diagnosis,) = asked(predict, "diagnose", *CHAIN, "--strategy", best["strategy"])
    assert page.data["diagnosis"] == diagnosis
    assert page.data["weaknesses"] == json.loads(encode_pretty(weaknesses(make_profile())))


def test_without_a_strategy_it_shows_what_search_finds(predict: Caller) -> None:
    ranks = (*CHAIN, "--ranks", "4")
    page = report(predict, *ranks, "--memory", "1GiB")
    found = asked(predict, "search", *ranks, "--memory", "1GiB", "--pareto")
    assert page.data["search"] == found
    assert page.data["predictions"] == [row["prediction"] for row in found["rows"]]
    assert found["rows"][0]["predict_command"] in page.text
    assert page.data["memory"]["limit_bytes"] == 2**30
    assert page.data["timeline"]["iteration_s"] == pytest.approx(found["rows"][0]["prediction"]["iteration_s"])
    assert set(page.data) >= FIGURES


def test_a_page_of_a_search_searches_once(predict: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched_again(*_: object) -> None:
        raise AssertionError("the page has searched already")

    monkeypatch.setattr(remedies, "search", searched_again)
    page = report(predict, *CHAIN, "--ranks", "4")
    assert "limitations" in page.data
    assert "other strategies were not searched" not in page.text


def test_a_page_of_several_searches_tries_strategies_of_its_ranks(
    predict: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def note(_: object, change: str, __: object) -> list[object]:
        tried.append(change)
        return []

    monkeypatch.setattr(remedies, "_predicted", note)
    page = report(predict, *CHAIN, "--ranks", "2:4:x2")
    strategies = [change.removeprefix("--strategy ") for change in tried if change.startswith("--strategy ")]
    assert {parse_strategy(strategy).ranks for strategy in strategies} == {page.data["predictions"][0]["ranks"]}
    assert len({prediction["ranks"] for prediction in page.data["predictions"]}) == 2


def test_a_configuration_that_does_not_fit_comes_behind(predict: Caller) -> None:
    serial, d2 = asked(predict, "", *CHAIN, "--strategy", "serial,d2")
    assert d2["iteration_s"] < serial["iteration_s"]
    assert serial["memory_bytes"] < d2["memory_bytes"]
    cluster = msgspec.structs.replace(make_profile().cluster, memory_bytes_per_rank=d2["memory_bytes"] - 1.0)
    write_profile(predict.profile, make_profile(cluster=cluster))
    page = report(predict, *CHAIN, "--strategy", "serial,d2")
    assert [each["strategy"] for each in page.data["predictions"]] == ["serial", "d2"]
    assert "chain: serial on batch 16" in page.text
    assert [row["fits"] for row in page.data["ranking"]["rows"]] == [True, False]
    assert "It does not fit" in report(predict, *CHAIN, "--strategy", "d2").text


def test_a_sweep_is_drawn_with_its_band_and_knee(predict: Caller) -> None:
    sweep = (*CHAIN, "--strategy", "data", "--ranks", "2:16:x2")
    found = asked(predict, "", *sweep)
    data = report(predict, *sweep).data
    drawn = {point["ranks"]: (point["efficiency"], point["interval"]) for point in data["efficiency"]["points"]}
    assert drawn == {each["ranks"]: (each["efficiency"], each["efficiency_interval"]) for each in found}
    assert data["efficiency"]["knees"] == [{"series": "data", "ranks": found[0]["knee_ranks"]}]
    # One strategy is drawn with other ranks, on as many samples a rank.
    grown = report(predict, *CHAIN, "--strategy", "d4").data["scaling-predictions"]
    assert [(each["ranks"], each["batch"]) for each in grown] == [(2, 8), (4, 16), (8, 32), (16, 64), (32, 128)]


def test_runs_stand_beside_their_predictions(predict: Caller) -> None:
    write_profile(predict.profile, PROFILE)
    runs = [
        str(run_like(Path(name), strategy, 16, factor=factor))
        for name, strategy, factor in (("a", "serial", 1.02), ("b", "d2", 1.3))
    ]
    page = report(predict, *runs)
    validated = asked(predict, "validate", *runs, "-o", "validated", "--html", "beside.html", "--force")
    simulated = [pair for pair in validated["pairs"] if pair["evaluator"] == "simulate"]
    assert [pair["error"] for pair in page.data["pairs"]] == [pair["error"] for pair in simulated]
    predicted, measured = page.data["phases"][2:]
    assert (predicted["side"], measured["side"]) == ("predicted", "measured")
    assert predicted["spread_s"] == simulated[1]["interval_s"]
    assert measured["iteration_s"] == simulated[1]["measured_median_s"]
    assert page.data["diagnosis"]["run"] == "b"
    beside = Page(Path("beside.html").read_text())
    assert {name: beside.data[name] for name in FIGURES} == {name: page.data[name] for name in FIGURES}


def test_runs_that_memory_ended_leave_nothing_to_explain(predict: Caller) -> None:
    write_profile(predict.profile, PROFILE)
    short = MemoryShortage(rank=1, phase="backward", requested_bytes=5, needed_bytes=3000, had_bytes=2000)
    run = str(run_like(Path("a"), "d2", 16, did_not_fit=(short,), complete=False))
    (Path("a") / TRAINING_FILE).unlink()
    own = ("--from-profile", str(predict.profile), run, "--force")
    validated = predict.bare("validate", *own, "-o", "validated", "--html", "page.html")
    assert validated.code == 0
    assert "no run has times to explain" in validated.err
    assert Path("validated/report.json").exists()
    refused = predict.bare("report", *own, "-o", "page.html")
    assert refused.code == 2
    assert "every run ran out of memory" in refused.err
    assert not Path("page.html").exists()


def test_the_same_command_writes_the_same_bytes(predict: Caller) -> None:
    report(predict, *CHAIN, "--ranks", "4")
    first = Path("page.html").read_bytes()
    report(predict, *CHAIN, "--ranks", "4")
    assert Path("page.html").read_bytes() == first


def test_a_page_runs_its_own_scripts_and_asks_for_nothing(predict: Caller) -> None:
    page = report(predict, *CHAIN, "--strategy", "d2")
    (policy,) = (value for name, value in page.attributes if name == "content" and "script-src" in str(value))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    rules = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert not {"link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href") and not str(value).startswith("#")]
    assert not any(re.search("<!--|</script", script) for script in page.scripts)
    assert Path("page.html").stat().st_size < MOST_BYTES


def test_each_chart_has_its_data_a_title_and_a_table(predict: Caller) -> None:
    page = report(predict, *CHAIN, "--ranks", "2")
    charts = {str(value).removeprefix("chart-") for name, value in page.attributes if str(value).startswith("chart-")}
    assert charts == FIGURES | ({"fits"} & charts)
    assert charts <= page.data.keys()
    assert page.tags.count("figure") == page.tags.count("figcaption") == len(charts)
    assert page.tags.count("table") >= len(charts)


HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u202e{{ 7 * 7 }}\u2028&amp;\"'"


def test_hostile_names_stay_text(predict: Caller) -> None:
    document = encode_pretty(make_network()).replace(b'"fc0"', msgspec.json.encode(HOSTILE))
    network = msgspec.json.decode(document, type=ModelGraph)
    profile = make_profile(msgspec.structs.replace(network, name=HOSTILE))
    environment = msgspec.structs.replace(profile.environments[0], hostname=HOSTILE)
    write_profile(
        predict.profile, msgspec.structs.replace(profile, environments=(environment,), command_line=(HOSTILE,))
    )
    page = report(predict, "--model", HOSTILE, "--strategy", "d2", "--batch", "16")
    write_profile(predict.profile, make_profile())
    clean = report(predict, *CHAIN, "--strategy", "d2")
    assert set(page.tags) == set(clean.tags)
    assert len(page.scripts) == len(clean.scripts)
    assert page.data["predictions"][0]["model"] == HOSTILE
    assert any(HOSTILE in kind["name"] for kind in page.data["timeline"]["kinds"])
    assert HOSTILE.replace("\u202e", "")[:40] in page.text
    assert "\u202e" not in page.text
    assert "{{ 7 * 7 }}" in page.text


def bars(strategy: str, micro_batches: int) -> tuple[dict[str, Any], list[str], int]:
    factory = NetworkFactory(4, 16, 16)
    for index in range(12):
        factory.conv(f"conv{index}", 8)
        factory.relu(f"relu{index}")
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    network = factory.network("convolutional")
    fits = tuple(ring_fit(operation, alpha_s=2e-4) for operation in OPERATIONS)
    profile = make_profile(network, communication=fits, contexts=(with_compute(1.3, 1.6),))
    settings = plan_settings(batch=4 * micro_batches, micro_batches=micro_batches, schedule="1f1b")
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    found = predict_timeline(CostModel(profile=profile, network=network), point).timeline
    lasting = sum(int((role.end_s - role.start_s > 5e-10).sum()) for role in found.roles)
    return *timeline_section.bars_of_timeline(found), lasting


@pytest.mark.parametrize("micro_batches", [8, 512])
def test_bars_hold_every_task_within_what_a_page_may(micro_batches: int) -> None:
    data, left_out, lasting = bars("p4", micro_batches)
    drawn = data["bars"]
    assert sum(bar[4] for bar in drawn) == lasting
    assert len(drawn) <= timeline_section.MOST_BARS
    assert bool(left_out) == (lasting > timeline_section.MOST_BARS)
    assert {bar[1] for bar in drawn} == set(range(len(data["kinds"])))
    assert max(bar[2] + bar[3] for bar in drawn) == pytest.approx(1e6 * data["iteration_s"], rel=1e-6)
    for one, other in itertools.pairwise(drawn):
        assert one[0] < other[0] or one[2] + one[3] <= other[2] + 2e-3
    assert {kind["category"] for kind in data["kinds"]} >= {"FW", "BW", "WU"}


def test_what_a_report_cannot_be_is_refused_in_a_line(predict: Caller) -> None:
    own = ("--from-profile", str(predict.profile))
    for arguments, said in (
        ((*CHAIN, "--strategy", "d2", "--evaluator", "paradl"), "predict report uses --evaluator simulate"),
        (("--model", "chain"), "Missing option '--batch'"),
        (CHAIN, "Missing option '--ranks'"),
        (("some-run", "--batch", "16"), "--batch: this is known from the runs; leave it out, or give --model too"),
        ((*CHAIN, "--ranks", "2", "--accumulate", "2"), "--accumulate: predict search tries all of them"),
    ):
        result = predict.bare("report", *own, *arguments, "-o", "page.html")
        assert result.code == 2
        assert said in result.err
    assert not Path("page.html").exists()
    Path("page.html").write_text("mine")
    result = predict.bare("report", *own, *CHAIN, "--strategy", "d2", "-o", "page.html")
    assert (result.code, Path("page.html").read_text()) == (2, "mine")


def test_a_deep_ledger_is_cut_to_its_largest_entries() -> None:
    count = 3 * seconds_section.MOST_ENTRIES
    entry = LedgerEntry(
        name="layer", phase="FW", source="measured", count=1, base_s=1, total_s=1, exposed_s=0.75, hidden_s=0.25
    )
    role = RoleLedger(role="replica", ranks=2, entries=(entry,) * count)
    ledger = Ledger(
        model="deep",
        strategy="d2",
        ranks=2,
        batch=4,
        evaluator="simulate",
        iteration_s=0.75 * count,
        interval_s=(0.0, 1.0),
        roles=(role,),
    )
    document, said = seconds_section.ledger_document(ledger, role)
    held: Any = json.loads(msgspec.json.encode(document))
    exposed_s = sum(entry["exposed_s"] for entry in held["role"]["entries"])
    assert len(held["role"]["entries"]) + held["left_out"]["entries"] == count
    assert exposed_s + held["left_out"]["exposed_s"] == pytest.approx(ledger.iteration_s)
    assert f"{count} entries" in said[0]
    assert seconds_section.ledger_document(ledger, msgspec.structs.replace(role, entries=(entry,)))[1] == []


def test_equal_blocks_share_a_row_of_the_largest_entries(predict: Caller) -> None:
    factory = NetworkFactory(8, 16, 16)
    for index in range(6):
        factory.conv(f"block.{index}.conv", 8)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    write_profile(predict.profile, make_profile(factory.network("blocks")))
    page = report(predict, "--model", "blocks", "--batch", "16", "--strategy", "d2")
    rows = {row["label"]: row["exposed_s"] for row in page.data["entries"]}
    assert "block.*.conv FW" in rows
    assert sum(rows.values()) == pytest.approx(page.data["ledger"]["iteration_s"])


def test_the_answer_says_what_each_source_is(predict: Caller) -> None:
    page = report(predict, *CHAIN, "--strategy", "d2")
    assert MEANINGS.keys() == set(Source)
    told = {name: share for name, share in page.data["predictions"][0]["sources"].items() if share > 0.001}
    for name in told:
        assert f"{name.replace('_', ' ')}: {MEANINGS[Source[name.upper()]]}" in page.text


def test_the_answer_says_when_candidates_were_left_open() -> None:
    assert fastest_of(5_000, 60, 0) == "the fastest of 5,000 candidates"
    assert fastest_of(5_000, 60, 12).endswith("of 60 that were predicted. Of 5,000 candidates, 12 are left open")


def test_a_far_slower_configuration_stands_in_the_table_alone() -> None:
    (fast,) = load_profile("h100-sxm").predict("gpt2", "d8", batch=64).predictions
    slow = msgspec.structs.replace(fast, time=msgspec.structs.replace(fast.time, iteration_s=20 * fast.iteration_s))
    drawn, said = near_fastest((fast, fast, slow))
    assert drawn == (fast, fast)
    for draw in (ranking, made_of):
        whole, left_out = draw((fast, fast)), draw((fast, fast, slow), drawn, said)
        assert left_out.data == whole.data
        assert len(left_out.table.rows) == 3
        assert left_out.shows == f"{whole.shows} 1 that take more than 5 times as long stand in the table alone."
