"""Networks of models that were traced beforehand, so that predicting from a published profile needs no torch.

One file a model under ``networks/``, as ``paradl-bench describe`` writes it, compressed. ``benchmarks/networks/
traced_networks.py`` writes them anew; a test holds one against a trace. Torch-free.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import decode_json, read_whole
from paradl_bench.network.graph import ModelGraph

FOLDER = Path(__file__).parent / "networks"
_ENDING = ".json.gz"


def network_file(model: str) -> Path:
    """Where the network of a model lies, if it comes with the tool."""
    return FOLDER / f"{model}{_ENDING}"


def traced_models() -> list[str]:
    """Names of the models whose networks come with the tool."""
    return sorted(path.name.removesuffix(_ENDING) for path in FOLDER.glob(f"*{_ENDING}"))


def traced_network(model: str) -> ModelGraph | None:
    """The network of a model by its name, for samples of its usual shape; None where it does not come with the tool.

    Raises:
        UserError: its file is broken.
    """
    path = network_file(model)
    if path.parent != FOLDER or not path.is_file():
        return None
    try:
        content = gzip.decompress(read_whole(path, what="network"))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"network {path}: {error}; install the tool again") from None
    return decode_json(content, ModelGraph, where=f"network {path}", shipped=True)
