"""Strategies by how often they are drawn, and which of them a module has a chance to run under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import parse_strategy
from random_modules.described import Description

OF_MODULES: Mapping[str, float] = {
    "serial": 3,
    **{"d2": 6, "z1d2": 3, "z2d2": 5, "z3d2": 6, "f2": 6, "c2": 6, "s2": 10, "s1x2": 3, "t2": 4, "p2": 22},
    **{"d3": 1, "z3d3": 1, "f3": 2, "s3": 3, "p3": 4},
    **{"p4": 4, "d2p2": 4, "p2f2": 3, "p2c2": 2, "p2s2": 5, "p2t2": 2, "d2f2": 3, "d2c2": 2, "d2s2": 5, "d2t2": 2},
    **{"s2x2": 3, "s4": 1, "d4": 2, "z2d4": 1, "f2d2": 1, "s2d2": 1, "f2p2": 1, "s2p2": 1, "t4": 1, "f4": 1},
    **{"d2p2t2": 1, "d2p2f2": 1, "d2p2s2": 1},
    **{"d2z2d2": 2, "d2z3d2": 4, "z3d2d2": 1, "d2z1d2": 0.2, "x2": 2},
    **{"z1d2p2": 3, "z2d2p2": 2, "z3d2p2": 3, "p2z1d2": 1, "p2z3d2": 1},
    **{"z1d2f2": 1, "z2d2f2": 1, "z3d2f2": 3, "z1d2c2": 1, "z2d2c2": 1, "z3d2c2": 3, "f2z3d2": 1, "c2z2d2": 1},
    **{"z1d2s2": 4, "z1d1s2": 2, "s2z1d2": 1, "z3d2s2": 0.2, "z2d2t2": 1, "z3d2t2": 2},
}
"""Of all modules."""
OF_DECODERS: Mapping[str, float] = {
    **{"d2": 1, "z1d2": 1, "z2d2": 1, "z3d2": 2, "p2": 3, "d2p2": 1, "p4": 1, "d2z2d2": 1, "d2z3d2": 2},
    **{"t2": 6, "t4": 1, "d2t2": 2, "t2d2": 1, "p2t2": 3, "t2p2": 1, "f2": 0.5, "d2c2": 0.5},
    **{"z1d2t2": 2, "z2d2t2": 2, "z3d2t2": 3, "t2z3d2": 1, "z3d2f2": 1, "z3d2c2": 1},
    **{"z1d2p2": 1, "z3d2p2": 1},
    **{"x2": 6, "x4": 1, "d2x2": 2, "x2d2": 1, "z1d2x2": 2, "z2d2x2": 2, "z3d2x2": 3, "z3d1x2": 2, "x2z3d2": 1},
    **{"e2": 6, "e3": 1, "e4": 3, "d2e2": 4, "e2d2": 2},
    **{"x2t2": 2, "t2x2": 1, "z1d1x2t2": 1, "z3d1x2t2": 1},
    **{"p2x2": 2, "x2p2": 1, "d2p2x2": 0.5, "z1d2p2x2": 0.5},
    **{"p2e2": 1, "e2p2": 0.5, "d2p2e2": 0.5, "e2t2": 1, "t2e2": 1, "x2e2": 1, "e2x2": 0.5},
    **{"z1d2e2": 1, "z2d2e2": 1, "z3d2e2": 2, "x2f2": 0.2},
}
"""Of small language models; the last are of what does not nest."""

SPLIT = {"conv", "linear", "functional_linear", "functional_conv", "mlp", "perceptron"}
LAYERS = {
    *SPLIT,
    *("scale", "offset", "batch_norm", "layer_norm", "positions", "multi_head", "fused_attention", "excite"),
    *("grouped_attention", "experts", "token_norm"),
}
"""Steps that filters or channels are split of; those that may begin a stage."""
PAIRS = {"mlp", "encoder_layer", "separate_attention", "perceptron", "grouped_attention"}
"""Steps with linear layers in pairs."""
WHOLE = {
    *("layer_norm", "group_norm", "pool_positions", "patches", "unit_length", "softmax", "centre", "einsum", "excite")
}
"""Steps that read all positions of an image."""


def every_step(steps: list[Description]) -> Iterator[Description]:
    """Steps and those of blocks inside."""
    for step in steps:
        yield step
        for inner in step.get("blocks", ()):
            yield from every_step(inner)


def fits(strategy: str, steps: list[Description]) -> float:
    """Far fewer cases of what a limit refuses."""
    names, of = {step["do"] for step in every_step(steps)}, parse_strategy(strategy)
    kinds = {axis.kind for axis in of.axes}
    if "spatial" in kinds:
        early = [step["do"] for step in every_step(steps[:3]) if step["do"] != "block"]
        cut = bool({"conv", "pool", "functional_conv"} & set(early)) and not WHOLE & set(early)
        return 1.5 if cut else 0.02
    if "expert" in kinds:
        return 2.0 if "experts" in names else 0.02
    if "tensor" in kinds:
        return 1.0 if names & PAIRS else 0.05
    if "pipeline" in kinds:
        stages = degree_of(of, Trait.STAGES)
        return 1.0 if len([s for s in every_step(steps) if s["do"] in LAYERS]) >= stages else 0.05
    if kinds & {"filter", "channel"}:
        return 1.0 if names & SPLIT else 0.05
    return 1.0
