"""Layouts of ranks on emulated nodes, and what passes between nodes that are up; no torch."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from host_network import held, needs_nodes

from paradl_bench.cli import group
from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.ranks.emulated_nodes.cluster import EmulatedCluster, emulated_cluster, nodes_of_rank
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout, layout_of_options
from paradl_bench.ranks.emulated_nodes.links import MTU_BYTES, burst_bytes, packet_bytes
from paradl_bench.ranks.emulated_nodes.time_slices import SHORT_MS

RATE = 25e6  # 200 Mbit/s
LAYOUT = NodeLayout(nodes=3, ranks_per_node=2, link_bytes_per_s=RATE)


@pytest.mark.parametrize(
    ("nodes", "per_node", "ranks", "expected"),
    [("2", 2, 4, "2x2"), ("2", None, 4, "2x2"), ("4", None, 4, "4x1"), ("1", None, 3, "1x3"), ("3", 2, None, "3x2")],
)
def test_ranks_are_shared_out_over_nodes(nodes: int, per_node: int | None, ranks: int | None, expected: str) -> None:
    layout = layout_of_options(nodes, per_node, "200Mbit/s", ranks=ranks)
    assert layout is not None
    assert (str(layout), layout.link_bytes_per_s) == (expected, RATE)
    places = [(layout.node_of(rank), layout.local_rank(rank)) for rank in range(layout.ranks)]
    assert places == [(node, local) for node in range(layout.nodes) for local in range(layout.ranks_per_node)]


def test_no_nodes_are_emulated_where_none_are_asked_for() -> None:
    assert layout_of_options(None, 2, None, ranks=4) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, None, "1Gbit/s", 4), "--link-bandwidth is for emulated nodes: give --nodes"),
        (("2", None, None, 4), "give the rate of each node's link as well, as --link-bandwidth 1Gbit/s"),
        (("3", None, "1Gbit/s", 4), "which 4 ranks do not fill equally: say with --ranks-per-node"),
        (("2", None, None, 1), "--nodes 2: the run has 1 rank, fewer than nodes: give --nodes 1, or more ranks"),
        (("5", 1, "1Gbit/s", 4), "--nodes 5: the run has 4 ranks, fewer than nodes: give --nodes 4"),
        (("2", None, "1Gbit/s", None), "--nodes 2: say with --ranks-per-node how many"),
        (("2", 3, "1Gbit/s", 4), "--nodes 2 --ranks-per-node 3 hold 6 ranks; the run takes 4"),
        (("2", 2, "1", 4), "--link-bandwidth: '1' is no rate"),
        (("2", 2, "1bit/s", 4), "--link-bandwidth 1bit/s: give a rate from 1kB/s to 100GB/s"),
        (("2", 2, "999999999Gbit/s", 4), "give a rate from 1kB/s to 100GB/s"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: tuple[str | None, int | None, str | None, int | None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        layout_of_options(*options[:3], ranks=options[3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy serial --nodes 2", "--nodes 2: the run has 1 rank, fewer than nodes"),
        ("--strategy d2 --ranks-per-node 1", "--ranks-per-node is for --exchange leader"),
        (
            "--strategy d2 --emulate .",
            "--emulate . is a directory; give a file: what predict ghost wrote",
        ),
    ],
)
def test_train_refuses_options_of_nodes_and_emulation_in_a_line(words: str, message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(group, ["train", "vgg11", "--batch", "4", *words.split(), "-o", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_nodes_have_addresses_of_their_own() -> None:
    layout = NodeLayout(nodes=600, ranks_per_node=1, link_bytes_per_s=RATE)
    addresses = {layout.address(node) for node in range(600)}
    assert len(addresses) == 600
    assert not {"10.0.0.0", "10.0.255.255"} & addresses
    assert all(socket.inet_aton(address) for address in addresses)


@pytest.mark.parametrize(
    ("link_bytes_per_s", "packet"),
    [(1e3, 9014), (18e6, 9014), (25e6, 12_500), (125e6, 62_500), (1e9, 65_536), (1e11, 65_536)],
)
def test_packets_hold_half_a_millisecond_between_frame_and_offload_size(link_bytes_per_s: float, packet: int) -> None:
    assert packet_bytes(link_bytes_per_s) == packet
    # A bucket that is less deep than a packet would have it cut into frames.
    assert burst_bytes(link_bytes_per_s) == 2 * packet


def connected(cluster: EmulatedCluster, sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between the nodes of two ranks, by the nodes' addresses; both of its ends."""
    with cluster.entered(receiver):
        listener = socket.create_server((cluster.layout.address(cluster.layout.node_of(receiver)), 0))
    with cluster.entered(sender):
        out = socket.socket()
    out.bind((cluster.layout.address(cluster.layout.node_of(sender)), 0))
    with listener:
        out.connect(listener.getsockname())
        return out, listener.accept()[0]


def move(size: int, *connections: tuple[socket.socket, socket.socket]) -> float:
    """Seconds until so many bytes have come out of each connection, all of them at once; closes them."""
    threads = []
    for sender, receiver in connections:
        threads.append(threading.Thread(target=sender.sendall, args=(bytes(size),)))
        threads.append(threading.Thread(target=receive, args=(receiver, size)))
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    for end in itertools.chain(*connections):
        end.close()
    return seconds


def receive(connection: socket.socket, size: int) -> None:
    while size:
        size -= len(connection.recv(min(size, 1 << 16)))


def sent_bytes(cluster: EmulatedCluster, rank: int) -> dict[str, int]:
    """Bytes that each device of a rank's node has sent, as ``ip -s link`` counts them."""
    with cluster.entered(rank):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(counts.split()[8]) for name, counts in (line.split(":") for line in lines)}


def sent_packets(cluster: EmulatedCluster, rank: int) -> int:
    """Packets that the link's device on a rank's node has sent; those that frames are cut from later count once."""
    with cluster.entered(rank):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return next(int(line.split(":")[1].split()[9]) for line in lines if line.split(":")[0].strip() == "eth0")


@needs_nodes
def test_transfers_take_the_link_between_nodes_and_loopback_within() -> None:
    size = 2_000_000
    with emulated_cluster(LAYOUT) as cluster:
        assert cluster is not None
        before = sent_bytes(cluster, 0)
        move(size, connected(cluster, 0, 1))
        inside = sent_bytes(cluster, 0)
        # Both ranks have the address of the node's link, and the kernel still delivers through the loopback.
        assert inside["lo"] - before["lo"] >= size
        assert inside["eth0"] == before["eth0"]
        seconds = move(size, connected(cluster, 1, 2))
        across = sent_bytes(cluster, 0)
        assert across["eth0"] - inside["eth0"] >= size
        assert across["lo"] == inside["lo"]
        assert seconds >= (size - burst_bytes(RATE)) / RATE


@needs_nodes
def test_frames_pass_a_link_many_at_a_time() -> None:
    size = 20_000_000
    with emulated_cluster(NodeLayout(nodes=2, ranks_per_node=1, link_bytes_per_s=125e6)) as cluster:
        assert cluster is not None
        before = sent_packets(cluster, 0)
        move(size, connected(cluster, 0, 1))
        packets = sent_packets(cluster, 0) - before
    # Six frames fill a packet at this rate; a connection begins with fewer.
    assert size / packet_bytes(125e6) <= packets < size / (4 * MTU_BYTES)


@needs_nodes
def test_a_nodes_link_limits_receiving_too() -> None:
    size = 1_000_000
    with emulated_cluster(LAYOUT) as cluster:
        assert cluster is not None
        seconds = move(size, connected(cluster, 0, 4), connected(cluster, 2, 4))
    # Each sender's own link would let its part through in half of that.
    assert seconds >= (2 * size - burst_bytes(RATE)) / RATE


@needs_nodes
def test_uplinks_bound_what_passes_between_racks_alone() -> None:
    size, uplink = 1_000_000, 6.25e6
    layout = layout_of_options("2x2", 1, "200Mbit/s,50Mbit/s", ranks=4)
    with emulated_cluster(layout) as cluster:
        assert cluster is not None
        inside = move(size, connected(cluster, 0, 1))
        between = move(size, connected(cluster, 0, 2))
        # Each pair has its own nodes' links, and both racks' uplinks in common.
        shared = move(size, connected(cluster, 0, 2), connected(cluster, 1, 3))
        words = cluster.record.words
    assert inside >= (size - burst_bytes(RATE)) / RATE
    assert between >= (size - burst_bytes(uplink)) / uplink
    assert shared >= (2 * size - burst_bytes(uplink)) / uplink
    # Its own rack's link is four times as fast, which no delay of a busy host makes up for.
    assert inside < between
    assert words.startswith("2 x 2 x 1 ranks, nodes with links of 25.0 MB/s, racks with uplinks of 6.25 MB/s (tbf at ")
    assert "burst 25000 B, of uplinks 18028 B, mtu 9000" in words


@needs_nodes
def test_the_hosts_network_is_untouched_and_nodes_vanish_afterwards() -> None:
    mine = os.readlink("/proc/thread-self/ns/net")
    with emulated_cluster(LAYOUT) as cluster:
        assert cluster is not None
        names = {os.readlink(f"/proc/self/fd/{each.descriptor}") for each in cluster.namespaces}
        assert len(names) == LAYOUT.nodes
        assert mine not in names
        assert held(names) == names
        assert os.readlink("/proc/thread-self/ns/net") == mine
        assert not {"switch", "node0", "node1"} & {name for _, name in socket.if_nameindex()}
    assert not held(names)


@needs_nodes
def test_ranks_know_their_node_and_the_record_its_link_shaping(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
    with emulated_cluster(LAYOUT) as cluster:
        assert cluster is not None
        # Other nodes that are up end theirs when they like.
        assert cluster.record.time_slice_ms <= SHORT_MS or not os.access(setting, os.W_OK)
        told = [cluster.variables(rank) for rank in range(6)]
    assert [each["PARADL_EMULATED_NODE"] for each in told] == ["node0", "node0", "node1", "node1", "node2", "node2"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1"] * 3
    assert {each["GLOO_SOCKET_IFNAME"] for each in told} == {"eth0"}
    monkeypatch.setenv("PARADL_EMULATED_NODES", told[0]["PARADL_EMULATED_NODES"])
    record = nodes_of_rank()
    assert record is not None
    assert (record.nodes, record.ranks_per_node, record.link_bytes_per_s, record.one_level) == (3, 2, RATE, "")
    assert record.shaping.startswith("tbf at both ends, packets of 12500 B, burst 25000 B, mtu 9000, ")


@needs_nodes
def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with (
        pytest.raises(WorkError, match="need the program ip, which was not found: install iproute2"),
        emulated_cluster(LAYOUT),
    ):
        pass


@needs_nodes
def test_a_rate_refused_by_tc_is_reported_in_one_line() -> None:
    slow = NodeLayout(nodes=1, ranks_per_node=1, link_bytes_per_s=0.01)
    with pytest.raises(WorkError, match=r"emulated nodes: tc failed: \S") as it, emulated_cluster(slow):
        pass
    assert "\n" not in str(it.value)


ONE_LEVEL = """
from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
with emulated_cluster(NodeLayout(nodes=2, ranks_per_node=2, link_bytes_per_s=1e6)) as cluster:
    assert set(cluster.variables(3)) == {"PARADL_EMULATED_NODES"}
    print(cluster.record.words)
"""


def test_without_namespace_rights_one_level_is_used_and_recorded() -> None:
    command = [sys.executable, "-c", ONE_LEVEL]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv of util-linux, which takes root's rights away, is not installed")
        command = ["setpriv", "--bounding-set=-sys_admin", *command]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    words = "2 x 2 ranks, nodes on one level (this process may not make network namespaces, as root may)"
    # Who may not make namespaces may still be root, and set the time slice.
    assert result.stdout.strip() in (words, f"{words}, time slices of {SHORT_MS} ms")
    assert result.stderr == f"emulated: {result.stdout}"
