"""What a profile says of training runs: the cost model of each, its prediction, and what makes the two unlike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import format_seconds
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster
from paradl_bench.records.emulation import words_of_emulation
from paradl_bench.records.training.input_times import RunInput
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.frameworks.presets import preset_named
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.compute.layer_source import MEASURED_FIRST, LayersFrom
from predict.costs.cost_model import CostModel
from predict.costs.files import choose_network
from predict.costs.input.input_terms import KNOWN_BY, NO_INPUT, InputOptions
from predict.emulation.ghost import slept_seconds
from predict.ledger.ledger import Ledger
from predict.prediction.prediction import Prediction, Predictor
from predict.validation.ranks.activity import Activity, activity_of
from predict.validation.ranks.calls import Calls, calls_of
from predict.validation.runs import Run
from predict.validation.validation_report import PREDICTOR
from predict.workload import Configuration, evaluators

_NO_BACKEND = "none"
_SAME_SECONDS = 1e-6
"""Relative difference of sums of equal seconds, that were added up in other orders."""


def _unlike(profile: Profile, run: Run) -> list[str]:
    """What makes a run unlike the profile: its environment against the nearest of the profile's, and its network."""
    environment = run.manifest.environment.computing
    differences = min((known.differences(environment) for known in profile.environments), key=len, default=[])
    lines = []
    kinds = dict.fromkeys(words_of_emulation(known.computing.emulated) for known in profile.environments)
    emulated = "; ".join(words for words in kinds if words)
    if emulated and not environment.emulated and not any(text.startswith("emulated ") for text in differences):
        # Layers of this host are like the run's, and what was swept over emulated links is not.
        lines.append(f"{run.path} ran on real links, and the profile was measured on {emulated}")
    if differences:
        lines.append(f"{run.path} ran in another environment than the profile's: {'; '.join(differences)}")
    network = profile.network.get(run.description.model)
    if network is not None and network.digest != run.description.network_digest:
        shapes = ["x".join(map(str, shape)) for shape in (network.input_shape, run.description.input_shape)]
        about = f"input {shapes[0]} against {shapes[1]}" if shapes[0] != shapes[1] else "layers or parameters differ"
        lines.append(f"{run.path} trained another {run.description.model} than the profile's: {about}")
    return lines


def _own_network(profile: Profile, run: Run) -> Path | None:
    """The run's own file of a network that the profile does not hold: its layers are estimated."""
    if run.description.model in profile.network:
        return None
    return next(iter(sorted(run.path.glob("network-*.json"))), None)


def _input_options(profile: Profile, about: RunInput | None) -> InputOptions:
    """As the run read; nothing, whatever the profile knows of reading, where it drew its samples in memory."""
    if about is None:
        return NO_INPUT
    same = (
        side.source for side in profile.input_side if about.source in (side.source, str(Path(side.source).resolve()))
    )
    return InputOptions(
        preset=about.preset,
        rank_workers=about.workers,
        # Where one mini-batch is copied ahead, workers have read another one.
        prefetch=2 if about.workers and preset_named(about.preset).copies_ahead else None,
        source=next(same, None),
    )


@contextmanager
def _named(run: Run) -> Iterator[None]:
    """Errors name the run that they are of."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{run.path}: {error}") from error


class RunPredictors:
    """Cost models by what they are made for, kept from run to run.

    Args:
        layers_from: what layers take in predictions; what emulated runs slept is compared with measured layers.
    """

    def __init__(
        self,
        profile: Profile,
        profile_path: Path,
        cluster: Cluster | None,
        layers_from: LayersFrom = MEASURED_FIRST,
    ) -> None:
        self._profile = profile
        self._layers_from = layers_from
        self._profile_path = profile_path
        self._cluster = cluster
        self._evaluators = evaluators()
        self._known: dict[tuple[str | float | None, ...], CostModel] = {}

    def covers(self, run: Run, evaluator: str) -> bool:
        """Whether the evaluator has something to say on a run's strategy and settings."""
        asked, ghost = self._evaluators[evaluator], run.description.ghost
        if ghost is not None and ghost.slow_rank is not None and evaluator != PREDICTOR:
            # The closed forms take all ranks as equally fast.
            return False
        if run.description.input is not None and evaluator not in KNOWN_BY:
            return False
        applies = asked.covers(parse_strategy(run.description.strategy)) and asked.knows(run.description.settings)
        return applies and not self.lacks(run, evaluator)

    def lacks(self, run: Run, evaluator: str) -> str:
        """What an evaluator misses to say anything on a run's model, in words; empty where it can."""
        return self._evaluators[evaluator].lacks(self.costs_of(run))

    def predict(self, run: Run, evaluator: str) -> Prediction:
        """The prediction of a run's configuration.

        Raises:
            UserError: the profile lacks what the run needs; the message names the run.
        """
        with _named(run):
            point = Configuration(strategy=parse_strategy(run.description.strategy), settings=run.description.settings)
            return Predictor(self.costs_of(run), self._evaluators[evaluator]).predict(point)

    def activity(self, run: Run) -> Activity | str:
        """When ranks worked, against the simulation; or in words why that is not known.

        Raises:
            UserError: as of :meth:`predict`.
        """
        with _named(run):
            return activity_of(run, self.costs_of(run))

    def calls(self, run: Run) -> Calls | None:
        """What ranks spent in calls, beside its prediction; None where the run did not time them.

        Raises:
            UserError: as of :meth:`predict`.
        """
        return None if run.description.call_timing is None else calls_of(run, self.ledger(run))

    def ledger(self, run: Run) -> Ledger:
        """What every second of a run's prediction is made of.

        Raises:
            UserError: as of :meth:`predict`.
        """
        with _named(run):
            point = Configuration(strategy=parse_strategy(run.description.strategy), settings=run.description.settings)
            return Predictor(self.costs_of(run), self._evaluators[PREDICTOR]).explain(point)

    def differences(self, run: Run) -> list[str]:
        """What makes a run unlike the profile, in lines: its environment, its network, or what its layers slept."""
        return [*_unlike(self._profile, run), *self._unslept(run)]

    def _unslept(self, run: Run) -> list[str]:
        """What an emulated run slept other than this profile says; nothing of a real run."""
        about = run.description
        if about.ghost is None:
            return []
        costs = self._costs(run, MEASURED_FIRST)
        strategy = parse_strategy(about.strategy)
        plan = planner_for(strategy).plan(costs.network, strategy, about.settings)
        said_s = sum(slept_seconds(plan, costs.compute_costs(plan), about.ghost.slow_rank).values())
        slept_s = sum(about.ghost.slept_s.values())
        if math.isclose(said_s, slept_s, rel_tol=_SAME_SECONDS):
            return []
        return [
            f"{run.path} slept {format_seconds(slept_s)} an iteration, and would sleep {format_seconds(said_s)}"
            " by this profile: it was emulated with another profile"
        ]

    def costs_of(self, run: Run) -> CostModel:
        """The cost model of a run's network, in what it computed in and over what it ran.

        Raises:
            UserError: the profile lacks what the run needs.
        """
        return self._costs(run, self._layers_from)

    def _costs(self, run: Run, layers_from: LayersFrom) -> CostModel:
        about = run.description
        dilate, slow = (about.ghost.dilate, about.ghost.slow_rank) if about.ghost else (None, None)
        drawn = about.ghost is not None and about.ghost.drawn is not None
        of_ghosts = dilate, drawn, "" if slow is None else str(slow)
        computed_in = about.optimizer, about.dtype, about.kernel_settings, about.backend
        key = (about.model, about.network_digest, *computed_in, *of_ghosts, str(layers_from), repr(about.input))
        if key not in self._known:
            network = _own_network(self._profile, run)
            self._known[key] = CostModel(
                profile=self._profile if dilate is None else emulated(self._profile, dilate, drawn=drawn),
                network=choose_network(self._profile, about.model, network, self._profile_path),
                optimizer=about.optimizer,
                dtype=about.dtype,
                kernel_settings=about.kernel_settings,
                cluster=self._cluster,
                backend=None if about.backend == _NO_BACKEND else about.backend,
                input_options=_input_options(self._profile, about.input),
                # It exchanges DDP's buckets, whatever an evaluator would group its gradients by.
                fusion=Fusion(rule="ddp"),
                slow_rank=slow,
                layers_from=layers_from,
            )
        return self._known[key]
