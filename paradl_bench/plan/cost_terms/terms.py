"""Cost terms: what an algorithm of a collective costs in alpha, beta and gamma_r.

``calibrate`` stacks them as rows of a regression, ``predict`` multiplies them by the fit; both call the same
function, so that the two cannot diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_KEPT = 4096
"""Calls of one algorithm whose terms are remembered: those of a few searches."""


class CostTerms(NamedTuple):
    """Coefficients for (ranks, bytes): time = alpha_count alpha + beta_bytes beta + gamma_bytes gamma_r.

    Each is an array of the broadcast shape of ranks and bytes: a number of messages, and two numbers of bytes.
    """

    alpha_count: Floats
    beta_bytes: Floats
    gamma_bytes: Floats


class LevelTerms(NamedTuple):
    """Cost terms of an algorithm that treats links inside a node and links between nodes apart.

    Each part is multiplied by its own level's alpha and beta.
    """

    inside: CostTerms
    between: CostTerms


TermsFunction = Callable[[Floats, Floats], CostTerms]
LevelTermsFunction = Callable[[Floats, Floats, Floats], LevelTerms]
"""Of ranks, bytes, and the group's ranks per node."""


class Algorithm:
    """A collective algorithm: its name and its cost terms.

    Attributes:
        name: ``ring``, ``tree``.
        source: paper and equation or table row.
        libraries: those that are known to run this algorithm where it is not the operation's default.
        short: whether libraries run it for short messages alone, since every step sends the whole message.

    Args:
        terms: of an algorithm that knows one kind of link (flat).
        level_terms: of one that knows two (hierarchical), in the place of ``terms``.
        parts: of ranks, into how many equal parts it cuts ``message_bytes``, of which every step sends one; None where
            steps send all of it, or messages of unlike sizes.
    """

    def __init__(
        self,
        *,
        name: str,
        source: str,
        terms: TermsFunction | None = None,
        level_terms: LevelTermsFunction | None = None,
        libraries: tuple[str, ...] = (),
        short: bool = False,
        parts: Callable[[Floats], Floats] | None = None,
    ) -> None:
        if (terms is None) == (level_terms is None):
            raise ValueError(f"algorithm {name!r} has either terms or level_terms")
        self.name = name
        self.source = source
        self.libraries = libraries
        self.short = short
        self._terms = terms
        self._level_terms = level_terms
        self._parts = parts
        # Predictions ask for the same few messages again and again, whatever their links.
        self._of_one = lru_cache(_KEPT)(self._level_terms_of)

    @property
    def cuts(self) -> bool:
        """Whether a step sends a part of the message, by how many ranks there are."""
        return self._parts is not None

    def parts(self, ranks: ArrayLike) -> Floats:
        """The message's bytes over those of the message of one step: what grows with the ranks where it is cut."""
        p = np.asarray(ranks, float)
        return np.ones_like(p) if self._parts is None else np.asarray(self._parts(p))

    @property
    def hierarchical(self) -> bool:
        """Whether links inside a node and between nodes have parameters of their own."""
        return self._level_terms is not None

    def level_terms(self, ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike = 1) -> LevelTerms:
        """Terms inside a node and between nodes, vectorised (broadcast against each other); one rank costs nothing.

        Args:
            ranks_per_node: how many ranks of the group share a node. A flat algorithm makes no use of it: all its
                terms are between nodes, at the slowest link that it crosses.
        """
        arrays = [np.asarray(value, float) for value in (ranks, message_bytes, ranks_per_node)]
        if not any(array.ndim for array in arrays):
            return self._of_one(*map(float, arrays))
        return self._level_terms_of(*arrays)

    def _level_terms_of(self, ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike) -> LevelTerms:
        p, m, g = np.broadcast_arrays(*(np.asarray(value, float) for value in (ranks, message_bytes, ranks_per_node)))
        if self._level_terms is not None:
            level_terms = self._level_terms(p, m, np.minimum(g, p))
        else:
            assert self._terms is not None
            level_terms = LevelTerms(CostTerms(0 * m, 0 * m, 0 * m), self._terms(p, m))
        alone = p <= 1
        inside, between = (
            CostTerms(*(np.where(alone, 0.0, np.broadcast_to(part, p.shape)) for part in terms))
            for terms in level_terms
        )
        return LevelTerms(inside, between)

    def terms(self, ranks: ArrayLike, message_bytes: ArrayLike, ranks_per_node: ArrayLike = 1) -> CostTerms:
        """Terms between nodes: all there are of a flat algorithm, and where no two ranks share a node."""
        return self.level_terms(ranks, message_bytes, ranks_per_node).between

    def seconds(
        self,
        ranks: ArrayLike,
        message_bytes: ArrayLike,
        *,
        alpha_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float,
    ) -> Floats:
        """Seconds of the collective under the given parameters, every rank on a node of its own."""
        terms = self.terms(ranks, message_bytes)
        return np.asarray(
            terms.alpha_count * alpha_s + terms.beta_bytes * beta_s_per_byte + terms.gamma_bytes * gamma_s_per_byte
        )


class CollectiveOperation:
    """One collective as both the runner and the models see it; a file of this folder declares one.

    Attributes:
        name: ``all_reduce``, ``send_recv``, ...
        bus_factor: bus bandwidth over algorithm bandwidth as a function of ranks (nccl-tests, PERFORMANCE.md).
        size_factor: nccl-tests' size (its largest buffer) over ``message_bytes`` as a function of ranks.
        algorithms: by name; the first is the default.
        message_bytes_is: what ``message_bytes`` counts, in words, for documentation and files.
        ends_with: whose time is the call's: the ``slowest`` rank's, or the ``receiver``'s, which is told last. (DistSim
            takes min(send, recv), since the side that calls earlier only waits. Here both call behind a barrier, and
            libraries that buffer end a send before its message is on the link: gloo's of 1 MiB took 0.5 ms over a link
            that needs 42.)
        in_place: whether a rank has one buffer, which is read and then holds the result, as in training.
    """

    def __init__(
        self,
        *,
        name: str,
        message_bytes_is: str,
        bus_factor: Callable[[int], float],
        algorithms: tuple[Algorithm, ...],
        size_factor: Callable[[int], float] = lambda _ranks: 1.0,
        ends_with: Literal["slowest", "receiver"] = "slowest",
        in_place: bool = False,
    ) -> None:
        self.name = name
        self.message_bytes_is = message_bytes_is
        self.bus_factor = bus_factor
        self.size_factor = size_factor
        self.ends_with = ends_with
        self.in_place = in_place
        self.algorithms: Mapping[str, Algorithm] = {algorithm.name: algorithm for algorithm in algorithms}

    @property
    def default_algorithm(self) -> str:
        """Name of the algorithm that is fitted where nothing else is asked for or known."""
        return next(iter(self.algorithms))

    def algorithm_of(self, library: str) -> str:
        """Name of the algorithm that a library is known to run; the default where nothing is known."""
        known = (a.name for a in self.algorithms.values() if library in a.libraries)
        return next(known, self.default_algorithm)

    def call_seconds(self, samples_s: Sequence[Sequence[float]]) -> Floats:
        """Seconds of each call from a list a rank, index i being the same call on all of them (see ``ends_with``)."""
        times = np.asarray(samples_s, float)
        return np.asarray(times.max(axis=0) if self.ends_with == "slowest" else times[-1])

    def algorithm_bandwidth(self, ranks: int, message_bytes: int, seconds: float) -> float:
        """Bytes/s as nccl-tests defines ``algbw``: its size over the time."""
        return self.size_factor(ranks) * message_bytes / seconds

    def bus_bandwidth(self, ranks: int, message_bytes: int, seconds: float) -> float:
        """Bytes/s as nccl-tests defines ``busbw``: comparable with the hardware's, whatever the number of ranks."""
        return self.bus_factor(ranks) * self.algorithm_bandwidth(ranks, message_bytes, seconds)
