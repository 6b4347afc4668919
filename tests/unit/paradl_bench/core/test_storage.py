"""Files that survive: a process killed at any byte, a full disk, a folder that can't be written."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files import json_lines, storage
from paradl_bench.core.files.json_lines import append_lines, read_lines, torn_bytes
from paradl_bench.core.files.storage import (
    decode_json,
    encode_pretty,
    hash_of_file,
    read_json,
    read_whole,
    write_bytes_atomically,
    write_text_atomically,
)


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    seconds: tuple[float, ...] = ()


RECORDS = [
    Record(text="one"),
    Record(text="zwei\nlines", seconds=(1.5, 2.0)),
    Record(text="drei \N{GREEK SMALL LETTER ALPHA}"),
]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    append_lines(path, RECORDS[:1])
    append_lines(path, RECORDS[1:])
    append_lines(path, [])
    assert read_lines(path, Record) == (RECORDS, 0)


def test_a_truncated_file_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_lines(path, RECORDS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        records, torn_bytes = read_lines(path, Record)
        assert records == RECORDS[: whole[:length].count(b"\n")]
        assert torn_bytes == length - (whole[:length].rfind(b"\n") + 1)


def test_appending_to_a_truncated_file_follows_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_lines(path, RECORDS)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        append_lines(path, [Record(text="after")])
        kept = RECORDS[: whole[:length].count(b"\n")]
        assert read_lines(path, Record) == ([*kept, Record(text="after")], 0)


@given(st.binary(max_size=40), st.integers(1, 8))
def test_the_last_line_ends_where_searching_everything_finds_it(content: bytes, chunk_bytes: int) -> None:
    from io import BytesIO

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_CHUNK_BYTES", chunk_bytes)
        assert json_lines.end_of_last_line(BytesIO(content)) == content.rfind(b"\n") + 1


def test_a_torn_line_longer_than_a_chunk_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_lines(path, RECORDS)
    with open(path, "ab") as stream:
        stream.write(b"x" * 200_000)
    append_lines(path, RECORDS)
    assert read_lines(path, Record) == (RECORDS * 2, 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": 3}\n', r"records\.jsonl line 4: Expected `str`, got `int` - at `\$\.text`"),
        (b'{"text": "x", "seconds": [1, null]}\n', r"line 4: .* - at `\$\.seconds\[1\]`"),
        (b'{"text": "x", "speed": 1}\n', "line 4: .*unknown field `speed`"),
        (b'{"text": "\xff"}\n', "line 4"),
        (b"\n", "line 4"),
        (b'{"text": "cut\n', "line 4"),
    ],
)
def test_an_invalid_line_is_named_by_file_line_and_field(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "records.jsonl"
    append_lines(path, RECORDS)
    with open(path, "ab") as stream:
        stream.write(line)
    append_lines(path, RECORDS)
    with pytest.raises(UserError, match=why):
        read_lines(path, Record)


def test_a_file_that_is_not_there_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent\.jsonl: No such file"):
        read_lines(tmp_path / "absent.jsonl", Record)


def test_a_document_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "manifest.json"
    write_text_atomically(path, "old")
    write_bytes_atomically(path, encode_pretty(RECORDS[1]))
    assert msgspec.json.decode(path.read_bytes(), type=Record) == RECORDS[1]
    assert path.read_bytes().endswith(b"\n")
    assert os.listdir(path.parent) == ["manifest.json"]


def test_a_new_file_follows_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text_atomically(tmp_path / "shared.json", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "shared.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_failed_write_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    path = tmp_path / "profile.json"
    write_text_atomically(path, "old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(storage.os, broken, fail)
    expected = WorkError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_text_atomically(path, "new")
    if isinstance(error, OSError):
        assert str(caught.value) == (
            f"cannot write {path}: No space left on device; free some there, or give a place on another disk with -o"
        )
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["profile.json"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkError, match=r"cannot write .*file/profile\.json"):
        write_text_atomically(tmp_path / "file" / "profile.json", "x")
    with pytest.raises(WorkError, match=r"cannot append to .*file/records\.jsonl"):
        append_lines(tmp_path / "file" / "records.jsonl", RECORDS)


def _limit_files_to_100_bytes() -> None:
    # A write beyond the limit then fails as it does on a full disk: what fits is written, and the rest is refused.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


FILL_THE_DISK = """
import sys
from pathlib import Path
from typing import Any
from paradl_bench.core.errors import WorkError
from paradl_bench.core.files.storage import write_text_atomically
from paradl_bench.core.files.json_lines import append_lines
folder = Path(sys.argv[1])
for act in (lambda: append_lines(folder / "records.jsonl", [{"text": "x" * 40}, {"text": "y" * 40}]),
            lambda: write_text_atomically(folder / "profile.json", "z" * 200)):
    try:
        act()
    except WorkError as error:
        print(error)
"""


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    append_lines(tmp_path / "records.jsonl", RECORDS[:1])
    write_text_atomically(tmp_path / "profile.json", "old")
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)],
        preexec_fn=_limit_files_to_100_bytes,
        capture_output=True,
        text=True,
        check=True,
    )
    told = "File too large; raise the limit on the size of a file (ulimit -f)"
    assert [line.split(":")[-1].strip() for line in done.stdout.splitlines()] == [told] * 2, done.stderr
    assert read_lines(tmp_path / "records.jsonl", Record) == (RECORDS[:1], 0)
    assert (tmp_path / "profile.json").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["profile.json", "records.jsonl"]


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: float
    parts: tuple[object, ...] = ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"size": "two"}', "Expected `float`, got `str` - at `$.size`"),
        (b'{"size": 2, "sise": 3}', "Object contains unknown field `sise`"),
        (b'{"size": 2', "Input data was truncated"),
        (b'{"size": NaN}', "$.size is NaN, which is no number"),
        (b'{"size": 2, "parts": ["\xff"]}', "decode byte 0xff"),
        (b'{"size": 2, "parts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ],
)
def test_an_invalid_document_is_named_with_kind_and_path(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "point.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_json(path, Point, what="point", remedy="; write it anew")
    text = str(raised.value)
    assert text.startswith(f"point {path}: ")
    assert said in text
    assert text.endswith("; write it anew")
    assert "\n" not in text


def test_a_document_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "point.json"
    with pytest.raises(UserError, match=f"^cannot read {path}: No such file"):
        read_json(path, Point)
    path.write_bytes(encode_pretty(Point(size=2.5)))
    assert read_json(path, Point) == Point(size=2.5)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "it is a pipe"), (Path("/dev/zero"), "it is a device"), (tmp_path, "it is a folder")):
        of_records = (lambda p: read_json(p, Record), lambda p: read_lines(p, Record))
        for read in (read_whole, hash_of_file, torn_bytes, *of_records):
            with pytest.raises(UserError, match=rf"cannot read {path}: {why}; give a regular file"):
                read(path)
    with pytest.raises(UserError, match="cannot read"):
        read_whole(Path("a\0b"))


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 4096)
    assert read_whole(path, most_bytes=4096) == b"x" * 4096
    with pytest.raises(UserError, match=r"large: it holds more than 2.00 KiB"):
        read_whole(path, most_bytes=2048)
    # /proc says that its files hold nothing, and they do not end there.
    with pytest.raises(UserError, match=r"it holds more than 4 B"):
        read_whole(Path("/proc/self/status"), most_bytes=4)


ROOT = Path(__file__).parents[4]
_OWN_WAYS = {
    "paradl_bench/core/files/storage.py",
    "paradl_bench/core/files/json_lines.py",
    "paradl_bench/ranks/directories/writer_lock.py",  # opens to lock
    "paradl_bench/measure/kernels/runs.py",  # /sys
    "paradl_bench/measure/machine/node_findings.py",  # /sys
    "paradl_bench/ranks/directories/host_watch.py",  # /proc
}
_SYSTEMS = ("/proc/", "/sys/", "_SYSCTL", "_TASKS", "task /", "index /")


def test_all_files_are_read_by_the_one_reader() -> None:
    """What others may have put there is opened by ``open_regular``; the system's own files (/proc, /sys) need not."""
    found = []
    for package in ("paradl_bench", "calibrate", "predict"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(file.read_text())):
                if name in _OWN_WAYS or not isinstance(node, ast.Call):
                    continue
                text = ast.unparse(node)
                if _reads(node) and not any(system in text for system in _SYSTEMS):
                    found.append(f"{name}:{node.lineno}: {text[:80]}")
    assert not found


def _reads(node: ast.Call) -> bool:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in ("read_bytes", "read_text")
    if not (isinstance(node.func, ast.Name) and node.func.id == "open"):
        return False
    modes = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)] or ["r"]
    return "r" in str(modes[0])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a":1,"a":2}', "$.a"),
        ('{"b":[{},{"c":{"d" : 1, "d":2}}]}', "$.b[1].c.d"),
        ('{"a":"\\u0022:","b":{"c":1,"c":1}}', "$.b.c"),
        ('{"a":12345678901234567890123,"a":1}', "$.a"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_its_path(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(f"file: {where} occurs twice")):
        decode_json(text.encode(), dict[str, Any], where="file")
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a":1}\n' + text + "\n")
    with pytest.raises(UserError, match=re.escape(f"line 2: {where} occurs twice")):
        read_lines(path, dict[str, Any])


@pytest.mark.parametrize("text", ['{"a": "\\": x", "b": {"a": 1}}', '{"a\\u0022": 1, "a" : ["\\":", "a"]}', "[1, 2]"])
def test_equal_keys_and_texts_in_different_objects_are_read(text: str) -> None:
    assert decode_json(text.encode(), object, where="file") == json.loads(text)
