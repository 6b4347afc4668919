"""The file formats that can be imported, found by looking."""

from __future__ import annotations

from paradl_bench.core.registry import discover
from paradl_bench.importers.importer import Importer


def importers() -> dict[str, Importer]:
    """Every format's reader, by name; imports no torch."""
    return discover("paradl_bench.importers", "IMPORTER", Importer)
