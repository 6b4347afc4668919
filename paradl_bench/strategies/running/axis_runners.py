"""What the ``module.py`` of an axis' folder declares as ``RUNNER``: how its ranks run layers, stages or parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import AxisKind
from paradl_bench.plan.axis_planner import ShardedLayers
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.strategies.running.group_functions import Group, Reduce
from paradl_bench.strategies.running.sharded_module import Loss, Sharding


@runtime_checkable
class AxisRunner(Protocol):
    """What the ``module.py`` of a strategy folder declares as ``RUNNER``: how the ranks of one axis shard layers."""

    @property
    def name(self) -> str:
        """The kind of axis."""

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """Put this rank's shards in the place of parameters, which are alike on all ranks; no communication.

        Raises:
            UserError: a limit is exceeded; the message names the layer that sets it.
        """


class StagedModule(Protocol):
    """The stages of one rank, which step through an iteration by themselves.

    Attributes:
        module: what holds their parameters. stages: what they are. sharding: how their layers are sharded.
    """

    module: torch.nn.Module
    stages: Sequence[Any]
    sharding: Sharding

    @property
    def holders(self) -> Mapping[str, int]:
        """Per parameter that several ranks hold, how many do."""

    @property
    def handed(self) -> Sequence[torch.Tensor]:
        """What stages of the rank handed to each other in the last iteration, each held until the next one hands it."""

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all micro-batches; the mini-batch's loss where the last stage is, else None."""


@runtime_checkable
class StagingRunner(Protocol):
    """``RUNNER`` of an axis that parts layers into stages."""

    def build_stages(
        self,
        module: torch.nn.Module,
        network: ModelGraph,
        strategy: Strategy,
        settings: PlanSettings,
        device: torch.device,
        loss: Loss,
        *,
        sharded: ShardedLayers,
        shard: Callable[[], Sharding],
        shard_parameters: Callable[[ModelGraph, frozenset[str]], Reduce | None],
        group_along: Callable[..., Group],
    ) -> StagedModule:
        """This rank's stages.

        Args:
            sharded: the layers as this rank shards them, as planned. shard: has them run so. shard_parameters: has
                replicas hold parts of the rank's stages, as one network with parameters that are held apart.
            group_along: from axes to the group along these; ``heard`` for one that moves what is sent in every case.
        """


class Sharers(NamedTuple):
    """Whose ranks share parameters out.

    Attributes:
        everyone: of all parameters but some. replicas: with the same shards afterwards; None where no other has them.
        apart: names of the others, as of :class:`~paradl_bench.plan.axis_planner.ShardedLayers`. alike: ranks that hold
            the same of these.
    """

    everyone: Group
    replicas: Group | None
    apart: frozenset[str]
    alike: Group


@runtime_checkable
class ParameterRunner(Protocol):
    """``RUNNER`` of an axis whose ranks may hold parts of what replicas else hold alike."""

    def shard_parameters(
        self,
        module: torch.nn.Module,
        network: ModelGraph,
        axis: Axis,
        device: torch.device,
        sharers: Sharers,
        settings: PlanSettings,
        in_stages: bool,
    ) -> Reduce | None:
        """Have ranks hold parts of parameters, where the axis says so.

        Args:
            network: with the shapes that parameters have on this rank before. sharers: who shares them out.
            in_stages: whether what is returned reduces.
        """


def axis_runner(kind: AxisKind) -> object | None:
    """``RUNNER`` of the ``module.py`` in a kind's folder; None without that."""
    return kind.beside("module", "RUNNER", object)


def sharding_runner(kind: AxisKind) -> AxisRunner:
    """That of a kind whose ranks shard layers."""
    runner = axis_runner(kind)
    assert isinstance(runner, AxisRunner)
    return runner
