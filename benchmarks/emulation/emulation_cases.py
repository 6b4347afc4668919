"""What the emulation suites have in common, and the suite of strategies: clusters, runs and their requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))

from emulated_profile import BATCH, FEW_RANKS, Sweep, phase_seconds, sweeps_of

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.records.measurement import is_complete
from paradl_bench.records.slow_rank import parse_slow_rank
from paradl_bench.strategies.context.options import ContextOptions
from paradl_bench.strategies.exchange.options import ExchangeOptions, bucket_limits
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions

Configured = tuple[str, dict[str, object]]
"""A strategy, and what of a :class:`Case` is not its default."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Runs that are calibrated and predicted together.

    Attributes:
        models: and the shape of a sample. configurations: of a model on a layout. sweeps: that calibrate a layout.
    """

    models: Mapping[str, tuple[int, ...]]
    configurations: Callable[[NodeLayout, str], list[Configured]]
    sweeps: Callable[[Path, NodeLayout], list[Sweep]]

    def traced(self, model: str) -> ModelGraph:
        """One of its models."""
        return _traced(model, self.models[model])


BRIEF = frozenset({"emulated_networks:small_vgg"})
"""Models that train by a strategy of each kind alone."""

NODES_OF = {4: (1, 2, 4), 2: (2, 4)}
"""By ranks on a node: how many nodes."""

CLUSTERS = (4,)
"""Those of them that are emulated unless others are asked for: 4, 8 and 16 ranks."""

SERIAL_S, SERIAL_S_A_RANK = 3.0, 0.375
"""What a serial iteration sleeps at least, and at least a rank: layers are dilated to it, so that the time for which
ranks take the host's cores, all of them together, is small beside what each one sleeps."""

ITERATIONS, WARMUP = 5, 3
"""As few as can be compared: sleeps do not spread, and messages are seen over configurations, not repetitions."""

LINK_BYTES_PER_S = 125e6
"""Of each node's link, a tenth or less of what ranks of a node send each other on a host of a few cores."""

FOUND = ("stages", "cut_by")
"""Options that every pipeline's run records and nobody asked for."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the suite.

    Attributes:
        directory: that it is measured into. profile: whose seconds layers sleep.
    """

    model: str
    input_shape: tuple[int, ...]
    strategy: str
    directory: str
    profile: str
    layout: NodeLayout
    batch: int = BATCH
    schedule: str = "gpipe"
    micro_batches: int | None = None
    bucket_cap_mb: float | None = None
    exchange: str = "flat"
    context_exchange: str = "gather"
    sequence_parallel: str = "off"
    slow_rank: str = ""
    dilate: float
    iterations: int

    @property
    def request(self) -> TrainingRequest:
        """What is trained."""
        first, cap = bucket_limits(self.bucket_cap_mb)
        return TrainingRequest(
            model=self.model,
            input_shape=self.input_shape,
            strategy=parse_strategy(self.strategy),
            batch=self.batch,
            device="cpu",
            verify=False,
            axes=(
                PipelineOptions(schedule=self.schedule, micro_batches=self.micro_batches),
                ExchangeOptions(
                    exchange=self.exchange,
                    ranks_per_node=None if self.exchange == "flat" else self.layout.ranks_per_node,
                    first_bucket_bytes=first,
                    bucket_cap_bytes=cap,
                ),
                msgspec.convert({"context_exchange": self.context_exchange}, ContextOptions),
                msgspec.convert({"sequence_parallel": self.sequence_parallel}, SequenceOptions),
            ),
            layout=self.layout,
            iterations=self.iterations,
            warmup=WARMUP,
            emulate=self.profile,
            dilate=self.dilate,
            slow_rank=parse_slow_rank(self.slow_rank) if self.slow_rank else None,
        )

    @property
    def complete(self) -> bool:
        """Whether it was measured to its end."""
        return is_complete(Path(self.directory))


def configurations(layout: NodeLayout, model: str) -> list[Configured]:
    """Strategies of so many ranks, and their settings: of a model among :data:`BRIEF` one of each kind."""
    ranks, half = layout.ranks, layout.ranks // 2
    one_forward: dict[str, object] = {"schedule": "1f1b", "micro_batches": 2 * ranks}
    found: list[Configured]
    if model in BRIEF:
        if ranks > FEW_RANKS:
            return [(f"d{ranks}", {}), (f"d{layout.nodes}f{layout.ranks_per_node}", {})]
        found = [(f"d{ranks}", {}), (f"p{ranks}", one_forward), (f"d2f{half}", {})]
        return found if layout.nodes > 1 else [*found, (f"d2s{half}", {})]
    if ranks > FEW_RANKS:
        nodes, inside = layout.nodes, layout.ranks_per_node
        return [
            (f"d{ranks}", {}),
            (f"d{ranks}", {"exchange": "segmented"}),
            *((f"d{nodes}{axis}{inside}", {}) for axis in "fsp"),
        ]
    found = [
        (f"d{ranks}", {}),
        (f"f{ranks}", {}),
        (f"s2x{half}", {}),
        (f"p{ranks}", {}),
        (f"p{ranks}", one_forward),
        (f"d2f{half}", {}),
        (f"d2s{half}", {}),
        (f"d2p{half}", {}),
    ]
    if layout.nodes > 1:
        return [*found, *((f"d{ranks}", {"exchange": kind}) for kind in ("leader", "segmented"))]
    # What differs little with the number of nodes is tried on one.
    found += [
        (f"d2c{half}", {}),
        (f"d{ranks}", {"slow_rank": f"1.5@{ranks - 1}"}),
        (f"d{ranks}", {"bucket_cap_mb": 4.0}),
        (f"c{ranks}", {}),
        (f"p{ranks}", {**one_forward, "slow_rank": "1.5@1"}),
    ]
    return found


STRATEGIES = Suite(
    models={"resnet50": (3, 64, 64), "emulated_networks:small_vgg": (3, 32, 32)},
    configurations=configurations,
    sweeps=sweeps_of,
)
"""Every strategy that trains convolutional networks."""


def cases_of(base: Path, suite: Suite, model: str, layout: NodeLayout, *, dilate: float = 1.0) -> list[Case]:
    """Runs of one model on one layout, below ``base``; ``dilate``: how many times as long as usual layers sleep."""
    found = []
    of_model = {"model": model, "input_shape": suite.models[model], "layout": layout, "iterations": ITERATIONS}
    serial_s = dilate * max(SERIAL_S, SERIAL_S_A_RANK * layout.ranks)
    of_model["dilate"] = round(serial_s / sum(phase_seconds(suite.traced(model)).values()), 3)
    for strategy, settings in suite.configurations(layout, model):
        words = "-".join([strategy, *(f"{name}={value}" for name, value in settings.items())])
        directory = base / f"{layout}" / f"{model.rpartition(':')[2]}-{words}"
        files = {"directory": str(directory), "profile": str(profile_of(base, layout))}
        of_case = {**of_model, "strategy": strategy, **settings, **files}
        found.append(msgspec.convert(of_case, Case, from_attributes=True))
    return found


def profile_of(base: Path, layout: NodeLayout) -> Path:
    """By which ghosts of a layout sleep: layers are alike in those of all layouts, collectives are what was swept."""
    return base / f"{layout}" / "profile.json"


@cache
def _traced(model: str, input_shape: tuple[int, ...]) -> ModelGraph:
    return trace_network(load_model(model, input_shape))
