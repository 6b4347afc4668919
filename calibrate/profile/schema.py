"""JSON Schemas of everything that the commands write and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from calibrate.profile.profile import Profile
from paradl_bench.api.directory_files import RECORDS
from paradl_bench.core.errors import unknown_choice
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.measurement import Manifest
from paradl_bench.records.training.training_record import TrainingRun

FORMATS: dict[str, type[msgspec.Struct]] = {
    "profile": Profile,
    "manifest": Manifest,
    "network": ModelGraph,
    "cluster": Cluster,
    "run": TrainingRun,
    **{Path(name).stem: kind for name, kind in RECORDS.items()},
}
"""By name: the document, or one line of the JSON-lines file of that name."""


def schema_of(name: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a format.

    Raises:
        UserError: an unknown name; the message lists the choices.
    """
    if name not in FORMATS:
        raise unknown_choice("format", name, FORMATS)
    return msgspec.json.schema(FORMATS[name])
