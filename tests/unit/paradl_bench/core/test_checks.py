"""What records hold several numbers to: lists of one index have one length."""

from __future__ import annotations

import msgspec
import pytest

from paradl_bench.core.checks import check_aligned


class Record(msgspec.Struct, frozen=True, kw_only=True):
    value: object = None
    other: object = None


def test_lists_with_one_index_have_equal_length_or_are_empty() -> None:
    check_aligned(Record(value=(0.5, 0.25), other=()), "value", "other")
    with pytest.raises(ValueError, match=r"differ in length: \{'value': 2, 'other': 1\}"):
        check_aligned(Record(value=(0.5, 0.25), other=(0.5,)), "value", "other")
