"""What tests of ``predict search`` ask it, and the profile that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from click.testing import CliRunner
from profile_factory import free_copies, make_profile, ring_fit, with_compute

from calibrate.profile.profile import Profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.records.cluster import Cluster, Level
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.search.pricing.groups import Group
from predict.search.pricing.links import groups_along
from predict.workload import Configuration, evaluator_named

OPERATIONS = ("all_gather", "send_recv", "broadcast", "reduce_scatter")
LEVELS = (
    Level(name="node", ranks=2, alpha_s=2e-5, beta_s_per_byte=2e-10),
    Level(name="rack", ranks=4, alpha_s=5e-5, beta_s_per_byte=1e-9, contention=1.5),
    Level(name="system", ranks=64, alpha_s=1e-4, beta_s_per_byte=2e-9, contention=2.0),
)


def profile_of(network: ModelGraph, **changes: object) -> Profile:
    """Times of a network's layers and fits of every collective, on a cluster of 64 ranks."""
    fits = (ring_fit(), *(ring_fit(operation) for operation in OPERATIONS))
    made = make_profile(
        network,
        communication=fits,
        contexts=(with_compute(1.2, 1.3),),
        copies=free_copies(beta_s_per_byte=1e-10),
        cluster=Cluster(name="test", levels=LEVELS, memory_bytes_per_rank=8e9),
    )
    return msgspec.structs.replace(made, **changes)


def profile_on(network: ModelGraph, device: str) -> Profile:
    """Times of layers on a device of that kind; of iterations there are none in another dtype."""
    made = profile_of(network)
    return msgspec.structs.replace(
        made, model_times=(), devices=tuple(msgspec.structs.replace(own, kind=device) for own in made.devices)
    )


def asked(profile: Path, *options: str, model: str = "chain") -> Any:
    """What ``predict search`` answers."""
    return CliRunner().invoke(group, ["search", "--from-profile", str(profile), "--model", model, *options])


def found(profile: Path, *options: str, model: str = "chain") -> Any:
    """Its JSON."""
    result = asked(profile, *options, "--json", model=model)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def exactly(costs: CostModel, settings: PlanSettings, strategy: str) -> float:
    """Seconds of an iteration, simulated."""
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    return evaluator_named("simulate").prepare(costs, point).timing().iteration_s


def group_along(strategy: Strategy, *axes: int) -> Group:
    """The ranks along some axes of one strategy."""
    degrees = np.array([[axis.degree for axis in strategy.axes]])
    staged = np.array([[axis.has(Trait.STAGES) for axis in strategy.axes]])
    chosen = np.isin(np.arange(len(strategy.axes)), axes)[None]
    return Group(*groups_along(degrees, staged, chosen)[:, 0].tolist())
