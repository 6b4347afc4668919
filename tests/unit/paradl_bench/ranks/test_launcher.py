"""The launcher, on ranks that are plain processes without torch; joining is tested under tests/distributed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.interruption import Terminated, signals_raise
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
from paradl_bench.ranks.launcher import check_ranks_fit, launch_ranks
from paradl_bench.ranks.rank_place import RankPlace, check_backend, launcher_of_environment, ranks_of_node

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "PARADL_LAUNCHER", "TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_plain_process_starts_its_own_ranks() -> None:
    assert launcher_of_environment(None) is None
    assert launcher_of_environment("own") is None


def test_torchrun_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, TORCHELASTIC_RUN_ID="none", RANK=3, WORLD_SIZE=4, LOCAL_RANK=1)
    expected = RankPlace(launcher="torchrun", rank=3, ranks=4, local_rank=1)
    assert launcher_of_environment(None) == launcher_of_environment("torchrun") == expected
    assert launcher_of_environment("own") is None


def test_slurm_is_believed_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0)
    assert launcher_of_environment(None) is None
    assert launcher_of_environment("srun") == RankPlace(launcher="srun", rank=0, ranks=8, local_rank=0)
    set_variables(monkeypatch, SLURM_STEP_NUM_TASKS=2)
    assert launcher_of_environment("srun") == RankPlace(launcher="srun", rank=0, ranks=2, local_rank=0)


def test_ranks_of_a_node_are_those_that_the_launcher_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_node(None, 6) == 6
    set_variables(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=6, SLURM_LOCALID=0)
    assert ranks_of_node("srun", 6) is None
    set_variables(monkeypatch, SLURM_STEP_TASKS_PER_NODE="2(x3)")
    assert ranks_of_node("srun", 6) == 2
    set_variables(monkeypatch, SLURM_STEP_TASKS_PER_NODE="4,2")
    assert ranks_of_node("srun", 6) is None
    set_variables(monkeypatch, TORCHELASTIC_RUN_ID="none", RANK=0, WORLD_SIZE=6, LOCAL_RANK=0)
    assert ranks_of_node(None, 6) is None
    set_variables(monkeypatch, LOCAL_WORLD_SIZE=3)
    assert ranks_of_node(None, 6) == 3


def test_a_launcher_that_did_not_start_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="RANK is not set; start this command through torchrun"):
        launcher_of_environment("torchrun")
    with pytest.raises(UserError, match="SLURM_PROCID is not set; start this command through srun"):
        launcher_of_environment("srun")
    with pytest.raises(
        UserError, match=r"unknown launcher 'mpirun': did you mean srun\? choices are own, srun, torchrun"
    ):
        launcher_of_environment("mpirun")
    set_variables(monkeypatch, RANK="x", WORLD_SIZE=2, LOCAL_RANK=0)
    with pytest.raises(UserError, match="RANK='x'"):
        launcher_of_environment("torchrun")
    set_variables(monkeypatch, RANK=2)
    with pytest.raises(UserError, match="RANK=2 is no rank of 2"):
        launcher_of_environment("torchrun")


def test_backends_name_their_choices() -> None:
    check_backend("gloo", "cpu")
    check_backend("nccl", "cuda")
    with pytest.raises(UserError, match="unknown backend 'glo': did you mean gloo"):
        check_backend("glo", "cpu")
    with pytest.raises(UserError, match="use --backend gloo"):
        check_backend("nccl", "cpu")


def test_a_host_is_not_flooded_with_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    check_ranks_fit(2, "cpu")
    assert capsys.readouterr().err == ""
    check_ranks_fit(4, "cpu")
    assert "4 ranks share 2 cores" in capsys.readouterr().err
    with pytest.raises(UserError, match="1000 ranks on the 2 cores"):
        check_ranks_fit(1000, "cpu")


def launch(program: str, *, ranks: int = 2, timeout_s: float | None = 60, device: str = "cpu") -> None:
    launch_ranks([sys.executable, "-c", program], ranks=ranks, device=device, timeout_s=timeout_s)


def test_ranks_get_torchruns_variables_and_the_allocators_thresholds(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    names += ["GLOO_SOCKET_IFNAME", "PARADL_PROGRESS", *ALLOCATOR_VARIABLES]
    launch(
        "import os; rank = os.environ['RANK'];"
        f"open({str(tmp_path)!r} + '/' + rank, 'w').write('\\n'.join(os.environ[n] for n in {names!r}))"
    )
    for rank in "01":
        found = dict(zip(names, (tmp_path / rank).read_text().split("\n"), strict=True))
        assert found["RANK"] == found["LOCAL_RANK"] == rank
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert (found["OMP_NUM_THREADS"], found["PARADL_PROGRESS"], found["GLOO_SOCKET_IFNAME"]) == ("1", "0", "lo")
        assert {name: found[name] for name in ALLOCATOR_VARIABLES} == ALLOCATOR_VARIABLES


def test_rank_0_speaks_and_the_others_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    launch("import os, sys; r = os.environ['RANK']; print('out', r); print('err', r, file=sys.stderr)")
    shown = capfd.readouterr()
    assert shown.out.split() == ["out", "0"]
    assert shown.err.split() == ["err", "0"]


def test_a_users_mistake_on_a_rank_is_the_launchers(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('paradl-bench: error: no such model', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UserError, match=r"^no such model$"):
        launch(program)
    # It is reported once, by the launcher.
    assert "no such model" not in capfd.readouterr().err


def test_the_rank_that_failed_is_named_with_its_last_words() -> None:
    program = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no more memory')\ntime.sleep(60)"
    with pytest.raises(WorkError, match=r"rank 1 ended with exit code 1.*ValueError: no more memory$"):
        launch(program)


def test_the_last_words_are_the_exception_without_torchs_frame() -> None:
    """As torch prints a rank's exception: each line marked, an empty one at the end, and what others log behind it."""
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    for line in ('Traceback (most recent call last):', '  File \"m.py\", line 1, in f', 'KeyError: 1', '',\n"
        "        'The above exception was the direct cause of the following exception:', '',\n"
        "        'Traceback (most recent call last):', '  File \"m.py\", line 3, in f', '    raise', \n"
        "        'RuntimeError: shapes differ', 'a hint', ''):\n"
        "        print(f'[rank1]: {line}', file=sys.stderr)\n"
        "    print('[W socket.cpp] shutting down', file=sys.stderr)\n"
        "    sys.exit(1)\n"
        "time.sleep(60)"
    )
    with pytest.raises(WorkError, match=r"rank 1 ended with .*; its last words: RuntimeError: shapes differ$"):
        launch(program)


def test_last_words_that_begin_on_the_line_behind_are_shown() -> None:
    program = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('\\n    what failed:')\ntime.sleep(60)"
    with pytest.raises(WorkError, match=r"rank 1 ended with .*; its last words: ValueError: what failed:$"):
        launch(program)


def test_a_slowly_ending_rank_is_blamed_before_its_disconnected_peer() -> None:
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0': raise RuntimeError('gloo/transport/tcp/pair.cc: Connection closed by peer')\n"
        "time.sleep(4); raise ValueError('the cause')"
    )
    with pytest.raises(WorkError, match=r"rank 1 ended with exit code 1.*ValueError: the cause$"):
        launch(program)


def test_a_failure_is_blamed_on_its_rank_not_a_peer() -> None:
    # The peer is first to end, because the failing rank takes long to.
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('paradl-bench: error: lost the connection to another rank: closed', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(0.5); print('paradl-bench: error: the loss is nan', file=sys.stderr); sys.exit(3)"
    )
    with pytest.raises(WorkError, match=r"rank 1 ended with exit code 3.*the loss is nan$"):
        launch(program)


def test_a_killed_rank_is_named_with_its_signal_ending_others(tmp_path: Path) -> None:
    program = (
        f"import os, signal, time\nopen({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    with pytest.raises(WorkError, match=r"rank 1 was killed by signal 9 \(SIGKILL\); the other ranks were ended"):
        launch(program)
    assert_ended(tmp_path)


@pytest.mark.parametrize(("name", "crashed"), [("SIGSEGV", True), ("SIGTERM", False)])
def test_a_crash_is_not_gone_on_with(name: str, crashed: bool) -> None:
    program = (
        f"import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.{name})\ntime.sleep(60)"
    )
    with pytest.raises(WorkError, match=f"rank 1 was killed by signal.*{name}") as raised:
        launch(program)
    assert ("native code crashed; with PYTHONFAULTHANDLER=1 it says where" in str(raised.value)) is crashed
    assert raised.value.resumable is not crashed


def assert_ended(pids: Path) -> None:
    for file in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_ranks_that_hang_are_ended_in_time(tmp_path: Path) -> None:
    program = (
        f"import os, time; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()));"
        "time.sleep(0 if os.environ['RANK'] == '0' else 60)"
    )
    with pytest.raises(WorkError, match=r"rank 1 did not end within 1 s and was killed; --timeout sets the limit"):
        launch(program, timeout_s=1)
    assert_ended(tmp_path)


def test_an_interrupt_is_passed_on_once_and_waited_for(tmp_path: Path) -> None:
    # The ranks write what they have when they are interrupted, as measurements do.
    program = (
        "import os, signal, sys, time\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "try:\n"
        "    if os.environ['RANK'] == '1': open(path, 'w').close()\n"
        f"    while not os.path.exists({str(tmp_path)!r} + '/1'): time.sleep(0.01)\n"
        "    if os.environ['RANK'] == '0': os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.2); open(path, 'a').write('kept'); sys.exit(3)"
    )
    with pytest.raises(KeyboardInterrupt):
        launch(program)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["kept", "kept"]


def test_a_signal_while_polling_leaves_ranks_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises between poll's lock and its release would leave the launcher waiting for ever."""

    def poll(process: subprocess.Popen[bytes]) -> int | None:
        lock = process._waitpid_lock  # type: ignore[attr-defined]
        lock.acquire()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGTERM)
        lock.release()
        return original(process)

    original = subprocess.Popen.poll
    monkeypatch.setattr(subprocess.Popen, "poll", poll)
    with signals_raise(), pytest.raises(Terminated):
        launch("import time; time.sleep(60)")


def test_a_program_that_does_not_start_is_named() -> None:
    with pytest.raises(WorkError, match="cannot start rank 0 as /no/such/python"):
        launch_ranks(["/no/such/python"], ranks=2, device="cpu", timeout_s=5)


def test_ranks_do_not_survive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """A rank asks the kernel to end it with its launcher, which cannot do so itself when it is killed."""
    rank = (
        "import os, time; from paradl_bench.ranks.rank_place import die_with_launcher as die; die();"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    start = f"launch_ranks([sys.executable, '-c', {rank!r}], ranks=2, device='cpu', timeout_s=60)"
    program = f"import sys; from paradl_bench.ranks.launcher import launch_ranks; {start}"
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
        launcher.kill()
    wait_for(lambda: not any(alive(int((tmp_path / name).read_text())) for name in "01"))


def test_a_rank_without_its_launcher_ends_at_once() -> None:
    """Whatever its command: it is the program that looks, before torch is loaded and a model built."""
    of_a_rank = {"PARADL_LAUNCHER": "own", "PARADL_LAUNCHER_PID": "1"}
    command = [sys.executable, "-m", "paradl_bench", "doctor", "--json"]
    ended = subprocess.run(command, env=os.environ | of_a_rank, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "the launcher of this rank is gone" in ended.stderr


def wait_for(condition: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
