"""Descriptions that are drawn, by a number alone: the same on every machine and in every process.

Steps are drawn one at a time, and run on the meta device, which tells their shapes; one that does not run is drawn
anew. The whole is then trained once for real: a module that torch itself does not train is drawn anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from paradl_bench.network.models.catalog import LoadedModel
from random_modules.described import Body, Described, Description
from random_modules.operation import IMAGE, OPERATIONS, SEQUENCE, VECTOR, Sight

BATCH = 5
"""Samples that steps are tried on."""
MOST_VALUES = 2500
"""Of one sample, in any one value: cases are many."""
VOCABULARY = 17
CLASSES = 5


class Drawing:
    """Values drawn so far, on the meta device, and the steps that made them."""

    def __init__(self, rng: Random, kind: str, shape: tuple[int, ...]) -> None:
        self.rng = rng
        self.kind = kind
        self.steps: list[Description] = []
        self.current = "x"
        self._values: dict[str, tuple[str, torch.Tensor]] = {"x": (kind, torch.empty(BATCH, *shape, device="meta"))}
        self._holding: dict[str, torch.nn.Module] = {}

    @property
    def value(self) -> torch.Tensor:
        return self._values[self.current][1]

    @property
    def sight(self) -> Sight:
        alike = [
            name
            for name, (kind, value) in self._values.items()
            if kind == self.kind and value.shape == self.value.shape and name != self.current
        ]
        return Sight(self.kind, tuple(self.value.shape), tuple(alike[-4:]))

    def add(self, among: Mapping[str, float] | None = None) -> bool:
        """Draw one step; False where it does not fit.

        Args:
            among: operations by how often they are drawn; None for all of the value's kind by their own weights.
        """
        rng = self.rng
        fitting = among or {name: found.weight for name, found in OPERATIONS.items() if self.kind in found.kinds}
        do = rng.choices(list(fitting), list(fitting.values()))[0]
        arguments = OPERATIONS[do].draw(rng, self.sight)
        if arguments is None:
            return False
        reads = [self.current, *arguments.pop("reads", [])]
        step: Description = {"do": do, "name": f"{do}{len(self.steps)}", "with": arguments, "reads": reads}
        alike = [s for s in self.steps if s["do"] == do and s.get("with") == arguments and "shares" not in s]
        if alike and rng.random() < 0.3:
            step["shares"] = alike[-1]["name"]
        elif rng.random() < 0.06:
            step["frozen"] = True
        elif rng.random() < 0.03:
            step["unused"] = True
        return self._try(step, OPERATIONS[do].to or self.kind)

    def add_block(self, filling: Sequence[Callable[[Drawing], object]] | None = None) -> bool:
        """Draw a sequence of blocks, each of steps of its own, which keep the shape.

        Args:
            filling: adds the steps of one block each; None for one or two of any steps.
        """
        rng, made = self.rng, []
        for fill in filling or [_fill_any] * rng.choice([1, 2, 2]):
            inner = Drawing(rng, self.kind, tuple(self.value.shape[1:]))
            fill(inner)
            if inner.kind != self.kind or inner.value.shape != self.value.shape or not inner.steps:
                return False
            made.append(inner.steps)
        name = f"blocks{len(self.steps)}"
        checkpoint = rng.choice(["no"] * (60 if filling else 5) + ["reentrant", "not reentrant"])
        return self._try(
            {"do": "block", "name": name, "blocks": made, "reads": [self.current], "checkpoint": checkpoint}, self.kind
        )

    def _try(self, step: Description, kind: str) -> bool:
        """Keep a step if it runs, and gives no more values than allowed."""
        steps = [*self.steps, step]
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                body = Body([s for s in steps if s["name"] in (step["name"], step.get("shares"))])
                found = body.step(step, {name: value.clone() for name, (_, value) in self._values.items()})
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False
        if (
            found.dim() != {VECTOR: 2, SEQUENCE: 3}.get(kind, max(3, found.dim()))
            or not found.numel()
            or found.numel() // BATCH > MOST_VALUES
            or found.size(0) != BATCH
        ):
            return False
        self.steps, self.kind, self.current = steps, kind, step["name"]
        self._values[step["name"]] = kind, found
        return True

    def fill(self, count: int) -> None:
        """Draw so many steps that fit, if they are found in time."""
        wanted = len(self.steps) + count
        for _ in range(4 * count):
            if len(self.steps) < wanted:
                self.add_block() if self.rng.random() < 0.12 else self.add()

    def go_back(self) -> None:
        """Read an earlier value of the same kind next: a branch begins there."""
        earlier = [name for name, (kind, _) in self._values.items() if kind == self.kind]
        self.current = self.rng.choice(earlier)


def _fill_any(drawing: Drawing) -> None:
    for _ in range(drawing.rng.randint(2, 5)):
        drawing.add()


def draw_description(number: int, attempt: int) -> Description:
    """One description, which may not train."""
    rng = Random(f"module {number}.{attempt}")
    kind = rng.choices([IMAGE, SEQUENCE, VECTOR, "tokens"], [10, 4, 3, 3])[0]
    if kind == "tokens":
        return _of_tokens(rng)
    shape = _input_shape(rng, kind)
    drawing = Drawing(rng, kind, shape)
    drawing.fill(rng.randint(2, 6))
    if rng.random() < 0.3:
        _branch(drawing)
    drawing.fill(rng.randint(0, 3))
    head = _end(drawing)
    return {
        "input_shape": list(shape),
        "steps": drawing.steps,
        "head": head,
        "returns": _returns(rng, drawing),
    }


def _branch(drawing: Drawing) -> None:
    """Another way from an earlier value, which what comes later may read beside."""
    drawing.go_back()
    drawing.fill(2)


def _input_shape(rng: Random, kind: str) -> tuple[int, ...]:
    if kind == VECTOR:
        return (rng.choice([4, 6, 8, 12]),)
    if kind == SEQUENCE:
        return rng.choice([4, 6, 7]), rng.choice([4, 8, 12])
    dims = rng.choice([1, 2, 2, 2, 2, 3])
    return rng.choice([3, 4, 4, 6, 8]), *(rng.choice({1: [9, 12, 16], 2: [8, 8, 9, 12], 3: [4, 5, 6]}[dims]),) * dims


def _end(drawing: Drawing) -> dict[str, Any] | None:
    """Bring the value to what a head reads; None where the loss reads it as it is."""
    rng = drawing.rng
    if drawing.kind == IMAGE and rng.random() < 0.1 and drawing.sight.features > 1:
        return None
    while drawing.kind != VECTOR:
        name = "pool_tokens" if drawing.kind == SEQUENCE else "pool_positions"
        arguments = OPERATIONS[name].draw(rng, drawing.sight)
        step = {
            "do": name,
            "name": f"{name}{len(drawing.steps)}",
            "with": arguments,
            "reads": [drawing.current],
        }
        drawing._try(step, VECTOR)
    return {"in_features": drawing.sight.features, "out_features": CLASSES}


def _returns(rng: Random, drawing: Drawing) -> Description:
    """Mostly one tensor; else an earlier value beside it, which no loss reads."""
    regularised = rng.random() < 0.03
    if rng.random() < 0.8:
        return {"form": "tensor", "regularised": regularised}
    aside = rng.choice([step["name"] for step in drawing.steps] or ["x"])
    return {"form": rng.choice(["tuple", "list", "dict"]), "aside": aside, "regularised": regularised}


def _of_tokens(rng: Random) -> Description:
    tokens, features = rng.choice([5, 6, 8]), rng.choice([8, 12])
    drawing = Drawing(rng, SEQUENCE, (tokens, features))
    drawing.fill(rng.randint(2, 6))
    ready = drawing.kind == SEQUENCE and drawing.value.size(1) == tokens
    features_of_result = drawing.sight.features
    return {
        "input_shape": [tokens],
        "vocabulary": VOCABULARY,
        "features": features,
        "steps": drawing.steps if ready else [],
        "head": {"in_features": features_of_result if ready else features},
        "tied": (not ready or features_of_result == features) and rng.random() < 0.4,
        "returns": _returns(rng, drawing) if ready else {"form": "tensor", "regularised": False},
    }


def trains(description: Description) -> bool:
    """Whether torch itself trains it, on one process, with finite gradients, and in evaluation mode for one sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            module = Described(description).double().train()
            model = LoadedModel("drawn", module, module.input_shape, getattr(module, "token_task", None))
            inputs, targets = model.make_batch(4, seed=1)
            inputs = inputs if model.task else inputs.double().requires_grad_().clone()
            loss = model.loss(module(inputs), targets)
            loss.backward()
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return bool(loss.isfinite()) and bool(gradients) and all(bool(g.isfinite().all()) for g in gradients)


@functools.lru_cache(maxsize=4096)
def describe(number: int) -> Description:
    """The description of a number: the first that trains of those that are drawn for it."""
    return next(found for attempt in range(1000) if trains(found := draw_description(number, attempt)))
