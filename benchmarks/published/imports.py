"""Import every public log beside the repository, and hold what was read against a second count of its rows.

    python benchmarks/published/imports.py [-o results/public-measurements/DATE-COMMIT]

Every row is compared, not only their number: operation, ranks, ranks a node, bytes, and each time from microseconds to
seconds. The second method (public/counted_rows.py) knows nothing of the importers. Exit code 1 where the two differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from public.counted_rows import Row, imb_rows, kineto_kernels, nccl_rows, osu_rows, pipedream_times_ms  # noqa: E402

from paradl_bench.importers.catalog import importers  # noqa: E402
from paradl_bench.importers.importer import Imported, ImportOptions, load_file  # noqa: E402


def _data() -> Path:
    # Beside the repository, or beside the main working tree of a linked one.
    pointer = ROOT / ".git"
    main = Path(pointer.read_text().removeprefix("gitdir:").strip()).parents[2] if pointer.is_file() else ROOT
    return main.parent / "shared" / "data"


DATA = _data()
ALL = frozenset({"empty", "wrong", "failed"})
_OSU_RANKS = {"job02": 8, "job08": 32}
"""Of abci-v100, whose OSU tables say none; job04 is 4 ranks inside a node and 16 on several."""


@dataclass(slots=True)
class Result:
    """One file.

    Attributes:
        counted: well-formed rows by the second method. read: rows that the import takes.
        dropped: the others, by reason.
        recovered: rows that it takes where everything is asked for. differences: in words; empty where both agree.
    """

    file: str
    format: str
    counted: int = 0
    read: int = 0
    recovered: int = 0
    values: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def _options(path: Path) -> dict[str, Any]:
    """What the files do not say themselves, from their names and the pages that they stand on."""
    if path.name.startswith("aws"):
        return {"ranks": 16, "level": "system", "operation": "all_reduce"}
    if path.suffix in (".mpi", ".mpi-cpu"):
        inside = "intra" in path.name
        job = path.name.split("__")[2].split(".")[0]
        ranks = 4 if inside else _OSU_RANKS.get(job, 16)
        return {"ranks": ranks, "level": "node" if inside else "system", "ranks_per_node": 4}
    if path.parent.name == "bcaffe-k80":
        return {"ranks": 4, "level": "system", "ranks_per_node": 1}
    return {"level": "system"} if "imb" in path.name else {"batch": 64}


def _times(rows: Sequence[Row], told: dict[str, Any]) -> Counter[tuple[object, ...]]:
    """Every time with all that belongs to it; what the file does not say is as told."""
    return Counter(
        (
            row.operation or told.get("operation"),
            row.ranks or told.get("ranks"),
            row.ranks_per_node or told.get("ranks_per_node", 0),
            row.message_bytes,
            f"{time:.9g}",
        )
        for row in rows
        for time in row.times_us
    )


def _read_times(held: Imported) -> Counter[tuple[object, ...]]:
    return Counter(
        (each.operation, each.ranks, each.ranks_per_node, each.message_bytes, f"{each.samples_s[0][0] * 1e6:.9g}")
        for each in held.collectives
    )


def collectives(path: Path, form: str, count: Callable[[Path], list[Row]]) -> Result:
    """Compare a log of collectives, row by row."""
    result = Result(str(path.relative_to(DATA)), form)
    told = _options(path)
    log = load_file(path)
    options = {key: value for key, value in told.items() if key != "batch"}
    rows = count(path)
    taken = importers()[form].read(log, ImportOptions(**options))
    whole = importers()[form].read(log, ImportOptions(**options, keep=ALL))
    result.counted, result.read, result.recovered = len(rows), taken.rows, whole.rows
    result.dropped = dict(Counter(item.why.split("; --keep")[0] for item in taken.dropped))
    for label, held, wanted in (
        ("taken", taken, [row for row in rows if row.fate == "taken"]),
        ("with --keep", whole, rows),
    ):
        ours, theirs = _read_times(held), _times(wanted, told)
        result.values = sum(theirs.values())
        if held.rows != len(wanted):
            result.differences.append(f"{label}: {held.rows} rows read, {len(wanted)} counted")
        for what, more in (("only read", ours - theirs), ("only counted", theirs - ours)):
            if more:
                result.differences.append(f"{label}: {sum(more.values())} {what}, as {next(iter(more))}")
    return result


def pipedream(path: Path) -> Result:
    """Compare a PipeDream profile: forward and backward of every layer, in order."""
    result = Result(str(path.relative_to(DATA)), "pipedream")
    held = importers()["pipedream"].read(load_file(path), ImportOptions(batch=64))
    times = pipedream_times_ms(path)
    result.counted, result.read, result.recovered, result.values = len(times), held.rows, held.rows, 2 * len(times)
    result.dropped = dict(Counter(item.why for item in held.dropped))
    for phase, index in (("FW", 0), ("BW", 1)):
        ours = Counter(f"{each.samples_s[0] * 1e3:.9g}" for each in held.layers if each.phase == phase)
        if ours != Counter(f"{row[index]:.9g}" for row in times):
            result.differences.append(f"{phase} times differ")
    return result


def kineto(path: Path) -> Result:
    """Compare a profiler trace: its NCCL kernels, one by one, and their sum."""
    result = Result(str(path.relative_to(DATA)), "kineto")
    held = importers()["kineto"].read(load_file(path), ImportOptions(batch=64, level="node"))
    kernels, result.counted = kineto_kernels(path)
    result.values = len(kernels)
    read = [sample * 1e6 for each in held.collectives for samples in each.samples_s for sample in samples]
    result.dropped = dict(Counter(item.why for item in held.dropped))
    result.read = result.recovered = held.rows
    if Counter(f"{time:.6g}" for time in read) - Counter(f"{time:.6g}" for time in kernels):
        result.differences.append("a collective's time is that of no NCCL kernel")
    if len(read) + sum(result.dropped.values()) < len(kernels):
        result.differences.append(
            f"{len(kernels)} NCCL kernels, {len(read)} read, {sum(result.dropped.values())} dropped"
        )
    (trace,) = held.traces
    if abs(trace.communication_s - sum(kernels) * 1e-6) > 1e-6 + 1e-3 * trace.communication_s:
        result.differences.append(f"communication {trace.communication_s} s, kernels add up to {sum(kernels) * 1e-6} s")
    return result


NO_IMPORTER = {
    "abci-v100/resnet50_horovod_epoch_times.csv": "seconds an epoch: whole runs, of no layer and no collective",
    "abci-v100/resnet50_single_node_ips.csv": "images/s: whole runs, of no layer and no collective",
    "bcaffe-k80/googlenet_k80_layerwise.csv": "the three logs below as one table",
    "bcaffe-k80/osu_allreduce_10gbe.csv": "the two OSU logs as one table",
    "bcaffe-k80/tmp2comm.log": "B-Caffe's own log of layers; no format that another program writes",
    "bcaffe-k80/tmp4comm.log": "as above",
    "bcaffe-k80/tmp4ocomm.log": "as above",
}


def compare_logs() -> list[Result]:
    """Logs of collectives."""
    found = []
    for path in sorted((DATA / "nccl-logs").iterdir()):
        form, count = ("imb", imb_rows) if "imb" in path.name else ("nccl-tests", nccl_rows)
        found.append(collectives(path, form, count))
    for path in sorted((DATA / "abci-v100" / "nccl_osu").iterdir()):
        form, count = ("nccl-tests", nccl_rows) if path.suffix == ".nccl" else ("osu", osu_rows)
        found.append(collectives(path, form, count))
    paths = sorted((DATA / "bcaffe-k80").glob("allreduce*.log"))
    return found + [collectives(path, "osu", osu_rows) for path in paths]


def compare() -> list[Result]:
    """All files."""
    found = compare_logs()
    found += [pipedream(path) for path in sorted((DATA / "pipedream-layers").glob("*.txt"))]
    found += [kineto(path) for path in sorted((DATA / "kineto").rglob("*.gz"))]
    return found


def report(found: Sequence[Result]) -> str:
    """The table, in Markdown."""
    lines = [
        "Rows of every file, counted a second time (`benchmarks/published/public/counted_rows.py`) and by importers.",
        "`recovered` is with `--keep empty --keep wrong --keep failed`; `values` are times that were compared, with",
        "operation, ranks, ranks a node and bytes. Of a trace, `counted` are kernels and `values` its NCCL kernels;",
        "`read` are layers and collectives of each iteration.",
        "",
        "| file | format | counted | read | recovered | values | dropped | differences |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for each in found:
        dropped = "; ".join(f"{count}: {why}" for why, count in each.dropped.items())
        cells = (each.file, each.format, each.counted, each.read, each.recovered, each.values, dropped)
        lines.append("| " + " | ".join(map(str, cells)) + f" | {'; '.join(each.differences) or 'none'} |")
    tables = [each for each in found if each.format != "kineto"]
    totals = [sum(getattr(each, name) for each in tables) for name in ("counted", "read", "recovered", "values")]
    lines.append(
        f"| all but traces | | {' | '.join(map(str, totals))} | {sum(sum(t.dropped.values()) for t in tables)} | |"
    )
    lines += ["", "Files that no importer reads:", ""]
    lines += [f"- `{name}`: {why}" for name, why in NO_IMPORTER.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table and write it where told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder for imports.md and imports.json")
    options = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"{DATA} is not here: the public measurements lie beside the repository")
    found = compare()
    text = report(found)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "imports.md").write_text(
            f"    python benchmarks/published/imports.py -o {options.output}\n\n{text}"
        )
        held = [{name: getattr(each, name) for name in Result.__slots__} for each in found]
        (options.output / "imports.json").write_text(json.dumps(held, indent=1) + "\n")
    sys.exit(1 if any(each.differences for each in found) else 0)


if __name__ == "__main__":
    main()
