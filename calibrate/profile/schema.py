"""JSON Schemas of everything that the commands write and read."""

from __future__ import annotations

from typing import Any

import msgspec

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import unknown_choice
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.records.input_record import BatchSamples, FileSamples, LoaderSamples, UnreadableFile
from paradl_bench.records.measurement import Manifest
from paradl_bench.records.roofline_record import RateSamples
from paradl_bench.records.samples import (
    CollectiveSamples,
    CopySamples,
    IterationSamples,
    LayerSamples,
)
from paradl_bench.records.training.training_record import TrainingIterations, TrainingRun

FORMATS: dict[str, type[msgspec.Struct]] = {
    "profile": Profile,
    "manifest": Manifest,
    "network": ModelGraph,
    "cluster": Cluster,
    "layers": LayerSamples,
    "iterations": IterationSamples,
    "copies": CopySamples,
    "collectives": CollectiveSamples,
    "contexts": ContextSamples,
    "rates": RateSamples,
    "files": FileSamples,
    "batches": BatchSamples,
    "loader": LoaderSamples,
    "unreadable": UnreadableFile,
    "training": TrainingIterations,
    "run": TrainingRun,
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
