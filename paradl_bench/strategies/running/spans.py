"""When the communication of layers runs on a rank, and when tensors are cut and put together for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

COPIES = "split and concatenate"
"""What rows call it where tensors are cut, padded or put together."""


class Listener(Protocol):
    """Who is told when layer-wise communication begins and ends."""

    def span_began(self, what: str) -> None:
        """It begins."""

    def span_ended(self, what: str) -> None:
        """It has ended."""

    def settle(self) -> None:
        """Communication begins beside the next layer: what was computed before it is to be over."""

    def work(self) -> None:
        """What the rank does up to its next layer or communication is real: it copies parameters or gradients."""

    def worked(self) -> None:
        """What was copied behind communication has been; before it, communication tells by beginning."""


@dataclass(slots=True)
class Spans:
    """When layer-wise communication began and ended, in the order in which it was issued, while ``stamp`` is set.

    Attributes:
        rows: (what, begin, end) with stamps of the clock that ``stamp`` belongs to; no two lie in each other.
        listener: told of all communication, whether it is stamped or not; None where nobody is.
        copying_since: the stamp from which on tensors are cut and put together; None where they are not.
    """

    stamp: Callable[[], Any] | None = None
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)
    listener: Listener | None = None
    copying_since: Any = None

    def work(self) -> None:
        """Tell that what follows is real work on gradients or parameters."""
        if self.listener is not None:
            self.listener.work()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell that what is inside is real work on parameters, behind their communication."""
        self.work()
        yield
        if self.listener is not None:
            self.listener.worked()

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Stamp what is inside."""
        begin = self.begin(what)
        yield
        self.end(what, begin)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Stamp what is inside, but for its communication, as splitting and concatenating (ParaDL, section 5.3.3)."""
        if self.stamp is None or self.copying_since is not None:
            yield
            return
        self.copying_since = self.stamp()
        try:
            yield
        finally:
            self.rows.append((COPIES, self.copying_since, self.stamp()))
            self.copying_since = None

    def begin(self, what: str) -> Any:
        """The stamp of a beginning, for :meth:`end`; None where nothing is stamped."""
        if self.listener is not None:
            self.listener.span_began(what)
        if self.stamp is None:
            return None
        begin = self.stamp()
        if self.copying_since is not None:
            self.rows.append((COPIES, self.copying_since, begin))
        return begin

    def end(self, what: str, begin: Any) -> None:
        """Tell, and stamp, that what began is over."""
        if self.listener is not None:
            self.listener.span_ended(what)
        if self.stamp is None:
            return
        end = self.stamp()
        self.rows.append((what, begin, end))
        if self.copying_since is not None:
            self.copying_since = end
