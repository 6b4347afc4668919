"""The paper's regressor: a multi-layer perceptron on logarithms of sizes (KernelMLP, section 3.1).

5 blocks of (dense 50, ReLU), then dense 1; mean squared error of log(time); Adam at 1e-3, times 0.1 after 15 epochs
without improvement of the validation part, stopped after 20. The paper does not say how many kernels go into a batch,
nor how weights start; both are Keras's defaults here, which it used: 32, Glorot.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.kernels.files import Arrays
from paradl_bench.core.statistics import Floats

WIDTH, BLOCKS = 50, 5
_BATCH = 32
_RATE, _LOWER, _PATIENCE, _STOP = 1e-3, 0.1, 15, 20
_MOST_EPOCHS = 1000


def train_mlp(
    inputs: Floats, target: Floats, validation_inputs: Floats, validation_target: Floats, *, seed: int
) -> Arrays:
    """Train on one part, watch another.

    Returns:
        ``weight0``, ``bias0``, ... of the epoch with the least validation error; (outputs, inputs) and (outputs,).

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    # A generator of its own: whoever calls keeps their random numbers.
    generator = torch.Generator().manual_seed(seed)
    widths = [inputs.shape[1], *([WIDTH] * BLOCKS), 1]
    layers = [torch.nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    for layer in layers:
        torch.nn.init.xavier_uniform_(layer.weight, generator=generator)
        torch.nn.init.zeros_(layer.bias)
    body = [part for layer in layers[:-1] for part in (layer, torch.nn.ReLU())]
    network = torch.nn.Sequential(*body, layers[-1])
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=_LOWER, patience=_PATIENCE - 1)
    x, y, watched_x, watched_y = (
        torch.as_tensor(np.ascontiguousarray(array)) for array in (inputs, target, validation_inputs, validation_target)
    )
    best, kept, waited = np.inf, copy.deepcopy(network.state_dict()), 0
    for _ in range(_MOST_EPOCHS):
        for rows in torch.randperm(len(y), generator=generator).split(_BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(x[rows])[:, 0], y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            error = float(torch.nn.functional.mse_loss(network(watched_x)[:, 0], watched_y))
        schedule.step(error)
        if error < best:
            best, kept, waited = error, copy.deepcopy(network.state_dict()), 0
        else:
            waited += 1
        if waited >= _STOP:
            break
    network.load_state_dict(kept)
    return {
        f"{name}{index}": getattr(layer, name).detach().numpy().copy()
        for index, layer in enumerate(layers)
        for name in ("weight", "bias")
    }


def evaluate_mlp(arrays: Mapping[str, NDArray[Any]], inputs: Floats) -> Floats:
    """What the network says for each row of ``inputs``."""
    values = inputs
    for index in range(BLOCKS):
        values = np.maximum(values @ arrays[f"weight{index}"].T + arrays[f"bias{index}"], 0.0)
    return np.asarray((values @ arrays[f"weight{BLOCKS}"].T + arrays[f"bias{BLOCKS}"])[:, 0])
