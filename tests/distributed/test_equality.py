"""Every strategy gives the serial model's outputs, input gradients and parameter gradients, on real ranks in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paradl_bench.measure.process_groups import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

NETWORKS = """
import torch
from torch import nn
import torch.nn.functional as F

class Plain(nn.Module):
    "Strides, an uneven extent, an overlapping pool, bias or none, functional operations, a skip and a concatenation."
    input_shape = (4, 23, 19)
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 7, stride=2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 7, 1)
        self.fc1 = nn.Linear(13 * 12 // 12, 9)
        self.fc2 = nn.Linear(9, 5)
    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = x + self.conv2(x)
        x = torch.cat([x, F.relu_(self.conv3(x))], 1)
        return self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1).flatten(1))))

class Grouped(nn.Module):
    "Groups, depthwise, dilation, ceil mode, averages with and without padding counted."
    input_shape = (4, 22, 21)
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2)
        self.conv2 = nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False)
        self.pool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.pool2 = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
        self.pool3 = nn.AvgPool2d(2, 1, 1, count_include_pad=False)
        self.conv3 = nn.Conv2d(8, 12, 3, padding="same", groups=4)
        self.fc = nn.Linear(12, 6)
    def forward(self, x):
        x = self.pool1(F.silu(self.conv2(F.relu(self.conv1(x)))))
        x = self.conv3(self.pool3(self.pool2(x)))
        return self.fc(x.mean((2, 3)))

class Normed(nn.Module):
    input_shape = (4, 12, 12)
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)
    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))

class Line(nn.Module):
    input_shape = (4, 37)
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(4, 6, 5, stride=2, padding=2), nn.ReLU(), nn.AvgPool1d(3, 2, 1),
            nn.Conv1d(6, 8, 3), nn.Tanh())
        self.fc = nn.Linear(8 * 8, 4)
    def forward(self, x):
        return self.fc(self.body(x).flatten(1))

class Volume(nn.Module):
    input_shape = (4, 9, 10, 11)
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(4, 6, 3, padding=1), nn.LeakyReLU(), nn.AvgPool3d(2),
            nn.Conv3d(6, 8, 3, padding=1))
        self.fc1 = nn.Linear(8 * 4 * 5 * 5, 10)
        self.fc2 = nn.Linear(10, 4)
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.body(x).flatten(1))))
"""

CHECK = """
import sys
import torch
from paradl_bench.measure.process_groups import join_ranks
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.partition import shard_channels, shard_filters
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.channel_shards import split_layers
from paradl_bench.strategies.parallel import build_parallel

CUTS = {"filter": shard_filters, "channel": shard_channels}

def own_parts(network, strategy, rank):
    "Per parameter, the slices of it that this rank holds; none for whole ones."
    parts = {}
    for axis, position in zip(strategy.axes, strategy.coordinates(rank)):
        if axis.kind not in CUTS:
            continue
        for index, shards in split_layers(network, axis.degree, CUTS[axis.kind]).shards.items():
            names, own = network.layers[index].parameters, shards[position]
            parts[names[0]] = (slice(*own.filters), slice(*own.group_channels))
            if axis.kind == "filter":
                parts |= {name: (slice(*own.filters),) for name in names[1:]}
    return parts

def check(name, text, context):
    strategy, per_replica = parse_strategy(text), 3
    places = zip(strategy.axes, strategy.coordinates(context.rank))
    replicas, replica = next(((axis.degree, at) for axis, at in places if axis.kind == "data"), (1, 0))
    model, serial = load_model(f"networks:{name}"), load_model(f"networks:{name}")
    network = trace_network(model)
    model.module.double(), serial.module.double()
    inputs, targets = model.make_batch(per_replica * replicas, seed=7)
    inputs = inputs.double()
    settings = PlanSettings(batch=len(inputs), first_bucket_bytes=1000, bucket_cap_bytes=1000)
    parallel = build_parallel(model.module, network, strategy, settings, context.device)
    parts = own_parts(network, strategy, context.rank)
    own = slice(replica * per_replica, (replica + 1) * per_replica)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model.module, serial.module)]
    close = lambda found, exact: torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)
    for _ in range(3):
        found_x, exact_x = inputs[own].clone().requires_grad_(), inputs.clone().requires_grad_()
        found, exact = parallel.module(found_x), serial.module(exact_x)
        close(found, exact[own])
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(found, targets[own]).backward()
        serial.loss(exact, targets).backward()
        close(found_x.grad, exact_x.grad[own] * replicas)
        exact_parameters = dict(serial.module.named_parameters())
        for key, parameter in model.module.named_parameters():
            of = parts.get(key, ())
            close(parameter, exact_parameters[key][of])
            close(parameter.grad, exact_parameters[key].grad[of])
        for optimizer in optimizers:
            optimizer.step()

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    for case in sys.argv[2:]:
        name, text = case.split(":")
        try:
            check(name, text, context)
        except BaseException as error:
            raise AssertionError(f"{case}, rank {context.rank}: {error}") from error
"""

CASES = {
    2: (
        "Plain:f2 Plain:c2 Plain:s2 Plain:s1x2 Grouped:f2 Grouped:c2 Grouped:s2 Grouped:s1x2 Normed:f2 Normed:c2 "
        "Line:f2 Line:c2 Line:s2 Volume:f2 Volume:c2 Volume:s2 Volume:s1x1x2"
    ),
    4: (
        "Plain:f4 Plain:c4 Plain:s4 Plain:s2x2 Plain:d2f2 Plain:d2c2 Plain:d2s2 Grouped:f4 Grouped:c4 Grouped:s2x2 "
        "Grouped:d2f2 Grouped:d2s2 Line:s4 Line:d2c2 Volume:s2x2 Volume:d2s2 Volume:d2f2"
    ),
    3: "Plain:f3 Plain:s3 Grouped:s3 Line:s3 Volume:s3 Plain:c3",
}


@pytest.mark.parametrize("ranks", CASES)
def test_sharded_is_serial(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    program = tmp_path / "program_of_test.py"
    program.write_text(CHECK)
    command = [sys.executable, str(program), str(tmp_path), *CASES[ranks].split()]
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=300)
