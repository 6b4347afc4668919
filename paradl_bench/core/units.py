"""Units at the border: inside the program all is seconds and bytes.

Sizes follow nccl-tests: ``K``, ``M``, ``G`` are powers of 1024 and so are ``KiB``, ``MiB``, ``GiB``; ``KB``, ``MB``,
``GB`` are powers of 1000, as everywhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from paradl_bench.core.errors import UserError

# Digits are limited, so that exact arithmetic on what a user typed stays cheap.
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)")
_SUFFIX_BYTES = {
    "": 1,
    "b": 1,
    **{u: 1024 ** (i + 1) for i, u in enumerate("kmgt")},
    **{u + "ib": 1024 ** (i + 1) for i, u in enumerate("kmgt")},
    **{u + "b": 1000 ** (i + 1) for i, u in enumerate("kmgt")},
}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|[smh]?)")
_SUFFIX_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BANDWIDTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kKMGT]?)(i?)(bit|B)/s")
MAX_COUNT = 2**63 - 1
MAX_SWEEP_POINTS = 4096
_SEQUENCES = ("encoder", "decoder")
LARGEST_FACTOR = 1e9
"""By which a time that was measured may be stretched, and what a rank-hour may cost."""


def is_whole(text: str) -> bool:
    """Whether a text is a whole number from 0 on that int() reads: ASCII digits, no more than 1,000."""
    return text.isascii() and text.isdigit() and len(text) <= 1000


def parse_size(text: str, where: str = "") -> int:
    """Bytes of ``64M``, ``1GiB``, ``16e9``, ``4096``; ``where`` names the option in the error.

    Raises:
        UserError: the text is no size, not a whole positive number of bytes, or more than a file could hold (2^63).
    """
    size = f"{where}: size {text!r}".removeprefix(": ")
    match = _SIZE.fullmatch(text.strip())
    factor = _SUFFIX_BYTES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UserError(
            f"{size} is not a size: write a number with K, M, G (powers of 1024) or KB, MB, GB (powers of 1000), as"
            " 512M or 16GB"
        )
    value = Fraction(match.group(1)) * factor
    if value.denominator != 1 or not 1 <= value <= MAX_COUNT:
        raise UserError(f"{size} is not a whole positive number of bytes below 2^63")
    return int(value)


def parse_memory(text: str, where: str) -> int:
    """Bytes of ``16GiB``; few of them without a unit are refused, since who writes 16 means GiB.

    Raises:
        UserError: as of :func:`parse_size`, or fewer than 2^20 without a unit.
    """
    count = parse_size(text, where)
    if text.strip()[-1].isdigit() and count < 2**20:
        raise UserError(f"{where} {text.strip()}: that is {counted(count, 'byte')}; give a unit, as {count}GiB")
    return count


def spell_size(count: int) -> str:
    """Bytes as :func:`parse_size` takes them, exactly: ``64M``, ``1000``."""
    for suffix, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count % scale == 0 and count:
            return f"{count // scale}{suffix}"
    return str(count)


def parse_size_sweep(text: str) -> tuple[int, ...]:
    """Message sizes in bytes of ``1K:64M:2`` (first:last:factor) or of a list ``1K,4K,1M``.

    Raises:
        UserError: a part does not parse, the range is empty or has more than 4,096 points, or the factor is too small.
    """
    parts = text.split(":")
    if len(parts) > 3 or "-" in text or ".." in text:
        raise UserError(f"sizes {text!r} are not sizes: write first:last:factor, as 1K:64M:2, or a list, as 1K,4K,1M")
    if len(parts) == 1:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    first, last = parse_size(parts[0]), parse_size(parts[1])
    # Ranges of ranks are written with an x, which people then write here as well.
    factor = _parse_factor(parts[2].removeprefix("x") if len(parts) == 3 else "2", repr(text))
    if last < first:
        raise UserError(f"sizes {text!r}: the last size is smaller than the first")
    return _geometric(first, last, factor, f"sizes {text!r}")


def parse_ranks(text: str, where: str = "") -> tuple[int, ...]:
    """Rank counts of ``16:1024:x2`` (geometric), ``2:10:2`` (arithmetic), ``8`` or ``2,4,8``.

    Raises:
        UserError: a part is no positive whole number, the range is empty or has more than 4,096 points.
    """
    where = where or f"ranks {text!r}"
    forms = f"{where}: write counts as 2,4,8, or a range as 2:64:x2 (times 2) or 2:64:2 (plus 2)"
    parts = text.split(":")
    if len(parts) not in (1, 3) or any(not is_whole(part.strip()) for part in parts[0].split(",") + parts[1:2]):
        raise UserError(forms)
    if len(parts) == 1:
        return tuple(sorted({parse_count(part, where) for part in text.split(",")}))
    first, last = (parse_count(part, where) for part in parts[:2])
    if last < first:
        raise UserError(f"{where}: the last count is smaller than the first")
    if parts[2].startswith("x"):
        return _geometric(first, last, _parse_factor(parts[2][1:], where), where)
    step = parse_count(parts[2], where)
    if (last - first) // step >= MAX_SWEEP_POINTS:
        raise UserError(f"{where}: more than {MAX_SWEEP_POINTS} points")
    return tuple(range(first, last + 1, step))


def _geometric(first: int, last: int, factor: float, where: str) -> tuple[int, ...]:
    steps = math.floor(math.log(last / first) / math.log(factor) * (1 + 1e-9) + 1e-9)
    if steps >= MAX_SWEEP_POINTS:
        raise UserError(f"{where}: more than {MAX_SWEEP_POINTS} points")
    return tuple(dict.fromkeys(min(round(first * factor**step), last) for step in range(steps + 1)))


def _parse_factor(text: str, where: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 1.01):
        raise UserError(f"{where}: the factor {text!r} has to be a number of at least 1.01")
    return factor


def parse_count(text: str, where: str) -> int:
    """A positive whole number; ``where`` names the option in the error.

    Raises:
        UserError: the text is none, or one of 2^63 or more.
    """
    try:
        value = int(text.strip())
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_COUNT:
        raise UserError(f"{where}: {text.strip()!r} is not a positive whole number below 2^63")
    return value


def parse_counts(text: str, where: str) -> tuple[int, ...]:
    """Positive whole numbers parted by commas, without repeats, in the order given."""
    return tuple(dict.fromkeys(parse_count(part, where) for part in text.split(",")))


def parse_layers(text: str | None, where: str) -> tuple[str, ...]:
    """Names or patterns of layers parted by commas; empty for ``all`` and for no text.

    Raises:
        UserError: a name is empty.
    """
    if text is None or text.strip() == "all":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UserError(f"{where} {text!r}: a name is empty; write conv1,fc*, or all")
    return tuple(dict.fromkeys(names))


_RECOMPUTED = {"full": "all", "selective": "attention"}


def parse_recompute(text: str | None) -> tuple[str, ...]:
    """What ``--recompute`` makes of its text: empty for ``none`` and for no text, else as given, ``all`` included.

    Megatron-LM's and torchtitan's words are taken too: ``full`` for ``all``, ``selective`` for ``attention``.

    Raises:
        UserError: a name is empty, or ``all`` or ``none`` stands beside others.
    """
    if text is None or text.strip() == "none":
        return ()
    if text.strip() in _RECOMPUTED:
        return (_RECOMPUTED[text.strip()],)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names) or (len(names) > 1 and {"all", "none"}.intersection(names)):
        raise UserError(f"--recompute {text!r}: write none, all, or modules as layer1.*,head")
    return names


def parse_shape(text: str) -> tuple[int, ...]:
    """Extents of ``3x224x224``.

    Raises:
        UserError: an extent is no positive whole number.
    """
    parts = text.lower().split("x")
    if not all(is_whole(part.strip()) for part in parts):
        raise UserError(f"shape {text!r} is not a shape: write extents with x between them, channels first: 3x224x224")
    return tuple(parse_count(part, f"shape {text!r}") for part in parts)


def parse_sample_shape(input_shape: str | None, sequence: int | None) -> tuple[int, ...] | None:
    """Shape of one sample from ``--input-shape`` or ``--sequence``; None where neither is given.

    Raises:
        UserError: both are given, or an extent is no positive whole number below 2^63.
    """
    if input_shape and sequence:
        raise UserError("--input-shape and --sequence exclude each other: give a shape for images, a length for texts")
    if sequence:
        return (parse_count(str(sequence), "--sequence"),)
    return parse_shape(input_shape) if input_shape else None


def parse_duration(text: str, where: str) -> float:
    """Seconds of ``90``, ``90s``, ``40ms``, ``10us``, ``10m`` (minutes), ``1.5h``.

    Raises:
        UserError: the text is no positive time.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match.group(1)) * _SUFFIX_SECONDS[match.group(2)] if match else 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{where}: {text.strip()!r} is no time; write 10us, 40ms, 90s, 10m or 1.5h")
    return seconds


def check_bounds(value: float | None, where: str, right: str, *, most: float) -> None:
    """Hold an option's number to 0 and the most with which what is computed from it stays finite.

    Args:
        where: names the option in the error. right: what the number is of, for the error.

    Raises:
        UserError: it is no number, smaller or larger.
    """
    # Neither is NaN, which click's ranges let pass.
    if value is not None and not 0 <= value <= most:
        raise UserError(f"{where} {value:g}: {right} from 0 to {most:g}")


def parse_bandwidth(text: str, where: str) -> float:
    """A rate in bytes/s: ``1Gbit/s`` and ``125MB/s`` are the same, ``MiB/s`` are powers of 1024.

    Raises:
        UserError: no positive rate, or none that says its unit.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    rate = 0.0
    if match and (match.group(2) or not match.group(3)):
        power = " kmgt".index(match.group(2).lower() or " ")
        rate = float(match.group(1)) * (1024 if match.group(3) else 1000) ** power
        rate /= 8 if match.group(4) == "bit" else 1
    if not rate > 0:
        raise UserError(f"{where}: {text.strip()!r} is no rate; write 200Mbit/s, 1Gbit/s or 125MB/s")
    return rate


def format_bandwidth(bytes_per_s: float) -> str:
    """Three significant digits in decimal units, as links are sold: ``125 MB/s``."""
    rounded = float(f"{bytes_per_s:.3g}")
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(rounded) >= scale:
            return f"{_three_digits(rounded / scale)} {unit}"
    return f"{rounded:g} B/s"


def spell_bandwidth(bytes_per_s: float) -> str:
    """A rate as an option takes it: ``1Gbit/s``; :func:`parse_bandwidth` gives the same back, to nine digits."""
    bits = bytes_per_s * 8
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.9g}{unit}"
    return f"{bits:.9g}bit/s"


def format_seconds(seconds: float) -> str:
    """Three significant digits with the unit that suits: ``12.3 ms``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds == 0:
        return "0 s"
    rounded = float(f"{seconds:.3g}")
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(rounded) >= scale:
            return f"{_three_digits(rounded / scale)} {unit}"
    return f"{rounded:.3g} s"


def format_bytes(count: float) -> str:
    """Three significant digits in binary units: ``46.8 MiB``."""
    for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(count) >= scale:  # 1023.9 KiB stays in KiB, as in `ls -h`: 1024 KiB
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def format_input(shape: Sequence[int], *, tokens: bool) -> str:
    """A sample in words: ``1,024 tokens``, ``512 encoder and 512 decoder tokens``, ``3x224x224``.

    Args:
        tokens: whether it holds token ids: a sequence of them, or one for the encoder and one for the decoder.
    """
    if tokens and len(shape) == 1:
        return f"{shape[0]:,} tokens"
    if tokens and len(shape) == len(_SEQUENCES) == shape[0]:
        return " and ".join(f"{shape[1]:,} {name}" for name in _SEQUENCES) + " tokens"
    return "x".join(map(str, shape))


def format_difference(relative: float, digits: int = 1) -> str:
    """A relative difference with its sign, in percent: ``+2.8%``; what rounds to nothing has none: ``0.0%``."""
    text = f"{relative:+.{digits}%}"
    return text[1:] if text.strip("+-0.%") == "" else text


def format_around(ends: Iterable[float], middle: float) -> str:
    """Both ends of an interval, relative to what lies in it: ``-56% +79%``."""
    return " ".join(format_difference(end / middle - 1, 0) for end in ends)


def format_share(share: float, digits: int = 1) -> str:
    """A share in percent: ``2.8%``; what rounds to nothing has no sign."""
    return format_difference(share, digits).removeprefix("+")


def format_accuracy(accuracy: float, digits: int = 1) -> str:
    """1 less the absolute relative error, in percent; below 0 there is none, and the error is said instead."""
    return format_share(accuracy, digits) if accuracy >= 0 else f"none (off by {1 - accuracy:.0%})"


def counted(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``, ``1,024 strategies``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def _three_digits(value: float) -> str:
    rounded = float(f"{value:.3g}") if abs(value) < 1000 else value
    digits = max(0, 2 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    return f"{rounded:.{digits}f}"
