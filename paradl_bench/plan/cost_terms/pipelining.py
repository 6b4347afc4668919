"""Rings, trees and chains as steps and bytes; those in pieces in a form that is linear in alpha and beta.

Sanders et al. (2009) give the two-tree time with the number of pieces k chosen to minimise. At that k the time is
2 L alpha + m beta + 2 sqrt(2 L m alpha beta), L = ceil(log2 p): not linear, and libraries do not choose k so. NCCL cuts
a message into pieces of a fixed size. So a piece is fixed here, k follows from it, and terms are linear; where a
message is smaller than one piece, k is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paradl_bench.plan.cost_terms.terms import CostTerms, Floats, TermsFunction

StepsFunction = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""From ranks and bytes to (steps, bytes): messages one after the other, and what passes a link."""

PIECE_BYTES = 512 * 1024
"""NCCL's: NCCL_BUFFSIZE (4 MiB by default) in its 8 steps."""


def pieces(message_bytes: Floats) -> Floats:
    """Into how many pieces a message is cut, at least 1."""
    return np.maximum(1.0, np.ceil(message_bytes / PIECE_BYTES))


def piece_bytes(message_bytes: Floats) -> Floats:
    """Bytes of the first piece: the whole message where it is smaller than a piece."""
    return np.minimum(message_bytes, PIECE_BYTES)


def depth(ranks: Floats) -> Floats:
    """Levels of a binary tree over ``ranks`` ranks below its root: ceil(log2 p)."""
    return np.ceil(np.log2(np.maximum(ranks, 1.0)))


def messages_at_once(ranks: Floats) -> Floats:
    """Messages that a link carries before the last rank of a binomial tree has its own, if no send waits for another.

    A rank of r ranks below and including it sends to its ceil(log2 r) children at once. Messages that share its link
    evenly end together, so that each child begins after all of them: f(r) = ceil(log2 r) + max f(child's), with
    children of 1, 2, 4, ... ranks and one of the rest (the tree of Thakur, Rabenseifner, Gropp 2005, section 4.2).
    L (L + 1) / 2 for p = 2^L; a tree whose sends wait for each other has L.
    """
    rest = np.maximum(np.asarray(ranks, float), 1.0)
    passed, most = np.zeros_like(rest), np.zeros_like(rest)
    while (rest > 1).any():
        level = depth(rest)
        passed = passed + level
        # Of children but that of the rest, the largest is a whole tree two levels lower.
        below = np.where(level > 1, (level - 1) * (level - 2) / 2, 0.0)
        most = np.where(level > 0, np.maximum(most, passed + below), most)
        rest = np.where(level > 0, rest - 2 ** (level - 1), rest)
    return np.asarray(np.maximum(most, passed))


def moving(steps_and_bytes: StepsFunction) -> TermsFunction:
    """Terms of an algorithm that adds nothing up."""

    def terms(ranks: Floats, message_bytes: Floats) -> CostTerms:
        steps, moved = steps_and_bytes(ranks, message_bytes)
        return CostTerms(steps, moved, 0 * moved)

    return terms


def reducing(steps_and_bytes: StepsFunction) -> TermsFunction:
    """Terms of an algorithm that adds up all that arrives."""

    def terms(ranks: Floats, message_bytes: Floats) -> CostTerms:
        steps, moved = steps_and_bytes(ranks, message_bytes)
        return CostTerms(steps, moved, moved)

    return terms


def reducing_and_back(steps_and_bytes: StepsFunction) -> TermsFunction:
    """Terms of an algorithm that adds up all that arrives, and takes the sums back by as many steps and bytes."""

    def terms(ranks: Floats, message_bytes: Floats) -> CostTerms:
        steps, moved = steps_and_bytes(ranks, message_bytes)
        return CostTerms(2 * steps, 2 * moved, moved)

    return terms


def direct(ranks: Floats, message_bytes: Floats) -> CostTerms:
    """Terms of a message from one rank to another: alpha + m beta."""
    return CostTerms(1 + 0 * ranks, message_bytes, 0 * message_bytes)


def ring(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of a ring along which the parts of a message, one a rank, pass all others."""
    return ring_of_parts(ranks, message_bytes / ranks)


def halving(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of partners that exchange a half, a quarter, an eighth of a message: (p-1)/p of it in all."""
    return depth(ranks), (ranks - 1) / ranks * message_bytes


def ring_of_parts(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of a ring along which every rank's part, of so many bytes, passes all others."""
    return ranks - 1, (ranks - 1) * message_bytes


def binomial(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of a binomial tree, or of partners at distance 1, 2, 4, ...: the whole message at every step."""
    return depth(ranks), depth(ranks) * message_bytes


def binomial_at_once(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of a binomial tree whose sends wait for no other."""
    return depth(ranks), messages_at_once(ranks) * message_bytes


def chain(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(steps, bytes) of a pipeline along a chain of the ranks.

    The first piece passes ranks - 2 hops before the last rank's link is busy; then the whole message follows.
    """
    hops = ranks - 2
    return hops + pieces(message_bytes), hops * piece_bytes(message_bytes) + message_bytes


def two_tree(ranks: Floats, message_bytes: Floats) -> tuple[Floats, Floats]:
    """(alpha_count, beta_bytes) of a two-tree broadcast or reduction, half the message through each tree.

    2 (L + k)(alpha + (m/2k) beta), Sanders, Speck and Traeff 2009 as in ParaDL's footnote 4, with pieces of m/2k bytes
    of the fixed size: 2 (L + k) alpha + (2 L m/2k + m) beta.
    """
    half = message_bytes / 2
    steps = 2 * (depth(ranks) + pieces(half))
    return steps, 2 * depth(ranks) * piece_bytes(half) + message_bytes
