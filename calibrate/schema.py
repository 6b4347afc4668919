"""JSON Schemas of everything that the commands write and read."""

from __future__ import annotations

from typing import Any

import msgspec

from calibrate.profile import Profile
from paradl_bench.spec.behind import BehindComputeSamples
from paradl_bench.spec.beside_all_reduce import BesideAllReduceSamples
from paradl_bench.spec.cluster import Cluster
from paradl_bench.spec.errors import unknown_choice
from paradl_bench.spec.input_record import BatchSamples, FileSamples, LoaderSamples, UnreadableFile
from paradl_bench.spec.measurement import (
    CollectiveSamples,
    CopySamples,
    InterferenceSamples,
    IterationSamples,
    LayerSamples,
    Manifest,
)
from paradl_bench.spec.network import Network
from paradl_bench.spec.roofline_record import RateSamples
from paradl_bench.spec.training_record import TrainingIterations, TrainingRun

FORMATS: dict[str, type[msgspec.Struct]] = {
    "profile": Profile,
    "manifest": Manifest,
    "network": Network,
    "cluster": Cluster,
    "layers": LayerSamples,
    "iterations": IterationSamples,
    "copies": CopySamples,
    "collectives": CollectiveSamples,
    "interference": InterferenceSamples,
    "behind": BehindComputeSamples,
    "beside_all_reduce": BesideAllReduceSamples,
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
