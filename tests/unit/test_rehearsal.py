"""One rank's part of a model, run without the others: what a probe sees of it, and how long others take."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paradl_bench.measure.clocks import CpuClock
from paradl_bench.measure.probes import ProbeCost, probed_iteration
from paradl_bench.measure.rehearsal import PausingClock, RehearsedModel
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import parse_strategy

FREE = ProbeCost(fw_inside_s=0.0, fw_outside_builtin_s=0.0, fw_outside_python_s=0.0, bw_inside_s=0.0, bw_outside_s=0.0)


def test_a_pausing_clock_leaves_out_what_it_slept_through() -> None:
    clock, real = PausingClock(), CpuClock()
    begin, real_begin = clock.stamp(), real.stamp()
    with clock.pause():
        time.sleep(0.02)
    passed, really_passed = clock.seconds(begin, clock.stamp()), real.seconds(real_begin, real.stamp())
    assert really_passed - passed >= 0.02


@pytest.mark.parametrize(
    ("text", "options"),
    [
        *((text, {}) for text in ("f2", "c2", "s2", "s2x2")),
        ("f2", {"split": ("layer[24].*",)}),
        ("s2", {"spatial_until": "layer2.0.conv1"}),
    ],
)
def test_a_probe_sees_one_call_a_layer(text: str, options: dict[str, Any]) -> None:
    """Splits, copies and halos that a shard is made of are inside its layer, not beside it."""
    model = load_model("resnet18", (3, 32, 32))
    network = trace_network(model)
    parameters = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    settings = PlanSettings(batch=2, **options)
    part = RehearsedModel(model, network, parse_strategy(text).axes[0], 0, settings, torch.device("cpu"))
    inputs, targets = model.make_batch(2, seed=0)

    def forward() -> torch.Tensor:
        return part.loss(inputs, targets)

    found = probed_iteration(
        forward, model.module.zero_grad, part.clock, FREE, len(network.layers), observed=part.observed
    )
    assert (found.fw_s > 0).all()
    assert found.fw_total_s >= float(found.fw_s.sum())
    convolution = next(i for i, layer in enumerate(network.layers) if layer.name == "layer1.0.conv1")
    assert found.bw_s[convolution] > 0
    held = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    assert (held != parameters) == (text[0] in "fc")
    whole, shard = parameters["layer4.0.conv1.weight"], held["layer4.0.conv1.weight"]
    assert shard == {"f2": (256, 256, 3, 3), "c2": (512, 128, 3, 3)}.get(text, whole)
    (label,) = {label for _, label in part.layers.values()}
    blocks = {network.layers[index].name.partition(".")[0] for index in part.layers}
    assert (label, "layer1" in blocks, "layer2" in blocks) == {
        (): (text, True, True),
        ("split",): ("f2[split=layer[24].*]", False, True),
        ("spatial_until",): ("s2[spatial_until=layer2.0.conv1]", True, False),
    }[tuple(options)]
