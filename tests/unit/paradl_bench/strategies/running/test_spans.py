"""What is stamped around the communication of layers."""

from __future__ import annotations

import itertools

from paradl_bench.strategies.running.spans import COPIES, Spans


def stamped() -> Spans:
    """Spans whose clock is one further at each look."""
    return Spans(stamp=itertools.count().__next__)


def test_copies_are_what_lies_around_communication() -> None:
    spans = stamped()
    with spans.copies():
        with spans.span("all_gather"):
            pass
        with spans.span("halo"):
            pass
    assert spans.rows == [
        (COPIES, 0, 1),
        ("all_gather", 1, 2),
        (COPIES, 2, 3),
        ("halo", 3, 4),
        (COPIES, 4, 5),
    ]


def test_copies_inside_of_copies_count_once() -> None:
    spans = stamped()
    with spans.copies(), spans.copies():
        pass
    assert spans.rows == [(COPIES, 0, 1)]


def test_communication_outside_of_copies_stands_alone() -> None:
    spans = stamped()
    with spans.copies():
        pass
    with spans.span("all_reduce"):
        pass
    assert spans.rows == [(COPIES, 0, 1), ("all_reduce", 2, 3)]


def test_nothing_is_stamped_without_a_clock() -> None:
    spans = Spans()
    with spans.copies(), spans.span("all_gather"):
        pass
    assert spans.rows == []
