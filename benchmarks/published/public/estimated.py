"""Forward and backward of layers that nobody measured: an iteration shared out by the roofline of the network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from public.toolkit import TraceLayer, run

SHEET_RATES = {"V100": (15.7e12, 900e9), "A100": (19.5e12, 1555e9), "K80": (4.37e12, 240e9)}
"""FLOP/s in fp32 and bytes/s of one GPU, of the data sheets (SXM2 16 GB, SXM4 40 GB, half a board). Of an iteration
that was measured they say only which share each layer has, so that nothing but their ratio matters."""


def described(model: str, folder: Path) -> dict[str, Any]:
    """A network by ``paradl-bench describe``."""
    path = folder / f"{model}.json"
    if not path.exists():
        run("paradl_bench", "describe", model, "-o", str(path))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def shared_out(network: dict[str, Any], device: str, batch: int, iteration_s: float) -> list[TraceLayer]:
    """Layers in the order of forward, whose forward and backward add up to the iteration.

    Args:
        device: as its driver names it. One that no data sheet stands for here takes the V100's ratio of the two rates.
        batch: local.
    """
    flops_per_s, bytes_per_s = next((v for k, v in SHEET_RATES.items() if k in device), SHEET_RATES["V100"])
    sizes = {each["name"]: 4 * math.prod(each["shape"]) for each in network["parameters"]}

    def time(flops: float, moved: float) -> float:
        return batch * max(flops / flops_per_s, moved / bytes_per_s)

    layers = []
    for layer in network["layers"]:
        if layer["batchless"] or not layer["fw_bytes"]:
            continue
        # Backward has a product for the input's gradient and one for the weights', each about as many bytes as forward.
        halves = [layer["bw_input_flops"], layer["bw_weight_flops"]]
        backward = sum(time(half, layer["fw_bytes"]) for half in halves if half)
        own = sum(sizes.pop(name, 0) for name in layer["parameters"])
        layers.append(TraceLayer(layer["name"], time(layer["fw_flops"], layer["fw_bytes"]), backward, 0.0, own))
    scale = iteration_s / sum(layer.forward_s + layer.backward_s for layer in layers)
    return [each._replace(forward_s=each.forward_s * scale, backward_s=each.backward_s * scale) for each in layers]
