"""rccl-tests: AMD's port of nccl-tests prints its tables (ROCm/rccl-tests, ``src/common.cu``)."""

from __future__ import annotations

from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile
from paradl_bench.importers.nccl_tests import read_text


def read(log: LogFile, options: ImportOptions) -> Imported:
    """Read what rccl-tests printed.

    Raises:
        UserError: the file holds no table.
    """
    return read_text(log, options, library="rccl", tool="rccl-tests")


IMPORTER = Importer(name="rccl-tests", reads="AMD's rccl-tests: logs", kind="collectives", reader=read)
