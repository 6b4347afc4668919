"""Every second of an iteration explains itself: entries of a role add up to it, whatever is predicted by whom."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from network_factory import small_cnn
from profile_factory import (
    affine_seconds,
    free_copies,
    in_context,
    layer_times,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
    with_doctor,
)

from calibrate.profile.profile import Profile
from paradl_bench.plan.schedules.catalog import schedules
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.data.fusion.rules import RULES, Fusion
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware
from predict.costs.input.input_terms import InputOptions
from predict.ledger.ledger import Ledger, LedgerEntry, RoleLedger
from predict.ledger.waterfall import waterfall
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, PreparedEvaluation, evaluator_named, evaluators

CLOSE = 1e-9


CNN = small_cnn(convolutions=8, classes=8)
QUANTILES = tuple(0.75 + 0.05 * i for i in range(11))
"""Of an iteration, over its median."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast", "reduce")


def varied_profile() -> Profile:
    """With late ranks, interference, copies, and seconds that grow less than the batch."""
    return with_doctor(
        make_profile(
            CNN,
            layer_times=layer_times(CNN, seconds=affine_seconds, block_sd=0.05),
            model_times=model_times(CNN, seconds=affine_seconds, between_s=1e-3, quantiles=QUANTILES, samples=1000),
            communication=tuple(ring_fit(operation, beta_s_per_byte=1e-8) for operation in OPERATIONS),
            contexts=(with_compute(1.3, 1.6),),
            copies=free_copies(beta_s_per_byte=1e-9),
        )
    )


VARIED = varied_profile()
SURROUNDED = msgspec.structs.replace(
    VARIED,
    contexts=(
        *VARIED.contexts,
        *(in_context("after-compute", name, added_s=1e-4) for name in ("all_gather", "all_reduce")),
        *(in_context("with-all-reduce", name, added_s=1e-3) for name in ("all_gather", "all_reduce", "send_recv")),
        in_context("groups", factor=1.5),
    ),
)
"""With all that surrounds a call."""


class Case(NamedTuple):
    strategy: str
    settings: Mapping[str, Any] = MappingProxyType({})
    model: Mapping[str, Any] = MappingProxyType({})
    evaluator: str = "simulate"

    def __str__(self) -> str:
        return f"{self.evaluator} {self.strategy} {dict(self.settings)} {dict(self.model)}"


BUCKETS = {"first_bucket_bytes": 64, "bucket_cap_bytes": 64}
READ_FIRST = InputOptions(io_s=0.02, h2d_s=0.01, prefetch=0)
READ_AHEAD = InputOptions(io_s=0.5, h2d_s=0.01)
COPIED_AHEAD = InputOptions(io_s=0.3, h2d_s=0.2, preset="caffe-mpi", prefetch=2)
SIMULATED = (
    *(Case(strategy) for strategy in ("serial", "d4", "f4", "c4", "s4", "s2x2", "p4", "d2f2", "d2c2", "d2s2", "f2d2")),
    *(Case(strategy) for strategy in ("d2p2", "p2f2", "p2s2", "p2d2", "d2p2f2", "z1d4", "z2d4", "z3d4", "c2d2")),
    *(
        Case(strategy, {"schedule": schedule, "micro_batches": 8})
        for schedule in sorted(schedules())
        for strategy in ("p4", "d2p2", "p2f2")
    ),
    *(Case(strategy, {"accumulate": 2}) for strategy in ("d4", "f4", "s4", "z3d4")),
    *(Case("d4", settings) for settings in ({"recompute": ("conv*",)}, {"exchange": "leader", "ranks_per_node": 2})),
    *(
        Case(strategy, model={"slow_rank": SlowRank(factor=2.0, rank=1)})
        for strategy in ("d4", "f4", "s4", "p4", "d2f2", "d2p2")
    ),
    *(
        Case(strategy, model={"input_options": options})
        for strategy in ("d4", "d2s2", "p4", "d2p2f2")
        for options in (READ_FIRST, READ_AHEAD, COPIED_AHEAD)
    ),
    *(Case("d4", model={"fusion": Fusion(rule=rule)}) for rule in RULES),  # type: ignore[arg-type]
    Case("d4", model={"hardware": Hardware(bandwidth=0.5, peak_flops=2.0)}),
    *(Case(strategy) for strategy in ("d2z3d4", "z3d4d2", "d2z2d2f2", "d2z1d4")),
    *(Case(strategy, {"offload": "optimizer", "optimizer": "adam"}) for strategy in ("d4", "f4")),
)
CLOSED = (
    *(
        Case(strategy, evaluator=evaluator)
        for evaluator in ("paradl", "osf", "csf", "dag")
        for strategy in ("serial", "d4")
    ),
    *(Case(strategy, evaluator="paradl") for strategy in ("f4", "c4", "s4", "d2f2", "d2c2", "d2s2", "p4")),
    *(Case("d4", model={"fusion": Fusion(rule=rule)}, evaluator="osf") for rule in RULES),  # type: ignore[arg-type]
    *(
        Case("d4", model={"fusion": Fusion(rule="buffer", buffer_bytes=size, timeout_s=1e-3)}, evaluator="osf")
        for size in (1000, 20_000)
    ),
    *(
        Case(strategy, model={"input_options": options}, evaluator="dag")
        for strategy in ("serial", "d4")
        for options in (READ_FIRST, READ_AHEAD, COPIED_AHEAD, InputOptions(preset="naive", io_s=0.1, h2d_s=0.1))
    ),
    *(Case(strategy, evaluator="proportional") for strategy in ("f4", "d2f2", "s4", "p2f2")),
    *(Case(strategy, evaluator="flops") for strategy in ("serial", "d4", "f4", "s4", "p4", "d2p2", "z3d4")),
)


def prepared(case: Case, batch: int = 32, profile: Profile = VARIED) -> PreparedEvaluation:
    costs = CostModel(profile=profile, network=CNN, **case.model)
    point = Configuration(strategy=parse_strategy(case.strategy), settings=plan_settings(batch=batch, **case.settings))
    return evaluator_named(case.evaluator).prepare(costs, point)


def test_every_evaluator_has_a_case() -> None:
    assert {case.evaluator for case in (*SIMULATED, *CLOSED)} == set(evaluators())


@pytest.mark.parametrize("case", [*SIMULATED, *CLOSED], ids=str)
def test_entries_of_every_role_add_up_to_the_iteration(case: Case) -> None:
    evaluation = prepared(case)
    iteration_s = evaluation.timing().iteration_s
    roles = evaluation.ledger()
    assert sum(role.ranks for role in roles) == parse_strategy(case.strategy).ranks
    for role in roles:
        assert sum(entry.exposed_s for entry in role.entries) == pytest.approx(iteration_s, rel=CLOSE)
        steps = waterfall(role, {"FW": 1.5, "BW": 1.5, "WU": 1.2})
        assert sum(steps.values()) == pytest.approx(iteration_s, rel=10 * CLOSE)
        for entry in role.entries:
            added_up_s = entry.base_s
            for adjustment in entry.adjustments:
                added_up_s += adjustment.added_s
            assert added_up_s == entry.total_s
            assert -CLOSE * iteration_s <= entry.exposed_s <= entry.total_s + CLOSE * iteration_s
            assert entry.exposed_s + entry.hidden_s == pytest.approx(entry.total_s, abs=CLOSE * iteration_s)


@pytest.mark.parametrize("case", [*SIMULATED, *CLOSED], ids=str)
def test_rows_of_costs_take_what_each_takes_alone(case: Case) -> None:
    evaluation, draw = prepared(case), np.random.default_rng(5)
    costs = evaluation.costs
    seconds = costs.seconds * draw.random((5, len(costs.seconds)))
    # As errors of communication do: compute is alike in two rows.
    seconds[1] = np.where(costs.is_communication, seconds[1], seconds[0])
    slower = costs.compute_slowdown + draw.random(seconds.shape) * costs.is_communication
    for compute in (costs.compute_slowdown, slower):
        found = evaluation.iterations_s(seconds, compute, costs.communication_slowdown)
        of_rows = [*zip(seconds, np.broadcast_to(compute, seconds.shape), strict=True)]
        alone = [evaluation.iterations_s(row[None], slow, costs.communication_slowdown)[0] for row, slow in of_rows]
        assert found.tolist() == alone
        timed = [evaluation.time(*of_row, costs.communication_slowdown).iteration_s for of_row in of_rows]
        assert timed == pytest.approx(alone, rel=1e-12)


def waits(role: RoleLedger) -> set[str]:
    return {entry.name for entry in role.entries if entry.name.startswith("wait for")}


def of_phase(role: RoleLedger, *phases: str) -> list[LedgerEntry]:
    return [entry for entry in role.entries if entry.phase in phases]


@pytest.mark.parametrize("options", [READ_FIRST, READ_AHEAD, COPIED_AHEAD], ids=["first", "ahead", "copied"])
@pytest.mark.parametrize("evaluator", ["simulate", "dag"])
def test_what_is_waited_for_input_is_that_of_the_timing(options: InputOptions, evaluator: str) -> None:
    evaluation = prepared(Case("d4", model={"input_options": options}, evaluator=evaluator))
    timing, (role,) = evaluation.timing(), evaluation.ledger()
    assert timing.input_s > 0
    exposed = {phase: sum(entry.exposed_s for entry in of_phase(role, phase)) for phase in ("IO", "H2D")}
    assert exposed["H2D"] == pytest.approx(timing.h2d_s, rel=CLOSE, abs=1e-12)
    assert exposed["IO"] == pytest.approx(timing.input_s - timing.h2d_s, rel=CLOSE, abs=1e-12)


def test_communication_is_exposed_as_the_timing_says() -> None:
    evaluation = prepared(Case("d4"))
    timing, (role,) = evaluation.timing(), evaluation.ledger()
    collectives = [entry for entry in role.entries if "group" in entry.details]
    assert sum(entry.exposed_s for entry in collectives) == pytest.approx(timing.exposed_communication_s, rel=CLOSE)
    assert sum(entry.hidden_s for entry in collectives) == pytest.approx(timing.overlap_s, rel=CLOSE)


def test_stages_wait_for_stages_and_ranks_for_ranks() -> None:
    assert all(waits(role) == {"wait for other stages"} for role in prepared(Case("p4")).ledger())
    slow = prepared(Case("d4", model={"slow_rank": SlowRank(factor=2.0, rank=1)})).ledger()
    assert [(role.role, role.ranks, waits(role)) for role in slow] == [
        ("replica", 3, {"wait for other ranks"}),
        ("replica, slow rank 1", 1, set()),
    ]


@pytest.mark.parametrize("strategy", ["d2f2", "d2s2", "d2c2", "f2d2", "d2p2f2"])
def test_calls_in_contexts_add_up_too(strategy: str) -> None:
    evaluation = prepared(Case(strategy, BUCKETS), profile=SURROUNDED)
    iteration_s = evaluation.timing().iteration_s
    for role in evaluation.ledger():
        assert sum(entry.exposed_s for entry in role.entries) == pytest.approx(iteration_s, rel=CLOSE)


def test_what_surrounds_a_call_is_an_adjustment() -> None:
    of_contexts = {"after compute", "beside an all-reduce", "contention"}
    # Beside an all-reduce, calls that nobody measured are taken to share its links.
    assert of_contexts & set(effects(Case("d2f2", BUCKETS))) == {"beside an all-reduce"}
    found = effects(Case("d2f2", BUCKETS), profile=SURROUNDED)
    assert all(found[effect] > 0 for effect in of_contexts)


def effects(case: Case, batch: int = 32, profile: Profile = VARIED) -> dict[str, float]:
    found: dict[str, float] = {}
    for role in prepared(case, batch, profile).ledger():
        for entry in role.entries:
            for adjustment in entry.adjustments:
                found[adjustment.effect] = found.get(adjustment.effect, 0.0) + adjustment.added_s
    return found


def test_each_effect_is_an_adjustment_of_its_own() -> None:
    usual = effects(Case("d2"), 16)
    assert set(usual) == {"slowest rank", "beside compute", "beside communication"}
    assert all(seconds > 0 for seconds in usual.values())
    assert effects(Case("d2"), 1024)["local batch"] > 0
    assert effects(Case("d2", model={"hardware": Hardware(bandwidth=0.5)}), 16)["links"] > 0
    assert effects(Case("d2", model={"hardware": Hardware(peak_flops=2.0, memory_bandwidth=2.0)}), 16)["device"] < 0
    assert effects(Case("p2", model={"slow_rank": SlowRank(factor=2.0, rank=1)}))["slow rank"] > 0
    assert effects(Case("f4", evaluator="proportional"))["share of the whole layer"] < 0
    assert effects(Case("f4", evaluator="paradl"))["shared out over ranks"] < 0


def test_each_step_of_a_waterfall_has_its_own_seconds() -> None:
    crowded = layer_times(CNN, seconds=affine_seconds, block_sd=0.05, ranks_on_host={1: 1.0, 2: 1.25})
    profile = msgspec.structs.replace(VARIED, layer_times=crowded)
    predictor = Predictor(CostModel(profile=profile, network=CNN), evaluator_named("simulate"))

    def explained(strategy: str, batch: int) -> Ledger:
        settings = PlanSettings(batch=batch)
        return predictor.explain(Configuration(strategy=parse_strategy(strategy), settings=settings))

    one, two = explained("serial", 16), explained("d2", 32)
    (serial,), (replica,) = one.roles, two.roles
    assert one.waterfall_s == {"compute alone": pytest.approx(one.iteration_s)}
    copies_s = sum(entry.base_s for entry in of_phase(replica, "GE") if "group" not in entry.details)
    layers_s = sum(entry.total_s for entry in of_phase(serial, "FW", "BW") if entry.details.get("operation"))
    assert two.waterfall_s["compute alone"] == pytest.approx(one.iteration_s + copies_s)
    assert two.waterfall_s["shared host"] == pytest.approx(0.25 * layers_s)
    added = effects(Case("d2"), profile=profile)
    assert two.waterfall_s["overlap"] == pytest.approx(added["beside communication"])
    assert two.waterfall_s["waiting"] == pytest.approx(added["slowest rank"])
    timing = prepared(Case("d2"), profile=profile).timing()
    assert two.waterfall_s["exposed communication"] == pytest.approx(timing.exposed_communication_s)


def test_stages_and_slow_ranks_make_a_waterfall_wait() -> None:
    read = prepared(Case("p4", model={"input_options": READ_FIRST})).ledger()[-1]
    steps = waterfall(read, {})
    assert steps["input"] == pytest.approx(sum(entry.exposed_s for entry in read.entries if "mini-batch" in entry.name))
    assert steps["waiting"] > sum(entry.exposed_s for entry in read.entries if "stages" in entry.name)
    slow = prepared(Case("d4", model={"slow_rank": SlowRank(factor=2.0, rank=1)})).ledger()[1]
    usual = prepared(Case("d4")).ledger()[0]
    assert waterfall(slow, {})["waiting"] > 3 * waterfall(usual, {})["waiting"]


def test_base_and_price_are_of_the_same_layer() -> None:
    whole, shared = (prepared(Case("f4", evaluator=name)).ledger()[0] for name in ("simulate", "proportional"))
    names = {(entry.name, entry.phase) for entry in whole.entries}
    assert names == {(entry.name, entry.phase) for entry in shared.entries}


def test_a_ledger_says_of_what_prediction_it_is() -> None:
    predictor = Predictor(CostModel(profile=VARIED, network=CNN), evaluator_named("simulate"))
    point = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=32))
    ledger, prediction = predictor.explain(point), predictor.predict(point)
    assert (ledger.strategy, ledger.ranks, ledger.batch, ledger.evaluator) == ("d2", 2, 32, "simulate")
    assert (ledger.iteration_s, ledger.interval_s) == (prediction.iteration_s, prediction.time.interval_s)
