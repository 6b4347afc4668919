"""rccl-tests: AMD's port of nccl-tests prints its tables (ROCm/rccl-tests, ``src/common.cu``)."""

from __future__ import annotations

from functools import partial

from paradl_bench.importers.importer import Importer
from paradl_bench.importers.nccl_tests import read_text

IMPORTER = Importer(
    name="rccl-tests",
    reads="AMD's rccl-tests: logs",
    kind="collectives",
    reader=partial(read_text, library="rccl", tool="rccl-tests"),
)
