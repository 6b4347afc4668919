"""What holds the peak of a network that is watched in its prediction."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

TOLERANCE = 0.02
ENOUGH_BYTES = 10e6


@pytest.fixture
def hold_prediction_to_track(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that holds the predicted peak of a network, on so many samples, to what torch's tracker sees."""
    torch = pytest.importorskip("torch")

    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.measure.training.request import TrainingRequest
    from paradl_bench.measure.training.trainer import Trainer
    from paradl_bench.network.models.catalog import load_model
    from paradl_bench.plan.strategy import parse_strategy
    from paradl_bench.ranks.groups.process_groups import RankContext
    from paradl_bench.strategies.memory.peak import planned_memory

    alone = RankContext(
        rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="own", core=None
    )

    def hold(build: object, samples: int, dtype: str = "fp32") -> None:
        holder = types.ModuleType("watched_networks")
        holder.network = build  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "watched_networks", holder)
        request = TrainingRequest(
            model="watched_networks:network",
            input_shape=None,
            strategy=parse_strategy("serial"),
            batch=samples,
            device="cpu",
            dtype=dtype,
        )
        model = load_model(request.model)
        network = trace_network(model)
        trainer = Trainer(model, request, alone)
        trainer.prepare(network)
        tracked = trainer.track_memory().tracked_bytes
        assert tracked > ENOUGH_BYTES
        predicted = planned_memory(network, request.strategy, request.settings, dtype=dtype).peak_bytes
        assert predicted == pytest.approx(tracked, rel=TOLERANCE)

    return hold
