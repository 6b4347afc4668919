"""Every field of every format by its type: numbers have bounds, and whatever stands in a field is read or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from field_changes import VALUES, places, sample, with_value
from msgspec import inspect
from parser_seeds import seeds

from calibrate.profile.profile import Profile
from paradl_bench.api.directory_files import RECORDS
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import decode_json
from paradl_bench.measure.kernels.design import Design
from paradl_bench.measure.kernels.request import DESIGN_FILE
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.measurement import MANIFEST_NAME, Manifest
from paradl_bench.records.training.ghost_record import GhostTable
from paradl_bench.records.training.training_record import RUN_NAME, TrainingRun
from paradl_bench.slurm.jobs.plan import PLAN, Plan
from paradl_bench.slurm.jobs.site import Site
from paradl_bench.strategies.data.fusion.fusion_file import FusionFile

FORMATS: dict[str, type[msgspec.Struct]] = {
    **RECORDS,
    "profile.json": Profile,
    "network.json": ModelGraph,
    MANIFEST_NAME: Manifest,
    RUN_NAME: TrainingRun,
    DESIGN_FILE: Design,
    PLAN: Plan,
    "cluster.yaml": ClusterFile,
    "site.yaml": Site,
    "ghost.json": GhostTable,
    "fusion.json": FusionFile,
}


def numbers(kind: inspect.Type, where: str, seen: set[type]) -> Iterator[tuple[str, inspect.Type]]:
    if isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from numbers(field.type, f"{kind.cls.__name__}.{field.name}", seen)
    elif isinstance(kind, (inspect.IntType, inspect.FloatType)):
        yield where, kind
    for label in ("types", "item_types"):
        for part in getattr(kind, label, ()):
            yield from numbers(part, where, seen)
    for label in ("item_type", "value_type"):
        if hasattr(kind, label):
            yield from numbers(getattr(kind, label), where, seen)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_number_of_a_format_has_both_bounds(name: str) -> None:
    found = list(numbers(inspect.type_info(FORMATS[name]), name, set()))
    unbounded = [
        where
        for where, kind in found
        if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)  # type: ignore[attr-defined]
    ]
    assert not unbounded


def document_of(name: str) -> Any:
    """A small file that is valid, as builtins; every field is set where a plain value of it is valid too."""
    if name in ("cluster.yaml", "site.yaml", "ghost.json", "fusion.json"):
        return sample(inspect.type_info(FORMATS[name]))
    content = seeds(name)[-1]
    return json.loads(content.splitlines()[0] if name.endswith(".jsonl") else content)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_any_field_value_is_read_or_refused_in_one_line(name: str) -> None:
    kind, document = FORMATS[name], document_of(name)
    text = json.dumps(document)
    # Entries of one list are alike.
    fields = {
        tuple("*" if isinstance(key, int) else key for key in where): where for where, _ in places(kind, document)
    }
    tried, refusals = set(), []
    # A profile has some hundred fields: each gets every fourth value, from another one on.
    step = 4 if len(fields) > 200 else 1
    for number, where in enumerate(fields.values()):
        for value in VALUES[number % step :: step]:
            try:
                changed = with_value(json.loads(text), where, copy.deepcopy(value), kind)
            except (LookupError, TypeError, StopIteration):
                continue
            tried.add(where[0])
            try:
                decode_json(msgspec.json.encode(changed), kind, where="file")
            except UserError as error:
                refusals.append(str(error))
    assert tried == {field.encode_name for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
    assert refusals
    assert not [line for line in refusals if "\n" in line]
