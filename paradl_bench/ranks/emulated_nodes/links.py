"""Links between namespaces, made and shaped with iproute2's ``ip`` and ``tc``.

Every node has a pair of virtual Ethernet devices, one end of it inside, the other a port of a bridge. Every rack has a
bridge of its own, which such a pair joins to one bridge of all racks. Bridges lie in a namespace of their own: nothing
is added to the host's network, and its firewall sees nothing. A token bucket (tc-tbf(8)) holds either end to the link's
rate: the node's or rack's end what it sends, the other end what it receives. Queues are long enough
that nothing is dropped, as on fabrics with credits. What ranks of one node send each other goes to the node's own
address, which the kernel delivers through its loopback, past the token bucket.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from paradl_bench.core.errors import WorkError
from paradl_bench.ranks.emulated_nodes.layout import INTERFACE, TOP_SWITCH, NodeLayout
from paradl_bench.ranks.emulated_nodes.namespaces import Namespace

MTU_BYTES = 9000
"""Jumbo frames, as on clusters: fewer packets for the cores that ranks compute on."""
_HEADER_BYTES = 14
# Segmentation offload: frames pass the stack many at a time, as one packet. Cut into frames of their own they take four
# times as much of the cores, of which 16 ranks then have none left: the cores, not the links, set what links carry.
_MOST_PACKET_BYTES, _PACKET_S = 64 * 1024, 500e-6
# A token bucket cuts what is larger than it is deep; the second packet is for a timer that is late.
_BURST_PACKETS = 2
_QUEUE_BYTES = 256 * 1024**2
# Any namespace may have it, and where nothing is dropped others do nothing better. BBR, some hosts' default, stops for
# 200 ms every ten seconds to probe the link.
_CONGESTION_CONTROL = "reno"
_SYSCTL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_TIMEOUT_S = 60


def packet_bytes(link_bytes_per_s: float) -> int:
    """What passes a link in one piece: frames of half a millisecond, at least one and at most what offload takes."""
    return min(max(MTU_BYTES + _HEADER_BYTES, round(link_bytes_per_s * _PACKET_S)), _MOST_PACKET_BYTES)


def burst_bytes(link_bytes_per_s: float) -> int:
    """What passes a link unshaped after a pause: the depth of its token bucket, two packets."""
    return _BURST_PACKETS * packet_bytes(link_bytes_per_s)


def connect(layout: NodeLayout, switch: Namespace, nodes: Sequence[Namespace]) -> str:
    """Join the nodes, and racks of them, each by a link of its own; returns how links were shaped, in words.

    Args:
        switch: the namespace of all switches.

    Raises:
        WorkError: ``ip`` or ``tc`` is missing, or failed (the kernel lacks a sort of device, say).
    """
    ip, tc = _program("ip"), _program("tc")
    switches = dict.fromkeys(map(layout.switch_of, range(layout.nodes)))
    for name in dict.fromkeys((TOP_SWITCH, *switches)):
        # A bridge without spanning tree forwards at once.
        _batch(ip, switch, [f"link add name {name} type bridge stp_state 0 mcast_snooping 0", *_up(name)])
    packet, shaped = packet_bytes(layout.link_bytes_per_s), _bucket(layout.link_bytes_per_s)
    control = ""
    for index, node in enumerate(nodes):
        port = layout.name(index)
        lines = [
            f"link add name {port} mtu {MTU_BYTES} type veth peer name {INTERFACE} mtu {MTU_BYTES}"
            f" netns /proc/self/fd/{node.descriptor}",
            f"link set dev {port} master {layout.switch_of(index)} gso_max_size {packet}",
            *_up(port),
        ]
        _batch(ip, switch, lines, keep=[node.descriptor])
        lines = [
            f"address add {layout.address(index)}/16 dev {INTERFACE}",
            f"link set dev {INTERFACE} gso_max_size {packet}",
            *_up(INTERFACE),
            *_up("lo"),
        ]
        _batch(ip, node, lines)
        _batch(tc, switch, [f"qdisc add dev {port} root {shaped}"])
        _batch(tc, node, [f"qdisc add dev {INTERFACE} root {shaped}"])
        control = _set_congestion_control(node)
    burst = f"{burst_bytes(layout.link_bytes_per_s)} B"
    if layout.racks is not None:
        _join_racks(ip, tc, switch, switches, layout.racks.uplink_bytes_per_s)
        burst += f", of uplinks {burst_bytes(layout.racks.uplink_bytes_per_s)} B"
    return f"tbf at both ends, packets of {packet} B, burst {burst}, mtu {MTU_BYTES}, tcp {control}"


def _join_racks(ip: str, tc: str, switch: Namespace, racks: Iterable[str], uplink_bytes_per_s: float) -> None:
    """Join the switches of racks to that of all. What is larger than an uplink's bucket is cut into frames there."""
    for rack in racks:
        # Named by whose bridge the other end is on.
        to_all, to_rack = f"{rack}-up", f"{rack}-down"
        lines = [
            f"link add name {to_all} mtu {MTU_BYTES} type veth peer name {to_rack} mtu {MTU_BYTES}",
            f"link set dev {to_all} master {rack}",
            f"link set dev {to_rack} master {TOP_SWITCH}",
            *_up(to_all),
            *_up(to_rack),
        ]
        _batch(ip, switch, lines)
        _batch(tc, switch, [f"qdisc add dev {end} root {_bucket(uplink_bytes_per_s)}" for end in (to_all, to_rack)])


def _bucket(bytes_per_s: float) -> str:
    return f"tbf rate {round(bytes_per_s * 8)}bit burst {burst_bytes(bytes_per_s)} limit {_QUEUE_BYTES}"


def _up(device: str) -> list[str]:
    # Without an address of IPv6, which nobody here speaks.
    return [f"link set dev {device} addrgenmode none", f"link set dev {device} up"]


def _program(name: str) -> str:
    # A user's PATH may lack where administrators' programs lie.
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise WorkError(f"emulated nodes need the program {name}, which was not found: install iproute2")
    return path


def _batch(program: str, namespace: Namespace, lines: Iterable[str], *, keep: Sequence[int] = ()) -> None:
    """Run commands of ``ip`` or ``tc`` inside a namespace."""
    with namespace.entered():
        result = subprocess.run(
            [program, "-batch", "-"],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            pass_fds=tuple(keep),
            check=False,
        )
    if result.returncode:
        said = next((line.strip() for line in result.stderr.splitlines() if line.strip()), "it gives no reason")
        raise WorkError(f"emulated nodes: {Path(program).name} failed: {said}")


def _set_congestion_control(node: Namespace) -> str:
    with node.entered():
        # A container may hold the setting read-only; what holds is recorded either way.
        with contextlib.suppress(OSError):
            _SYSCTL.write_text(_CONGESTION_CONTROL)
        try:
            return _SYSCTL.read_text().strip()
        except OSError:
            return "unknown"
