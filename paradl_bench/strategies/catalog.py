"""Strategies by the kinds of axes that they have; each folder beside this file is one, found by discovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import Planner, PlanSettings
from paradl_bench.spec.registry import discover
from paradl_bench.spec.strategy import KIND_OF_LETTER, LETTER_OF_KIND, Strategy

if TYPE_CHECKING:
    import torch

_PACKAGE = "paradl_bench.strategies"


@runtime_checkable
class Runner(Protocol):
    """What the ``module.py`` of each strategy folder declares as ``RUNNER``: how the strategy really trains."""

    @property
    def name(self) -> str:
        """As its planner's."""

    @property
    def needs_process_group(self) -> bool:
        """Whether ranks have to have joined before :meth:`build`."""

    def build(
        self, module: torch.nn.Module, network: Network, settings: PlanSettings, device: torch.device
    ) -> torch.nn.Module:
        """The module as one rank trains it; called on every rank, and may communicate.

        Args:
            module: the whole model, already on ``device``.
            network: its traced network.
        """


def planner_for(strategy: Strategy) -> Planner:
    """The planner of a strategy's kinds.

    Raises:
        UserError: none plans them; the message names those that are planned.
    """
    planners = discover(_PACKAGE, "PLANNER", Planner, submodule="plan")  # type: ignore[type-abstract]
    if strategy.name not in planners:
        raise _unknown(strategy, "planned", list(planners))
    return planners[strategy.name]


def runner_for(strategy: Strategy) -> Runner:
    """What runs a strategy's kinds; imports torch.

    Raises:
        UserError: none runs them; the message names those that run.
    """
    runners = discover(_PACKAGE, "RUNNER", Runner, submodule="module")  # type: ignore[type-abstract]
    if strategy.name not in runners:
        raise _unknown(strategy, "run", list(runners))
    return runners[strategy.name]


def _unknown(strategy: Strategy, what: str, names: list[str]) -> UserError:
    choices = ", ".join(f"{name} ({_example(name)})" if name != "serial" else name for name in names)
    return UserError(f"strategy {strategy} ({strategy.name}) cannot be {what} yet; those that can are {choices}")


def _example(name: str) -> str:
    letters = {kind: LETTER_OF_KIND[kind] for kind in KIND_OF_LETTER.values()}
    return "".join(f"{letter}2" for kind in name.split("+") for known, letter in letters.items() if known == kind)
