"""From simulated sweeps to a profile, as a user makes one, and from that to predictions of what was not fitted."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from fat_tree import FatTree
from plan_file import plan_text
from simulation import Result, Simulator, Sweep

from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.errors import WorkError
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.emulation import Emulation
from paradl_bench.records.measurement import COLLECTIVES_FILE, Environment
from paradl_bench.records.samples import CollectiveSamples
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.cost_model import CostModel
from predict.prediction.interval import interval
from predict.simulation import prepared
from predict.workload import Configuration

TOOL = "smpi"


class Pair(NamedTuple):
    """A prediction beside what SimGrid says.

    Attributes:
        what: the collective, or model and strategy. ranks: of the world. groups: that are at it at once.
        without_contention_s: predicted with phi of 1.
        low_s, high_s: the 90% interval.
    """

    kind: str
    library: str
    what: str
    ranks: int
    groups: int
    message_bytes: int
    simulated_s: float
    predicted_s: float
    without_contention_s: float
    low_s: float
    high_s: float
    basis: str = ""

    @property
    def error(self) -> float:
        """Signed, relative to what was simulated."""
        return self.predicted_s / self.simulated_s - 1

    @property
    def error_without_contention(self) -> float:
        """The same with phi of 1."""
        return self.without_contention_s / self.simulated_s - 1

    @property
    def held(self) -> bool:
        """Whether the interval holds it."""
        return self.low_s <= self.simulated_s <= self.high_s


def environment(simulator: Simulator) -> Environment:
    """Of measurements that no machine made: the simulator stands where the device does."""
    said = f"simulated by SimGrid {simulator.version}"
    return Environment(
        device="cpu",
        device_name=said,
        device_count=simulator.tree.ranks_per_node,
        memory_bytes=0,
        hostname=f"fat tree of {simulator.tree.nodes} nodes {said}",
        kernel="",
        versions={"simgrid": simulator.version},
        settings={},
        emulated=Emulation(messages=simulator.messages),
    )


def records(case: Sweep, result: Result, tree: FatTree) -> Iterator[CollectiveSamples]:
    """A case's rows as measurements: of the first group alone, and of every group of all at once."""
    level = tree.level_of(case.ranks * case.groups)
    per_node = min(case.ranks, max(tree.ranks_per_node // case.groups, 1))
    for row in result.rows:
        for group in range(row.together):
            members = row.seconds[group :: case.groups]
            # There and back is what the first rank sees: the other one's last send is buffered, and ends at once.
            sides = (members[0], members[0]) if case.operation == "send_recv" else members
            yield CollectiveSamples(
                library=case.library,
                tool=TOOL,
                operation=case.operation,
                level=level,
                ranks=case.ranks,
                message_bytes=row.message_bytes,
                dtype="fp32",
                block=0,
                samples_s=tuple((seconds,) for seconds in sides),
                verified=False,
                ranks_per_node=per_node,
                concurrent=row.together,
                group=group,
            )


def write_measurements(simulator: Simulator, cases: Sequence[Sweep], directory: Path, command: Sequence[str]) -> None:
    """A measurement directory of all cases, written anew; what it holds is in the results."""
    for old in directory.glob("*") if directory.is_dir() else ():
        old.unlink()
    opened = MeasurementDirectory.open(
        directory,
        kind="collectives",
        arguments={"command": "simulate", "cases": str(len(cases))},
        command_line=tuple(command),
        environment=environment(simulator),
    )
    for case in cases:
        opened.append(COLLECTIVES_FILE, records(case, simulator.sweep(case), simulator.tree))
    opened.finish()


def toolkit(*arguments: str) -> None:
    """Run a command of the toolkit as a user does.

    Raises:
        WorkError: it failed.
    """
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkError(f"{' '.join(arguments[:3])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


class Judge:
    """Predicts from a profile, with and without contention, and holds the simulated beside it."""

    def __init__(self, simulator: Simulator, profile: Path, cluster: ClusterFile) -> None:
        self._simulator = simulator
        self._cluster = cluster
        self._profile = read_profile(profile)

    def collective(self, case: Sweep) -> Iterator[Pair]:
        """The first group alone, and all at once where there are several."""
        for row in self._simulator.sweep(case).rows:
            world = case.ranks * case.groups
            strategy = parse_strategy(f"d{world}" if case.groups == 1 else f"d{case.ranks}f{case.groups}")
            level = self._simulator.tree.level_of(world)
            work = Collective(operation=case.operation, message_bytes=row.message_bytes, ranks=case.ranks)
            costs = [
                CommunicationCosts(of, self._cluster, case.library).cost(work, strategy)
                for of in (self._profile, _without_contention(self._profile))
            ]
            told = costs[0] if row.together > 1 else costs[1]
            half = Z90 * math.hypot(*(shift for _, shift in told.modes))
            forms = [
                fit
                for fit in self._profile.communication
                if (fit.library, fit.operation, fit.level) == (case.library, case.operation, level)
            ]
            yield Pair(
                "collective",
                case.library,
                case.operation,
                world,
                row.together,
                row.message_bytes,
                max(row.seconds),
                told.cost.seconds,
                costs[1].cost.seconds,
                told.cost.seconds - half,
                told.cost.seconds + half,
                "; ".join(f"{fit.algorithm} {fit.regime}" for fit in forms),
            )

    def iteration(self, model: str, strategy: Strategy, batch: int, library: str) -> tuple[Pair]:
        """An iteration of a model of the profile."""
        point = Configuration(strategy=strategy, settings=PlanSettings(batch=batch))
        of = self._model(self._profile, model, library)
        priced = prepared.price(of, point)
        workload = prepared.workload_of(of, point, priced)
        name = f"{library}-iteration-{model}-{strategy}-{batch}"
        simulated = self._simulator.iteration(name, library, strategy.ranks, plan_text(priced))
        alone = self._model(_without_contention(self._profile), model, library)
        bounds = interval(workload)
        timing = workload.timing()
        exposed = timing.exposed_communication_s / timing.iteration_s
        pair = Pair(
            "iteration",
            library,
            f"{model} {strategy}",
            strategy.ranks,
            1,
            0,
            max(simulated.rows[0].seconds),
            timing.iteration_s,
            prepared.prepare(alone, point).timing().iteration_s,
            bounds.low_s,
            bounds.high_s,
            f"{exposed:.0%} of it communication that compute does not hide",
        )
        return (pair,)

    def _model(self, profile: Profile, model: str, library: str) -> CostModel:
        network = profile.network[model]
        return CostModel(profile=profile, network=network, cluster=self._cluster, backend=library)


def _without_contention(profile: Profile) -> Profile:
    others = tuple(entry for entry in profile.contexts if entry.context != "groups")
    return msgspec.structs.replace(profile, contexts=others)
