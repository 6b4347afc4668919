"""Ranks that run several emulated trainings one after the other: started once, since loading torch takes seconds.

Arguments: a directory with ``networks_of_emulation.py`` and ``profile.json``, where each run goes; then a run each, as
``name strategy dilate setting=value ...``, with ``model=NAME`` for another network than the small one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.run import measure_training
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import RankContext, join_ranks
from paradl_bench.records.slow_rank import parse_slow_rank
from predict.emulation.ghost import make_table


def run(case: str, where: Path, context: RankContext) -> None:
    """Train once."""
    name, strategy, dilate, *words = case.split()
    options: dict[str, Any] = {
        key: (value,) if key == "recompute" else int(value) if value.isdigit() else value
        for key, value in (word.split("=") for word in words)
    }
    if "spread" in options:
        options["spread"] = options["spread"] == "drawn"
    if "slow_rank" in options:
        options["slow_rank"] = parse_slow_rank(options["slow_rank"])
    model = options.pop("model", "Small")
    axes, others = read_options(options)
    request = TrainingRequest(
        model=f"networks_of_emulation:{model}",
        input_shape=None,
        strategy=parse_strategy(strategy),
        batch=8,
        device="cpu",
        iterations=5,
        warmup=3,
        emulate=str(where / "profile.json"),
        dilate=float(dilate),
        axes=axes,
        **others,
    )
    request.check()
    measure_training(request, context, where / name, ("paradl-bench", "train"), make_table=make_table)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    sys.path.append(str(directory))
    with join_ranks("gloo", "cpu", timeout_s=120) as joined:
        for each in sys.argv[2:]:
            run(each, directory, joined)
