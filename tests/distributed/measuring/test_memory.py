"""Peaks that torch's tracker sees on the ranks of every strategy, against the prediction."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paradl_bench.ranks.launcher import launch_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.long(minutes=2)]

PLACES = os.pathsep.join(map(str, (Path(__file__).parents[2] / "on_ranks", Path(__file__).parents[3])))
NETWORKS = """
import torch
from torch import nn
from paradl_bench.network.models.token_tasks import NextToken

class Residual(nn.Module):
    "Batch norm, activations in place, pooling, a skip connection and a dropped mask."
    input_shape = (3, 16, 16)
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1))
        self.act, self.drop, self.head = nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 10)
    def forward(self, x):
        x = self.stem(x)
        x = self.act(self.body(x) + x)
        return self.head(self.drop(nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)))

class Plain(nn.Module):
    "As vgg and CosmoFlow: convolutions with biases, average and maximum pooling, fully connected layers."
    input_shape = (3, 18, 12)
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(), nn.AvgPool2d(2),
            nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.hidden, self.head = nn.Linear(9 * 4 * 3, 40), nn.Linear(40, 10)
    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.features(x).flatten(1))))

class Unread(Plain):
    "Two modules that never run share their parameter, as T5's embeddings do where it is given embedded tokens."
    def __init__(self):
        super().__init__()
        del self.head
        self.unread, self.twin = nn.Linear(40, 200), nn.Linear(40, 200, bias=False)
        self.twin.weight, self.head = self.unread.weight, nn.Linear(40, 10)

class Block(nn.Module):
    "Queries, keys and values read one tensor; heads and features are cut by tensor parallelism."
    dropped = 0.0
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (of(y).unflatten(-1, (4, 16)).transpose(1, 2) for of in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropped)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

class Decoder(nn.Module):
    input_shape = (16, 64)
    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(64), nn.Linear(64, 10)
    def forward(self, x):
        return self.head(self.norm(self.blocks(x)).mean(1))

class DroppingBlock(Block):
    "Probabilities are dropped, so attention is products apart: in fp32, whatever they read."
    dropped = 0.1

class Dropping(Decoder):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(DroppingBlock(), DroppingBlock())

class Tied(nn.Module):
    "The first stage's embedding is the last one's output layer."
    def __init__(self):
        super().__init__()
        self.token_task = NextToken(vocabulary=400, sequence=16)
        self.embedding, self.norm = nn.Embedding(400, 64), nn.LayerNorm(64)
        self.blocks = nn.Sequential(Block(), Block())
    def forward(self, ids):
        return nn.functional.linear(self.norm(self.blocks(self.embedding(ids))), self.embedding.weight)

class Mixture(nn.Module):
    "As many tokens to each expert, wherever they are."
    experts = 4
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(self.experts, 64, 128) / 8) for _ in range(2))
        self.down, self.norm = nn.Parameter(torch.randn(self.experts, 128, 64) / 8), nn.LayerNorm(64)
    def chosen(self, x):
        return torch.arange(x.shape[0] * x.shape[1], device=x.device) % self.experts
    def forward(self, x):
        chosen = self.chosen(x)
        order = chosen.argsort()
        ends = nn.functional.one_hot(chosen, self.experts).sum(0).cumsum(0).to(torch.int32)
        rows = self.norm(x).flatten(0, 1)[order]
        products = [nn.functional.grouped_mm(rows, matrices, offs=ends) for matrices in (self.gate, self.up)]
        inner = nn.functional.silu(products[0]) * products[1]
        made = nn.functional.grouped_mm(inner, self.down, offs=ends)[order.argsort()]
        return x + made.view_as(x)

class Spread(Mixture):
    "The same experts twice."
    def __init__(self):
        super().__init__()
        self.token_task, self.embedding = NextToken(vocabulary=24, sequence=16), nn.Embedding(24, 64)
        self.head = nn.Linear(64, 24)
    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(2):
            x = super().forward(x)
        return self.head(x)

class Gathered(Spread):
    "All tokens to one expert."
    def chosen(self, x):
        return super().chosen(x) * 0 + 1

class Choosing(Mixture):
    "Each token to an expert of its own choice."
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, self.experts)
    def chosen(self, x):
        return self.router(x.flatten(0, 1)).max(-1)[1]

class Routed(Choosing, Spread):
    "The same experts twice, and each token to one of its own choice."

class Placed(Spread):
    "As many tokens of any part of a sequence to each expert."
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding.from_pretrained(torch.eye(self.experts).repeat(4, 1))
    def chosen(self, x):
        scores = self.places(torch.arange(x.shape[1], device=x.device)) + 0 * x[..., : self.experts]
        return scores.flatten(0, 1).max(-1)[1]

def t5():
    "Norms that compute in fp32 and keep what they were given, and a mask that gets a gradient."
    from paradl_bench.network.models.language_models import build_language_model
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 53}
    model = build_language_model("t5", dropout_rate=0.0, **sizes)
    model.input_shape = (16,)
    return model

def deepseek_v3():
    "A router in fp32, heads that are turned in pairs, and whose keys are wider than their values."
    from paradl_bench.network.models.language_models import build_language_model
    ranks = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "vocab_size": 53}
    model = build_language_model("deepseek_v3", **ranks, **experts, **sizes, **heads)
    model.input_shape = (12,)
    return model

def qwen3():
    "Queries and keys of each head are normalised, with weights that all heads share."
    from paradl_bench.network.models.language_models import build_language_model
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 53}
    model = build_language_model("qwen3", num_attention_heads=4, num_key_value_heads=2, **sizes)
    model.input_shape = (12,)
    return model

class Mixed(nn.Module):
    "Experts in blocks, each of which is a unit of two groups of parameters."
    def __init__(self):
        super().__init__()
        self.token_task, self.embedding = NextToken(vocabulary=24, sequence=16), nn.Embedding(24, 64)
        self.blocks, self.head = nn.Sequential(*(Mixture() for _ in range(3))), nn.Linear(64, 24)
    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))

class Chosen(Mixed):
    "Other experts in each block."
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Choosing() for _ in range(3)))

class Lured(Choosing):
    "All tokens to one expert, whatever the router says."
    def chosen(self, x):
        return super().chosen(x) * 0 + 1

class Fixed(Mixed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Lured() for _ in range(3)))

class Few(Tied):
    "So few words that the loss is not where most is held."
    def __init__(self):
        super().__init__()
        self.token_task, self.embedding = NextToken(vocabulary=24, sequence=16), nn.Embedding(24, 64)
"""

PROGRAM = """
import functools, json, sys
from paradl_bench.records.training.training_record import MemoryPeak
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.network.models.catalog import load_model
from paradl_bench.records.kernel_settings import settings_of_label
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.strategies.memory.peak import planned_memory
from paradl_bench.strategies.pipeline.memory import pipelined_memory
from shared_traces import trace_together, traced

def peaks(case, context):
    name, text, *words = case.split()
    strategy = parse_strategy(text)
    kinds = {"recompute": lambda value: tuple(value.split("+")), "kernel_settings": settings_of_label}
    axes, others = read_options({key: kinds[key](value) if key in kinds else int(value) if value.isdigit() else value
        for key, value in (word.split("=") for word in words)})
    request = TrainingRequest(model=f"networks:{name}", input_shape=None, strategy=strategy, batch=8, device="cpu",
        verify=False, axes=axes, **others)
    model = load_model(request.model)
    network = traced(request.model)
    trainer = Trainer(model, request, context)
    if request.kernel_settings.label:
        # Which lays the model out.
        trainer.try_alone(network)
    issued = trainer.prepare(network)
    plan = planner_for(strategy).plan(network, strategy, request.settings)
    assert not differences(issued, planned_collectives(plan, context.rank))
    of_ranks = context.gather(trainer.track_memory(), MemoryPeak)
    # Threads of groups that are left open are looked at after each message.
    trainer.close()
    predict = pipelined_memory if degree_of(strategy, Trait.STAGES) > 1 else planned_memory
    tracked = max(of_ranks, key=lambda peak: peak.tracked_bytes)
    expected = predict(as_held(network, request.dtype), strategy, request.settings, dtype=request.dtype)
    return [tracked.tracked_bytes, tracked.parts_bytes, expected.peak_bytes, expected.parts_bytes]

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    names = dict.fromkeys(f"networks:{case.split()[0]}" for case in sys.argv[2:])
    trace_together([functools.partial(traced, name) for name in names], context)
    found = {case: peaks(case, context) for case in sys.argv[2:]}
    if context.rank == 0:
        open(sys.argv[1] + "/found.json", "w").write(json.dumps(found))
"""

OF_BOTH = ["d2", "f2", "c2", "s2", "s1x2", "d2 batch_norm=sync", "s2 batch_norm=sync", "z1d2", "z2d2", "z3d2"]
OF_BOTH += [f"p2 schedule={schedule} micro_batches=4" for schedule in ("gpipe", "1f1b", "interleaved", "zb")]
OF_TWO = [f"{strategy} accumulate=4" for strategy in ("d2", "f2", "s2", "z1d2", "z2d2", "z3d2")]
OF_TWO += [f"{strategy} recompute=all" for strategy in ("d2", "f2", "c2", "s2", "s2 batch_norm=sync", "z1d2")]
OF_TWO += ["d2 recompute=all accumulate=2"]
OF_TWO += ["d2 optimizer=adamw-fused", "z3d2 optimizer=adamw-fused"]
OF_TWO += [f"{setting} dtype=bf16" for setting in ("d2", "z1d2", "z3d2", "d2 accumulate=4", "d2 optimizer=adam")]
OF_TWO += [f"{setting} dtype=bf16-weights" for setting in ("d2", "z1d2 optimizer=adam", "d2 offload=optimizer")]
OF_TWO += [f"{setting} dtype=bf16-weights" for setting in ("z2d2", "z3d2 accumulate=4", "z3d2 reduce_dtype=fp32")]
OF_TWO += ["d2 kernel_settings=channels_last", "z1d2 kernel_settings=channels_last dtype=bf16"]
OF_TWO += ["f2 filter_backward=reduce-scatter"]
OF_TWO += [f"{case} offload=optimizer" for case in ("d2", "z1d2", "z2d2", "z3d2", "p2", "d2 optimizer=adam")]
CASES = {2: OF_TWO, 4: ["d2f2", "d2c2", "d2s2", "s2x2", "p4 schedule=1f1b", "p4 schedule=zb", "d2p2", "p2f2", "p2s2"]}
CASES[4] += [f"z1d2p2 schedule={schedule} micro_batches=4" for schedule in ("gpipe", "1f1b")]
CASES[4] += [f"z3d2p2 schedule={schedule} micro_batches=4" for schedule in ("gpipe", "interleaved", "zb")]
OF_BLOCKS = {
    2: [
        *("t2", "t2 dtype=bf16", "t2 recompute=all", "p2 schedule=1f1b micro_batches=4 dtype=bf16"),
        *(f"p2 schedule={schedule} micro_batches=4 recompute=all" for schedule in ("gpipe", "1f1b")),
        *(f"{case} dtype=bf16-weights optimizer=adam" for case in ("d2", "t2", "p2 micro_batches=4")),
        *(f"{strategy} recompute=all" for strategy in ("z2d2", "z3d2")),
        *(f"{strategy} recompute=all dtype=bf16" for strategy in ("d2", "t2", "z3d2", "p2 micro_batches=4")),
    ],
    4: [
        "p2t2 dtype=bf16",
        "d2t2 dtype=bf16-weights",
        "d2p2 dtype=bf16",
        "d2z3d2",
        "z3d2t2",
        "z2d2t2",
        "z1d2t2",
        "z3d2p2 optimizer=adamw",
        "d2z3d2 dtype=bf16-weights reduce_dtype=fp32",
        *(f"{strategy} dtype=bf16-weights" for strategy in ("z3d4", "d2z3d2", "z3d2t2", "z3d2p2")),
    ],
}
OF_VOCABULARY = {
    2: ["t2", "t2 dtype=bf16", "t2 sequence_parallel=on", "t2 sequence_parallel=on dtype=bf16"],
    4: ["t4", "t4 sequence_parallel=on", "d2t2 sequence_parallel=on", "p2t2 schedule=1f1b micro_batches=4"],
}
OF_VOCABULARY[4] += [f"p2t2 schedule={name} micro_batches=4 sequence_parallel=on" for name in ("1f1b", "zb")]
OF_TOKENS = {2: ["x2", "x2 dtype=bf16", "x2 accumulate=4", "x2 recompute=all"], 4: ["x4", "d2x2", "z3d2x2", "z1d2x2"]}
OF_TOKENS[2] += [f"t2 sequence_parallel=on recompute={name}" for name in ("all", "all dtype=bf16", "blocks.0.k")]
OF_TOKENS[4] += ["x4 dtype=bf16 context_exchange=ring", "p2x2", "p2x2 schedule=zb micro_batches=4"]
OF_TOKENS[4] += ["x2p2 schedule=interleaved micro_batches=4 context_exchange=ring"]
OF_TOKENS[4] += ["p2x2 schedule=1f1b micro_batches=4 context_exchange=all-to-all recompute=all"]
for exchange in ("all-to-all", "ring"):
    OF_TOKENS[2] += [f"{case} context_exchange={exchange}" for case in OF_TOKENS[2][:4]]
OF_TOKENS[4] += ["x4 context_exchange=ring", "d2x2 context_exchange=all-to-all", "z3d2x2 context_exchange=ring"]
OF_TOKENS[4] += ["x2t2", "x2t2 sequence_parallel=on dtype=bf16", "x2t2 sequence_parallel=on recompute=all", "z3d1x2t2"]
OF_TOKENS[4] += ["t2x2 context_exchange=ring accumulate=4", "x2t2 sequence_parallel=on context_exchange=all-to-all"]
OF_EXPERTS = {
    2: ["Spread e2", "Spread e2 dtype=bf16", "Gathered e2 expert_imbalance=2"],
    4: ["Spread e4", "Spread d2e2", "Mixed z3d2e2", "Spread e2p2 schedule=1f1b micro_batches=4"],
}
OF_EXPERTS[2] += ["Spread t2", "Spread t2 dtype=bf16", "Mixed t2 recompute=all"]
# Gradients of what two layers read wait for each other.
OF_EXPERTS[2] += ["Spread d2 accumulate=4", "Spread t2 accumulate=2"]
OF_EXPERTS[4] += ["Spread e2t2", "Spread t2e2 dtype=bf16", "Mixed z3d1e2t2", "Gathered e2t2 expert_imbalance=2"]
OF_EXPERTS[4] += ["Placed x2e2"]
OF_EXPERTS[2] += [f"Chosen t2 sequence_parallel=on{setting}" for setting in ("", " dtype=bf16", " accumulate=4")]
OF_EXPERTS[4] += [f"Chosen {strategy} sequence_parallel=on" for strategy in ("x2t2", "d2t2", "p2t2 micro_batches=4")]
OF_EXPERTS[4] += ["Fixed e2t2 sequence_parallel=on expert_imbalance=2"]
OF_EXPERTS[2] += [f"Routed x2{setting}" for setting in ("", " dtype=bf16")]
OF_EXPERTS[4] += ["Routed x4", "Routed z3d2x2", "Routed p2x2 schedule=1f1b micro_batches=4"]
OF_LANGUAGE = [f"deepseek_v3 {strategy}" for strategy in ("d2", "t2", "e2", "p2 micro_batches=4", "x2")]
OF_LANGUAGE += [f"deepseek_v3 x2 context_exchange={exchange}" for exchange in ("all-to-all", "ring")]
OF_LANGUAGE += [f"t5 {strategy} dtype=bf16-weights" for strategy in ("d2", "p2 micro_batches=4")]
OF_LANGUAGE += [f"qwen3 t2{further}" for further in ("", " sequence_parallel=on", " recompute=all")]
TOLERANCE = 0.01
"""Losses, targets and counters are not predicted, and these networks are small."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_tracked_peak_of_the_largest_rank_is_predicted(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    program = tmp_path / "program_of_test.py"
    program.write_text(PROGRAM)
    both = "Residual", "Plain"
    # Two ranks run what axes and schedules do with both, all else in turn.
    of_images = [*itertools.product(both, OF_BOTH)] * (ranks == 2)
    of_images += zip(itertools.cycle(both), CASES[ranks], strict=False)
    cases = [f"{name} {case}" for name, case in of_images]
    cases += [f"Decoder {case}" for case in OF_BLOCKS[ranks]]
    cases += [f"Dropping {strategy} dtype=bf16" for strategy in ("d2", "t2", "p2 micro_batches=4")] * (ranks == 2)
    in_parts = "zb", "zbv", "dualpipev"
    cases += [f"Tied p2 schedule={schedule} micro_batches=4" for schedule in ("gpipe", *in_parts) if ranks == 2]
    # Stages of the other two begin with a sum, whose two gradients are one tensor.
    handed = "zbv micro_batches=4", "dualpipev micro_batches=8"
    of_ranks = itertools.product((*both, "Decoder"), handed)
    cases += [f"{name} p2 schedule={schedule}" for name, schedule in of_ranks] * (ranks == 2)
    cases += ["Decoder p2 schedule=zb micro_batches=4", "Spread p2 schedule=zb micro_batches=4"] * (ranks == 2)
    cases += [f"Tied {case}" for case in OF_VOCABULARY[ranks]]
    cases += [f"Tied {case}" for case in ("z2d2", "z3d2", "z3d2 recompute=all", "p2 micro_batches=4 recompute=all")] * (
        ranks == 2
    )
    cases += [f"Few {case}" for case in OF_TOKENS[ranks]] + OF_EXPERTS[ranks]
    cases += ["Plain t2", *(f"Unread {case}" for case in ("d2", "z1d2", "z2d2", "z3d2", "f2"))] if ranks == 2 else []
    if ranks == 2 and importlib.util.find_spec("transformers") is not None:
        cases += OF_LANGUAGE
    command, beside = [sys.executable, str(program), str(tmp_path), *cases], {"PYTHONPATH": PLACES}
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=1700, environment=beside)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == cases
    wrong = {
        case: (f"{predicted / tracked - 1:+.1%}", tracked_parts, predicted_parts)
        for case, (tracked, tracked_parts, predicted, predicted_parts) in found.items()
        if abs(predicted / tracked - 1) > TOLERANCE
    }
    assert not wrong, "\n".join(f"{case}: {what}" for case, what in wrong.items())
