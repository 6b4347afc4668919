"""A lent GPU's measurements, held against predictions: from the network itself, from others, from published kernels."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_cases import PRECISIONS, RAW, SHARDS, Case, chosen, seconds_so_far, timed
from gpu_operators import operator_lines, operators_beside

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import write_text_atomically
from paradl_bench.measure.layers.summary import closures
from paradl_bench.records.measurement import is_complete

KERNEL_REGRESSION = Path(__file__).parents[1] / "published" / "kernel_regression.py"
OWN, OTHERS, WITH_KERNELS, PUBLISHED = "own layers", "other networks", "with kernels", "published kernels"
COLUMNS = (OTHERS, WITH_KERNELS, PUBLISHED)
"""What predicts an iteration beside the network's own layers."""


class Measured(NamedTuple):
    """A network in one precision, both its layers and its run complete."""

    case: Case
    dtype: str
    layers: Path
    run: Path


def analyse(options: argparse.Namespace) -> list[str]:
    """Fit and validate what is there, and write the summary; what failed or is missing, a line each."""
    raw, failed = options.output / RAW, []
    measured = []
    for case in chosen(options):
        for dtype in PRECISIONS:
            found = Measured(case, dtype, *(raw / case.name / f"{what}-{dtype}" for what in ("layers", "train")))
            missing = [path.relative_to(raw) for path in (found.layers, found.run) if not is_complete(path)]
            failed += [f"{path}: not complete" for path in missing]
            measured += [] if missing else [found]
    work = options.output / "profiles"
    rates, kernels = ([path] if is_complete(path) else [] for path in (raw / "rates", raw / "kernels"))
    rows = []
    for case in dict.fromkeys(found.case for found in measured):
        own = [found for found in measured if found.case is case]
        others = [found.layers for found in measured if found.case is not case]
        inputs = {OWN: [*(found.layers for found in own), *filter(is_complete, [raw / case.name / SHARDS]), *rates]}
        if others:
            inputs[OTHERS] = [*others, *rates]
            inputs |= {WITH_KERNELS: [*others, *rates, *kernels]} if kernels else {}
        pairs = {}
        for what, directories in inputs.items():
            profile = work / f"{case.name}-{what.replace(' ', '-')}.json"
            fit = ["calibrate", "fit", *map(str, directories), "-o", str(profile), "--force"]
            pairs[what] = predicted(own, str(profile), fit, failed)
        pairs[PUBLISHED] = predicted(own, options.published, None, failed)
        rows += [row(found, pairs) for found in own if found.dtype in pairs[OWN]]
    if kernels:
        held_out = [
            str(KERNEL_REGRESSION),
            *map(str, kernels),
            "--without-mlp",
            "-o",
            str(options.output / "regressors"),
        ]
        code, _ = timed([sys.executable, *held_out])
        failed += [f"regressors: exit code {code}"] if code else []
    else:
        failed.append("kernels: not complete")
    operators = [each for path in kernels for each in _operators(path, options.published, failed)]
    write_summary(options.output, rows, failed, operator_lines(operators, options.published))
    return failed


def _operators(kernels: Path, published: str, failed: list[str]) -> list[dict[str, Any]]:
    try:
        return operators_beside(kernels, published)
    except UserError as error:
        failed.append(f"operators: {error}")
        return []


def predicted(own: Sequence[Measured], profile: str, fit: list[str] | None, failed: list[str]) -> dict[str, Any]:
    """By precision, what ``simulate`` says of the runs; empty where a command failed, which ``failed`` names."""
    report = own[0].run.parents[2] / "reports" / f"{own[0].case.name}-{Path(profile).stem}"
    validate = ["predict", "validate", "--from-profile", profile, *(str(found.run) for found in own)]
    for module, *words in [*([fit] if fit else []), [*validate, "-o", str(report), "--force"]]:
        code, _ = timed([sys.executable, "-m", module, *words])
        if code:
            failed.append(
                f"{own[0].case.name} by {Path(profile).stem}: {module} {words[0]} ended with exit code {code}"
            )
            return {}
    pairs = json.loads((report / "report.json").read_text())["pairs"]
    return {pair["dtype"]: pair for pair in pairs if pair["evaluator"] == "simulate"}


def row(found: Measured, pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Closure of the whole layers, the serial run against its predictions, and memory."""
    (closure,) = (each for each in closures(found.layers) if not each.shard)
    pair = pairs[OWN][found.dtype]
    memory = pair["memory"] or {}
    return {
        "network": found.case.name,
        "dtype": found.dtype,
        "batch": found.case.batch,
        "closure_remainder": closure.remainder_relative,
        "predicted_s": pair["predicted_s"],
        "interval_s": pair["interval_s"],
        "measured_s": pair["measured_median_s"],
        "measured_iqr_s": pair["measured_iqr_s"],
        "error": pair["error"],
        "memory_error": memory.get("error"),
        "memory_of": memory.get("measured"),
        "others": {what: pairs[what][found.dtype]["error"] for what in COLUMNS if found.dtype in pairs.get(what, {})},
        "covered": {what: by[found.dtype]["covered"] for what, by in pairs.items() if found.dtype in by},
    }


def errors_of(rows: list[dict[str, Any]]) -> list[str]:
    """A table of what predicts: median and mean error of the runs, and how many lie in their intervals."""
    lines = ["", "| predicted from | runs | median error | mean error | in their intervals |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for what in (OWN, *COLUMNS):
        of_row = ((row["error"] if what == OWN else row["others"].get(what), row["covered"].get(what)) for row in rows)
        found = [(abs(error), covered) for error, covered in of_row if error is not None]
        if found:
            errors, covered = zip(*found, strict=True)
            spread = f"{statistics.median(errors):.1%} | {statistics.mean(errors):.1%}"
            lines.append(f"| {what} | {len(found)} | {spread} | {sum(covered)} |")
    return lines


def write_summary(output: Path, rows: list[dict[str, Any]], failed: list[str], operators: Sequence[str] = ()) -> None:
    """``summary.json``, and ``summary.md`` for a reader, with the lines of ``operators`` behind the runs."""
    spent = seconds_so_far(output)
    output.mkdir(parents=True, exist_ok=True)
    found = {"networks": rows, "gpu_seconds": spent, "failed": failed}
    write_text_atomically(output / "summary.json", json.dumps(found, indent=1) + "\n")
    names = ("closure remainder", "predicted", "90%", "measured", "error", *(f"by {name}" for name in COLUMNS))
    lines = [f"| network | dtype | batch | {' | '.join(names)} | memory error |"]
    lines.append("| --- | --- | ---: " + "| ---: " * (len(names) + 1) + "|")
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    lines += [*(errors_of(rows) if rows else []), *operators]
    layers_s = sum(seconds for name, seconds in spent.items() if "/layers-" in name)
    lines += [
        "",
        f"Layers took {layers_s / 60:.1f} minutes of the device, all measurements {sum(spent.values()) / 60:.1f}.",
    ]
    lines += [f"- {line}" for line in failed]
    write_text_atomically(output / "summary.md", "\n".join(lines) + "\n")


def cells(row: dict[str, Any]) -> list[str]:
    """Of one network in one precision."""
    low_s, high_s = row["interval_s"]
    others = (row["others"].get(what) for what in COLUMNS)
    memory = "-" if row["memory_error"] is None else f"{row['memory_error']:+.1%} ({row['memory_of']})"
    return [
        *(str(row[name]) for name in ("network", "dtype", "batch")),
        f"{row['closure_remainder']:+.1%}",
        f"{row['predicted_s'] * 1e3:.2f} ms",
        f"{low_s * 1e3:.1f} to {high_s * 1e3:.1f} ms",
        f"{row['measured_s'] * 1e3:.2f} ms",
        f"{row['error']:+.1%}",
        *("-" if error is None else f"{error:+.1%}" for error in others),
        memory,
    ]
