"""``predict --explain``: the whole ledger as JSON, its largest entries as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from predict_caller import Caller
from profile_factory import make_network, make_profile, ring_fit

from calibrate.profile.profile import write_profile
from predict.ledger.ledger import LedgerEntry
from predict.ledger.presentation import folded

LONG = make_network((32,) * 24)
FITS = tuple(map(ring_fit, ("all_reduce", "broadcast", "send_recv")))


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    caller = Caller(tmp_path, monkeypatch, capfd)
    write_profile(caller.profile, make_profile(LONG, communication=FITS))
    return caller


def table(out: str) -> list[str]:
    """Rows of the ledger's table, from its first entry to its sum."""
    lines = [line.strip() for line in out[out.rindex("base from") :].splitlines()]
    return [line for line in lines[2:] if line and not set(line) <= {"─", " "}]


def test_each_point_has_a_ledger_with_all_entries(predict: Caller) -> None:
    words = ("--strategy", "serial,d2", "--batch", "8")
    predictions = predict(*words, "--json").json()
    ledgers = predict(*words, "--explain", "--json").json()
    assert [each["strategy"] for each in ledgers] == ["serial", "d2"]
    for ledger, prediction in zip(ledgers, predictions, strict=True):
        assert ledger["iteration_s"] == prediction["iteration_s"]
        (role,) = ledger["roles"]  # type: ignore[misc, attr-defined]
        assert sum(entry["exposed_s"] for entry in role["entries"]) == pytest.approx(ledger["iteration_s"], rel=1e-9)
        assert len(role["entries"]) > 40


def test_the_table_ends_with_what_is_left_and_the_iteration(predict: Caller) -> None:
    found = predict("--strategy", "d2", "--batch", "8", "--explain")
    (ledger,) = predict("--strategy", "d2", "--batch", "8", "--explain", "--json").json()
    (role,) = ledger["roles"]  # type: ignore[misc, attr-defined]
    rows = table(found.out)
    whole = next(index for index, row in enumerate(rows) if row.startswith("all entries = the iteration"))
    assert rows[whole - 1].startswith(f"{len(role['entries']) - 20} more entries")
    assert whole == 21
    # A table that is too wide is parted: each part has all rows.
    wholes = [line for line in found.out.splitlines() if line.strip().startswith("all entries = the iteration")]
    assert any(f"{1e3 * ledger['iteration_s']:.3f}" in line for line in wholes)  # type: ignore[operator]
    shown = [entry["name"] for entry in role["entries"][:20]]
    assert all(row.startswith(name) for row, name in zip(rows[:20], shown, strict=True))


def test_entries_come_by_exposed_seconds_within_a_hundred_columns(predict: Caller) -> None:
    found = predict("--strategy", "d2", "--batch", "8", "--explain", "--evaluator", "osf", "--fusion", "buffer")
    begin = found.out.index("by osf")
    assert max(len(line.rstrip()) for line in found.out[begin:].splitlines()) <= 120
    assert max(len(row) for row in table(found.out)[:22]) <= 100
    (ledger,) = predict("--strategy", "d2", "--batch", "8", "--explain", "--json").json()
    exposed = [entry["exposed_s"] for entry in ledger["roles"][0]["entries"]]  # type: ignore[index]
    assert exposed == sorted(exposed, reverse=True)


def test_a_file_takes_the_whole_ledger_beside_the_table(predict: Caller) -> None:
    path = predict.folder / "ledger.json"
    found = predict("--strategy", "p2", "--batch", "8", "--explain", "-o", str(path))
    assert found.code == 0, found.err
    (ledger,) = json.loads(path.read_text())
    assert [role["role"] for role in ledger["roles"]] == ["stage 0", "stage 1"]
    assert "1 more role, which waits for this one, is in --json" in found.out


def test_a_ledger_is_no_csv(predict: Caller) -> None:
    found = predict("--strategy", "d2", "--batch", "8", "--explain", "--csv")
    assert found.code == 2
    assert (
        found.err
        == "predict: error: --explain writes a table or JSON: give --format table or json, not csv or parquet\n"
    )


def test_equal_blocks_are_one_row_with_all_that_they_take() -> None:
    def entry(name: str, exposed_s: float, base_s: float = 2.0, **details: int) -> LedgerEntry:
        shared = {"phase": "FW", "source": "measured", "count": 1.0, "hidden_s": 0.5, "total_s": base_s}
        return LedgerEntry(name=name, base_s=base_s, exposed_s=exposed_s, details=details, **shared)

    blocks = [entry(f"h.{block}.mlp.0.fc FW", 1.0 + block) for block in range(4)]
    others = [entry("h.4.mlp.0.fc FW", 9.0, base_s=3.0), entry("h.5.mlp.0.fc FW", 8.0, bytes=4), entry("head FW", 5.5)]
    parts = folded([*others, *blocks])
    assert [(part.name, len(part.entries)) for part in parts] == [
        ("h.*.mlp.*.fc FW", 4),
        ("h.4.mlp.0.fc FW", 1),
        ("h.5.mlp.0.fc FW, 4 B", 1),
        ("head FW", 1),
    ]
    assert sum(each.exposed_s for part in parts for each in part.entries) == 9.0 + 8.0 + 5.5 + 10.0
    # So few of them are told apart.
    assert [part.name for part in folded(blocks[:3])] == [each.name for each in reversed(blocks[:3])]
