"""Networks, and programs of ranks that train them: what is issued against the plan, and gradients against serial."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from paradl_bench.ranks.launcher import launch_ranks

NETWORKS = """
import os, signal
import torch
from torch import nn

class BatchNormed(nn.Module):
    "Convolutions without biases, batch norm and a skip connection, as resnets have."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.norm2(self.two(x)) + x)
        return self.head(x.mean((2, 3)))

class Biased(nn.Module):
    "Convolutions and fully connected layers with biases and no batch norm, as vgg has."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.hidden, self.head = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, 10)
    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.one(x)), 2)
        x = torch.relu(self.two(x))
        x = nn.functional.interpolate(x, (4, 4))
        return self.head(torch.relu(self.hidden(x.flatten(1))))

class Recalling(nn.Module):
    "Reads its own input again, beside what was made of it, and by a convolution that may come behind the last block."
    input_shape = (3, 12, 12)
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3), nn.Linear(11, 10)
    def forward(self, x):
        y = torch.einsum("bchw,bdhw->bcd", self.one(x), x).sum(2) + torch.relu(self.two(x)).mean((2, 3))
        return self.head(torch.cat([y, x.amax((2, 3))], 1))

class Blocks(nn.Module):
    "Numbered blocks that read their input twice, behind a stem."
    input_shape = (3, 12, 12)
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.two = nn.Conv2d(8, 6, 3, padding=1)
        def forward(self, x):
            return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(Blocks.Block(), Blocks.Block())
        self.head = nn.Linear(6, 10)
    def forward(self, x):
        return self.head(self.body(torch.relu(self.stem(x))).mean((2, 3)))

class Shared(nn.Module):
    "One layer that is used twice."
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 10)
    def forward(self, x):
        return self.head(torch.relu(self.twice(torch.relu(self.twice(x)))))

class Recurrent(nn.Module):
    "Layers whose kernels hand on all gradients at once, in an order that the meta device does not know."
    input_shape = (5, 6)
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.rnn, self.gru = nn.RNN(16, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)
    def forward(self, x):
        x = self.gru(self.rnn(self.lstm(x)[0])[0])[0]
        return self.head(self.attention(x, x, x)[0].mean(1))

class Querying(nn.Module):
    "Layers that work on a parameter, whose results hold no batch."
    input_shape = (5, 8)
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, 8))
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 10)
    def forward(self, x):
        query = self.down(torch.relu(self.up(self.query.tanh())))
        scores = (query @ torch.tanh(self.first(x)).mT).softmax(-1)
        return self.head((scores @ x + query).mean(1))

class Unused(nn.Module):
    "A head that the loss does not read."
    input_shape = (6,)
    def __init__(self):
        super().__init__()
        self.body, self.aside, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 10)
    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.head(x), self.aside(x)

class Killed(Biased):
    "Is killed on rank 1 in its 20th iteration."
    calls = 0
    def forward(self, x):
        Killed.calls += x.device.type != "meta"
        if Killed.calls == 20 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

class Hungry(Biased):
    "Asks on rank 1, in its 20th forward, for more memory than there is."
    calls = 0
    def forward(self, x):
        Hungry.calls += x.device.type != "meta"
        if Hungry.calls == 20 and os.environ.get("RANK") == "1":
            torch.empty(2**48)
        return super().forward(x)

class Diverging(Biased):
    "Has a loss that is no number, from the 20th iteration on."
    calls = 0
    def forward(self, x):
        Diverging.calls += x.device.type != "meta"
        return super().forward(x) * (float("nan") if Diverging.calls >= 20 else 1.0)
"""

COMPARE = """
import functools, gc, json, os, sys
import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.fused_messages import with_messages
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.data.fusion.fusion_file import parse_fusion
from paradl_bench.strategies.exchange.fused_module import FusedModule
from paradl_bench.strategies.nesting.catalog import planner_for

@functools.cache
def traced(model):
    return trace_network(load_model(model))

def compare(case, context):
    name, text, cap_mb, batch_norm, *words = case.split()
    axes, options = read_options({name: int(value) if value.isdigit() else value
        for name, value in (word.replace("+", ",").split("=") for word in words)}
        | {"bucket_cap_mb": None if cap_mb == "-" else float(cap_mb)})
    if "recompute" in options:
        options["recompute"] = tuple(options["recompute"].split(","))
    buffer = options.pop("fusion_buffer", None)
    fusion = parse_fusion(options.pop("fusion", None), None if buffer is None else str(buffer))
    strategy = parse_strategy(text)
    exchanging = (DistributedDataParallel, FusedModule)
    request = TrainingRequest(fusion=fusion, model=f"networks:{name}",
        input_shape=None, strategy=strategy, batch=4 * context.ranks,
        device="cpu", verify=False,
        axes=axes, batch_norm=batch_norm, **options)
    model, network = load_model(request.model), traced(request.model)
    request = with_messages(request, network)
    trainer = Trainer(model, request, context)
    network = trainer.try_alone(network)
    issued = trainer.prepare(network)
    plan = planner_for(strategy).plan(network, strategy, request.settings)
    chunk = trainer.run_chunk(0, 2)
    planned = plan.collectives(plan.role_of(context.rank))
    trainer.close()
    # One that outlives its groups, and is collected later, may wait for a thread of theirs that waits for it.
    assert not [held for held in gc.get_objects() if type(held) in (DistributedDataParallel, FusedModule)], case
    return dict(differences=differences(issued, planned_collectives(plan, context.rank)),
        counts=chunk.collectives_issued, recorded=trainer.recorded_count, chunk=msgspec.to_builtins(chunk),
        collectives=sum(planned.values()), of_layers=len(plan.of_layers(plan.role_of(context.rank))),
        all_reduces=sum(n for (op, _, _), n in planned.items() if op == "all_reduce"))

def threads():
    return len(os.listdir("/proc/self/task"))

sys.path.append(sys.argv[1])
before = threads()
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    assert threads() > before
    for name in dict.fromkeys(case.split()[0] for case in sys.argv[2:]):
        traced(f"networks:{name}")
    # What was traced stays: a collection after each case is to be of that case.
    gc.freeze()
    found = context.gather({case: compare(case, context) for case in sys.argv[2:]}, dict)
    if context.rank == 0:
        open(sys.argv[1] + "/found.json", "w").write(json.dumps(found))
# A thread of gloo's that outlives the interpreter aborts the process.
assert threads() == before, (threads(), before)
"""

GRADIENTS = """
import sys
import torch
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.parallel import build_parallel

def gradients(module, loss_of, inputs, targets):
    module.zero_grad()
    loss_of(module(inputs), targets).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in module.named_parameters()}

def check(name, context, batch_norm):
    model, serial = load_model(f"networks:{name}"), load_model(f"networks:{name}")
    network = trace_network(model)
    model.module.double(), serial.module.double()
    inputs, targets = model.make_batch(4 * context.ranks, seed=7)
    inputs = inputs.double()
    settings = plan_settings(batch=4 * context.ranks, first_bucket_bytes=1000, bucket_cap_bytes=1000)
    parallel = build_parallel(model.module, network, parse_strategy("d2"), settings, context.device).module
    parts = list(zip(inputs.chunk(context.ranks), targets.chunk(context.ranks)))
    for _ in range(3):
        found = gradients(parallel, model.loss, *parts[context.rank])
        if batch_norm:
            # Statistics are each rank's own: the exact answer is the mean of the parts' gradients.
            of_parts = [gradients(serial.module, serial.loss, *part) for part in parts]
            exact = {key: sum(g[key] for g in of_parts) / len(parts) for key in found}
        else:
            exact = gradients(serial.module, serial.loss, inputs, targets)
        for key in exact:
            torch.testing.assert_close(found[key], exact[key], rtol=1e-12, atol=1e-14)

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    check("Biased", context, batch_norm=False)
    check("Shared", context, batch_norm=False)
    check("BatchNormed", context, batch_norm=True)
"""


def launch(where: Path, program: str, *arguments: str, ranks: int = 2) -> None:
    path = where / "program_of_test.py"
    path.write_text(program)
    launch_ranks([sys.executable, str(path), str(where), *arguments], ranks=ranks, device="cpu", timeout_s=200)


def issued_and_planned(workplace: Path, cases: list[str], ranks: int) -> list[dict[str, Any]]:
    """What each rank found, by case: network, strategy, bucket cap in MiB or -, batch norm, options as name=value."""
    launch(workplace, COMPARE, *cases, ranks=ranks)
    of_ranks: list[dict[str, Any]] = json.loads((workplace / "found.json").read_text())
    assert len(of_ranks) == ranks
    for found in of_ranks:
        assert list(found) == cases
        for case, result in found.items():
            assert result["differences"] == [], case
            assert result["counts"] == [result["recorded"]] * 2, case
    return of_ranks
