"""Modules from their descriptions, which are plain JSON: steps one after the other, each with a name.

A description has ``input_shape`` (of one sample; of token ids where ``vocabulary`` is there, some of which are
``masked``), ``steps`` and ``returns``. A step has ``do`` (an operation, or ``block``), ``name``, its arguments
``with``, and ``reads``: names of the values that it is given, its own result being known by its name and the model's
input as ``x``. ``shares`` names a step whose parts it uses, ``frozen`` says that its parameters are not trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paradl_bench.network.models.token_tasks import MaskedTokens, NextToken
from random_modules.operation import OPERATIONS, Parts
from random_modules.steps import attention, elementwise, experts, language, layers, windows

Description = dict[str, Any]
OF_OPERATIONS = (attention, elementwise, experts, language, layers, windows)
"""Modules that register operations when they are loaded."""


class Body(nn.Module):
    """Steps, run in order; what the last one gives is the result."""

    def __init__(self, steps: list[Description]) -> None:
        super().__init__()
        self.steps = steps
        self._names: dict[str, tuple[str, ...]] = {}
        for step in steps:
            made = {} if "shares" in step else _made(step)
            self._names[step["name"]] = tuple(made)
            for name, part in made.items():
                self._hold(part_name(step["name"], name), part)

    def _hold(self, name: str, part: Any) -> None:
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            self.register_buffer(name, part)
        else:
            setattr(self, name, part)

    def parts(self, step: Description) -> Parts:
        """What a step holds, or another that it shares with."""
        of = step.get("shares", step["name"])
        return {name: getattr(self, part_name(of, name)) for name in self._names[of]}

    def step(self, step: Description, values: dict[str, Any]) -> Any:
        given = [values[name] for name in step["reads"]]
        if step.get("unused"):
            return given[0]
        if step["do"] == "block":
            return self._block(step, given[0])
        return OPERATIONS[step["do"]].run(self.parts(step), *given, **step["with"])

    def _block(self, step: Description, x: torch.Tensor) -> torch.Tensor:
        blocks = self.parts(step)[""]
        if step["checkpoint"] == "no":
            return blocks(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=step["checkpoint"] == "reentrant")
        return x

    def run(self, values: dict[str, Any]) -> Any:
        last = values["x"]
        for step in self.steps:
            last = values[step["name"]] = self.step(step, values)
        return last

    def forward(self, x: torch.Tensor) -> Any:
        return self.run({"x": x})


class Described(Body):
    """A whole model: its steps, then what it returns."""

    def __init__(self, description: Description) -> None:
        super().__init__(description["steps"])
        self.input_shape = tuple(description["input_shape"])
        self.returns = description["returns"]
        vocabulary = description.get("vocabulary")
        if vocabulary:
            tokens = self.input_shape[0]
            self.token_task: MaskedTokens | NextToken = (
                MaskedTokens(vocabulary=vocabulary, sequence=tokens, mask_token=3)
                if description.get("masked")
                else NextToken(vocabulary=vocabulary, sequence=tokens)
            )
            self.embedding = nn.Embedding(vocabulary, description["features"])
            self.tied = description["tied"]
            if not self.tied:
                self.head = nn.Linear(description["head"]["in_features"], vocabulary)
        elif description["head"]:
            self.head = nn.Linear(**description["head"])

    def forward(self, x: torch.Tensor) -> Any:
        tokens = hasattr(self, "embedding")
        values = {"x": self.embedding(x) if tokens else x}
        last = self.run(values)
        if tokens and self.tied:
            logits = F.linear(last, self.embedding.weight)
        else:
            logits = self.head(last) if hasattr(self, "head") else last
        return self._returned(logits, values)

    def _returned(self, logits: torch.Tensor, values: dict[str, Any]) -> Any:
        aside = values.get(self.returns.get("aside", ""))
        if self.returns["regularised"]:
            logits = logits * (1 + 0.01 * sum(p.square().sum() for p in self.parameters()))
        forms = {
            "tensor": lambda: logits,
            "tuple": lambda: (logits, aside),
            "list": lambda: [logits, aside],
            "dict": lambda: {"logits": logits, "aside": aside},
        }
        return forms[self.returns["form"]]()


def _made(step: Description) -> Parts:
    if step["do"] == "block":
        return {"": nn.Sequential(*(Body(steps) for steps in step["blocks"]))}
    parts = OPERATIONS[step["do"]].build(**step["with"])
    if step.get("frozen"):
        for part in parts.values():
            if isinstance(part, (nn.Module, nn.Parameter)):
                part.requires_grad_(False)
    return parts


def part_name(step: str, part: str) -> str:
    """The attribute that a step's part lies under."""
    return f"{step}_{part}" if part else step
