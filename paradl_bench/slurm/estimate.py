"""About how long commands take, before anything was measured: for asking for an allocation, and no prediction.

Counted are the iterations and calls that the settings ask for. An iteration is its FLOPs at a rate that is taken
for granted, and twice its gradients' bytes between ranks; a call of a sweep its stated seconds, or
its bytes if these take longer. The network is traced, which needs torch; without it what depends on it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paradl_bench.core.units import parse_sample_shape, parse_size_sweep
from paradl_bench.slurm.jobs.request import CalibrationRequest, Configuration
from paradl_bench.slurm.jobs.site import Site
from paradl_bench.slurm.starts import ASSUMED, Start

_FLOPS_PER_S = {"cpu": 2e10, "cuda": 1e13}
"""Of a core and of a GPU in fp32, rather low: an allocation that ends early costs less than one that is too short."""
_PAIRS = 4
"""Of plain and probed iterations a block; the default of ``layers``."""
_LONGEST_CALL = 3
"""Repetitions of a message that takes longer than its seconds."""
_OVERHEAD = 1.5
"""Of a sweep beyond its timed calls: barriers, verified calls, exchange of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model makes a rank do: FLOPs of forward and backward of a sample, and bytes of its gradients."""

    flops: float
    gradient_bytes: float


def trace_works(request: CalibrationRequest) -> dict[str, Work] | None:
    """The work of every model, traced without computing; None where torch is missing.

    Raises:
        UserError: a model is unknown, or does not run on the sample's shape.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return None
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model

    shape = parse_sample_shape(request.input_shape or None, request.sequence or None)
    works = {}
    for name in request.models:
        network = trace_network(load_model(name, shape, device="meta"))
        flops = float(network.fw_flops + network.bw_flops)
        works[name] = Work(flops=flops, gradient_bytes=float(network.parameter_bytes))
    return works


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of commands; None where the models' work is not known."""

    request: CalibrationRequest
    site: Site
    works: Mapping[str, Work] | None
    start: Start = ASSUMED

    @property
    def flops_per_s(self) -> float:
        """What a rank is taken to sustain."""
        return self.site.estimate.flops_per_s or _FLOPS_PER_S[self.site.device]

    @property
    def basis(self) -> str:
        """What the estimate stands on, in words."""
        rates = self.site.estimate
        rate = f"{self.flops_per_s:.3g} FLOP/s a rank and {rates.bytes_per_s:.3g} byte/s between ranks"
        stated = (
            "stated by the site file" if rates.flops_per_s else "assumed; state them under estimate: in the site file"
        )
        without = (
            "" if self.works is not None else "; torch is not installed here: layers and runs count as their limit"
        )
        start = f"{self.start.seconds:.3g} s a start"
        return f"from the counts of iterations and calls at {rate} ({stated}), {start} ({self.start.source}){without}"

    def iteration_s(self, model: str, batch: float) -> float | None:
        """An iteration of a rank that computes ``batch`` samples, without communication."""
        return None if self.works is None else self.works[model].flops * batch / self.flops_per_s

    def layers_s(self, model: str, ranks: int, shards: int) -> float | None:
        """A profile of layers; a part of a model counts as a whole one."""
        iteration_s = self.iteration_s(model, self.request.batch)
        if iteration_s is None:
            return None
        iterations = self.request.blocks * (2 * _PAIRS + 1) + 2
        return self.start.seconds + iterations * iteration_s * (1 + shards)

    def sweep_s(self, *, kinds: int) -> float:
        """A sweep; ``kinds`` counts what is measured of each point: alone, and in each context."""
        request = self.request
        sizes = parse_size_sweep(request.sizes)
        calls_s = sum(max(request.point_s, _LONGEST_CALL * self._all_reduce_s(size)) for size in sizes)
        operations = len(request.operations.split(","))
        return self.start.seconds + _OVERHEAD * kinds * request.blocks * operations * calls_s

    def run_s(self, model: str, run: Configuration) -> float | None:
        """A training run; a rank is taken to compute its share of the mini-batch, and to exchange all parameters."""
        iteration_s = self.iteration_s(model, run.batch / run.ranks)
        if iteration_s is None or self.works is None:
            return None
        if run.ranks > 1:
            iteration_s += self._all_reduce_s(self.works[model].gradient_bytes)
        # Recorded, warming up, one before every ten, timed.
        iterations = 3 + self.request.warmup + 1.1 * self.request.iterations
        return self.start.seconds + iterations * iteration_s

    def _all_reduce_s(self, size: float) -> float:
        return 2 * size / self.site.estimate.bytes_per_s
