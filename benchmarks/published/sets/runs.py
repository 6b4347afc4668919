"""What every set of published runs gives: a run's measured time beside predictions of it, or why there is none."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

SHOWN = 2
"""Of runs that are not predicted for one reason, how many are named."""
HALF_WIDTH = 0.15
HELD = (0.85, 0.95)
"""What is wanted of 90% intervals: how wide they are in the median, and which share of runs they hold."""
ORDERED = 0.9
"""In which share of sets of runs the whole order is wanted to be right."""


class Predicted(NamedTuple):
    """One prediction of a run, in seconds (or a ratio, in sets of ratios), and its 90% interval if it has one."""

    by: str
    value: float
    interval: tuple[float, float] | None = None


class Run(NamedTuple):
    """A published run.

    Attributes:
        measured: None where the set is named, but not predicted.
        predicted: the tool's own prediction first; all runs of a set have them by the same names.
        remark: of the first prediction's parts; of a run without predictions why there is none.
        group: of a set with too many runs to list, what its rows are of.
    """

    name: str
    measured: float
    predicted: tuple[Predicted, ...] = ()
    remark: str = ""
    group: str = ""

    def error(self, at: int = 0) -> float:
        """Of one prediction: signed, relative to what was measured."""
        return self.predicted[at].value / self.measured - 1


class PublishedSet(NamedTuple):
    """Runs of one publisher.

    Attributes:
        title, cited: what the set is of, and repository, commit and licence of its data.
        inputs: what predictions are made from. causes: what is known of why they fall short.
        measured_in: head of the column of what was measured; ``shown`` is what its numbers are multiplied by.
        wanted: the mean of errors' sizes that the first prediction is to stay within; 0 where it has none.
    """

    title: str
    cited: str
    inputs: str
    causes: tuple[str, ...]
    runs: tuple[Run, ...]
    measured_in: str = "measured ms"
    shown: float = 1e3
    wanted: float = 0.0


def mean_error(runs: Sequence[Run], at: int) -> tuple[float, float]:
    """Of one prediction over runs: the mean size of errors, and the mean with signs."""
    errors = [run.error(at) for run in runs]
    return statistics.fmean(map(abs, errors)), statistics.fmean(errors)


def coverage(runs: Sequence[Run], at: int = 0) -> tuple[int, int, float] | None:
    """How many 90% intervals hold, of how many, and their median half-width relative to the prediction."""
    held, widths = 0, []
    for run in runs:
        found = run.predicted[at]
        if found.interval is not None:
            low, high = found.interval
            held += low <= run.measured <= high
            widths.append((high - low) / 2 / found.value)
    return (held, len(widths), statistics.median(widths)) if widths else None


def short_by(reached: float, wanted: float) -> str:
    """A figure that is wanted, and by how many points what was reached is beyond it."""
    how = "reached" if reached <= wanted else f"missed by {100 * (reached - wanted):.1f} points"
    return f"wanted {wanted:.1%}, {how}"


def orders(sets: Sequence[Sequence[tuple[Mapping[str, int], Run]]]) -> tuple[str, str]:
    """Of runs alike but for the degrees of axes, how many sets and pairs are predicted in their measured order.

    Returns:
        Shares of all, and the pairs in wrong order by the axes whose degrees differ.
    """
    whole, best = 0, 0
    pairs: dict[str, int] = {}
    wrong: dict[str, list[float]] = {}
    for group in sets:
        order = sorted(group, key=lambda each: each[1].measured)
        said = [run.predicted[0].value for _, run in order]
        best += said[0] == min(said)
        whole += all(before < after for before, after in pairwise(said))
        for (one, faster), (other, slower) in combinations(order, 2):
            axes = " and ".join(axis for axis in one if one[axis] != other[axis])
            pairs[axes] = pairs.get(axes, 0) + 1
            if faster.predicted[0].value >= slower.predicted[0].value:
                wrong.setdefault(axes, []).append(slower.measured / faster.measured - 1)
    of_sets, of_pairs = whole / len(sets), 1 - sum(map(len, wrong.values())) / sum(pairs.values())
    apart = {axes: statistics.median(found) for axes, found in sorted(wrong.items())}
    told = [
        f"{axes} {len(wrong[axes])} of {pairs[axes]}, measured {middle:.1%} apart in the median"
        for axes, middle in apart.items()
    ]
    return (
        f"Of {len(sets)} sets that differ by degrees alone, the order is right in {of_sets:.1%} ({ORDERED:.0%} wanted),"
        f" the best in {best / len(sets):.1%}; of {sum(pairs.values())} pairs {of_pairs:.1%}.",
        f"Pairs in the wrong order, by the axes whose degrees differ: {'; '.join(told) or 'none'}.",
    )


def table(found: PublishedSet) -> list[str]:
    """A row a run with signed errors, means, how intervals hold, and what is not predicted."""
    runs = [run for run in found.runs if run.predicted]
    lines = [f"## {found.title}", "", f"{found.cited}. From {found.inputs}.", ""]
    if runs and runs[0].group:
        lines += _by_group(runs)
    elif runs:
        names = [each.by for each in runs[0].predicted]
        lines += [f"| run | {found.measured_in} | {' | '.join(names)} | |", "|---|---|" + "---|" * (len(names) + 1)]
        for run in runs:
            errors = " | ".join(f"{run.error(at):+.1%}" for at in range(len(names)))
            lines.append(f"| {run.name} | {found.shown * run.measured:.4g} | {errors} | {run.remark} |")
        means = [mean_error(runs, at) for at in range(len(names))]
        lines.append("| mean of errors' sizes | | " + " | ".join(f"{size:.1%}" for size, _ in means) + " | |")
        lines.append("| mean error, signed | | " + " | ".join(f"{signed:+.1%}" for _, signed in means) + " | |")
    held = coverage(runs) if runs else None
    if held is not None:
        lines += ["", f"Of {held[1]} 90% intervals {held[0]} hold; the median half-width is {held[2]:.1%}."]
    lines += ["", f"Mean: {short_by(mean_error(runs, 0)[0], found.wanted)}."] if runs and found.wanted else []
    lines += [""] if runs else []
    left = [run for run in found.runs if not run.predicted]
    for why in dict.fromkeys(run.remark for run in left):
        names = [run.name for run in left if run.remark == why]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines.append(f"- Not predicted ({len(names)}), {why}: {', '.join(names[:SHOWN])}{more}")
    return [*lines, *(f"- {cause}" for cause in found.causes), ""]


def _by_group(runs: Sequence[Run]) -> list[str]:
    """A row a group, of the first prediction: means of errors, the farthest off, and how intervals hold."""
    lines = ["| runs | how many | mean of errors' sizes | signed | from, to | 90% intervals hold | half-width |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups = sorted({run.group for run in runs})
    for name in (*groups, "all"):
        own = [run for run in runs if name in (run.group, "all")]
        size, signed = mean_error(own, 0)
        errors = [run.error() for run in own]
        ends = f"{min(errors):+.1%}, {max(errors):+.1%}"
        held = coverage(own)
        intervals = f"{held[0] / held[1]:.1%} | {held[2]:.1%}" if held else "- | -"
        lines.append(f"| {name} | {len(own)} | {size:.1%} | {signed:+.1%} | {ends} | {intervals} |")
    return lines


def summary(sets: Sequence[PublishedSet]) -> list[str]:
    """A row a set: how many runs are predicted, mean errors of all predictions, and how intervals hold."""
    lines = ["| set | runs predicted | mean of errors' sizes, and signed, of the first | others | 90% intervals |"]
    lines.append("|---|---|---|---|---|")
    judged: list[Run] = []
    shares, widths = [], []
    for found in sets:
        runs = [run for run in found.runs if run.predicted]
        if not runs:
            continue
        means = [(each.by, *mean_error(runs, at)) for at, each in enumerate(runs[0].predicted)]
        (by, size, signed), *others = means
        beside = ", ".join(f"{other} {mean:.1%}" for other, mean, _ in others)
        held = coverage(runs)
        judged += runs if held else []
        shares += [held[0] / held[1]] if held else []
        widths += [held[2]] if held else []
        intervals = f"{held[0]} of {held[1]} hold, half-width {held[2]:.1%}" if held else "none"
        count = f"{len(runs)} of {len(found.runs)}"
        wanted = f"; {short_by(size, found.wanted)}" if found.wanted else ""
        lines.append(f"| {found.title} | {count} | {by} {size:.1%}, {signed:+.1%}{wanted} | {beside} | {intervals} |")
    of_all = coverage(judged) if judged else None
    if of_all:
        in_mean = f"{statistics.fmean(shares):.1%} hold, half-width {statistics.fmean(widths):.1%}"
        told = f"{of_all[0]} of {of_all[1]} hold ({of_all[0] / of_all[1]:.1%}), half-width {of_all[2]:.1%}"
        wanted = f"{HELD[0]:.0%} to {HELD[1]:.0%} hold, half-width at most {HALF_WIDTH:.0%}"
        lines += [f"| mean of sets | | | | {in_mean} |", f"| all runs | | | | {told} |", f"| wanted | | | | {wanted} |"]
    return [*lines, ""]
