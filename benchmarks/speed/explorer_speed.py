"""How long predict explore takes to answer: a slider that moves, the other rows, a search.

Times are of the processor, not of the clock, so that what else runs on the machine counts less. ``--whole`` holds each
search that follows another one beside a search of all candidates on the same hardware.

python benchmarks/speed/explorer_speed.py --from-profile h100-sxm --model gpt2 --ranks 1024 --batch 4096
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from predict.validation.report.explore.explorer import Explorer
from predict.validation.report.explore.state import Asked, Changed, Searched


def _times_ms(ask: Callable[[Changed], object], count: int, offset: float, *names: str) -> list[float]:
    """Of as many answers, each for hardware that was not asked for before.

    Args:
        names: of the sliders that move; none for that of links' bandwidth and that of peak FLOP/s.
    """
    times = []
    for number in range(count):
        moved = dict.fromkeys(names or ("bandwidth", "peak_flops"), offset + number / 100)
        begun = time.process_time()
        ask(msgspec.structs.replace(Changed(), **moved))
        times.append(1e3 * (time.process_time() - begun))
    return times


_ELSEWHERE = (
    {"bandwidth": 0.1},
    {"bandwidth": 0.5},
    {"bandwidth": 4.0},
    {"latency": 0.3},
    {"latency": 3.0},
    {"peak_flops": 2.0},
    {"memory_bandwidth": 0.5},
    {"peak_flops": 2.0, "memory_bandwidth": 2.0},
    {"bandwidth": 2.5, "latency": 0.5, "peak_flops": 1.5},
    {"bandwidth": 0.2, "peak_flops": 4.0, "memory_bandwidth": 4.0},
)
"""Hardware that a following search is held beside a whole one on: by what the profile's is multiplied."""


def _compared(explorer: Explorer, search: Searched) -> Iterator[str]:
    """How the best and the eighth row of following searches compare with those of whole ones."""
    ratios = []
    for factors in _ELSEWHERE:
        asked = Asked(search=search, found_on=msgspec.structs.replace(Changed(), **factors))
        begun = time.process_time()
        followed = [row["iteration_s"] for row in explorer.search(asked)["rows"]]
        spent_ms = 1e3 * (time.process_time() - begun)
        found = Explorer(explorer.paths).search(asked)["rows"]
        whole = [row["iteration_s"] for row in found]
        ratios.append(followed[0] / whole[0])
        hardware = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
        best, last = f"{followed[0]:.5f} s of {whole[0]:.5f} s", f"{followed[-1]:.5f} s of {whole[-1]:.5f} s"
        yield f"{hardware}: best {best}, last row {last}, {spent_ms:.0f} ms of CPU"
    low, high = min(ratios), max(ratios)
    yield f"best over that of a whole search: {low:.3f} to {high:.3f}, median {statistics.median(ratios):.3f}"


def _told(what: str, times_ms: list[float]) -> str:
    low, _, high = statistics.quantiles(times_ms, n=4)
    median = statistics.median(times_ms)
    return f"{what}: median {median:.0f} ms of CPU, quartiles {low:.0f} to {high:.0f}, {len(times_ms)} answers"


@click.command()
@click.option("--from-profile", "profile", type=Path, default=Path("h100-sxm"), show_default=True)
@click.option("--model", default="gpt2", show_default=True)
@click.option("--ranks", default=1024, show_default=True)
@click.option("--batch", default=4096, show_default=True)
@click.option("--memory", default="80GiB", show_default=True)
@click.option("--count", default=20, show_default=True, help="Answers of a kind.")
@click.option("--whole", is_flag=True, help="Search all candidates on other hardware too.")
def main(profile: Path, model: str, ranks: int, batch: int, memory: str, count: int, whole: bool) -> None:
    """Print medians and quartiles, without the browser."""
    explorer = Explorer([profile])
    search = Searched(model=model, ranks=ranks, batch=batch, memory=memory)
    begun = time.process_time()
    rows = len(explorer.search(Asked(search=search))["rows"])
    click.echo(f"first search: {time.process_time() - begun:.2f} s of CPU, {rows} rows")
    click.echo(
        _told("the chosen row", _times_ms(lambda of: explorer.look(Asked(search=search, changed=of)), count, 1.1))
    )

    click.echo(_told("all rows", _times_ms(lambda of: explorer.rows(Asked(search=search, changed=of)), count, 1.2)))
    few = max(count // 4, 2)
    links, device = (
        _times_ms(lambda of: explorer.search(Asked(search=search, found_on=of)), few, 1.3, *names)
        for names in (("bandwidth",), ("peak_flops",))
    )
    click.echo(_told("a search on other links", links))
    click.echo(_told("a search on another device", device))
    for line in _compared(explorer, search) if whole else ():
        click.echo(line)


if __name__ == "__main__":
    main()
