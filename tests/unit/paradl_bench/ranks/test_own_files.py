"""Nothing is written through links or to files of others, and no name of a file leads out of a directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from in_process import run_in_process

from calibrate.profile.profile import read_profile
from calibrate.report.explanation import weaknesses
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines, cut_torn_line
from paradl_bench.core.files.storage import file_name, open_own, write_bytes_atomically
from paradl_bench.measure.execution.compiler import refuse_open_cache
from paradl_bench.ranks.directories.directory import refuse_unusable
from paradl_bench.ranks.directories.writer_lock import LOCK_NAME, lock_for_writing, refuse_locked, release

Link = Callable[[Path, Path], None]
LAYERS = ("layers", "alexnet", "--batch", "2", "--input-shape", "3x64x64", "--pairs", "2", "--blocks", "1")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text('{"kept": 1}\nwithout a newline at its end')
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_left_alone(tmp_path: Path, precious: Path, link: Link) -> None:
    before = precious.read_bytes()
    output = tmp_path / "lk"
    output.mkdir()
    link(precious, output / LOCK_NAME)
    result = run_in_process(tmp_path, *LAYERS, "-o", "lk")
    assert (result.returncode, precious.read_bytes()) == (2, before), result.stderr
    with pytest.raises(UserError, match=r"is a link|has a second hard link"):
        lock_for_writing(output)
    refuse_locked(output)
    assert precious.read_bytes() == before


def test_a_directory_with_somebody_elses_lock_is_not_ours(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_NAME
    lock.write_text("a database's own\n")
    with pytest.raises(UserError, match="is not empty and holds no measurement"):
        refuse_unusable(tmp_path, "layers")
    with pytest.raises(UserError, match="is not a lock of this program"):
        lock_for_writing(tmp_path)
    assert lock.read_text() == "a database's own\n"


@pytest.mark.parametrize("content", ["", "process 17 on node-1.site\n"])
def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    refuse_unusable(tmp_path, "layers")
    lock_for_writing(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    release(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_records_are_not_appended_through_links_nor_cut(tmp_path: Path, precious: Path, link: Link) -> None:
    before = precious.read_bytes()
    link(precious, tmp_path / "rows.jsonl")
    for change in (lambda path: append_lines(path, [1]), cut_torn_line):
        with pytest.raises(UserError, match=r"is a link|has a second hard link"):
            change(tmp_path / "rows.jsonl")
    assert precious.read_bytes() == before


def test_a_document_replaces_a_link_not_its_target(tmp_path: Path, precious: Path) -> None:
    before = precious.read_bytes()
    (tmp_path / "run.json").symlink_to(precious)
    write_bytes_atomically(tmp_path / "run.json", b"{}")
    assert (precious.read_bytes(), (tmp_path / "run.json").read_bytes()) == (before, b"{}")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="is not a regular file"):
        append_lines(tmp_path / "rows.jsonl", [1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_file_is_refused_outside_that_users_folder(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_lines(path, [1])
    os.chown(path, 65534, 65534)
    with pytest.raises(UserError, match="belongs to another user"):
        append_lines(path, [2])
    os.chown(tmp_path, 65534, 65534)
    append_lines(path, [2])
    assert path.read_bytes() == b"1\n2\n"


def test_a_file_is_emptied_only_where_it_may_be_written(tmp_path: Path, precious: Path) -> None:
    own = tmp_path / "own.log"
    own.write_bytes(b"before")
    os.close(open_own(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert own.read_bytes() == b""
    os.link(precious, tmp_path / "run.log")
    with pytest.raises(UserError, match="has a second hard link"):
        open_own(tmp_path / "run.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert precious.stat().st_size


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "..", ".", "", ".hidden", "a\0b", "\x1b[31m", "x" * 500])
def test_a_name_of_a_file_leads_nowhere(tmp_path: Path, name: str) -> None:
    made = file_name(name)
    assert (tmp_path / made).parent == tmp_path
    assert not made.startswith(".")
    assert made.isascii()
    assert made.isprintable()
    assert 0 < len(made) <= 100
    assert file_name("resnet18-v1.5_x") == "resnet18-v1.5_x"


def test_compiled_code_is_kept_where_nobody_else_can_put_theirs(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    refuse_open_cache(cache)
    refuse_open_cache(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(UserError, match="set TORCHINDUCTOR_CACHE_DIR to a folder of yours"):
        refuse_open_cache(cache)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="set TORCHINDUCTOR_CACHE_DIR to a folder of yours"):
        refuse_open_cache(tmp_path / "link")


def test_commands_that_are_proposed_run_nothing_that_a_profile_names(tmp_path: Path) -> None:
    """Somebody pastes them into a shell."""
    profile = read_profile(Path(__file__).parents[3] / "data" / "profile-v3.json")
    marker = tmp_path / "marker"
    make = f"touch {marker}"
    fits = tuple(msgspec.structs.replace(fit, library=f"{fit.library}; {make} #") for fit in profile.communication)
    times = tuple(msgspec.structs.replace(time, model=f"{time.model}$({make})") for time in profile.model_times)
    found = msgspec.structs.replace(profile, communication=fits, model_times=times)
    commands = [weakness.command for weakness in weaknesses(found) if weakness.command]
    assert any("--backend" in command for command in commands)
    assert any("paradl-bench layers" in command for command in commands)
    stand_ins = "paradl-bench() { :; }; srun() { :; }\n"
    subprocess.run(["bash", "-c", stand_ins + "\n".join(commands)], cwd=tmp_path, check=True, timeout=60)
    assert not marker.exists()
