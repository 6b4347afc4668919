"""Modules that can stand in the place of layers, and the calls of torch functions that they make.

The layer kinds say what a call costs, as they do of a traced one; here stands which shapes a module takes and returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from paradl_bench.network.kinds.activation import KIND as ACTIVATION
from paradl_bench.network.kinds.kind import BUFFER, Call, TensorArgument, as_tuple
from paradl_bench.network.partition import Window

Shape = tuple[int, ...]
Argument = int | float | bool | tuple[int, ...]
Arguments = Mapping[str, Argument]
Sort = Literal["width", "count", "extents", "padding", "flag", "share"]
"""What an argument may be: a width that is read, a whole number, one number or one a dim (3x5), likewise from 0, true
or false, a share."""


class Misfit(ValueError):
    """A module or a layer does not take what it gets; the text says what it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that can be written.

    Attributes:
        arguments: in their order. optional: those that may be missing. defaults: of these, but for a pool's stride,
            which is its kernel.
        width_dim: the dim of a sample that its width is of.
        call: of one sample, from arguments and the shape of what is read; a :class:`Misfit` where that does not fit.
    """

    name: str
    arguments: Mapping[str, Sort]
    optional: frozenset[str]
    defaults: Arguments
    width_dim: int
    call: Callable[[Arguments, Shape], Call]

    @property
    def usage(self) -> str:
        """How it is written: ``linear(in,out[,bias])``."""
        given = [name for name in self.arguments if name not in self.optional]
        further = [name for name in self.arguments if name in self.optional]
        inside = ",".join(given) + (f"[{',' if given else ''}{','.join(further)}]" if further else "")
        return f"{self.name}({inside})" if inside else self.name


def shape_text(shape: Shape) -> str:
    """A shape for a person: ``512x7x7``."""
    return "x".join(map(str, shape)) or "one number"


def same_shape(name: str) -> Callable[[Arguments, Shape], Call]:
    """The call of a function of each element."""
    return lambda given, shape: Call(name, (_tensor(shape),), {}, ((1, *shape),), 1)


def positions(windows: tuple[Window, ...], extents: Shape) -> Shape:
    """Extents of what windows return that start inside of the tensor, its padding included; floors, as torch's default.

    Raises:
        Misfit: a window is larger than what it reads, or there are more or fewer dims.
    """
    if len(extents) != len(windows):
        raise Misfit(f"{len(windows) + 1} dims a sample")
    reach = tuple(window.dilation * (window.kernel - 1) + 1 - 2 * window.padding for window in windows)
    if any(extent < least for extent, least in zip(extents, reach, strict=True)):
        raise Misfit(f"extents of at least {shape_text(reach)}")
    return tuple((at - least) // w.stride + 1 for at, least, w in zip(extents, reach, windows, strict=True))


def _tensor(shape: Shape) -> TensorArgument:
    return TensorArgument((1, *shape))


def _parameters(shape: Shape, *names: str) -> dict[str, TensorArgument]:
    return {name: TensorArgument(shape, name) for name in names}


def _linear(given: Arguments, shape: Shape) -> Call:
    width, features = cast("int", given["in"]), cast("int", given["out"])
    bias = _parameters((features,), "bias") if given["bias"] else {}
    weight = TensorArgument((features, width), "weight")
    return Call("linear", (_tensor(shape), weight), bias, ((1, *shape[:-1], features),), 1)


def _spatial(shape: Shape, dims: int) -> Shape:
    if len(shape) != dims + 1:
        raise Misfit(f"{dims + 1} dims a sample")
    return shape[1:]


def _windowed(given: Arguments, dims: int) -> dict[str, Shape]:
    kernel = as_tuple(given["kernel"], dims)
    settings = {
        "stride": given.get("stride", kernel),
        "padding": given["padding"],
        "dilation": given.get("dilation", 1),
    }
    filled = {"kernel": kernel, **{name: as_tuple(value, dims) for name, value in settings.items()}}
    wrong = next((name for name, values in filled.items() if len(values) != dims), None)
    if wrong:
        raise Misfit(f"a {wrong} of 1 or {dims} numbers")
    return filled


def _conv(dims: int) -> Callable[[Arguments, Shape], Call]:
    def call(given: Arguments, shape: Shape) -> Call:
        channels, filters, groups = (cast("int", given[name]) for name in ("in", "out", "groups"))
        if channels % groups or filters % groups:
            raise Misfit(f"channels and filters that groups={groups} parts evenly")
        window = _windowed(given, dims)
        kernel = window.pop("kernel")
        extents = positions(tuple(map(Window, kernel, *window.values())), _spatial(shape, dims))
        weight = TensorArgument((filters, channels // groups, *kernel), "weight")
        bias = _parameters((filters,), "bias") if given["bias"] else {}
        settings = {**bias, **window, "groups": groups}
        return Call(f"conv{dims}d", (_tensor(shape), weight), settings, ((1, filters, *extents),), 1)

    return call


def _pool(name: str, dims: int) -> Callable[[Arguments, Shape], Call]:
    def call(given: Arguments, shape: Shape) -> Call:
        window = _windowed(given, dims)
        if any(2 * pad > size for pad, size in zip(window["padding"], window["kernel"], strict=True)):
            raise Misfit("a padding of at most half its kernel")
        extents = positions(tuple(map(Window, *window.values())), _spatial(shape, dims))
        settings = {"stride": window["stride"], "padding": window["padding"]}
        return Call(name, (_tensor(shape), window["kernel"]), settings, ((1, shape[0], *extents),), 1)

    return call


def _adaptive_pool(name: str, dims: int) -> Callable[[Arguments, Shape], Call]:
    def call(given: Arguments, shape: Shape) -> Call:
        _spatial(shape, dims)
        output = as_tuple(given["output"], dims)
        if len(output) != dims:
            raise Misfit(f"an output of 1 or {dims} numbers")
        return Call(name, (_tensor(shape), output), {}, ((1, shape[0], *output),), 1)

    return call


def _dropout(given: Arguments, shape: Shape) -> Call:
    settings = {"p": given["p"], "training": True, "inplace": False}
    return Call("dropout", (_tensor(shape),), settings, ((1, *shape),), 1)


def _batch_norm(given: Arguments, shape: Shape) -> Call:
    width = (shape[0],)
    running = tuple(TensorArgument(width, BUFFER + name) for name in ("running_mean", "running_var"))
    trained = _parameters(width, "weight", "bias")
    return Call("batch_norm", (_tensor(shape), *running, *trained.values(), True), {}, ((1, *shape),), 1)


def _layer_norm(given: Arguments, shape: Shape) -> Call:
    width = (shape[-1],)
    settings = {"normalized_shape": width, **_parameters(width, "weight", "bias")}
    return Call("layer_norm", (_tensor(shape),), settings, ((1, *shape),), 1)


def _group_norm(given: Arguments, shape: Shape) -> Call:
    groups = cast("int", given["groups"])
    if shape[0] % groups:
        raise Misfit(f"channels that groups={groups} parts evenly")
    settings = {"num_groups": groups, **_parameters((shape[0],), "weight", "bias")}
    return Call("group_norm", (_tensor(shape),), settings, ((1, *shape),), 1)


def _flatten(given: Arguments, shape: Shape) -> Call:
    return Call("flatten", (_tensor(shape), 1), {}, ((1, math.prod(shape)),), 1)


def _module(
    name: str,
    arguments: dict[str, Sort],
    call: Callable[[Arguments, Shape], Call],
    *,
    width_dim: int = 0,
    **defaults: Argument,
) -> Module:
    optional = frozenset(name for name in arguments if name in (*defaults, "stride"))
    return Module(name=name, arguments=arguments, optional=optional, defaults=defaults, width_dim=width_dim, call=call)


def _windowed_modules(dims: int) -> tuple[Module, ...]:
    window: dict[str, Sort] = {"kernel": "extents", "stride": "extents", "padding": "padding"}
    of_conv: dict[str, Sort] = {"dilation": "extents", "groups": "count", "bias": "flag"}
    sizes: dict[str, Sort] = {"in": "width", "out": "count"}
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True}
    conv = _module(f"conv{dims}d", sizes | window | of_conv, _conv(dims), **defaults)
    pools = [f"{way}_pool{dims}d" for way in ("max", "avg")]
    adaptive = [f"adaptive_{name}" for name in pools]
    return (
        conv,
        *(_module(name, window, _pool(name, dims), padding=0) for name in pools),
        *(_module(name, {"output": "extents"}, _adaptive_pool(name, dims)) for name in adaptive),
    )


_LINEAR: dict[str, Sort] = {"in": "width", "out": "count", "bias": "flag"}
_ALL = (
    _module("linear", _LINEAR, _linear, width_dim=-1, bias=True),
    *(module for dims in (1, 2, 3) for module in _windowed_modules(dims)),
    *(_module(name, {}, same_shape(name)) for name in ACTIVATION.functions if name != "prelu"),
    _module("dropout", {"p": "share"}, _dropout, p=0.5),
    _module("batch_norm", {"channels": "width"}, _batch_norm),
    _module("layer_norm", {"size": "width"}, _layer_norm, width_dim=-1),
    _module("group_norm", {"groups": "count", "channels": "width"}, _group_norm),
    _module("flatten", {}, _flatten),
)
MODULES = {module.name: module for module in _ALL}
"""Modules by the names of torch's functions."""
