"""Memory by the paper's formula (MODELS.md, "ParaDL", memory; rho = 1).

e times the sum over layers of 2 b (x + y) + 2 w + bias, b the local batch: every tensor counts twice, and the bias
once, as printed.
"""

from __future__ import annotations

from paradl_bench.spec.network import DTYPE_BYTES, Network
from predict.memory import MemoryUse, memory_use


def paradl_memory(network: Network, local_batch: int, *, dtype: str = "fp32") -> MemoryUse:
    """The paper's sum for serial and data, with a reuse factor of 1."""
    element = DTYPE_BYTES[dtype]
    activations = 2 * local_batch * element * sum(x.input_elements + x.output_elements for x in network.layers)
    bias = sum(parameter.bytes for parameter in network.parameters if parameter.name.rpartition(".")[2] == "bias")
    weights = 2 * (network.parameter_bytes - bias)
    return memory_use({"activations": activations, "weights": weights, "bias": bias})
