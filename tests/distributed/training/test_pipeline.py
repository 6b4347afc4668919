"""Pipelines on real ranks: losses and parameter gradients are the serial model's, what is sent is the plan's."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paradl_bench.ranks.launcher import launch_ranks

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import drawn_networks
from pipeline_program import Case, case_of

from paradl_bench.core.errors import UserError
from paradl_bench.strategies.nesting.catalog import planner_for

pytestmark = [pytest.mark.distributed, pytest.mark.long(minutes=4)]

PROGRAM = Path(__file__).parents[2] / "on_ranks" / "pipeline_program.py"
NETWORKS = ("Chain", "Residual", "Branching", "Normed")

CASES = {
    2: [
        f"{name}:p2:{schedule}:{count}"
        for name in NETWORKS
        for schedule in ("gpipe", "1f1b", "interleaved", "zb", "zbv")
        for count in (2, 4)
    ]
    + [f"{name}:p2:dualpipev:{count}" for name in NETWORKS for count in (4, 7)]
    + [f"transformer_networks.Tied:p2:{schedule}:2" for schedule in ("1f1b", "interleaved", "zb", "zbv")]
    + ["transformer_networks.Tied:p2:dualpipev:4"]
    + [f"transformer_networks.llama_tokens:p2:{schedule}" for schedule in ("1f1b:4:again=all", "interleaved:4")]
    + ["Chain:p2:gpipe:1", "Chain:p2:1f1b:3:features.3", "Residual:p2:gpipe:2:convs.3", "Residual:p2:zbv:6"],
    4: [
        f"{name}:{text}:{schedule}:4"
        for name in NETWORKS
        for text, schedule in (("p4", "gpipe"), ("p4", "1f1b"), ("d2p2", "gpipe"), ("d2p2", "1f1b"))
    ]
    + ["Chain:p2d2:1f1b:3", "Residual:d2p2:interleaved:4", "Normed:d2p2:interleaved:2", "Branching:p4:1f1b:6"]
    + [
        *("transformer_networks.gpt2_tokens:d2p2:interleaved:2", "transformer_networks.llama_tokens:p4:1f1b:4"),
        "Residual:p4:zb:6",
        *("Residual:p4:zbv:8", "Chain:d2p2:zbv:3", "Normed:p2d2:zbv:4", "Normed:p4:zbv:5"),
        *("Residual:p4:dualpipev:8", "Chain:d2p2:dualpipev:5", "Normed:p2d2:dualpipev:4", "Normed:p4:dualpipev:11"),
        "transformer_networks.Tied:d2p2:dualpipev:4",
        "Chain:d2p2:zb:3",
        "Normed:p2d2:zb:4",
        "Branching:d2p2:zb:2",
    ],
}

# What pipelines are easily wrong about (pipeline_idioms.py), each under another schedule; and at other cuts.
IDIOMS = (
    *("Discarded", "Views", "Filled", "Copied", "SeveralTensors", "Attending", "RunningSums", "Constants"),
    *("Auxiliary", "Query", "Transposed", "ChangedInput"),
)
# What reads a weight elsewhere too keeps its layer whole.
WHOLE = (*IDIOMS, "Regularised")
IMAGES = ("DiscardedImages", "ChangedChannels", "ViewedChannels", "AuxiliaryImages", "NormedImages")

# An axis that shares layers inside of a pipeline, or outside; and eight stages on four ranks.
NESTED = {
    4: [
        *("Chain:p2f2:gpipe:2:scatter", "Normed:p2s2:interleaved:4", "Residual:p2f2:1f1b:4"),
        *("Rereading:p2s1x2:1f1b:3", "Rereading:p2s2:zb:2:two", "transformer_networks.gpt2:p2t2:gpipe:2"),
        *("Branching:c2p2:interleaved:4", "pipeline_idioms.Query:p2c2:1f1b:2", "pipeline_idioms.Query:p2f2:zb:2"),
        *("pipeline_idioms.Attending:d2p2:zb:2", "pipeline_idioms.ChangedChannels:p2s2:1f1b:2"),
        *("transformer_networks.Tied:d2p2:1f1b:2", "transformer_networks.Tied:p2t2:zb:2"),
        *("Residual:p2f2:zbv:4", "transformer_networks.gpt2:p2t2:zbv:2", "Normed:p2s2:zbv:4"),
        "transformer_networks.Scaled:p2t2:zb:2",
        *("Residual:p2f2:dualpipev:4", "transformer_networks.gpt2:p2t2:dualpipev:4", "Normed:s2p2:dualpipev:5"),
        *("pipeline_idioms.ViewedChannels:p2s2:zb:2", "pipeline_idioms.AuxiliaryImages:p2s2:gpipe:2"),
    ],
}
MORE_NESTED = {
    4: [f"{name}:p2{axis}:gpipe:2" for name in NETWORKS for axis in ("f2", "c2", "s2")]
    + [
        f"pipeline_idioms.{name}:{text}:1f1b:2"
        for name, text in zip(IMAGES, itertools.cycle(("p2s2", "s2p2", "p2s1x2")), strict=False)
    ]
    + [f"pipeline_idioms.{name}:p2c2:1f1b:2" for name in IDIOMS[::2]]
    + ["Rereading:p2f2:gpipe:2", "Rereading:p2s2:gpipe:2", "Chain:p2c2:interleaved:2", "Residual:p2s2:interleaved:2"]
    + [f"Rereading:p2s2:gpipe:2:{cut}" for cut in ("early", "late", "three", "two", "fc")]
    + [f"transformer_networks.{name}:p2t2:gpipe:2" for name in ("Split", "Own", "t5")]
    + [f"transformer_networks.Split:p2t2:1f1b:3:{cut}" for cut in ("q", "up", "transpose#6")]
    + ["Rereading:p2c2:1f1b:3", "transformer_networks.gpt2:p2t2:zb:2"]
    + ["Chain:f2p2:1f1b:2", "Normed:s2p2:gpipe:2", "Residual:p4:interleaved:8"]
    + ["Normed:p4:interleaved:4", "Residual:f2p2:1f1b:2:scatter", "Rereading:p2f2:interleaved:2:scatter"]
    + [f"{name}:p4:zb:4" for name in NETWORKS]
    + ["Chain:p2f2:zb:2:scatter", "Rereading:p2c2:zb:3", "Normed:s2p2:zb:2", "transformer_networks.Split:p2t2:zb:3:up"],
}

# Tensor ranks that each hold and send a part of the sequence; cuts between layers that read one gathered tensor, and
# through tensors that one layer returns; then proof that this would be seen.
SEQUENCE = {
    4: [
        *("gpt2_tokens:t2p2:gpipe:2", "llama_tokens:p2t2:zb:2:model.layers.1.mlp.up_proj"),
        *("bert_tokens:p2t2:interleaved:2", "Reading:p2t2:1f1b:2:transpose#2", "Tied:p2t2:1f1b:2:clip"),
        "gpt2_tokens:p2t2:gpipe:2:unsummed",
    ],
    8: ["gpt2_tokens:d2p2t2:zb:2", "llama_tokens:p2z1d2t2:1f1b:2:clip"],
}
MORE_SEQUENCE = {
    4: [
        *("gpt2_tokens:p2t2:interleaved:4", "Tied:p2t2:zb:2", "Reading:p2t2:zb:2:norm"),
        "gpt2_tokens:p2t2:1f1b:2:transformer.h.0.attn.view#2",
    ],
}

# Ranks of each stage hold parts of the tokens, and the last ones take the loss of their own targets: each exchange, a
# cut through an attention, a tied table, parts with unlike numbers of targets, the mirrored order of a causal ring;
# heads and features that further ranks hold, also in shards.
CONTEXT = {
    4: [
        *("gpt2_tokens:p2x2:gpipe:2", "gpt2_tokens:x2p2:zb:2", "masked:p2x2:1f1b:2", "Tied:p2x2:1f1b:2:clip"),
        *("llama_tokens:p2x2:1f1b:2:all-to-all", "bert_tokens:x2p2:interleaved:2:all-to-all"),
        *("llama_tokens:p2x2:interleaved:2:ring", "gpt2_tokens:p2x2:zb:2:ring:clip"),
        *("mixtral_tokens:p2x2:1f1b:2:ring", "Latent:p2x2:zb:2:clip", "Sorted:x2p2:gpipe:2"),
        *("gpt2_tokens:p2x2:1f1b:2:transformer.h.0.attn.view#2", "gpt2_tokens:x2p2:1f1b:2:again=all"),
    ],
    8: [
        *("Tied:p2d2x2:zb:2:clip", "gpt2_tokens:p2x2t2:1f1b:2:transformer.h.0.attn.view#2"),
        "llama_tokens:p2z3d1x2t2:zb:2:clip:sequence",
    ],
}

# Ranks of each stage hold some experts of its layers, whose gradients are exchanged along other axes than all else, as
# are shards of them.
EXPERTS = {
    4: [
        "Sorted:p2e2:zb:2",
        "Skewed:e2p2:gpipe:2:head",
        "qwen_tokens:p2e2:zb:2:clip",
        "mixtral_tokens:p2e2:interleaved:2",
        "mixtral_tokens:z3d1e2p2:1f1b:2",
    ],
    8: [
        *("mixtral_tokens:e2d2p2:gpipe:2", "qwen_tokens:p2z3d2e2:zb:2:clip", "mixtral_tokens:p2e2t2:1f1b:2"),
        *("qwen_tokens:z1d1t2p2e2:zb:2:clip", "Sorted:e2t2p2:interleaved:2"),
    ],
}

# Replicas of stages that share out the optimizer's state, or rows of what they hold; the last limits gradients.
ZERO = {
    4: [
        *("Chain:p2z1d2:interleaved:2", "transformer_networks.Tied:z1d2p2:zb:2:clip", "Normed:z1d2p2:1f1b:4"),
        *("Chain:z3d2p2:1f1b:4", "Normed:p2z2d2:interleaved:4", "Residual:z3d2p2:zb:4", "Residual:z3d2p2:zbv:4"),
        *("Chain:p2z1d2:dualpipev:4", "Residual:z3d2p2:dualpipev:4", "Normed:z2d2p2:dualpipev:5"),
        *("pipeline_idioms.Attending:z2d2p2:gpipe:2", "transformer_networks.gpt2:z3d2p2:gpipe:2:clip"),
        "transformer_networks.Split:z3d2p2:1f1b:2:bf16",
    ],
    8: ["Chain:d2z3d2p2:gpipe:2", "transformer_networks.Own:p2d2z2d2:1f1b:2:clip", "Branching:z1d2p4:1f1b:4"],
}

# Three deep, each in another order of axes and under another schedule.
DEEP = {
    8: ["Chain:d2p2f2:gpipe:2", "Residual:d2p2c2:1f1b:2", "Normed:d2p2s2:interleaved:2", "Rereading:p2s2d2:1f1b:3"],
}

# Stages that compute their parts of segments again, among them parts of a segment that a cut parts.
AGAIN = {
    2: [
        *("Normed:p2:gpipe:2:again=body", "equality_networks.Blocked:p2:1f1b:4:again=all"),
        *("Residual:p2:1f1b:2:again=convs.1+convs.2+project", "Chain:p2:1f1b:2:features.3:again=features.0-6"),
        *("transformer_networks.gpt2:p2:interleaved:4:again=all", "transformer_networks.t5:p2:1f1b:4:again=all"),
        *("transformer_networks.Tied:p2:gpipe:2:again=ups.0+downs.1", "pipeline_idioms.Views:p2:1f1b:2:again=a"),
        *("transformer_networks.t5:t2:gpipe:1:bf16:again=all", "transformer_networks.gpt2:p2:1f1b:2:bf16:again=all"),
    ],
    4: [
        *("equality_networks.Blocked:p2s2:1f1b:2:again=all", "equality_networks.Blocked:p2f2:interleaved:2:again=all"),
        *("equality_networks.Blocked:d2p2:1f1b:2:again=all", "transformer_networks.gpt2:p2t2:1f1b:2:again=all"),
        *("transformer_networks.Split:p2t2:1f1b:3:again=up+down", "transformer_networks.t5:p4:1f1b:4:again=all"),
    ],
}

# Gradients whose squares are summed over stages, tied and sharded parameters among them.
CLIPPED = {
    2: [
        *("Chain:p2:gpipe:2", "transformer_networks.Tied:p2:interleaved:2", "Chain:p2:dualpipev:4"),
        *("Normed:p2:zb:2", "Normed:p2:zbv:2"),
    ],
    4: [
        *("transformer_networks.Tied:p2t2:1f1b:2", "transformer_networks.Tied:d2p2:1f1b:2", "Chain:p2f2:gpipe:2"),
        *("Rereading:s2p2:zb:2", "Branching:c2p2:interleaved:2"),
    ],
    8: ["transformer_networks.Tied:d2p2t2:1f1b:2"],
}

# Parts of layers or of tokens in stages, by autocast: as far from fp64 as serial training in bf16, and sent as planned.
LOWERED = ("Own:d2t2:gpipe:1", "Split:p2t2:1f1b:2:up", "Own:p2t2:zb:3", "gpt2_tokens:p2t2:zb:2:sequence")
LOWERED += ("gpt2_tokens:p2x2:1f1b:2:ring", "Scaled:p2t2:1f1b:2")
MORE_LOWERED = {
    2: (
        *("Own:t2:gpipe:1", "Split:t2:gpipe:1", "gpt2:t2:gpipe:1", "bert:t2:gpipe:1"),
        *("Own:p2:gpipe:2", "Split:p2:1f1b:4", "Own:p2:interleaved:4", "Own:p2:zb:4", "gpt2:p2:1f1b:4"),
    ),
    4: ("Split:p2t2:gpipe:2", "Split:t2p2:1f1b:3:q", "gpt2:d2p2:1f1b:2", "bert:p4:interleaved:4", "Own:t4:gpipe:1"),
}

# Parameters in bf16, whose fp32 copies, or fp32 shards, take the steps that serial ones take.
HELD_LOW = {
    2: ("Own:z1d2:gpipe:1", "Tied:p2:1f1b:2", "Own:t2:gpipe:1", "gpt2:d2:gpipe:1", "Own:z3d2:gpipe:1:reduced"),
    4: ("Own:d2t2:gpipe:1", "Tied:d2p2:1f1b:2", "Split:p2t2:1f1b:2:up", "Own:z1d2t2:gpipe:1", "Own:d2z2d2:gpipe:1"),
}
# Norms compute in fp32: what a cut inside of one sends is.
HELD_LOW[2] += (
    "llama_tokens:p2:1f1b:2:model.layers.1.input_layernorm#3",
    "llama_tokens:p2:interleaved:2",
    "Tied:p2:zbv:2",
    "Tied:p2:dualpipev:4",
)
# It converts to its weights' dtype, of what another stage has too.
HELD_LOW[2] += tuple(f"t5:p2:{schedule}:2" for schedule in ("gpipe", "1f1b"))
HELD_LOW[4] += ("Own:z3d2t2:gpipe:1", "Split:z3d2p2:1f1b:2:up", "mixtral_tokens:z3d2e2:gpipe:1:reduced")

IDIOMATIC = {
    2: [f"pipeline_idioms.{name}:p2:{schedule}:2" for name in WHOLE for schedule in ("gpipe", "interleaved", "zb")],
    3: [f"pipeline_idioms.{name}:p3:1f1b:3" for name in WHOLE],
}
MORE_IDIOMATIC = {
    2: [f"pipeline_idioms.{name}:p2:1f1b:3" for name in IDIOMS]
    + [f"pipeline_idioms.{name}:p2:{schedule}" for name in WHOLE for schedule in ("zbv:2", "dualpipev:4")]
    + [f"pipeline_idioms.Discarded:p2:zb:2:{cut}" for cut in ("b", "tanh", "d", "f")]
    + [f"pipeline_idioms.Views:p2:zb:2:{cut}" for cut in ("c", "view", "getitem#4", "pad")]
    + [f"pipeline_idioms.Attending:p2:zb:2:{cut}" for cut in ("gru", "gru#2", "lstm", "lstm#3", "matmul", "getitem")]
    + [f"pipeline_idioms.Query:p2:zb:2:{cut}" for cut in ("tanh", "q", "k", "v", "softmax", "fc")]
    + [f"pipeline_idioms.SeveralTensors:p2:interleaved:2:{cuts}" for cuts in ("chunk:unbind:e", "cat:split:d")],
    4: [
        # Each of them under one of these in turn: drawn modules have all.
        f"pipeline_idioms.{name}:{text}:4"
        for name, text in zip(IDIOMS, itertools.cycle(("p4:gpipe", "d2p2:1f1b", "p4:zb", "p2f2:gpipe")), strict=False)
    ]
    + [f"pipeline_idioms.Regularised:{text}:4" for text in ("p4:gpipe", "p4:zb", "d2p2:1f1b", "d2p2:zb")],
}

# By number of ranks; each network takes the next strategy, and the next schedule.
DRAWN = {
    2: ("p2",),
    4: ("p4", "d2p2", "p2f2", "p2c2", "p2s2", "p2t2"),
    8: ("d2p2f2", "d2p2c2", "d2p2s2", "p2d2t2", "p2s2x2", "p4f2", "f2p2d2"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
A_LAUNCH = 20
"""Cases that ranks run before they are started anew."""


def run(ranks: int, cases: list[str], timeout_s: int = 900, environment: Mapping[str, str] | None = None) -> None:
    # A message that nobody answers ends the ranks after a minute; this is for the whole, with other work on the cores.
    command = [sys.executable, str(PROGRAM), *cases]
    places = os.pathsep.join(map(str, (PROGRAM.parent, PROGRAM.parents[2])))
    beside = {"PYTHONPATH": places, **(environment or {})}
    launch_ranks(command, ranks=ranks, device="cpu", timeout_s=timeout_s, environment=beside)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_are_serial(ranks: int) -> None:
    run(ranks, CASES[ranks])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_work_in_place_views_and_several_outputs_are_serial(ranks: int) -> None:
    run(ranks, IDIOMATIC[ranks])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", MORE_IDIOMATIC)
def test_more_of_them_are_serial(ranks: int) -> None:
    cases = MORE_IDIOMATIC[ranks]
    for start in range(0, len(cases), A_LAUNCH):
        run(ranks, cases[start : start + A_LAUNCH])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_replicas_that_hold_parts_of_stages_are_serial(ranks: int) -> None:
    run(ranks, ZERO[ranks])


@pytest.mark.parametrize("ranks", NESTED)
def test_stages_that_share_their_layers_are_serial(ranks: int) -> None:
    run(ranks, NESTED[ranks])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_stages_that_hold_parts_of_the_sequence_are_serial(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}:sequence" for case in SEQUENCE[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_stages_that_attend_to_tokens_of_other_ranks_are_serial(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}" for case in CONTEXT[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_stages_that_send_tokens_to_experts_are_serial(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}" for case in EXPERTS[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE_SEQUENCE)
def test_more_stages_that_hold_parts_are_serial(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}:sequence" for case in MORE_SEQUENCE[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE_NESTED)
def test_more_stages_that_share_their_layers_are_serial(ranks: int) -> None:
    run(ranks, MORE_NESTED[ranks])


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_clipped_gradients_of_stages_update_as_serial_ones(ranks: int) -> None:
    run(ranks, [f"{case}:clip" for case in CLIPPED[ranks]])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_that_compute_again_are_serial(ranks: int) -> None:
    run(ranks, AGAIN[ranks])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_copies_of_parameters_in_bf16_move_as_serial_ones(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}:bf16-weights" for case in HELD_LOW[ranks]])


def test_gradients_in_bf16_are_as_exact_as_serial_ones() -> None:
    run(4, [f"transformer_networks.{case}:bf16" for case in LOWERED])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE_LOWERED)
def test_more_gradients_in_bf16_are_as_exact(ranks: int) -> None:
    run(ranks, [f"transformer_networks.{case}:bf16" for case in MORE_LOWERED[ranks]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", DEEP)
def test_three_deep_is_serial(ranks: int) -> None:
    run(ranks, DEEP[ranks])


def drawn_cases(strategies: tuple[str, ...], numbers: range, schedules: int) -> Iterator[str]:
    """Every network under every strategy, each with as many of the schedules, taken in turn."""
    for turn, (number, strategy) in enumerate(itertools.product(numbers, strategies)):
        for chosen in range(schedules):
            schedule = SCHEDULES[(turn + number // len(SCHEDULES) + chosen) % len(SCHEDULES)]
            yield f"drawn_networks.kept{number}:{strategy}:{schedule}:{2 + number % 2}"


def can_run(case: Case) -> bool:
    """Whether torch runs it alone, no limit refuses it, and no maximum is of padding alone, which is infinite."""
    try:
        model, network = case.load()
        planner_for(case.strategy).plan(network, case.strategy, case.settings)
    except UserError:
        return False
    inputs, _ = model.make_batch(case.settings.batch, seed=7)
    return bool(model.module(inputs).isfinite().all())


def run_drawn(where: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, count: int, schedules: int) -> None:
    environment = drawn_networks.keep(drawn_networks.drawn_networks(count, of=10 + ranks), where / "networks.json")
    monkeypatch.setitem(os.environ, *next(iter(environment.items())))
    asked = list(drawn_cases(DRAWN[ranks], range(count), schedules))
    cases = [text for text in asked if can_run(case_of(text))]
    # Some networks have fewer layers than stages, or fewer filters than ranks, or lose their positions at once.
    assert len(cases) >= len(asked) / 3
    for start in range(0, len(cases), A_LAUNCH):
        run(ranks, cases[start : start + A_LAUNCH], environment=environment)


@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_networks_in_stages_are_serial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    run_drawn(tmp_path, monkeypatch, ranks, count={2: 3, 4: 1}[ranks], schedules=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "count", "schedules"), [(2, 20, 3), (4, 4, 1), (8, 2, 1)])
def test_many_drawn_networks_in_stages_are_serial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, count: int, schedules: int
) -> None:
    run_drawn(tmp_path, monkeypatch, ranks, count, schedules)
