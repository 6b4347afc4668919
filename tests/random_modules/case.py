"""A case: a random module under a strategy with settings, all drawn by one number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Literal

import msgspec

from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import RECOMPUTE_ALL
from paradl_bench.plan.strategy import parse_strategy
from random_modules.decoder import describe_decoder
from random_modules.described import Description
from random_modules.draw import describe
from random_modules.strategies import LAYERS, OF_DECODERS, OF_MODULES, SPLIT, every_step, fits

Family = Literal["module", "decoder"]
DESCRIBES: Mapping[Family, Callable[[int], Description]] = {"module": describe, "decoder": describe_decoder}
STRATEGIES: Mapping[Family, Mapping[str, float]] = {"module": OF_MODULES, "decoder": OF_DECODERS}
DECODERS = 0.4
"""Of all cases, those of small language models."""
PARTS = {"multi_head": "", "linear": "", "token_norm": "", "grouped_attention": "_out", "perceptron": "_up"}
"""A module of a step, by what its name ends in: ZeRO's units of a block are often as small."""
OPTIMIZERS = ("adam", "adamw", "adamw-fused")

SAMPLES = 2
"""Of a micro-batch, on one replica."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one number stands for.

    Attributes:
        family: that the module is drawn from.
        strategy: as it is written.
        options: of TrainingRequest.
        cut: where a pipeline is cut, as shares of the model's operations; empty for where the planner cuts it.
        split: whether only every other step's layers are split.
    """

    number: int
    strategy: str
    options: dict[str, Any]
    family: Family = "module"
    cut: tuple[float, ...] = ()
    split: bool = False

    @property
    def model(self) -> str:
        return f"random_modules:{self.family}{self.number}"

    @property
    def description(self) -> Description:
        return DESCRIBES[self.family](self.number)

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
        # JSON has no tuples.
        options = {name: tuple(own) if isinstance(own, list) else own for name, own in self.options.items()}
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
        family = [] if self.family == "module" else [self.family]
        return " ".join(
            [self.strategy, *family, *words, *(["cut"] if self.cut else []), *(["split"] if self.split else [])]
        )


@functools.lru_cache(maxsize=4096)
def case_of(number: int) -> Case:
    """The case of a number."""
    family: Family = "decoder" if Random(f"family {number}").random() < DECODERS else "module"
    rng = Random(f"case {number}")
    steps = DESCRIBES[family](number)["steps"]
    names = {step["do"] for step in every_step(steps)}
    weights = {name: weight * fits(name, steps) for name, weight in STRATEGIES[family].items()}
    strategy = rng.choices(list(weights), list(weights.values()))[0]
    axes = parse_strategy(strategy).axes
    kinds, stage = {axis.kind for axis in axes}, max((axis.prefix for axis in axes), default=0)
    options: dict[str, Any] = {"optimizer": rng.choice(OPTIMIZERS)} if rng.random() < 0.4 else {}
    if rng.random() < 0.5:
        options["bucket_cap_mb"] = 0.001
    if "batch_norm" in names and rng.random() < 0.5 and stage < 2 and "pipeline" not in kinds:
        options["batch_norm"] = "sync"
    if "filter" in kinds and rng.random() < 0.4:
        options["filter_backward"] = "reduce-scatter"
    if "tensor" in kinds and family == "decoder" and rng.random() < 0.6:
        options["sequence_parallel"] = "on"
    if "expert" in kinds and rng.random() < 0.2:
        options["expert_imbalance"] = 1.5
    # What refuses it beside these has to be seen a few times alone.
    refusing = stage > 1 and len(kinds) > 1
    if rng.random() < (0.03 if refusing or "block" not in names else 0.5):
        options["recompute"] = _repeated(rng, steps)
    cut: tuple[float, ...] = ()
    split = bool(kinds & {"filter", "channel"}) and len(names & SPLIT) > 1 and rng.random() < 0.2
    if "pipeline" in kinds:
        stages = degree_of(parse_strategy(strategy), Trait.STAGES)
        layers = sum(step["do"] in LAYERS for step in every_step(steps))
        schedule = rng.choice(SCHEDULES if layers >= 2 * stages else ("gpipe", "1f1b"))
        # One a stage at least, of which a rank may have two.
        few = 2 * stages if schedule == "dualpipev" else stages
        options |= {"schedule": schedule, "micro_batches": rng.choice([few, few, few + 1, 2 * stages])}
        if rng.random() < 0.2 and schedule in ("gpipe", "1f1b"):
            cut = tuple(rng.random() for _ in range(stages - 1))
    elif rng.random() < 0.3:
        options["accumulate"] = rng.choice([2, 3])
    if strategy == "d4":
        options |= {"exchange": rng.choice(["segmented", "leader"]), "ranks_per_node": 2}
    return Case(number=number, family=family, strategy=strategy, options=options, cut=cut, split=split)


def _repeated(rng: Random, steps: list[Description]) -> tuple[str, ...]:
    """What is computed again: mostly all blocks, or the first one, or a module in it."""
    blocks = [step for step in steps if step["do"] == "block"]
    if not blocks or rng.random() < 0.6:
        return RECOMPUTE_ALL
    name = blocks[0]["name"]
    modules = [step["name"] + PARTS[step["do"]] for step in blocks[0]["blocks"][0] if step["do"] in PARTS]
    return (f"{name}.0.{modules[0]}",) if modules and rng.random() < 0.5 else (f"{name}.0",)


def draws_again(description: Description) -> bool:
    """Whether backward draws numbers, as a checkpoint that drops values does: nothing holds those still."""
    steps = list(every_step(description["steps"]))
    drops = any(step["do"] == "dropout" and 0 < step["with"]["p"] < 1 for step in steps)
    return drops and any(step.get("checkpoint", "no") != "no" for step in steps)
