"""What every rank runs: program.py CASES RESULTS, where CASES is JSON and a line of RESULTS is written for each case.

A rank that fails writes RESULTS.RANK.failed and ends; the others are ended by whoever started them.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from pathlib import Path

import msgspec
import torch

from paradl_bench.network.graph import ModelGraph
from paradl_bench.ranks.groups.process_groups import join_ranks
from random_modules.case import Case
from random_modules.comparison import compare


def where_it_failed(error: BaseException) -> str:
    """The error, and the innermost lines of this program that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "paradl_bench" in f.filename]
    lines = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-3:]]
    return f"{type(error).__name__}: {str(error)[:600]} ({', '.join(lines)})"


def main(cases: Path, results: Path) -> None:
    warnings.filterwarnings("ignore")
    asked = json.loads(cases.read_text())
    with join_ranks("gloo", "cpu", timeout_s=45) as context:
        gc.freeze()
        for item in asked:
            case, network = msgspec.convert(item["case"], Case), msgspec.convert(item["network"], ModelGraph)
            torch.manual_seed(0)
            began = time.monotonic()
            try:
                found = context.gather(compare(case, network, context), dict)
            except BaseException as error:
                what = {"number": case.number, "rank": context.rank, "at": time.time(), "error": where_it_failed(error)}
                Path(f"{results}.{context.rank}.failed").write_text(json.dumps(what))
                raise
            gc.collect()
            if context.rank == 0:
                lines = {
                    key: [f"rank {rank}: {line}" for rank, own in enumerate(found) for line in own[key]]
                    for key in ("plan", "serial")
                }
                seconds = time.monotonic() - began
                with results.open("a") as file:
                    file.write(json.dumps({"number": case.number, "seconds": round(seconds, 3), **lines}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
