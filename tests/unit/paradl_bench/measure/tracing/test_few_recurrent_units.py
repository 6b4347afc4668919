"""Recurrent layers of few units, whose memory is held to what is watched by itself: pages that are not full show."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model


class OnFewTokens(nn.Module):
    """A recurrent layer between two linear ones."""

    input_shape = (5, 6)

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.before, self.recurrent, self.head = nn.Linear(6, 6), recurrent, nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.before(x))[0].mean(1))


FEW_UNITS = {
    "lstm": lambda: OnFewTokens(nn.LSTM(6, 6, 2, batch_first=True)),
    "lstm both ways": lambda: OnFewTokens(nn.LSTM(6, 3, batch_first=True, bidirectional=True)),
    "gru": lambda: OnFewTokens(nn.GRU(6, 6, 2, batch_first=True)),
    "rnn": lambda: OnFewTokens(nn.RNN(6, 6, batch_first=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_UNITS)
def test_the_peak_of_few_recurrent_units_is_predicted(name: str, hold_prediction_to_track: Callable[..., None]) -> None:
    hold_prediction_to_track(FEW_UNITS[name], 16_000)


def test_an_lstm_of_few_units_keeps_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = types.ModuleType("few_units")
    holder.lstm = FEW_UNITS["lstm"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "few_units", holder)
    network = trace_network(load_model("few_units:lstm"))
    layer = next(layer for layer in network.layers if layer.attributes.get("function") == "lstm")
    assert layer.memory is not None
    assert layer.memory.kept[1] == 0
