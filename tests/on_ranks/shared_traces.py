"""Networks that are traced once in a run of the tests, by one rank for all: to trace one takes as long as to train it.

What was traced lies in a folder of the run, in a file that is named after the model and the text that it is made of:
tests write other networks of the same name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.ranks.groups.process_groups import RankContext

FOLDER = "PARADL_SHARED_TRACES"
"""The variable that names the folder; without it, each process traces by itself."""


@contextmanager
def shared_in(folder: Path) -> Iterator[None]:
    """Inside, this process and ranks that it starts read what was traced from a folder, and keep there what is new."""
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER] = str(folder)
    yield
    del os.environ[FOLDER]


@functools.cache
def traced(name: str, described: str = "") -> ModelGraph:
    """The network of the model ``module:factory``.

    Args:
        described: what the factory makes, where its module does not say that.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return trace_network(load_model(name))
    source = Path(str(importlib.import_module(name.partition(":")[0]).__file__)).read_text()
    path = Path(folder) / f"{hashlib.sha256(repr((name, described, source)).encode()).hexdigest()}.json"
    if not path.exists():
        write_bytes_atomically(path, encode_pretty(trace_network(load_model(name))))
    return read_network(path)


def trace_together(networks: Iterable[Callable[[], ModelGraph]], context: RankContext) -> None:
    """Trace what all ranks need, each rank some of it."""
    for network in [*networks][context.rank :: context.ranks]:
        # One that cannot be traced is refused where it is needed.
        with suppress(UserError):
            network()
    context.barrier()
