"""A Slurm of our own on this host: munged, slurmctld and two slurmd, which are two nodes of one core each.

Everything lies in one temporary directory and listens on ports of its own; nothing of an installed Slurm is touched,
and all of it is ended with the context.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from host_network import free_ports

NODES = ("node1", "node2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "srun", "scontrol", "sinfo")
_START_S = 60.0

_CONFIGURATION = """\
ClusterName=paradl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=20
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=5
MailProg=/bin/true
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=60 State=UP
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A running one; ``variables`` make Slurm's commands speak to it."""

    folder: Path
    variables: dict[str, str]

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=os.environ | self.variables, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def logs(self) -> str:
        """The last lines of the daemons, for whoever has to find out why."""
        texts = (path.read_text(errors="replace").splitlines()[-15:] for path in sorted(self.folder.glob("*.log")))
        return "\n".join(line for lines in texts for line in lines)


class CannotStart(Exception):
    """Why there is no Slurm here."""


def why_not() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"{missing[0]} is not installed (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmd has to be root to start jobs"
    return None


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start one in an empty directory; it is ended however the body ends.

    Raises:
        CannotStart: the nodes did not come up; the daemons' last lines are in the message.
    """
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(host=host, folder=folder, ports=free_ports(4)))
    (folder / "state").mkdir()
    cluster = SlurmCluster(folder=folder, variables={"SLURM_CONF": str(configuration), "PATH": _search_path()})
    started: list[subprocess.Popen[bytes]] = []
    try:
        _start_munge(folder, started)
        _start(cluster, started, "slurmctld", "-D", "-c")
        cores = sorted(os.sched_getaffinity(0))
        for index, node in enumerate(NODES):
            (folder / f"spool-{node}").mkdir()
            # Each node has a core, as ranks on nodes of their own would; steps inherit it.
            _start(cluster, started, "slurmd", "-D", "-N", node, core=cores[index % len(cores)])
        _wait_for_nodes(cluster)
        yield cluster
    finally:
        _end(cluster, started)


def _search_path() -> str:
    # Daemons lie where a user's PATH need not lead.
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _start_munge(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    private = folder / "munge"
    private.mkdir(mode=0o700)
    key = private / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    names = {name: private / name for name in ("socket", "pid", "log", "seed")}
    options = [
        f"--key-file={key}",
        f"--socket={names['socket']}",
        f"--pid-file={names['pid']}",
        f"--log-file={names['log']}",
        f"--seed-file={names['seed']}",
    ]
    # Forced, since directories above ours may be writable by others, which it dislikes.
    command = [shutil.which("munged", path=_search_path()) or "munged", "--foreground", "--force", *options]
    started.append(_popen(command, dict(os.environ), folder / "munged.log", core=None))
    deadline = time.monotonic() + _START_S
    while not names["socket"].exists():
        if time.monotonic() > deadline or started[-1].poll() is not None:
            raise CannotStart(f"munged: {(folder / 'munged.log').read_text(errors='replace')[-500:]}")
        time.sleep(0.05)


def _start(
    cluster: SlurmCluster, started: list[subprocess.Popen[bytes]], program: str, *options: str, core: int | None = None
) -> None:
    path = shutil.which(program, path=_search_path()) or program
    log = cluster.folder / f"{program}-{len(started)}.out"
    started.append(_popen([path, *options], os.environ | cluster.variables, log, core=core))


def _popen(command: list[str], variables: dict[str, str], log: Path, *, core: int | None) -> subprocess.Popen[bytes]:
    before = os.sched_getaffinity(0)
    with open(log, "wb") as stream:
        try:
            if core is not None:
                # Inherited by the child; nothing runs between fork and exec.
                os.sched_setaffinity(0, {core})
            return subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, process_group=0
            )
        finally:
            os.sched_setaffinity(0, before)


def _wait_for_nodes(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        states = cluster.ask("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
        if {f"{node} idle" for node in NODES} <= set(states):
            return
        time.sleep(0.2)
    raise CannotStart(f"the nodes of Slurm did not come up in {_START_S:g} s: {cluster.logs()[-1500:]}")


def _end(cluster: SlurmCluster, started: list[subprocess.Popen[bytes]]) -> None:
    if len(started) > 1:
        cluster.ask("scancel", "--full", "--user", str(os.getuid()))
        deadline = time.monotonic() + 20
        while cluster.ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
    for process in reversed(started):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in reversed(started):
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
