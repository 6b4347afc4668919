"""The table of ghost seconds, from the program that predicts.

``predict`` reads what this package measures, so this package imports nothing of it: the table is a file that
``predict ghost`` writes, as a user would have it write one. The same cost model then says what a rank sleeps and what
is predicted of it, sharded shapes and batches that nobody measured included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.training.ghost_record import GhostTable, read_table

_MIB = 1024 * 1024


def make_table(
    profile: str,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    *,
    dtype: str,
    backend: str,
    spread: bool = False,
) -> GhostTable:
    """What every rank of a run sleeps.

    Args:
        profile: file that calibrate fit wrote.
        network: as traced; the profile need not hold the model, if it holds what tells of its layers.
        backend: of the run's collectives.
        spread: with what single sleeps are drawn from.

    Raises:
        UserError: the profile is none, has nothing for a layer, or no spread; the message is that of ``predict ghost``.
        WorkError: that failed otherwise.
    """
    with tempfile.TemporaryDirectory() as directory:
        described = Path(directory) / "network.json"
        described.write_bytes(encode_pretty(network))
        command = [
            # -P: a user's predict.py in the working directory must not shadow ours.
            *(sys.executable, "-P", "-m", "predict", "ghost", "--from-profile", profile),
            *("--model", network.name, "--network", str(described), "--strategy", str(strategy)),
            *(
                "--dtype",
                dtype,
                "--no-channels-last",
                "--no-compile",
                "--no-tf32",
                "--no-cudnn-benchmark",
                "--backend",
                backend,
                *_arguments(settings),
                *(("--spread",) if spread else ()),
                "-o",
                "-",
            ),
        ]
        result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        said = (result.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        kind = UserError if result.returncode == UserError.exit_code else WorkError
        raise kind(f"--emulate {profile}: {said.removeprefix('predict: error: ')}")
    table = read_table(result.stdout, f"what predict ghost made of {profile}")
    assert table.network_digest == network.digest
    assert len(table.role_of_rank) == strategy.ranks
    return table


def _arguments(settings: PlanSettings) -> list[str]:
    """The options that ask ``predict`` for a plan of these settings."""
    default = PlanSettings(batch=settings.batch)
    given = ["--batch", str(settings.batch), "--optimizer", settings.optimizer]
    if settings.bucket_cap_bytes != default.bucket_cap_bytes:
        given += ["--bucket-cap-mb", repr(settings.bucket_cap_bytes / _MIB)]
    for name in ("recompute", "split", "stages"):
        value = getattr(settings, name)
        given += [f"--{name}", ",".join(value)] if value else []
    for name in ("accumulate", "batch_norm", "filter_backward", "exchange", "schedule"):
        given += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    for name in ("micro_batches", "spatial_until", "ranks_per_node"):
        value = getattr(settings, name)
        given += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return given
