"""Answers that are found once."""

from __future__ import annotations

from paradl_bench.core.cache_keys import Answers, numbered


def test_an_answer_is_found_once_and_the_last_are_kept() -> None:
    answers, asked = Answers(most=2), list[str]()

    def find(key: str) -> str:
        return answers.once(key, lambda: asked.append(key) or key.upper())

    assert [find(key) for key in ("a", "a", "b", "c", "b", "a")] == ["A", "A", "B", "C", "B", "A"]
    # The third answer took the place of the first.
    assert asked == ["a", "b", "c", "a"]


def test_equal_keys_are_of_one_kind() -> None:
    assert numbered([(1, "a"), 2, (1, "a"), None, 2]) == ([0, 1, 3], [0, 1, 0, 2, 1])
    assert numbered([]) == ([], [])
