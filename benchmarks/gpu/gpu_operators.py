"""A lent GPU's kernels beside a shipped profile's regressors for the same shapes, kind by kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.profile.profile import read_profile
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.records.measurement import read_records
from predict.costs.compute.kernel_costs import KernelCosts


def operators_beside(kernels: Path, published: str) -> list[dict[str, Any]]:
    """How long published regressors say that a sweep's kernels take, over how long they took.

    Args:
        kernels: a directory of ``paradl-bench kernels``. published: a profile that comes with the tool.

    Returns:
        A row for each kind, stage and dtype. Of ``kernels`` measured ones ``answered`` lie near published ones.
    """
    models = read_profile(published).kernel_models
    records = read_records(kernels, KERNELS_FILE, KernelSamples)
    costs = {dtype: KernelCosts(models, dtype) for dtype in {record.dtype for record in records}}
    groups: dict[tuple[str, str, str], list[KernelSamples]] = {}
    for record in records:
        groups.setdefault((record.shape.kind, record.shape.stage, record.dtype), []).append(record)
    rows = []
    for (kind, stage, dtype), found in sorted(groups.items()):
        ratios = list(_ratios(found, costs[dtype]))
        if ratios:
            low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
            held = {"answered": len(ratios), "low": low, "median": middle, "high": high}
            rows.append({"kind": kind, "stage": stage, "dtype": dtype, "kernels": len(found), **held})
    return rows


def _ratios(records: Iterable[KernelSamples], costs: KernelCosts) -> Iterable[float]:
    for record in records:
        answer = costs.of_shape(record.shape)
        if answer is not None:
            yield answer.seconds / statistics.median(record.samples_s)


def operator_lines(rows: Sequence[dict[str, Any]], published: str) -> list[str]:
    """The rows as a table in Markdown; nothing of no rows."""
    if not rows:
        return []
    lines = ["", f"Kernels of the sweep, by the regressors of `{published}`: predicted over measured.", ""]
    lines.append("| kernels | stage | dtype | measured | with a published regressor | median | 5% to 95% |")
    lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        counts = f"{row['kernels']} | {row['answered']}"
        spread = f"{row['median']:.2f} | {row['low']:.2f} to {row['high']:.2f}"
        lines.append(f"| {row['kind']} | {row['stage']} | {row['dtype']} | {counts} | {spread} |")
    return lines
