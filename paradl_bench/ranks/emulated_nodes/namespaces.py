"""Network namespaces without a name: they last as long as a process or an open file of one holds them (Linux).

The kernel takes a namespace away with all that is in it once nobody holds it, so that a run leaves nothing behind
however it ends, SIGKILL included: there is nothing to find and to clear at the next start, and nothing of anybody
else's to mistake for it. See namespaces(7), network_namespaces(7) and setns(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from paradl_bench.core.interruption import uninterrupted

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_REFUSALS = {
    errno.EPERM: "this process may not make network namespaces, as root may",
    errno.EINVAL: "this kernel has no network namespaces",
    errno.ENOSYS: "this kernel has no network namespaces",
}


class NoNamespaces(Exception):
    """Network namespaces can't be made here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A network namespace, by an open file that holds it."""

    descriptor: int

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, the sockets that it makes and the processes that it starts in the namespace, for a moment.

        A signal that would raise waits until the thread is back.
        """
        with uninterrupted():
            former = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(self.descriptor)
                yield
            finally:
                _enter(former)
                os.close(former)


@contextlib.contextmanager
def new_namespace() -> Iterator[Namespace]:
    """A namespace with nothing in it but a loopback that is down; let go of at the end.

    Raises:
        NoNamespaces: the kernel refuses; the message says why.
    """
    descriptor = _unshared()
    try:
        yield Namespace(descriptor=descriptor)
    finally:
        os.close(descriptor)


def _unshared() -> int:
    with uninterrupted():
        try:
            former = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise NoNamespaces(_REFUSALS[errno.ENOSYS]) from None
        try:
            _call("unshare", _CLONE_NEWNET)
            try:
                return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
            finally:
                _enter(former)
        except OSError as error:
            raise NoNamespaces(_REFUSALS.get(error.errno or 0, os.strerror(error.errno or 0))) from None
        finally:
            os.close(former)


def _enter(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns come with Python 3.12.
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
