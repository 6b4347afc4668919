"""The file formats that can be imported, found by looking."""

from __future__ import annotations

from paradl_bench.measure.importers.importer import Importer
from paradl_bench.spec.registry import discover


def importers() -> dict[str, Importer]:
    """Every format's reader, by name; imports no torch."""
    return discover("paradl_bench.measure.importers", "IMPORTER", Importer)
