"""Measurements from a script or a notebook: each runs as its command does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paradl_bench.api.raw_samples import PathLike, RawSamples, read

if TYPE_CHECKING:
    import click

    from paradl_bench.api.model_names import Model

MEASURING = "PARADL_MEASURING"
"""Variable of processes that measure: they import a model, which may be of the script that asked for them."""
_calls = 0


def measure_layers(model: Model, output: PathLike, *, batch: int | Sequence[int], **options: object) -> RawSamples:
    """Measure the layers of a model, as ``paradl-bench layers`` does, and read the samples.

    The measurement runs in its own process, so that nothing else is timed. Under torchrun, all ranks make the same
    call.

    Args:
        model: what ``paradl-bench models`` lists by name, or ``"package.module:factory"``; or an object: a function or
            class that builds a module, or a module. An object stands at the top level of a script or of an imported
            file, since each rank imports it.
        output: the measurement directory, which all ranks see; an incomplete measurement is continued.
        batch: local batches to measure.
        options: options of the command, with underscores: ``device="cuda"``, ``shards="f2"``.

    Raises:
        UserError: a wrong model or option, or a call while the model's own file is imported.
        WorkError: the measurement failed; its samples are kept.
    """
    from paradl_bench.commands.layers import COMMAND

    return _measured(COMMAND, "layers", model, [], output, {"batch": batch, **options})


def train(model: Model, strategy: str, output: PathLike, *, batch: int, **options: object) -> RawSamples:
    """Train a model for a few iterations, as ``paradl-bench train`` does, and read their times.

    It starts the ranks of the strategy. Under torchrun, which has started them, all ranks make the same call.

    Args:
        model, output: as in :func:`measure_layers`.
        strategy: ``"serial"``, ``"d2"``, ``"d2f2"``.
        batch: samples in the global mini-batch.
        options: options of the command, with underscores: ``iterations=20``, ``input_shape="3x32x32"``.

    Raises:
        UserError: as in :func:`measure_layers`, or the strategy is impossible for the model, the batch or the ranks.
        WorkError: the strategy does not train as serial training does, or a rank failed.
    """
    from paradl_bench.commands.train import COMMAND

    return _measured(COMMAND, "train", model, ["--strategy", strategy], output, {"batch": batch, **options})


def measure_collectives(output: PathLike, **options: object) -> RawSamples:
    """Time collectives, as ``paradl-bench collectives`` does, and read the samples.

    Args:
        output: as in :func:`measure_layers`.
        options: options of the command, with underscores: ``ranks=2``, ``ops=["all_reduce"]``, ``sizes="1K:64M:4"``.

    Raises:
        UserError: a wrong option.
        WorkError: a rank failed, or a result was wrong.
    """
    from paradl_bench.commands.collectives import COMMAND

    return _measured(COMMAND, "collectives", None, [], output, options)


def _measured(
    command: click.Command,
    name: str,
    model: Model | None,
    words: Sequence[str],
    output: PathLike,
    options: dict[str, object],
) -> RawSamples:
    """What the command measured."""
    from paradl_bench.api.model_names import named
    from paradl_bench.core.errors import UserError, WorkError
    from paradl_bench.core.terminal.keywords import ask
    from paradl_bench.ranks.rank_place import CALL

    global _calls
    if MEASURING in os.environ:
        raise UserError(
            f"paradl_bench measures {name} while the model's own file is imported: put what the script does under"
            ' if __name__ == "__main__":'
        )
    label, folder = (None, "") if model is None else named(model)
    asked = ask(command, name, [*([label] if label else []), *words, "-o", os.fspath(output)], options)
    _calls += 1
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    # -P: modules of the working directory are imported where the command asks for one, and not before.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "paradl_bench", *asked.words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {MEASURING: name, CALL: str(_calls)} | ({"PYTHONPATH": path} if path else {}),
    )
    if done.returncode:
        _, _, said = done.stderr.rpartition("error: ")
        raise (UserError if done.returncode == UserError.exit_code else WorkError)(said.strip())
    return read(output)
