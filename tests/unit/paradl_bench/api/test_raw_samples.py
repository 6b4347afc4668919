"""Measurement directories from Python: raw samples as frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paradl_bench
from paradl_bench.api.directory_files import RECORDS
from paradl_bench.core.errors import UserError
from paradl_bench.core.frames import frame_of

DATA = Path(__file__).parents[3] / "data"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_layers_are_read_with_every_sample() -> None:
    raw = paradl_bench.read(DATA / "layers-v1")
    told = lines(DATA / "layers-v1" / "layers.jsonl")
    frame = raw.to_frame("layers")
    assert frame["layer"].to_list() == [row["layer"] for row in told]
    samples = frame.explode("samples_s")
    assert samples["samples_s"].to_list() == [value for row in told for value in row["samples_s"]]  # type: ignore[attr-defined]
    assert raw.tables == {"layers": len(told), "iterations": 2, "copies": len(raw.to_frame("copies"))}
    assert raw.to_frame().equals(frame)


def test_older_contexts_are_read_as_todays() -> None:
    raw = paradl_bench.read(DATA / "collectives-v1")
    assert set(raw.to_frame("contexts")["context"]) == {"with-compute"}
    assert raw.to_frame("collectives")["message_bytes"].dtype == "int64"


def test_a_training_run_is_read() -> None:
    frame = paradl_bench.read(DATA / "training-v1").to_frame()
    assert frame.explode(["iteration_s", "fw_s"])["iteration_s"].min() > 0


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_columns_follow_from_the_kind_of_record(name: str) -> None:
    frame = frame_of(RECORDS[name], [])
    assert len(frame) == 0
    assert len(frame.columns) >= len(RECORDS[name].__struct_fields__) - 1


def test_html_of_a_directory_shows_names_as_text(tmp_path: Path) -> None:
    for path in (DATA / "layers-v1").iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("toy", "<b>toy</b>"))
    html = paradl_bench.read(tmp_path)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;toy&lt;/b&gt;" in html


def test_what_is_no_table_or_directory_is_said() -> None:
    raw = paradl_bench.read(DATA / "layers-v1")
    with pytest.raises(UserError, match="unknown table of raw samples 'layer': did you mean layers"):
        raw.to_frame("layer")
    with pytest.raises(UserError, match="no/such is no measurement directory"):
        paradl_bench.read("no/such")
