"""One proof: a copy of a model trained by a strategy beside one trained serially, in fp64 where forward takes that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from paradl_bench.measure.proof.copies import TRIALS, Trial, copy_values, fresh_copy, runs, tolerance_of, undisturbed
from paradl_bench.measure.proof.mixing import Mixing, dtypes_of, find_mixing
from paradl_bench.measure.proof.parts import Place, place_of, trained_batch_norms
from paradl_bench.measure.proof.proving import Case, StrategyProof, synchronises
from paradl_bench.measure.proof.reference import Ranks
from paradl_bench.measure.proof.verdict import VARIES, Proved, settle
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.training.verification import Verification
from paradl_bench.strategies.nesting.parallel import ParallelModule

_SEED = 7


class Subject(NamedTuple):
    """What is proved, as one of its ranks sees it.

    Attributes:
        settings: with the mini-batch of the proof.
    """

    model: LoadedModel
    network: ModelGraph
    strategy: Strategy
    settings: PlanSettings
    device: torch.device
    ranks: Ranks
    build: Callable[[LoadedModel], ParallelModule]

    @property
    def place(self) -> Place:
        """Where this rank's samples are."""
        return place_of(self.strategy, self.settings, self.ranks.rank)

    def batch(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The global mini-batch; whole numbers stay whole."""
        inputs, targets = self.model.make_batch(self.settings.batch, seed=_SEED)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return inputs.to(self.device), targets.to(self.device)


def prove(subject: Subject) -> Proved:
    """Train one iteration both ways and compare; a collective.

    Raises:
        UserError: the strategy does not take the model.
    """
    with undisturbed(subject.device, torch.float64):
        trial = find_trial(subject)
    if trial is None:
        return left_out(NEITHER)
    with undisturbed(subject.device, trial.dtype):
        parallel, serial = (fresh_copy(subject.model, subject.device, trial.dtype) for _ in range(2))
        return prove_copies(subject, trial, parallel, serial)


NEITHER = "the model's forward runs neither in fp64 nor in fp32"


def left_out(why_not: str, mixing: str = "") -> Proved:
    """No proof."""
    return Proved(Verification(why_not=why_not, mixes_samples=mixing))


def find_trial(subject: Subject) -> Trial | None:
    """The first kind in which forward of one micro-batch runs on every rank."""
    for trial in TRIALS:
        copied = fresh_copy(subject.model, subject.device, trial.dtype)
        inputs, _ = subject.batch(trial.dtype)
        if all(subject.ranks.gather(runs(copied, inputs[: subject.place.samples], trial))):
            return trial
    return None


def prove_copies(subject: Subject, trial: Trial, parallel: LoadedModel, serial: LoadedModel) -> Proved:
    """As :func:`prove`, with copies of the model that are there already."""
    inputs, targets = subject.batch(trial.dtype)
    mixing = _mixing(subject, serial, inputs)
    if any(subject.ranks.gather(mixing.varies)):
        return left_out(VARIES)
    exact = all(dtype == torch.float64 for dtype in mixing.dtypes)
    if not exact and trained_batch_norms(subject.network):
        return left_out("layers compute in fp32, whose rounding batch norms of few values make as large as an error")
    # Running statistics have changed, and what is drawn outside of torch differs from the first.
    copy_values(parallel.module, serial.module)
    if mixing.layer and synchronises(subject.network, subject.strategy, subject.settings):
        return left_out(
            f"{mixing.layer} mixes the samples of each rank, and synchronised norms mix the samples of all ranks",
            mixing.layer,
        )
    tolerance = tolerance_of(mixing.dtypes)
    case = Case(
        subject.network,
        subject.strategy,
        subject.settings,
        tolerance,
        with_input=trial.with_input,
        optimizer=subject.settings.optimizer,
    )
    proof = StrategyProof(case, parallel, serial, subject.ranks, subject.build)
    outcome = settle(proof, subject.ranks, inputs, targets)
    groups = proof.groups
    del proof, parallel, serial
    subject.ranks.let_go(groups)
    verification = Verification(
        why_not=outcome.why_not,
        dtype="fp64" if exact else "fp32",
        samples=len(inputs),
        largest_difference=outcome.most,
        mixes_samples=mixing.layer,
    )
    return Proved(verification, outcome.first)


def _mixing(subject: Subject, model: LoadedModel, inputs: torch.Tensor) -> Mixing:
    """What mixes samples, where ranks or micro-batches compute parts of the mini-batch."""
    samples = subject.place.samples
    if len(inputs) == samples:
        return Mixing("", dtypes_of(model, inputs))
    mixing = find_mixing(model, subject.network, inputs[: 2 * samples])
    # Rounding may fall otherwise on a rank with another processor.
    return mixing._replace(layer=subject.ranks.gather(mixing.layer)[0])
