"""What makes nodes of one job unlike that should be alike: clocks, topology, network interfaces; torch-free.

Read from sysfs and from ``nvidia-smi``; on a node without GPUs the latter is left out. What changes from one moment to
the next (a clock's present rate, a temperature) is left out too, since no two nodes agree on it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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
    """One thing that was found on a node.

    Attributes:
        found: None for a tool or package that is not there.
        text: the whole of what ``found`` is the digest of, where it has many lines.
    """

    name: str
    found: str | None
    text: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a job.

    Attributes:
        ranks: of the job that ran there.
        clock: of its first rank, against rank 0's.
    """

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
        """Which nodes say what, in words."""
        return "; ".join(
            f"{'missing' if value is None else value} on {', '.join(hosts)}" for value, hosts in self.found
        )


class JobNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a job (file ``nodes.json``), and in what they differ."""

    nodes: tuple[Node, ...]
    differences: tuple[Difference, ...]


def node_findings(root: Path = SYS) -> tuple[NodeFinding, ...]:
    """Clocks, topology and network interfaces of this node, as far as it has them and says so.

    Args:
        root: where sysfs is mounted.
    """
    governor = _line(root / "devices/system/cpu/cpu0/cpufreq/scaling_governor")
    fastest = _line(root / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    turbo = _line(root / "devices/system/cpu/intel_pstate/no_turbo")
    source = _line(root / "devices/system/clocksource/clocksource0/current_clocksource")
    found = (
        NodeFinding(name="clock source", found=source),
        NodeFinding(name="CPU governor", found=governor),
        NodeFinding(name="CPU clock at most", found=f"{int(fastest) / 1e6:g} GHz" if fastest else None),
        NodeFinding(name="CPU turbo", found={"0": "on", "1": "off"}.get(turbo or "")),
        NodeFinding(name="NUMA nodes", found=_line(root / "devices/system/node/online")),
        NodeFinding(name="network interfaces", found=", ".join(_interfaces(root)) or None),
        NodeFinding(name="InfiniBand ports", found=", ".join(_infiniband(root)) or None),
        *_gpus(),
    )
    return tuple(each for each in found if each.found is not None)


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


def _gpus() -> tuple[NodeFinding, ...]:
    query = ["--query-gpu=" + ",".join(_GPU_FIELDS), "--format=csv,noheader"]
    gpus, topology = _nvidia_smi(*query), _nvidia_smi("topo", "-m")
    if gpus is None and topology is None:
        return ()
    digest = None if topology is None else f"{len(topology.splitlines())} lines, digest {_digest(topology)}"
    return (
        NodeFinding(name="GPUs (" + ", ".join(_GPU_FIELDS) + ")", found=_counted(gpus), text=gpus or ""),
        NodeFinding(name="topology (nvidia-smi topo -m)", found=digest, text=topology or ""),
    )


def _nvidia_smi(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _counted(text: str | None) -> str | None:
    """Equal lines once, with their number."""
    if text is None:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]


def calendar_lines(nodes: Sequence[Node]) -> list[str]:
    """Nodes whose calendar is a second or more from rank 0's, a line each: stamps of logs are of seconds."""
    return [
        f"the calendar of {node.host} is {format_seconds(abs(node.clock.wall_offset_s))}"
        f" {'ahead of' if node.clock.wall_offset_s > 0 else 'behind'} rank 0's (within"
        f" {format_seconds(node.clock.clock_error_s)}): logs and files of the two are stamped out of order; see to its"
        " chronyd or ntpd"
        for node in nodes
        if abs(node.clock.wall_offset_s) - node.clock.clock_error_s >= 1
    ]


def lines_of_nodes(directory: Path) -> list[str]:
    """What is worth saying of the nodes of a measurement, a line each; empty where they agree, or nobody noted them.

    Raises:
        UserError: a file that is not valid.
    """
    path = directory / NODES_NAME
    if not path.exists():
        return []
    job = read_json(path, JobNodes)
    lines = [f"its {len(job.nodes)} nodes differ in {each.name}: {each.sides}" for each in job.differences]
    return lines + calendar_lines(job.nodes)


def differences(nodes: Sequence[Node]) -> tuple[Difference, ...]:
    """What nodes do not agree on, in the order in which it was looked for."""
    by_node: list[Mapping[str, str | None]] = [{each.name: each.found for each in node.findings} for node in nodes]
    found = []
    for name in dict.fromkeys(name for values in by_node for name in values):
        groups: dict[str | None, list[str]] = {}
        for node, values in zip(nodes, by_node, strict=True):
            groups.setdefault(values.get(name), []).append(node.host)
        if len(groups) > 1:
            ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
            found.append(Difference(name=name, found=tuple((value, tuple(hosts)) for value, hosts in ordered)))
    return tuple(found)
