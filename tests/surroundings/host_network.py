"""Whether nodes can be emulated here, which network namespaces somebody holds, and which ports are free."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from paradl_bench.ranks.emulated_nodes.namespaces import NoNamespaces, new_namespace


def _hindrance() -> str:
    if not all(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") for name in ("ip", "tc")):
        return "ip and tc of iproute2 are not installed"
    try:
        with new_namespace():
            return ""
    except NoNamespaces as error:
        return str(error)


_WHY = _hindrance()
needs_nodes = pytest.mark.skipif(bool(_WHY), reason=f"no nodes can be emulated: {_WHY}")


def namespaces_of(*pids: int) -> set[str]:
    """Network namespaces of processes other than this one's own, as ``net:[4026532246]``."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def held(namespaces: set[str]) -> set[str]:
    """Those of some namespaces that a process is in, has open or has mounted: the kernel frees the others."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        links = [process / "ns" / "net"]
        with contextlib.suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
    mounted = Path("/proc/self/mountinfo").read_text()
    return {name for name in namespaces if name in found or name in mounted}


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody uses, for processes that are told theirs.

    They lie below those that kernels give out by themselves (from 32768) and below those that ranks derive from a job's
    number (from 20000): no connection of another test can take one before its process binds it.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held_until_all_are_found:
        for port in random.sample(range(10000, 20000), 1000):
            listener = held_until_all_are_found.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"fewer than {count} of 1,000 ports are free")
