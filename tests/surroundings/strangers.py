"""Processes of another user, which try to get into a run, and a network that they share with that run alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paradl_bench.ranks.emulated_nodes.namespaces import NoNamespaces, new_namespace

# What is imported is loaded before, since another user may not be able to read this Python.
_BECOME = """
import glob, json, os, pickle, socket, sys, time, datetime
import torch
import torch.distributed as dist
torch.zeros(1)
socket.create_connection  # whose codec for names is a module of its own
"a".encode("idna")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("ready", flush=True)
"""

JOINS_AS_RANK_1 = """
class Evil:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
while True:
    try:
        store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, datetime.timedelta(seconds=20))
        dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=datetime.timedelta(seconds=20))
        box = [Evil()]
        while True:
            dist.all_gather_object([None, None], Evil())
            dist.broadcast_object_list(box, src=1)
    except Exception as error:
        print(type(error).__name__, flush=True)
        time.sleep(0.05)
"""

WRITES_KEYS = """
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, datetime.timedelta(seconds=60))
while not any("paradl/0" in key for key in store.list_keys()):
    time.sleep(0.05)
print(store.get("paradl/0").hex(), flush=True)
store.set("paradl/1", b"\\0" * 96)
time.sleep(60)
"""

PRIES = """
# Opens whatever it can of other users' processes, and talks to all that listen here as gloo's ranks do: a number first.
opened, end = set(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/environ"):
        try:
            if os.stat(path.split("/fd")[0].removesuffix("/environ")).st_uid != 65534:
                open(path, "rb").read(1)
                opened.add(path)
        except OSError:
            pass
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    for row in rows:
        if row[3] == "0A" and row[1].startswith("0100007F"):
            for number in range(4):
                try:
                    with socket.create_connection(("127.0.0.1", int(row[1][9:], 16)), 0.2) as caller:
                        caller.sendall(number.to_bytes(8, "little") + b"\\xff" * 64)
                except OSError:
                    pass
print(json.dumps(sorted(opened)), flush=True)
"""


@contextmanager
def network_of_its_own() -> Iterator[None]:
    """A loopback that only what is started inside reaches: PRIES would end the runs of tests beside this one."""
    try:
        with new_namespace() as namespace, namespace.entered():
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
    except NoNamespaces as error:
        pytest.skip(str(error))


@contextmanager
def stranger(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that runs one of the programs; only root can start one."""
    if os.getuid():
        pytest.skip("only root can become another user")
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME + textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
