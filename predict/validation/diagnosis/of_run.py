"""The run that a diagnosis is held against, and the options of ``predict`` that predict it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.strategies.exchange.options import ExchangeOptions
from predict.validation.runs import Run, read_runs
from predict.validation.validation import unlike

_CONFIGURE = ("model", "strategy", "batch", "ranks")
"""Options that a run answers itself."""


def read_run_to_diagnose(directory: Path, profile_path: Path, *, force: bool) -> Run:
    """The run of a directory.

    Args:
        force: take a run of another environment, or of another network of the model's name.

    Raises:
        UserError: it can't be read, or is unlike what the profile was measured in.
    """
    (run,), _ = read_runs([directory])
    differences = unlike(read_profile(profile_path), run)
    if differences and not force:
        raise UserError(f"{differences[0]} (profile {profile_path}); give --force to compare nevertheless")
    return run


def options_of_run(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that predict a run.

    Raises:
        UserError: options say what the run says itself.
    """
    given = [name for name in _CONFIGURE if options[name] is not None]
    if given:
        raise UserError(f"--{given[0]}: the run of --run says it; leave it out")
    about = run.description
    found = {**options, "model": about.model, "strategy": about.strategy, "batch": str(about.settings.batch)}
    found |= {"optimizer": about.optimizer, "dtype": about.dtype, "backend": about.backend}
    found |= {name: int(text) if text.isdecimal() else text for name, text in about.settings.options.items()}
    # A run names its stages whatever they were cut by; given by name they would count as the user's.
    cut = found.pop("cut_by", "--stages")
    found["stages"] = options["stages"] if cut == "FLOPs" else found["stages"]
    found["bucket_cap_mb"] = about.settings.of(ExchangeOptions).bucket_cap_bytes / 1024**2
    if about.ghost is not None:
        found |= {"dilate": about.ghost.dilate, "spread": about.ghost.drawn is not None}
    return found
