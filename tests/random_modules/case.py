"""A case: a random module under a strategy with settings, all drawn by one number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import parse_strategy
from random_modules.described import Description
from random_modules.draw import describe

SAMPLES = 2
"""Of a micro-batch, on one replica."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb")
STRATEGIES = {
    "serial": 3,
    **{"d2": 6, "z1d2": 3, "z2d2": 5, "z3d2": 6, "f2": 6, "c2": 6, "s2": 10, "s1x2": 3, "t2": 4, "p2": 22},
    **{"d3": 1, "z3d3": 1, "f3": 2, "s3": 3, "p3": 4},
    **{"p4": 4, "d2p2": 4, "p2f2": 3, "p2c2": 2, "p2s2": 5, "p2t2": 2, "d2f2": 3, "d2c2": 2, "d2s2": 5, "d2t2": 2},
    **{"s2x2": 3, "s4": 1, "d4": 2, "z2d4": 1, "f2d2": 1, "s2d2": 1, "f2p2": 1, "s2p2": 1, "t4": 1, "f4": 1},
    **{"d2p2t2": 1, "d2p2f2": 1, "d2p2s2": 1},
}
"""Strategies, and how often each is drawn beside the others."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one number stands for.

    Attributes:
        strategy: as it is written.
        options: of TrainingRequest.
        cut: where a pipeline is cut, as shares of the model's operations; empty for where the planner cuts it.
        split: whether only every other step's layers are split.
    """

    number: int
    strategy: str
    options: dict[str, Any]
    cut: tuple[float, ...] = ()
    split: bool = False

    @property
    def model(self) -> str:
        return f"random_modules:module{self.number}"

    @property
    def description(self) -> Description:
        return describe(self.number)

    @property
    def replicas(self) -> int:
        return degree_of(parse_strategy(self.strategy), Trait.DIVIDES_BATCH)

    @property
    def count(self) -> int:
        """Micro-batches."""
        return int(self.options.get("micro_batches") or self.options.get("accumulate", 1))

    @property
    def samples(self) -> int:
        """Of a replica."""
        return SAMPLES * self.count

    def request(self, network: ModelGraph | None = None) -> TrainingRequest:
        """What ``paradl-bench train`` is asked for.

        Args:
            network: of the model; a cut that was drawn is among its operations.
        """
        options = dict(self.options)
        if self.cut and network is not None:
            own = [layer.name for layer in network.layers if not layer.name.startswith("loss")]
            at = sorted({max(1, min(len(own) - 1, int(share * len(own)))) for share in self.cut})
            options["stages"] = ",".join(own[index] for index in at)
        if self.split:
            names = [f"{step['name']}*" for step in self.description["steps"] if step["do"] in SPLIT]
            options["split"] = ",".join(names[::2])
        axes, others = read_options(options)
        return TrainingRequest(
            axes=axes,
            model=self.model,
            input_shape=None,
            strategy=parse_strategy(self.strategy),
            batch=self.samples * self.replicas,
            device="cpu",
            **others,
        )

    @property
    def label(self) -> str:
        """Strategy and settings, on one line."""
        words = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.strategy, *words, *(["cut"] if self.cut else []), *(["split"] if self.split else [])])


@functools.lru_cache(maxsize=4096)
def case_of(number: int) -> Case:
    """The case of a number."""
    rng = Random(f"case {number}")
    steps = describe(number)["steps"]
    names = {step["do"] for step in every_step(steps)}
    weights = {name: weight * _fits(name, steps) for name, weight in STRATEGIES.items()}
    strategy = rng.choices(list(weights), list(weights.values()))[0]
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["bucket_cap_mb"] = 0.001
    if "batch_norm" in names and rng.random() < 0.5 and not set(strategy) & set("p23"):
        options["batch_norm"] = "sync"
    if "f" in strategy and rng.random() < 0.4:
        options["filter_backward"] = "reduce-scatter"
    cut: tuple[float, ...] = ()
    split = strategy[0] in "fc" and len(names & SPLIT) > 1 and rng.random() < 0.2
    if "p" in strategy:
        stages = degree_of(parse_strategy(strategy), Trait.STAGES)
        schedule = rng.choice(SCHEDULES if len(names & LAYERS) > 2 * stages else ("gpipe", "1f1b"))
        options |= {"schedule": schedule, "micro_batches": rng.choice([stages, stages, stages + 1, 2 * stages])}
        if rng.random() < 0.2 and schedule in ("gpipe", "1f1b"):
            cut = tuple(rng.random() for _ in range(stages - 1))
    else:
        options |= _of_whole_batches(rng, strategy, "block" in names)
    return Case(number=number, strategy=strategy, options=options, cut=cut, split=split)


def _of_whole_batches(rng: Random, strategy: str, has_blocks: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["accumulate"] = rng.choice([2, 3])
    if not strategy.startswith(("z2", "z3")) and rng.random() < (0.6 if has_blocks else 0.05):
        options["recompute"] = ("all",)
    if strategy == "d4":
        options |= {"exchange": rng.choice(["segmented", "leader"]), "ranks_per_node": 2}
    return options


SPLIT = {"conv", "linear", "functional_linear", "functional_conv", "mlp"}
LAYERS = SPLIT | {"scale", "offset", "batch_norm", "layer_norm", "positions", "multi_head", "fused_attention", "excite"}
"""Steps that filters or channels are split of; those that may begin a stage."""
WHOLE = {
    "layer_norm",
    "group_norm",
    "pool_positions",
    "patches",
    "unit_length",
    "softmax",
    "centre",
    "einsum",
    "excite",
}
"""Steps that read all positions of an image."""


def _fits(strategy: str, steps: list[Description]) -> float:
    """Far fewer cases of what a limit refuses."""
    names = {step["do"] for step in every_step(steps)}
    if "s" in strategy.replace("serial", ""):
        early = [step["do"] for step in every_step(steps[:3]) if step["do"] != "block"]
        fits = bool({"conv", "pool", "functional_conv"} & set(early)) and not WHOLE & set(early)
        return 1.5 if fits else 0.02
    if "t" in strategy:
        return 1.0 if names & {"mlp", "encoder_layer", "separate_attention"} else 0.05
    if "p" in strategy:
        stages = degree_of(parse_strategy(strategy), Trait.STAGES)
        return 1.0 if len([s for s in every_step(steps) if s["do"] in LAYERS]) >= stages else 0.05
    if "f" in strategy or "c" in strategy:
        return 1.0 if names & SPLIT else 0.05
    return 1.0


def every_step(steps: list[Description]) -> Iterator[Description]:
    """Steps and those of blocks inside."""
    for step in steps:
        yield step
        for inner in step.get("blocks", ()):
            yield from every_step(inner)


def draws_again(description: Description) -> bool:
    """Whether backward draws numbers, as a checkpoint that drops values does: nothing holds those still."""
    steps = list(every_step(description["steps"]))
    drops = any(step["do"] == "dropout" and 0 < step["with"]["p"] < 1 for step in steps)
    return drops and any(step.get("checkpoint", "no") != "no" for step in steps)
