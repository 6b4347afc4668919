"""What is to be calibrated, apart from where: models, node counts, strategies, batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from paradl_bench.core.bounds import Count, PositiveCount, PositiveSeconds, Ranks
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import parse_size_sweep
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import axis_kind
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy, parse_strategy, parse_strategy_kinds
from paradl_bench.records.kernel_settings import flags_of_label, settings_of_label
from paradl_bench.slurm.jobs.site import Site
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv")
HALOS = "exchange"
"""What ranks send their neighbours, and receive of them, at once."""


def operations_of(strategies: Iterable[str]) -> str:
    """Operations of sweeps by which strategies are predicted; texts that do not parse ask for nothing."""
    operations = dict.fromkeys(OPERATIONS)
    for text in strategies:
        kinds = parse_strategy_kinds(text)
        with contextlib.suppress(UserError):
            for kind in [axis.kind for axis in parse_strategy(text).axes] if kinds is None else kinds:
                operations |= dict.fromkeys(axis_kind(kind).operations)
    return ",".join(operations)


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy on some nodes with its global mini-batch."""

    strategy: str
    ranks: int
    nodes: int
    batch: int

    @property
    def waits_beside_exchange(self) -> bool:
        """Whether layers wait for communication while gradients are exchanged beside backward."""
        strategy = parse_strategy(self.strategy)
        exchanges, shares = (degree_of(strategy, trait) > 1 for trait in (Trait.REPLICATES, Trait.SHARDS_LAYERS))
        return exchanges and shares and degree_of(strategy, Trait.STAGES) == 1


class CalibrationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chain of jobs measures.

    Attributes:
        nodes: how many, ascending. strategies: kinds, which take all ranks of the nodes, or with their degrees.
        batch: samples of a replica; the global mini-batch is that times the degree of data parallelism.
        input_shape, sequence: as in ``train``; empty for the model's own.
        dtype, kernel_settings: of layers and runs; the settings by their label, as in records.
        iterations, warmup: of runs. blocks: of layers and sweeps.
        operations, sizes: of sweeps, as ``collectives`` takes them.

    Raises:
        UserError: a part does not parse or fit.
    """

    models: tuple[str, ...]
    nodes: tuple[Ranks, ...]
    strategies: tuple[str, ...]
    batch: PositiveCount
    input_shape: str = ""
    sequence: Count = 0
    dtype: str = "fp32"
    kernel_settings: str = ""
    optimizer: str = "sgd"
    iterations: PositiveCount = 30
    warmup: Count = 5
    blocks: PositiveCount = 5
    operations: str
    sizes: str
    point_s: PositiveSeconds = 0.1

    def __post_init__(self) -> None:
        for name in self.models:
            if not name or not name.isprintable() or name.startswith("-") or any(mark in name for mark in " /'\"\\$"):
                raise UserError(f"--models: {name!r} is not a model's name; separate names by single commas")
        parse_size_sweep(self.sizes)
        for text in self.strategies:
            if parse_strategy_kinds(text) is None:
                parse_strategy(text)

    def check_numerics(self, site: Site) -> None:
        """Refuse, before an allocation is asked for, a dtype or settings that a rank of the site would refuse.

        Raises:
            UserError: the device has no such mode, or a strategy does not go with it.
        """
        settings_of_label(self.kernel_settings).check(site.device)
        for configuration in self.configurations(site.on_node):
            strategy, planned = parse_strategy(configuration.strategy), PlanSettings(batch=configuration.batch)
            check_dtype(strategy, planned, self.dtype)
            check_kernel_settings(strategy, planned, self.kernel_settings)

    @property
    def numerics(self) -> tuple[str, ...]:
        """Options of what is computed in, of ``layers`` and ``train``; none for fp32 without settings."""
        dtype = () if self.dtype == "fp32" else ("--dtype", self.dtype)
        return (*dtype, *flags_of_label(self.kernel_settings).split())

    def configurations(self, on_node: int) -> tuple[Configuration, ...]:
        """What is run on nodes of so many ranks, fewest nodes first.

        Raises:
            UserError: a strategy takes a number of nodes that was not asked for, or several kinds at once.
        """
        chosen: list[Configuration] = []
        for text in self.strategies:
            kinds = parse_strategy_kinds(text)
            if kinds is None or not kinds:
                chosen.append(self._fixed(parse_strategy(text), on_node))
                continue
            for nodes in self.nodes:
                if nodes * on_node > 1:
                    chosen.append(self._placed(_grown(kinds, text, nodes * on_node), nodes))
        return tuple(sorted(dict.fromkeys(chosen), key=lambda run: run.nodes))

    def _fixed(self, strategy: Strategy, on_node: int) -> Configuration:
        nodes = -(-strategy.ranks // on_node)
        if nodes > 1 and strategy.ranks % on_node:
            raise UserError(
                f"--strategies {strategy}: {strategy.ranks} ranks do not fill whole nodes of {on_node} ranks"
            )
        if nodes > 1 and nodes not in self.nodes:
            raise UserError(f"--strategies {strategy} takes {nodes} nodes of {on_node} ranks: add {nodes} to --nodes")
        return self._placed(strategy, nodes)

    def _placed(self, strategy: Strategy, nodes: int) -> Configuration:
        replicas = degree_of(strategy, Trait.DIVIDES_BATCH)
        return Configuration(strategy=str(strategy), ranks=strategy.ranks, nodes=nodes, batch=self.batch * replicas)

    @property
    def sample(self) -> tuple[str, ...]:
        """Options that choose the sample's shape."""
        if self.input_shape:
            return ("--input-shape", self.input_shape)
        return ("--sequence", str(self.sequence)) if self.sequence else ()


def _grown(kinds: tuple[str, ...], text: str, ranks: int) -> Strategy:
    if len(kinds) > 1:
        raise UserError(
            f"--strategies {text}: the number of nodes sets one axis only; write the degrees of both, as"
            f" d{ranks // 2}f2"
        )
    return Strategy(axes=(Axis(kind=kinds[0], extents=(ranks,)),))
