"""Language models on real ranks: gradients are the serial model's, and what is issued is what is planned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

from paradl_bench.ranks.launcher import launch_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

NETWORKS = """
from paradl_bench.network.models.language_models import build_language_model

def small(family, **settings):
    "Without dropout, which draws other masks on every rank."
    model = build_language_model(family, vocab_size=53, **settings)
    model.input_shape = (10,)
    return model

def bert(tied=True):
    return small("bert", tied=tied, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
def gpt2(tied=True):
    return small("gpt2", tied=tied, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
def t5(tied=True):
    return small("t5", tied=tied, d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, dropout_rate=0.0)

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | HEADS
def llama(): return small("llama", **SIZES)
def mixtral(): return small("mixtral", num_local_experts=4, num_experts_per_tok=2, **SIZES)
def deepseek_v3(family="deepseek_v3", **others):
    "A dense block, and one whose tokens go to experts."
    ranks = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    settings = SIZES | ranks | experts | {"num_key_value_heads": 4}
    return small(family, first_k_dense_replace=1, moe_intermediate_size=20, **settings, **others)
def deepseek_v2():
    "Angles of positions are complex numbers."
    return deepseek_v3("deepseek_v2", topk_method="group_limited_greedy")
def qwen3_moe():
    return small("qwen3_moe", moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2, **SIZES)

def qwen3():
    "Queries and keys of each head are normalised, with weights that all heads share."
    return small("qwen3", head_dim=8, **SIZES)

def longer(model):
    model.input_shape = (12,)
    return model
def longer_gpt2(): return longer(gpt2())
def longer_deepseek_v2(): return longer(deepseek_v2())
def longer_mixtral(): return longer(mixtral())
def longer_qwen3(): return longer(qwen3())

def bert_untied(): return bert(tied=False)
def gpt2_untied(): return gpt2(tied=False)
def t5_untied(): return t5(tied=False)
"""

CHECK = """
import functools, sys
import torch
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.measure.training.calls.recorder import CollectiveRecorder, differences, planned_collectives
from paradl_bench.measure.proof.parts import own_parts, place_of
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.nesting.parallel import build_parallel

@functools.cache
def traced(name):
    return trace_network(load_model(f"networks:{name}"))

def build(name, text, schedule, context, double):
    schedule, *words = schedule.split("+")
    strategy = parse_strategy(text)
    replicas = degree_of(strategy, Trait.DIVIDES_BATCH)
    model = load_model(f"networks:{name}")
    network = traced(name)
    if double:
        model.module.double()
    settings = plan_settings(batch=4 * replicas, first_bucket_bytes=20000, bucket_cap_bytes=20000, micro_batches=4,
        schedule=schedule, sequence_parallel="on" if "sequence" in words else "off",
        context_exchange=next((word for word in words if word in ("ring", "all-to-all")), "gather"))
    with CollectiveRecorder() as recorder:
        parallel = build_parallel(model.module, network, strategy, settings, context.device, model.loss)
    batch = model.make_batch(4 * replicas, seed=7)
    own = [part[place_of(strategy, settings, context.rank).own] for part in batch]
    plan = planner_for(strategy).plan(network, strategy, settings)
    parts = own_parts(network, strategy, context.rank, settings)
    return model, parallel, batch, own, replicas, plan, parts, recorder.issued("setup")

def iterate(model, parallel, own):
    if parallel.pipeline is not None:
        return parallel.pipeline.step(*own)
    loss = parallel.sharded_loss(model.loss)(parallel.module(own[0]), own[1])
    loss.backward()
    return loss.detach()

def check_gradients(name, text, schedule, context):
    model, parallel, batch, own, replicas, plan, parts, _ = build(name, text, schedule, context, double=True)
    serial = load_model(f"networks:{name}")
    serial.module.double()
    exact = dict(serial.module.named_parameters())
    # Its routers run in single precision whatever the model is built in: a sum over ranks rounds otherwise.
    close = {"rtol": 1e-5, "atol": 1e-8} if "deepseek" in name else {"rtol": 1e-9, "atol": 1e-11}
    for _ in range(2):
        model.module.zero_grad()
        serial.module.zero_grad()
        loss = iterate(model, parallel, own)
        loss = loss if loss is None or parallel.loss is None else parallel.loss.mean(loss)
        exact_loss = serial.loss(serial.module(batch[0]), batch[1])
        exact_loss.backward()
        if loss is not None and replicas == 1:
            torch.testing.assert_close(loss, exact_loss.detach(), **close)
        held = dict(model.module.named_parameters())
        assert held
        for key, parameter in held.items():
            wanted = exact[key].grad
            if wanted is None:
                # Nothing reads it in either.
                assert parameter.grad is None, f"gradient of {key}"
                continue
            torch.testing.assert_close(parameter.grad, wanted[parts.get(key, ())], **close,
                msg=lambda text: f"gradient of {key}: {text}")

def check_plan(name, text, schedule, context):
    model, parallel, _, own, _, plan, _, setup = build(name, text, schedule, context, double=False)
    issued = list(setup)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.01)
    for when in ("first", "rebuild", "iteration"):
        with CollectiveRecorder() as recorder:
            iterate(model, parallel, own)
            optimizer.step()
            optimizer.zero_grad()
        issued += recorder.issued(when)
    found = differences(issued, planned_collectives(plan, context.rank))
    assert not found, "; ".join(found)
    assert any(item.when == "iteration" for item in issued)

sys.path.append(sys.argv[1])
with join_ranks("gloo", "cpu", timeout_s=60) as context:
    for case in sys.argv[2:]:
        name, text, schedule = case.split(":")
        try:
            check_gradients(name, text, schedule, context)
            check_plan(name, text, schedule, context)
        except BaseException as error:
            raise AssertionError(f"{case}, rank {context.rank}: {error}") from error
"""

FAMILIES = ("bert", "gpt2", "t5")
AFTER_LLAMA = ("llama", "mixtral", "deepseek_v3")
CASES = {
    2: [f"{name}:d2:gpipe" for name in FAMILIES]
    + [f"{name}:{text}:gpipe" for name in ("bert", "t5") for text in ("f2", "c2")]
    + [f"{name}:{text}:gpipe" for name in AFTER_LLAMA for text in ("d2", "t2", "p2")]
    + [*(f"{name}:e2:gpipe" for name in ("mixtral", "deepseek_v3")), "mixtral:t2:gpipe+sequence"]
    + [f"{name}:t2:gpipe{further}" for name in ("qwen3", "qwen3_moe") for further in ("", "+sequence")]
    # The second stage reads turned keys that the first one made, in the dtype of what only the first one has.
    + [f"deepseek_v2:p2:{schedule}" for schedule in ("gpipe", "1f1b")]
    # Each rank routes its own tokens.
    + [f"{name}:x2:gpipe" for name in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")]
    + ["longer_deepseek_v2:x2:gpipe+ring", "deepseek_v3:x2:gpipe+all-to-all"]
    # A vocabulary of 53 tokens, which two and four ranks divide unevenly.
    + [f"{name}:t2:gpipe" for name in (*FAMILIES, "gpt2_untied", "t5_untied")]
    + [f"{name}:t2:gpipe+sequence" for name in ("bert", "gpt2", "gpt2_untied", "llama")]
    + [f"{name}_untied:p2:{schedule}" for name in FAMILIES for schedule in ("gpipe", "1f1b", "interleaved")],
    4: [
        *("bert_untied:p4:1f1b", "gpt2_untied:d2p2:1f1b", "t5_untied:p4:1f1b", "gpt2:p2t2:1f1b", "llama:d2t2:1f1b"),
        *("bert:t4:gpipe", "t5:t4:gpipe", "mixtral:e4:gpipe", "deepseek_v3:d2e2:gpipe"),
        *("mixtral:e2t2:gpipe", "deepseek_v3:t2e2:gpipe", "mixtral:x2e2:gpipe"),
        *("mixtral:e2t2:gpipe+sequence", "longer_mixtral:x2t2:gpipe+sequence", "mixtral:p2t2:zb+sequence"),
        *("qwen3:p2t2:1f1b+sequence", "longer_qwen3:x2t2:gpipe+sequence", "qwen3_moe:e2t2:gpipe"),
        *("mixtral:d2x2:gpipe", "mixtral:x2t2:gpipe", "mixtral:p2x2:1f1b", "deepseek_v3:p2x2:1f1b"),
        *("deepseek_v2:d2x2:gpipe", "deepseek_v2:p2t2:1f1b"),
        # Twelve tokens, which four ranks divide.
        *("bert:d2t2:gpipe+sequence", "llama:d2t2:gpipe+sequence", "longer_gpt2:t4:gpipe+sequence"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_serial_and_messages_are_planned(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "networks.py").write_text(NETWORKS)
    program = tmp_path / "program_of_test.py"
    program.write_text(CHECK)
    command = [sys.executable, str(program), str(tmp_path), *CASES[ranks]]
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=800)
