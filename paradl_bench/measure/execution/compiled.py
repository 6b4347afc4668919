"""Models and layers whose kernels torch.compile makes, and what compiling takes.

A model is compiled whole, as a user trains it: kernels reach over layers, and none of its layers has a time of its own
then. Layers that are timed are compiled each by itself, so that nothing is fused over two of them and every call enters
a compiled function: their sum is more than the whole model takes, and closure says by how much. The loss is not the
model's, and is not compiled.

Shapes are compiled as they are (``dynamic=False``): in a measurement they stay what they are. What torch would leave
uncompiled without a word (too many versions of one function; a layer that it cannot follow) is an error here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.overrides import TorchFunctionMode

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.measure.execution.compiler import refuse_open_cache
from paradl_bench.measure.execution.probes import OperationProbe
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.training.compile_record import COMPILED_FILE, CompileRecord
from paradl_bench.strategies.running.operations import is_operation

Call = Callable[..., Any]
BACKEND = "inductor"
"""What torch.compile compiles with: its own default."""
_OF_THE_COMPILER = (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError, InvalidCxxCompiler)


class Compiling:
    """What torch compiles while this is active."""

    def __init__(self) -> None:
        self.compile_s = 0.0
        self.times = 0
        self._since_s = 0.0
        self._before = self._after = _graphs()

    def __enter__(self) -> Compiling:
        self._before = _graphs()
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._after = _graphs()
        callback_handler.remove_start_callback(self._begin)
        callback_handler.remove_end_callback(self._end)

    def _begin(self, *_: object) -> None:
        beat()
        self.times += 1
        self._since_s = time.perf_counter()

    def _end(self, *_: object) -> None:
        beat()
        self.compile_s += time.perf_counter() - self._since_s

    def record(self, rank: int, model: str, batch: int, what: Literal["whole", "layers"]) -> CompileRecord:
        """What was compiled while this was active.

        Raises:
            WorkError: nothing was.
        """
        graphs = self._after - self._before
        if not graphs:
            raise WorkError(f"--compile: torch compiled no part of {model}")
        return CompileRecord(rank=rank, model=model, batch=batch, what=what, compile_s=self.compile_s, graphs=graphs)

    @contextlib.contextmanager
    def nothing_more(self, what: str) -> Iterator[None]:
        """What is timed inside must not hold the compiler's time.

        Raises:
            WorkError: something was compiled.
        """
        before = self.times
        yield
        if self.times > before:
            raise WorkError(
                f"{what} was compiled again between timed iterations, because its control flow or shapes vary:"
                " its times would include the compiler's"
            )


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def set_up_compiler(device: torch.device) -> None:
    """How this process compiles."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device.type == "cpu":
        # Ranks have a core each: processes that compile beside them would take it from what is timed.
        torch._inductor.config.compile_threads = 1


@contextlib.contextmanager
def compile_errors(what: str) -> Iterator[None]:
    """Say in one line what torch cannot compile.

    Raises:
        UserError: names it, and what torch says first.
    """
    try:
        yield
    except _OF_THE_COMPILER as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"--compile: torch cannot compile {what}: {said}") from error


def compiled(function: Call, name: str, *, whole_graph: bool = False) -> Call:
    """A function's kernels made by torch at its first call.

    Args:
        whole_graph: refuse it where it would be more than one graph.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # torch keeps what it compiled by code object, so many versions of one at most, and goes through them at every call:
    # each function has code of its own.
    code = call.__code__.replace(co_name=name)
    version = FunctionType(code, call.__globals__, name, None, call.__closure__)
    _refuse_others_code()
    made: Call = torch.compile(version, dynamic=False, fullgraph=whole_graph, backend=BACKEND)
    return made


def compile_in_place(module: torch.nn.Module) -> None:
    """A module's kernels made by torch at its first call; it stays the module that it was."""
    _refuse_others_code()
    module.compile(dynamic=False, backend=BACKEND)


def _refuse_others_code() -> None:
    refuse_open_cache(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()))


class _Functions(TorchFunctionMode):
    """Notes the function of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Call] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_operation(function, result):
            self.seen.append(function)
        return result


class CompiledLayers:
    """What stands for the functions that a model's forward calls: each compiled by itself, the loss's as they are.

    Layers of one operation share what is compiled.

    Args:
        forward: to the loss; called once to see what it calls.

    Raises:
        WorkError: it called other operations than when the network was traced.
    """

    def __init__(self, network: ModelGraph, forward: Callable[[], object]) -> None:
        with _Functions() as functions:
            forward()
        if len(functions.seen) != len(network.layers):
            raise WorkError(
                f"forward of {network.name} called {len(functions.seen)} operations where the traced network has"
                f" {len(network.layers)}: its control flow varies"
            )
        self._network, self._functions = network, functions.seen[: operations_of_forward(network)]
        made: dict[tuple[str, Call], Call] = {}
        self._calls: list[Call] = []
        for layer, function in zip(network.layers, self._functions, strict=False):
            key = layer.operation, function
            if key not in made:
                made[key] = compiled(function, layer.name, whole_graph=True)
            self._calls.append(made[key])

    def __call__(self, index: int, function: Call) -> Call:
        """What is called where forward calls a function and so many operations were called before."""
        is_layer = index < len(self._calls) and self._functions[index] == function
        return self._calls[index] if is_layer else function

    def first(self, index: int, function: Call) -> Call:
        """The same for the calls that compile; they raise UserError, which names the layer that torch cannot follow."""
        call = self(index, function)
        if call is function:
            return function

        def named(*args: Any, **kwargs: Any) -> Any:
            with compile_errors(f"layer {self._network.layers[index].name} of {self._network.name} by itself"):
                return call(*args, **kwargs)

        return named


class CompiledModel:
    """A model compiled whole, and its layers each by itself.

    Args:
        forward: to the loss, of the module or of what is given in its place.
    """

    layers: CompiledLayers
    """What stands for its functions, once they were compiled."""

    def __init__(
        self, name: str, network: ModelGraph, batch: int, module: torch.nn.Module, forward: Callable[..., torch.Tensor]
    ) -> None:
        self._name, self._network, self._batch, self._by_layer = name, network, batch, forward
        self.forward = partial(forward, compiled(module, f"{name}_batch_{batch}"))
        self._compiled: tuple[tuple[Literal["whole", "layers"], Compiling], ...] = ()

    def compile(self, stamp: Callable[[], Any], update: Callable[[], None]) -> None:
        """Compile all of it, in an iteration of either kind.

        Raises:
            UserError: what torch cannot compile.
        """
        with compile_errors(self._name):
            with Compiling() as of_whole:
                self.forward().backward()  # type: ignore[no-untyped-call]
            update()
            self.layers = CompiledLayers(self._network, self._by_layer)
            with Compiling() as of_layers:
                with OperationProbe(stamp, self.layers.first):
                    loss = self._by_layer()
                loss.backward()  # type: ignore[no-untyped-call]
            update()
        self._compiled = ("whole", of_whole), ("layers", of_layers)

    def records(self, rank: int) -> list[CompileRecord]:
        """What that took."""
        return [compiling.record(rank, self._name, self._batch, what) for what, compiling in self._compiled]


def keep_records(models: Sequence[CompiledModel], context: RankContext, directory: MeasurementDirectory | None) -> None:
    """Keep what every start of a measurement compiled; a collective."""
    records = [record for model in models for record in model.records(context.rank)]
    rows = [row for of_rank in context.gather(records, list[CompileRecord]) for row in of_rank]
    if directory is not None and rows:
        directory.append(COMPILED_FILE, rows)
