"""Pipelines on real ranks: losses and parameter gradients are the serial model's, what is sent is the plan's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paradl_bench.measure.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

NETWORKS = """
import torch
from torch import nn
import torch.nn.functional as F

class Chain(nn.Module):
    "As VGG: convolutions, activations in place and otherwise, pools, fully connected layers."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(72, 16), nn.ReLU(inplace=True), nn.Linear(16, 10), nn.Linear(10, 5))
    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))

class Residual(nn.Module):
    "Skips within blocks and one over the whole network; addition in place; a projection."
    input_shape = (3, 8, 8)
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(6))
        self.project = nn.Conv2d(6, 6, 1)
        self.fc = nn.Linear(6, 4)
    def forward(self, x):
        first = x = torch.tanh(self.stem(x))
        for a, b in zip(self.convs[::2], self.convs[1::2]):
            y = b(F.relu(a(x)))
            y += x
            x = F.relu(y, inplace=True)
        return self.fc((x + self.project(first)).mean((2, 3)))

class Branching(nn.Module):
    "Branches that are concatenated, and shapes that forward asks for; the output is a dict."
    input_shape = (2, 9, 9)
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(2, 4, k, padding=k // 2) for k in (1, 3, 5))
        self.merge = nn.Conv2d(12, 8, 3)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8 * 49, 12), nn.Linear(12, 4)
    def forward(self, x):
        x = F.elu(self.merge(torch.cat([self.one(x), self.two(x), F.relu(self.three(x))], 1)))
        x = torch.cat([self.left(x), self.right(x)], 1)
        x = x.reshape(x.size(0), -1) if x.dim() == 4 else x
        return {"logits": self.fc2(torch.sigmoid(self.fc1(x)))}

class Normed(nn.Module):
    "Batch norm: statistics are those of each micro-batch."
    input_shape = (3, 8, 8)
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(m for i in range(5) for m in
            (nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))))
        self.fc = nn.Linear(6, 4)
    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))
"""

CHECK = """
import sys
import torch
from paradl_bench.measure.process_groups import join_ranks
from paradl_bench.measure.recorder import CollectiveRecorder, differences, planned_collectives
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import first_tensor, load_model
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.parallel import build_parallel

def close(found, exact, what):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")

def run_serially(serial, inputs, targets, parts):
    "The mini-batch's loss and gradients, computed part by part where statistics of a part matter."
    losses = [serial.loss(serial.module(x), y) / parts for x, y in zip(inputs.chunk(parts), targets.chunk(parts))]
    sum(losses).backward()
    return torch.stack(losses).sum().detach()

def check(name, text, schedule, count, cuts, context):
    strategy = parse_strategy(text)
    replicas = next((axis.degree for axis in strategy.axes if axis.kind == "data"), 1)
    places = zip(strategy.axes, strategy.coordinates(context.rank))
    replica = next((at for axis, at in places if axis.kind == "data"), 0)
    model, serial = load_model(f"networks:{name}"), load_model(f"networks:{name}")
    network = trace_network(model)
    model.module.double(), serial.module.double()
    local = 2 * count
    settings = PlanSettings(batch=local * replicas, first_bucket_bytes=1000, bucket_cap_bytes=1000,
        micro_batches=count, schedule=schedule, stages=cuts)
    inputs, targets = model.make_batch(local * replicas, seed=7)
    inputs = inputs.double()
    own = slice(replica * local, (replica + 1) * local)
    parallel = build_parallel(model.module, network, strategy, settings, context.device, model.loss)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model.module, serial.module)]
    held = dict(model.module.named_parameters())
    assert set(held) == {p.name for stage in parallel.pipeline.stages for p in stage.network.parameters}
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = parallel.pipeline.step(inputs[own], targets[own])
        # Batch norm sees each replica's micro-batches; everything else the mean over all samples.
        exact = run_serially(serial, inputs, targets, count * replicas if name == "Normed" else 1)
        if loss is not None and replicas == 1:
            close(loss, exact, "loss")
        serial_parameters = dict(serial.module.named_parameters())
        for key, parameter in held.items():
            close(parameter, serial_parameters[key], key)
            close(parameter.grad, serial_parameters[key].grad, f"gradient of {key}")
        for optimizer in optimizers:
            optimizer.step()
    if name == "Normed" and replicas == 1:
        exact_buffers = dict(serial.module.named_buffers())
        for key, buffer in model.module.named_buffers():
            close(buffer, exact_buffers[key], key)

def compare_with_plan(name, text, schedule, count, cuts, context):
    "Every collective and message of construction and of the first three iterations, in fp32."
    strategy = parse_strategy(text)
    replicas = next((axis.degree for axis in strategy.axes if axis.kind == "data"), 1)
    model = load_model(f"networks:{name}")
    network = trace_network(model)
    settings = PlanSettings(batch=2 * count * replicas, first_bucket_bytes=1000, bucket_cap_bytes=1000,
        micro_batches=count, schedule=schedule, stages=cuts)
    planned = planned_collectives(planner_for(strategy).plan(network, strategy, settings), context.rank)
    with CollectiveRecorder() as recorder:
        parallel = build_parallel(model.module, network, strategy, settings, context.device, model.loss)
    issued = list(recorder.issued("setup"))
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.01)
    for when in ("first", "rebuild", "iteration"):
        with CollectiveRecorder() as recorder:
            parallel.pipeline.step(*model.make_batch(2 * count, seed=1))
            optimizer.step()
            optimizer.zero_grad()
        issued += recorder.issued(when)
    found = differences(issued, planned)
    assert not found, "; ".join(found)
    assert any(item.when == "iteration" and item.operation == "send_recv" for item in issued)

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    for case in sys.argv[2:]:
        name, text, schedule, count, *cuts = case.split(":")
        try:
            check(name, text, schedule, int(count), tuple(cuts), context)
            compare_with_plan(name, text, schedule, int(count), tuple(cuts), context)
        except BaseException as error:
            raise AssertionError(f"{case}, rank {context.rank}: {error}") from error
"""

CASES = {
    2: [
        f"{name}:p2:{schedule}:{count}"
        for name in ("Chain", "Residual", "Branching", "Normed")
        for schedule in ("gpipe", "1f1b", "interleaved")
        for count in (2, 4)
    ]
    + ["Chain:p2:gpipe:1", "Chain:p2:1f1b:3:features.3", "Residual:p2:gpipe:2:convs.3"],
    4: [
        f"{name}:{text}:{schedule}:4"
        for name in ("Chain", "Residual", "Branching", "Normed")
        for text, schedule in (("p4", "gpipe"), ("p4", "1f1b"), ("d2p2", "gpipe"), ("d2p2", "1f1b"))
    ]
    + ["Chain:p2d2:1f1b:3", "Residual:d2p2:interleaved:4", "Normed:d2p2:interleaved:2", "Branching:p4:1f1b:6"],
}


@pytest.mark.parametrize("ranks", CASES)
def test_stages_are_serial(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    program = tmp_path / "program_of_test.py"
    program.write_text(CHECK)
    command = [sys.executable, str(program), str(tmp_path), *CASES[ranks]]
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=300)
