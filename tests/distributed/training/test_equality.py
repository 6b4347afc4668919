"""Every strategy gives the serial outputs, input gradients and parameter gradients, on real ranks in float64."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paradl_bench.ranks.launcher import launch_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from drawn_networks import drawn_networks

# One launch runs dozens of cases, beside two other files of tests on the same cores.
pytestmark = [pytest.mark.distributed, pytest.mark.long(minutes=6), pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "equality_program.py"

# network:strategy, with :sync for synchronised batch norm, :seeded where serial draws the same random numbers, :alike
# where it can't, and ranks that compute alike are held against each other. Options: until=LAYER, split=LAYER+LAYER,
# accumulate=K, recompute=MODULE+MODULE (body.1-4 for the run body.1:4), scatter for a reduce-scatter in filter's
# backward, all-to-all or ring for that exchange around attentions, clip for gradients scaled to half of their norm,
# sequence for sequence parallelism, and an exchange of gradients over nodes: leader@2 on nodes of two ranks,
# 2leaders@2, segmented@2. Networks are those of equality_networks, or of the module that is named before a dot.
CASES = {
    2: (
        "Plain:f2 Plain:c2 Plain:s2 Plain:s1x2 Grouped:f2 Grouped:c2 Grouped:s2 Line:f2 Line:s2 Volume:s2 "
        "Volume:s1x1x2 Asking:s2 Asking:f2 Normed:f2 Normed:d2 Normed:s2 Normed:d2:sync Normed:s2:sync "
        "Dropped:f2:seeded Dropped:c2:seeded Dropped:s2:seeded DroppedInside:s2:alike DroppedInside:f2:alike "
        "DroppedInside:c2:alike Undropped:s2:until=dropout Grouped:f2:split=conv* Grouped:c2:split=conv[12] "
        "Plain:s1x2:until=conv3 Normed:s2:until=conv2:sync Dropped:s2:until=conv2:seeded Recalling:s2 "
        "Recalling:s1x2:until=conv2 Recalling:f2 Plain:f2:scatter Volume:f2:scatter Normed:f2:scatter "
        "Dropped:f2:scatter:seeded Tokens:f2:scatter:seeded Tokens:c2:seeded Volume:f2:scatter:split=*1 "
        "Joined:f2:scatter Plain:t2 Volume:t2 DroppedInside:t2:alike transformer_networks.Own:t2 "
        "transformer_networks.Split:t2 transformer_networks.Own:t2:split=[qkvo]*+head* "
        "transformer_networks.dropping:t2:alike transformer_networks.bert:t2 transformer_networks.t5:t2 "
        "transformer_networks.Tied:t2 transformer_networks.Untied:t2 transformer_networks.Fused:t2 "
        "transformer_networks.Untied:t2:recompute=head+downs.1 transformer_networks.Untied:t2:accumulate=3 "
        "transformer_networks.Untied:t2:split=ups*+downs* Plain:z3d2 Normed:z1d2:sync Normed:z3d2 Volume:z2d2 "
        "transformer_networks.bert:z3d2 transformer_networks.gpt2:z3d2 transformer_networks.t5:z2d2 "
        "Plain:f2:accumulate=3 Plain:s2:accumulate=3 Normed:s2:accumulate=3:sync Normed:f2:accumulate=3 "
        "Woven:d2:accumulate=3 Woven:z1d2:accumulate=3 Woven:z2d2:accumulate=3 Woven:z3d2:accumulate=3 "
        "Normed:z3d2:accumulate=3 Line:d2:recompute=all Line:s2:recompute=body Volume:c2:recompute=body.1-4 "
        "Volume:s2:recompute=body.0-2 Woven:d2:recompute=blocks.0+blocks.2 Blocked:c2:recompute=all "
        "Blocked:s2:recompute=all:sync Blocked:d2:recompute=stem+blocks.1:sync Blocked:z1d2:recompute=all "
        "Blocked:z3d2:recompute=blocks.1:accumulate=3 Woven:z3d2:recompute=blocks.0+blocks.2 "
        "transformer_networks.gpt2:z3d2:recompute=all transformer_networks.bert:z2d2:recompute=all:accumulate=3 "
        "Blocked:f2:recompute=all:scatter Blocked:d2:recompute=all:accumulate=3 Blocked:s1x2:recompute=all "
        "Blocked:s2:recompute=all:until=blocks.1.two BlockedDropout:f2:recompute=all:seeded "
        "BlockedDropout:c2:recompute=blocks.*:seeded BlockedDropout:s2:recompute=all:repeated "
        "transformer_networks.Own:t2:recompute=norm1+down transformer_networks.gpt2:t2:recompute=all "
        "transformer_networks.t5:t2:recompute=all transformer_networks.gpt2:d2:recompute=all "
        "transformer_networks.dropping:t2:recompute=all:repeated "
        "transformer_networks.gpt2_tokens:t2:sequence:recompute=all "
        "transformer_networks.llama_tokens:t2:sequence:recompute=attention:accumulate=3 "
        "transformer_networks.llama_tokens:t2:sequence:recompute=model.layers.1.mlp.up_proj+*.q_proj+*.v_proj "
        "equality_idioms.Measuring:s2 equality_idioms.Measuring:s1x2 equality_idioms.Measuring:f2 "
        "equality_idioms.Measuring:c2 equality_idioms.Measuring:t2 equality_idioms.Unwatched:s2 "
        "equality_idioms.Turned:s2 equality_idioms.Turned:f2 equality_idioms.Turned:c2 equality_idioms.Assigning:s2 "
        "equality_idioms.Assigning:f2 equality_idioms.Assigning:z3d2 equality_idioms.Gated:s2 "
        "equality_idioms.Mapped:s2 equality_idioms.Mapped:s1x2 equality_idioms.Handled:s2 equality_idioms.Frames:f2 "
        "equality_idioms.Frames:c2 equality_idioms.Frames:f2:scatter equality_idioms.Attended:t2 "
        "equality_idioms.Attended:f2 equality_idioms.Hooked:t2 transformer_networks.Reading:x2 "
        "transformer_networks.masked:x2:accumulate=3 transformer_networks.gpt2_tokens:x2:recompute=all "
        "transformer_networks.llama_tokens:x2 transformer_networks.bert_tokens:x2 "
        "transformer_networks.llama_tokens:x2:all-to-all transformer_networks.bert_tokens:x2:all-to-all:accumulate=3 "
        "transformer_networks.gpt2_tokens:x2:all-to-all:recompute=all "
        "transformer_networks.llama_tokens:x2:ring:accumulate=3 "
        "transformer_networks.gpt2_tokens:x2:ring:recompute=all transformer_networks.mixtral_tokens:e2 "
        "transformer_networks.mixtral_tokens:e2:recompute=all transformer_networks.Sorted:e2:accumulate=3 "
        "transformer_networks.qwen_tokens:t2:accumulate=3 transformer_networks.Sorted:t2 "
        "transformer_networks.Skewed:e2 transformer_networks.mixtral_tokens:x2 "
        "transformer_networks.mixtral_tokens:x2:ring:recompute=all "
        "transformer_networks.mixtral_tokens:x2:all-to-all:accumulate=3 transformer_networks.Latent:x2:accumulate=3 "
        "transformer_networks.Sorted:t2:sequence:accumulate=3 transformer_networks.Skewed:t2:sequence "
        "transformer_networks.mixtral_tokens:t2:sequence:recompute=all transformer_networks.Added:t2:sequence "
        "transformer_networks.Latent:x2:ring transformer_networks.Skewed:x2 transformer_networks.Added:x2"
    ),
    3: (
        "Plain:f3 Plain:s3 Grouped:s3 Line:s3 Volume:s3 Plain:c3 Normed:s3 Normed:s3:sync Dropped:s3:seeded "
        "DroppedInside:s3:alike Plain:f3:scatter Line:f3:scatter Dropped:f3:scatter:seeded Tokens:f3:scatter:seeded "
        "Plain:t3 transformer_networks.Own:t3 transformer_networks.gpt2:t3 "
        "transformer_networks.Tied:t3 transformer_networks.Untied:t3"
    ),
    4: (
        "Plain:f4 Plain:c4 Plain:s4 Plain:s2x2 Plain:d2f2 Plain:d2c2 Plain:d2s2 Grouped:f4 Grouped:s2x2 Grouped:d2s2 "
        "Line:d2c2 Volume:s2x2 Volume:d2s2 Normed:s2x2 Normed:d2s2 Normed:s2x2:sync Normed:d2f2:sync "
        "DroppedInside:d2s2:alike Plain:d2f2:split=conv1+fc2 Plain:d2c2:split=conv* Normed:d2s2:until=conv2:sync "
        "Normed:d2s2:accumulate=3 Plain:d4:segmented@2:accumulate=3 Grouped:f4:scatter Joined:f4:scatter "
        "Line:d2f2:scatter Normed:d2f2:scatter:sync transformer_networks.Own:t4 transformer_networks.Own:d2t2 "
        "transformer_networks.bert:t4 transformer_networks.gpt2:t2d2 transformer_networks.t5:2M1P2D "
        "transformer_networks.Untied:t4 transformer_networks.Untied:d2t2 Normed:z1d4 Normed:z3d4 Woven:z1d4 "
        "Woven:z3d4 Plain:d4:leader@2 Plain:d4:segmented@2 Woven:d4:leader@2 Plain:d2z2d2 Plain:d2z1d2 Woven:d2z3d2 "
        "Plain:d2z3d2:accumulate=3 transformer_networks.gpt2:d2z3d2 transformer_networks.Own:z3d2t2 "
        "transformer_networks.Own:z1d2t2 transformer_networks.t5:z2d2t2 "
        "transformer_networks.Untied:z3d2t2:accumulate=3 equality_idioms.Measuring:z3d2t2 "
        "transformer_networks.dropping:z3d2t2:alike transformer_networks.llama_tokens:x2z2d2:accumulate=3 "
        "transformer_networks.masked:z1d2x2 Plain:z3d2f2 Asking:z3d2f2 Normed:z1d2s2 Normed:d4:2leaders@2:sync "
        "Plain:z1d4:segmented@2 Plain:d2s2:leader@2 transformer_networks.Reading:x4 "
        "transformer_networks.masked:d2x2:accumulate=3 transformer_networks.gpt2_tokens:x4:all-to-all "
        "transformer_networks.bert_tokens:z3d2x2:all-to-all transformer_networks.llama_tokens:x4:ring "
        "transformer_networks.masked:x4:ring transformer_networks.gpt2_tokens:z3d2x2:ring "
        "transformer_networks.llama_tokens:z2d2x2:ring:accumulate=3 transformer_networks.gpt2_tokens:x2t2:sequence "
        "transformer_networks.llama_tokens:t2x2 transformer_networks.masked:t2x2 transformer_networks.Reading:x2t2 "
        "transformer_networks.gpt2_tokens:x2t2:all-to-all:recompute=all "
        "transformer_networks.bert_tokens:t2x2:all-to-all:accumulate=3:sequence "
        "transformer_networks.llama_tokens:x2t2:ring:accumulate=3:sequence transformer_networks.llama_tokens:z3d1x2t2 "
        "transformer_networks.gpt2_tokens:z1d1t2x2:ring transformer_networks.gpt2_tokens:t2x2:split=*mlp* "
        "transformer_networks.Biased:x2t2 transformer_networks.Skewed:e2d2 transformer_networks.Sorted:e4 "
        "transformer_networks.Sorted:e2t2:accumulate=3 transformer_networks.mixtral_tokens:t2e2:recompute=all "
        "transformer_networks.Sorted:x2e2 transformer_networks.mixtral_tokens:e2x2 "
        "transformer_networks.Sorted:t2e2:sequence:accumulate=3 transformer_networks.Skewed:e2t2:sequence "
        "transformer_networks.qwen_tokens:z3d2t2:sequence transformer_networks.Added:z2d1t2e2:sequence "
        "transformer_networks.mixtral_tokens:x2t2:sequence transformer_networks.mixtral_tokens:t2x2:sequence:ring "
        "transformer_networks.mixtral_tokens:e2t2:sequence:recompute=all "
        "transformer_networks.Skewed:e2t2 transformer_networks.qwen_tokens:z3d2t2 transformer_networks.Added:z2d1t2e2 "
        "transformer_networks.mixtral_tokens:d2e2:accumulate=3 transformer_networks.mixtral_tokens:d2x2:accumulate=3 "
        "transformer_networks.mixtral_tokens:z3d2x2:ring transformer_networks.mixtral_tokens:x2t2 "
        "transformer_networks.Latent:x4:ring transformer_networks.Latent:z1d2x2:all-to-all "
        "Plain:s2d2:segmented@2 Recalling:s2x2 "
        "Recalling:d2s2:until=conv2"
    ),
    # Data groups that stride over the ranks of a node, and nodes whose ranks do not all lead.
    8: (
        "Plain:d4f2:leader@4 Plain:d4f2:2leaders@4 Plain:d4f2:segmented@4 Grouped:d8:3leaders@4 Plain:d8:2leaders@4 "
        "Plain:d8:segmented@4 transformer_networks.gpt2_tokens:d2x2t2 transformer_networks.gpt2_tokens:z1d2x2t2:ring "
        "transformer_networks.llama_tokens:z3d2t2x2:sequence transformer_networks.mixtral_tokens:z3d2e2t2 "
        "transformer_networks.qwen_tokens:t2d2e2 transformer_networks.Sorted:z1d2t2e2:accumulate=3 "
        "transformer_networks.mixtral_tokens:x2e2t2 transformer_networks.mixtral_tokens:x2e2t2:sequence"
    ),
}

CLIPPED = {
    2: (
        "Plain:d2 Plain:f2 Plain:c2 Plain:s2 Normed:s2:sync Woven:z1d2 Woven:z2d2 Woven:z3d2 Woven:d2:accumulate=3 "
        "transformer_networks.Tied:t2 transformer_networks.gpt2:t2 transformer_networks.gpt2_tokens:x2 "
        "transformer_networks.gpt2_tokens:t2:sequence transformer_networks.mixtral_tokens:e2 "
        "transformer_networks.Skewed:e2 transformer_networks.mixtral_tokens:x2"
    ),
    4: (
        "Plain:d2f2 Plain:d2c2 Plain:d2s2 Plain:z3d2f2 Plain:d2z3d2 Plain:d4:2leaders@2 Normed:z1d2s2 "
        "transformer_networks.Own:d2t2 transformer_networks.Own:t2z3d2 transformer_networks.gpt2:z1d2t2 "
        "transformer_networks.gpt2_tokens:z3d2x2 transformer_networks.mixtral_tokens:d2e2 "
        "transformer_networks.gpt2_tokens:x2t2 transformer_networks.mixtral_tokens:e2t2 "
        "transformer_networks.mixtral_tokens:e2t2:sequence"
    ),
}

DRAWN_STRATEGIES = {
    2: ("f2", "c2", "s2", "t2", "z1d2", "z2d2", "z3d2"),
    3: ("f3", "c3", "s3", "t3", "z3d3"),
    4: ("s4", "s2x2", "t4", "d2f2", "d2c2", "d2s2", "d2t2", "z2d4"),
}


def named(text: str) -> dict[str, Any]:
    network, strategy, *words = text.split(":")
    options: dict[str, Any] = {"batch_norm": "sync"} if "sync" in words else {}
    options |= {"filter_backward": "reduce-scatter"} if "scatter" in words else {}
    options |= {"clip_norm": 1e6} if "clip" in words else {}
    options |= {"sequence_parallel": "on"} if "sequence" in words else {}
    options |= {"context_exchange": "all-to-all"} if "all-to-all" in words else {}
    options |= {"context_exchange": "ring"} if "ring" in words else {}
    for exchange, _, nodes in (word.partition("@") for word in words if "@" in word):
        leaders = exchange.removesuffix("leaders")
        options["exchange"] = exchange if leaders == exchange else f"leaders:{leaders}"
        options["ranks_per_node"] = int(nodes)
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        known = {
            "split": value.split("+"),
            "recompute": value.replace("-", ":").split("+"),
            "until": value,
            "accumulate": int(value) if value.isdigit() else value,
        }
        options[{"until": "spatial_until"}.get(name, name)] = known[name]
    return {
        "network": network,
        "strategy": strategy,
        "options": options,
        "seeded": "seeded" in words,
        "alike": "alike" in words,
        "repeated": "repeated" in words,
    }


def compare(where: Path, ranks: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Run cases on real ranks; raises where they differ from serial training."""
    (where / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(PROGRAM), str(where / "cases.json"), str(where / "result.json")]
    beside = {"PYTHONPATH": os.pathsep.join(map(str, (PROGRAM.parent, PROGRAM.parents[2])))}
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=1500, environment=beside)
    result: dict[str, Any] = json.loads((where / "result.json").read_text())
    return result


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4, 8))])
def test_sharded_is_serial(tmp_path: Path, ranks: int) -> None:
    cases = [named(text) for text in CASES[ranks].split()]
    assert compare(tmp_path, ranks, cases) == {"ran": len(cases), "refused": []}


@pytest.mark.parametrize("ranks", CLIPPED)
def test_clipped_gradients_update_as_serial_ones(tmp_path: Path, ranks: int) -> None:
    """Norm and update: the proof clips to less than the norm, and compares both."""
    cases = [named(f"{text}:clip") for text in CLIPPED[ranks].split()]
    assert compare(tmp_path, ranks, cases) == {"ran": len(cases), "refused": []}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "count", [pytest.param(4), pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_layers_that_were_drawn(tmp_path: Path, ranks: int, count: int) -> None:
    cases = [
        {
            "network": network,
            "strategy": strategy,
            "options": {
                # ZeRO's stages take statistics of a rank's own samples; serial is compared with the same.
                "batch_norm": "local" if strategy.startswith("z") else "sync",
                "filter_backward": ("reduce-scatter", "all-reduce")[index % 2],
            },
        }
        for index, network in enumerate(drawn_networks(count, ranks))
        for strategy in DRAWN_STRATEGIES[ranks]
    ]
    result = compare(tmp_path, ranks, cases)
    # Some networks have fewer filters than ranks, or lose their positions at once.
    assert result["ran"] > len(cases) / 3, result["refused"]
