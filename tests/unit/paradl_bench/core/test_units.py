"""Sizes, counts, shapes and ranks as users type them, and numbers as they are shown."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import (
    MAX_COUNT,
    MAX_SWEEP_POINTS,
    counted,
    format_accuracy,
    format_bandwidth,
    format_bytes,
    format_difference,
    format_input,
    format_seconds,
    format_share,
    parse_bandwidth,
    parse_count,
    parse_counts,
    parse_layers,
    parse_memory,
    parse_ranks,
    parse_sample_shape,
    parse_shape,
    parse_size,
    parse_size_sweep,
    spell_bandwidth,
)

counts = st.integers(1, MAX_COUNT)
# Text near the grammar finds more than text at large.
scribble = st.one_of(st.text(), st.text("0123456789.,:xXeE+- KMGTiBbkmgt_", max_size=24))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("64M", 64 * 1024**2),
        ("1GiB", 1024**3),
        ("1 GB", 10**9),
        ("16e9", 16 * 10**9),
        ("1.5k", 1536),
        ("0.5KB", 500),
        (" 8B ", 8),
    ],
)
def test_sizes_are_read_as_nccl_tests_reads_them(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@given(counts)
def test_any_number_of_bytes_survives_being_written_out(count: int) -> None:
    assert parse_size(str(count)) == count


@given(st.integers(1, 2**40), st.sampled_from([("K", 1024), ("MiB", 1024**2), ("MB", 10**6), ("k", 1024)]))
def test_a_suffix_multiplies(count: int, suffix: tuple[str, int]) -> None:
    assert parse_size(f"{count}{suffix[0]}") == count * suffix[1]


@pytest.mark.parametrize("text", ["", "M", "-1", "0", "0.5", "1.5", "64X", "1e", "1e99", "nan", "inf", "1KiBB", "1\n2"])
def test_what_is_no_size_says_how_one_is_written(text: str) -> None:
    with pytest.raises(UserError, match="size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_a_word_in_a_sizes_place_gets_examples() -> None:
    with pytest.raises(UserError, match=r"^--memory: size 'lots' is not a size: .*, as 512M or 16GB$"):
        parse_size("lots", "--memory")


@given(scribble)
@example("1." + "0" * 5000)
@example("9" * 5000)
@example("1:1e18:1.01")
def test_any_text_is_sizes_or_a_users_mistake(text: str) -> None:
    try:
        sizes = parse_size_sweep(text)
    except UserError:
        return
    assert sizes
    assert all(1 <= size <= MAX_COUNT for size in sizes)
    assert list(sizes) == sorted(set(sizes))


def test_a_sweep_of_sizes() -> None:
    assert parse_size_sweep("1K:8K:2") == (1024, 2048, 4096, 8192)
    assert parse_size_sweep("1K:8K") == (1024, 2048, 4096, 8192)
    assert parse_size_sweep("1M,1K") == (1024, 1024**2)


def test_a_size_factor_may_be_written_like_a_rank_factor() -> None:
    assert parse_size_sweep("1K:64K:x4") == parse_size_sweep("1K:64K:4") == (1024, 4096, 16384, 65536)


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.floats(1.5, 8))
def test_a_geometric_sweep_keeps_to_its_range_and_factor(first: int, more: int, factor: float) -> None:
    sizes = parse_size_sweep(f"{first}:{first + more}:{factor}")
    assert sizes[0] == first
    assert first <= min(sizes) <= max(sizes) <= first + more
    assert sizes[-1] * factor >= (first + more) * (1 - 1e-6) - factor
    # One byte for the rounding of each of two neighbours.
    for smaller, larger in pairwise(sizes):
        assert abs(larger - smaller * factor) <= 1 + factor


def test_the_last_power_is_not_lost_to_rounding() -> None:
    for power in range(1, 60):
        assert parse_size_sweep(f"1:{2**power}:2")[-1] == 2**power
        assert len(parse_ranks(f"1:{2**power}:x2")) == power + 1


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "shown"),
    [
        ("1Gbit/s", 125e6, "125 MB/s"),
        ("125MB/s", 125e6, "125 MB/s"),
        (" 200 Mbit/s ", 25e6, "25.0 MB/s"),
        ("1.5GiB/s", 1.5 * 1024**3, "1.61 GB/s"),
        ("12500kB/s", 12.5e6, "12.5 MB/s"),
        ("800bit/s", 100.0, "100 B/s"),
    ],
)
def test_rates_of_links_say_their_unit(text: str, bytes_per_s: float, shown: str) -> None:
    assert parse_bandwidth(text, "--link-bandwidth") == pytest.approx(bytes_per_s)
    assert format_bandwidth(bytes_per_s) == shown
    assert parse_bandwidth(spell_bandwidth(bytes_per_s), "--link-bandwidth") == pytest.approx(bytes_per_s, rel=1e-8)


@pytest.mark.parametrize("text", ["1", "1G", "1Gbit", "0Gbit/s", "-1Gbit/s", "1iB/s", "1Tbps", "nan", "1e3Gbit/s", ""])
def test_a_rate_without_its_unit_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--link-bandwidth: .* is no rate; write 200Mbit/s"):
        parse_bandwidth(text, "--link-bandwidth")


@pytest.mark.parametrize("text", ["8K:1K:2", "1K:8K:1", "1K:8K:x", "1:2:3:4", "1K:8K:nan", "1K::2", "1,,2"])
def test_what_is_no_sweep_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_size_sweep(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("8,2,4,2", (2, 4, 8)),
        ("16:128:x2", (16, 32, 64, 128)),
        ("2:10:4", (2, 6, 10)),
        ("2:9:4", (2, 6)),
        ("2:16:x1.5", (2, 3, 4, 7, 10, 15)),
    ],
)
def test_ranks(text: str, expected: tuple[int, ...]) -> None:
    assert parse_ranks(text) == expected


@given(scribble)
@example("1:" + "9" * 400 + ":x2")
@example("1:9999999999:1")
def test_any_text_is_ranks_or_a_users_mistake(text: str) -> None:
    try:
        ranks = parse_ranks(text)
    except UserError:
        return
    assert 1 <= len(ranks) <= max(MAX_SWEEP_POINTS, text.count(",") + 1)
    assert list(ranks) == sorted(set(ranks))
    assert ranks[0] >= 1


@given(st.lists(counts, min_size=1, max_size=6).map(tuple))
def test_a_shape_survives_being_written_out(shape: tuple[int, ...]) -> None:
    assert parse_shape("x".join(map(str, shape))) == shape


@given(scribble)
def test_any_text_parses_as_positive_numbers_or_is_refused(text: str) -> None:
    for parse in (parse_shape, lambda value: parse_counts(value, "--batch")):
        try:
            values = parse(text)
        except UserError:
            continue
        assert values
        assert min(values) >= 1


def test_layers_are_names_or_all() -> None:
    assert parse_layers(None, "--split") == parse_layers("all", "--split") == ()
    assert parse_layers("conv1, fc*,conv1", "--split") == ("conv1", "fc*")
    for wrong in ("", "fc,,conv1", "fc,"):
        with pytest.raises(UserError, match=r"--split '.*': a name is empty"):
            parse_layers(wrong, "--split")


def test_a_wrong_count_names_its_option() -> None:
    with pytest.raises(UserError, match=r"--batch: 'many' is not a positive whole number"):
        parse_count("many", "--batch")
    assert parse_counts("8,2,8", "--batch") == (8, 2)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 s"),
        (12.345, "12.3 s"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (9.999e-3, "10.0 ms"),
        (-2.5e-6, "-2.50 us"),
        (3e-9, "3.00 ns"),
        (3600.0, "3600 s"),
        (1e-12, "1e-12 s"),
        (math.inf, "inf"),
    ],
)
def test_seconds_are_shown_with_three_digits(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIT_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@given(st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-30))
def test_shown_seconds_are_the_seconds_to_three_digits(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert float(number) * UNIT_S[unit] == pytest.approx(seconds, rel=0.006)
    assert len(number.lstrip("-")) <= 8


@given(st.floats(1, 1e17))
def test_shown_bytes_are_the_bytes_to_three_digits(count: float) -> None:
    number, unit = format_bytes(count).split()
    assert float(number) * UNIT_BYTES[unit] == pytest.approx(count, rel=0.006, abs=0.5)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (1023, "1023 B"), (49_050_000, "46.8 MiB"), (1024**3, "1.00 GiB")]
)
def test_bytes_are_shown_in_binary_units(count: float, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.028, 1, "+2.8%"),
        (-0.0004, 1, "0.0%"),
        (0.0, 1, "0.0%"),
        (-0.049, 1, "-4.9%"),
        (-0.004, 0, "0%"),
        (2.5, 0, "+250%"),
    ],
)
def test_a_difference_that_rounds_to_nothing_has_no_sign(value: float, digits: int, text: str) -> None:
    assert format_difference(value, digits) == text
    assert format_share(value, digits) == text.removeprefix("+")


def test_an_accuracy_below_nothing_is_said_as_what_it_is() -> None:
    assert format_accuracy(0.9734) == "97.3%"
    assert format_accuracy(-0.929) == "none (off by 193%)"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "run", "1 run"),
        (2, "run", "2 runs"),
        (0, "row", "0 rows"),
        (1024, "strategy", "1,024 strategies"),
        (2, "day", "2 days"),
    ],
)
def test_one_is_one_and_others_are_many(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_implausible_memory_without_a_unit_is_refused() -> None:
    assert parse_memory("16GiB", "--memory") == 16 * 1024**3
    assert parse_memory("17179869184", "--memory") == 2**34
    assert parse_memory("512KiB", "--memory") == 2**19
    with pytest.raises(UserError, match="--memory 16: that is 16 bytes; give a unit, as 16GiB"):
        parse_memory("16", "--memory")


def test_a_sample_is_a_shape_or_a_sequence_below_limits() -> None:
    assert parse_sample_shape("3x8x8", None) == (3, 8, 8)
    assert parse_sample_shape(None, 12) == (12,)
    with pytest.raises(UserError, match="--sequence: '9223372036854775808' is not a positive whole number below 2"):
        parse_sample_shape(None, 2**63)


@pytest.mark.parametrize(
    ("shape", "tokens", "said"),
    [
        ((1024,), True, "1,024 tokens"),
        ((2, 512), True, "512 encoder and 512 decoder tokens"),
        ((3, 224, 224), False, "3x224x224"),
        ((1024,), False, "1024"),
    ],
)
def test_a_sample_is_said_by_what_it_holds(shape: tuple[int, ...], tokens: bool, said: str) -> None:
    assert format_input(shape, tokens=tokens) == said
