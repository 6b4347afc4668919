"""Training whose optimizer's state lies in host memory, against the same training that keeps it on the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paradl_bench.ranks.launcher import launch_ranks

pytestmark = pytest.mark.distributed

NETWORKS = """
import torch
from torch import nn

class Plain(nn.Module):
    input_shape = (3, 18, 12)
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(), nn.AvgPool2d(2),
            nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.hidden, self.head = nn.Linear(9 * 4 * 3, 40), nn.Linear(40, 10)
    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.features(x).flatten(1))))
"""

PROGRAM = """
import json, sys
import torch
from torch.distributed.tensor import DTensor
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.strategies.memory.of_plan import memory_of_plan

def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

def trained(case, offload, context):
    text, optimizer = case.split()
    strategy = parse_strategy(text)
    request = TrainingRequest(model="networks:Plain", input_shape=None, strategy=strategy, batch=8, device="cpu",
        optimizer=optimizer, offload=offload, verify=False)
    torch.manual_seed(1)
    model = load_model(request.model)
    network = trace_network(model)
    trainer = Trainer(model, request, context)
    trainer.prepare(network)
    before = [local(parameter).clone() for parameter in model.module.parameters()]
    for _ in range(2):
        trainer.iterate()
    own = trainer._optimizer
    own = getattr(own, "optim", own)
    held = sum(local(value).untyped_storage().nbytes() for state in own.state.values() for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim())
    after = [local(parameter).clone() for parameter in model.module.parameters()]
    planned = memory_of_plan(network, strategy, request.settings).parts_bytes["optimizer"]
    return before, after, held, planned

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    found = {}
    for case in sys.argv[2:]:
        before, kept, held, planned = trained(case, "none", context)
        again, offloaded, held_offloaded, planned_offloaded = trained(case, "optimizer", context)
        assert all(map(torch.equal, before, again))
        found[case] = {
            "equal": all(map(torch.equal, kept, offloaded)),
            "moved": not any(map(torch.equal, before, kept)),
            "held": [held, held_offloaded],
            "planned": [planned, planned_offloaded],
        }
    if context.rank == 0:
        open(sys.argv[1] + "/found.json", "w").write(json.dumps(found))
"""

CASES = [
    f"{strategy} {optimizer}"
    for strategy in ("d2", "z1d2", "z2d2", "z3d2", "f2", "p2")
    for optimizer in ("sgd", "adam")
]


def test_a_state_in_host_memory_trains_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    program = tmp_path / "program_of_test.py"
    program.write_text(PROGRAM)
    launch_ranks([sys.executable, str(program), str(tmp_path), *CASES], ranks=2, device="cpu", timeout_s=300)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == CASES
    for case, of_case in found.items():
        assert of_case["equal"], case
        assert of_case["moved"], case
        (held, held_offloaded), (planned, planned_offloaded) = of_case["held"], of_case["planned"]
        assert held > 0, case
        assert held_offloaded == planned_offloaded == 0, case
        # The rank with most is planned; rank 0 may have less.
        assert held <= planned, case
