"""Networks that hypothesis draws: convolutions, pools and norms of any settings on any extents, then two linear layers.

What hypothesis draws depends on the modules that a process has loaded (it collects their constants), so one process
draws and keeps what it drew (``keep``); ranks load ``drawn_networks:kept5``, the sixth.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

KEPT = "PARADL_DRAWN_NETWORKS"
"""The variable that names the file of what was kept."""


def keep(networks: list[dict[str, Any]], path: Path) -> dict[str, str]:
    """Write what ``kept0``, ``kept1``, ... are to be; returns the variable for processes that are to load them."""
    path.write_text(json.dumps(networks))
    return {KEPT: str(path)}


def kept(name: str) -> dict[str, Any]:
    """What ``Drawn`` takes of a network that was kept."""
    number = re.fullmatch(r"kept(\d+)", name)
    if number is None:
        raise AttributeError(name)
    networks: list[dict[str, Any]] = json.loads(Path(os.environ[KEPT]).read_text())
    return networks[int(number[1])]


def __getattr__(name: str) -> Callable[[], Any]:
    description = kept(name)
    from equality_networks import Drawn

    return functools.partial(Drawn, **description)


def output_extent(extent: int, arguments: dict[str, Any], dim: int) -> int:
    """Positions that a window operation writes (the formula in torch's documentation)."""

    def of(name: str, default: int) -> int:
        value = arguments.get(name, default)
        return int(value[dim]) if isinstance(value, list) else int(value)

    kernel, stride, padding, dilation = of("kernel_size", 1), of("stride", 1), of("padding", 0), of("dilation", 1)
    free = extent + 2 * padding - dilation * (kernel - 1) - 1
    if free < 0:
        return 0
    if not arguments.get("ceil_mode"):
        return free // stride + 1
    count = -(-free // stride) + 1
    # The last window has to start inside the input or the padding before it.
    return count - 1 if (count - 1) * stride >= extent + padding else count


@st.composite
def convolutions(draw: st.DrawFn, channels: int, dims: int) -> tuple[str, dict[str, Any], int]:
    """Its name, arguments and filters."""
    groups = draw(st.sampled_from([1, 1, channels, *(g for g in (2, 3) if channels % g == 0)]))
    filters = groups * draw(st.integers(1, max(1, 10 // groups)))
    kernel = [draw(st.sampled_from([1, 2, 3, 3, 5, 7])) for _ in range(dims)]
    dilation = draw(st.sampled_from([1, 1, 1, 2]))
    arguments = {
        "in_channels": channels,
        "out_channels": filters,
        "kernel_size": kernel,
        "stride": [draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims)],
        "padding": [draw(st.integers(0, dilation * (size - 1))) for size in kernel],
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    return "conv", arguments, filters


@st.composite
def pools(draw: st.DrawFn, channels: int, dims: int) -> tuple[str, dict[str, Any], int]:
    """Its name, arguments and channels."""
    maximum = draw(st.booleans())
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    arguments: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": [draw(st.integers(1, size)) for size in kernel],
        "padding": [draw(st.integers(0, size // 2)) for size in kernel],
        "ceil_mode": draw(st.booleans()),
    }
    if maximum:
        arguments["dilation"] = draw(st.sampled_from([1, 1, 2]))
    else:
        arguments["count_include_pad"] = draw(st.booleans())
    return "max" if maximum else "avg", arguments, channels


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    """What ``Drawn`` takes."""
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    smallest, largest = {1: (9, 40), 2: (8, 24), 3: (6, 11)}[dims]
    extents = [draw(st.integers(smallest, largest)) for _ in range(dims)]
    channels = draw(st.integers(1, 6))
    input_shape = [channels, *extents]
    layers: list[list[Any]] = []
    for index in range(draw(st.integers(2, 5))):
        kind = convolutions if index == 0 or draw(st.booleans()) else pools
        name, arguments, filters = draw(kind(channels, dims))
        written = [output_extent(extent, arguments, dim) for dim, extent in enumerate(extents)]
        if min(written) < 1:
            continue
        layers.append([name, arguments])
        extents, channels = written, filters
        if draw(st.integers(0, 3)) == 0:
            layers.append(["norm", {"num_features": channels, "affine": draw(st.booleans())}])
        if draw(st.booleans()):
            layers.append([draw(st.sampled_from(["relu", "relu_in_place", "tanh"])), {}])
    features = channels
    for extent in extents:
        features *= extent
    return {"input_shape": input_shape, "layers": layers, "features": features}


def drawn_networks(count: int, of: int) -> list[dict[str, Any]]:
    """As many networks as asked for; ``of`` is the draw's seed."""
    found: list[dict[str, Any]] = []

    @seed(of)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(networks())
    def collect(network: dict[str, Any]) -> None:
        found.append(network)

    collect()
    return found
