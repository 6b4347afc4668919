"""What makes nodes of one job unlike that should be alike: clocks, topology, network interfaces; torch-free.

Read from sysfs and from ``nvidia-smi``; on a node without GPUs the latter is left out. What changes from one moment to
the next (a clock's present rate, a temperature) is left out too, since no two nodes agree on it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paradl_bench.core.files.storage import read_json
from paradl_bench.core.units import format_seconds
from paradl_bench.records.hosts.host_record import RankHost

SYS = Path("/sys")
NODES_NAME = "nodes.json"
_TIMEOUT_S = 30
_GPU_FIELDS = (
    "name",
    "clocks.max.sm",
    "clocks.max.memory",
    "power.limit",
    "persistence_mode",
    "ecc.mode.current",
)


class NodeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found on a node, or None; of what has many lines ``found`` is a digest, and ``text`` all."""

    name: str
    found: str | None
    text: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a job, the ranks that ran there, and the clock of its first rank against rank 0's."""

    host: str
    ranks: tuple[int, ...]
    clock: RankHost
    findings: tuple[NodeFinding, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something in which nodes differ: which of them say what, the most common first."""

    name: str
    found: tuple[tuple[str | None, tuple[str, ...]], ...]

    @property
    def sides(self) -> str:
        """In words."""
        return "; ".join(
            f"{'missing' if value is None else value} on {', '.join(hosts)}" for value, hosts in self.found
        )


class JobNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a job (file ``nodes.json``), and in what they differ."""

    nodes: tuple[Node, ...]
    differences: tuple[Difference, ...]


def node_findings(root: Path = SYS) -> tuple[NodeFinding, ...]:
    """Clocks, topology and network interfaces of this node, as far as sysfs, mounted at ``root``, says so."""
    system = root / "devices/system"
    fastest = _line(system / "cpu/cpu0/cpufreq/cpuinfo_max_freq")
    turbo = _line(system / "cpu/intel_pstate/no_turbo")
    values = {
        "clock source": _line(system / "clocksource/clocksource0/current_clocksource"),
        "CPU governor": _line(system / "cpu/cpu0/cpufreq/scaling_governor"),
        "CPU clock at most": f"{int(fastest) / 1e6:g} GHz" if fastest else None,
        "CPU turbo": {"0": "on", "1": "off"}.get(turbo or ""),
        "NUMA nodes": _line(system / "node/online"),
        "network interfaces": ", ".join(_interfaces(root)),
        "InfiniBand ports": ", ".join(_infiniband(root)),
    }
    return (*(NodeFinding(name=name, found=value) for name, value in values.items() if value), *_gpus())


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _interfaces(root: Path) -> Iterator[str]:
    """Interfaces with a device behind them, as ``eth0 up 25000 Mb/s MTU 1500 (mlx5_core)``."""
    for path in sorted((root / "class/net").glob("*")):
        driver = path / "device/driver"
        if not driver.exists():
            continue
        speed = _line(path / "speed")
        rate = f" {speed} Mb/s" if speed and speed.isdigit() else ""
        yield f"{path.name} {_line(path / 'operstate')}{rate} MTU {_line(path / 'mtu')} ({driver.resolve().name})"


def _infiniband(root: Path) -> Iterator[str]:
    for port in sorted((root / "class/infiniband").glob("*/ports/*")):
        state = (_line(port / "state") or "").rpartition(": ")[2]
        yield f"{port.parents[1].name}:{port.name} {state} {_line(port / 'rate')} ({_line(port / 'link_layer')})"


def _gpus() -> Iterator[NodeFinding]:
    gpus = _nvidia_smi("--query-gpu=" + ",".join(_GPU_FIELDS), "--format=csv,noheader")
    if gpus is not None:
        # Equal lines once, with their number.
        lines = [line.strip() for line in gpus.splitlines() if line.strip()]
        counted = "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))
        yield NodeFinding(name="GPUs (" + ", ".join(_GPU_FIELDS) + ")", found=counted, text=gpus)
    topology = _nvidia_smi("topo", "-m")
    if topology is not None:
        digest = hashlib.sha256(" ".join(topology.split()).encode()).hexdigest()[:12]
        words = f"{len(topology.splitlines())} lines, digest {digest}"
        yield NodeFinding(name="topology (nvidia-smi topo -m)", found=words, text=topology)


def _nvidia_smi(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def calendar_lines(nodes: Sequence[Node]) -> list[str]:
    """Nodes whose calendar is a second or more from rank 0's, a line each: stamps of logs are of seconds."""
    return [
        f"the calendar of {node.host} is {format_seconds(abs(node.clock.wall_offset_s))}"
        f" {'ahead of' if node.clock.wall_offset_s > 0 else 'behind'} rank 0's (within"
        f" {format_seconds(node.clock.clock_error_s)}), so time stamps of logs and files are out of order; check"
        " its chronyd or ntpd"
        for node in nodes
        if abs(node.clock.wall_offset_s) - node.clock.clock_error_s >= 1
    ]


def lines_of_nodes(directory: Path) -> list[str]:
    """What is worth saying of a measurement's nodes, a line each; raises UserError where their file is broken."""
    path = directory / NODES_NAME
    if not path.exists():
        return []
    job = read_json(path, JobNodes)
    differ = f"its {len(job.nodes)} nodes differ in"
    lines = [f"{differ} {difference.name}: {difference.sides}" for difference in job.differences]
    return lines + calendar_lines(job.nodes)


def differences(nodes: Sequence[Node]) -> tuple[Difference, ...]:
    """What nodes do not agree on, in the order in which it was looked for."""
    by_host = {node.host: {finding.name: finding.found for finding in node.findings} for node in nodes}
    unlike = []
    for name in dict.fromkeys(name for values in by_host.values() for name in values):
        groups: dict[str | None, list[str]] = {}
        for host, values in by_host.items():
            groups.setdefault(values.get(name), []).append(host)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
            unlike.append(Difference(name=name, found=tuple((value, tuple(hosts)) for value, hosts in ordered)))
    return tuple(unlike)
