"""Halos are priced as messages both ways at once where those were measured, else as messages one way."""

from __future__ import annotations

import pytest
from network_factory import two_convolutions
from profile_factory import in_context, make_profile, ring_fit

from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.contexts import InContext
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import HaloExchange
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

ALPHA, ONE_WAY, BOTH_WAYS = 50e-6, 1e-9, 3e-9
NAMES = ("all_reduce", "all_gather", "broadcast", "send_recv")


NETWORK = two_convolutions()


def measured(operation: str, added_s: float) -> InContext:
    return in_context("after-compute", operation, added_s=added_s)


def fits(*, exchange: bool) -> tuple[CommunicationFit, ...]:
    found = tuple(map(ring_fit, NAMES))
    return (*found, ring_fit("exchange", beta_s_per_byte=BOTH_WAYS)) if exchange else found


def predicted(strategy: str, *entries: InContext, exchange: bool) -> Prediction:
    profile = make_profile(NETWORK, communication=fits(exchange=exchange), contexts=entries)
    asked = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=8))
    return Predictor(CostModel(profile=profile, network=NETWORK), evaluator_named("simulate")).predict(asked)


@pytest.mark.parametrize(("exchange", "beta"), [(False, ONE_WAY), (True, BOTH_WAYS)])
def test_halo_messages_in_both_directions_take_measured_exchange_times(exchange: bool, beta: float) -> None:
    strategy = parse_strategy("s4")
    profile = make_profile(NETWORK, communication=fits(exchange=exchange))
    communication = CommunicationCosts(profile, None, "gloo")
    middle = HaloExchange(sends_bytes=(4096, 8192), receives_bytes=(8192, 1024), axes=(0,))
    found = communication.halo_cost(middle, strategy)
    # The larger side: both of those sent.
    assert found.cost.seconds == pytest.approx(2 * ALPHA + 12288 * beta)
    one_way = HaloExchange(sends_bytes=(4096,), receives_bytes=(), axes=(0,))
    assert communication.halo_cost(one_way, strategy).cost.seconds == pytest.approx(ALPHA + 4096 * ONE_WAY)


def test_only_halos_are_priced_so() -> None:
    halved, exchanged = (predicted("s2", exchange=exchange) for exchange in (False, True))
    assert exchanged.time.communication_s > halved.time.communication_s
    piped, still = (predicted("p2", exchange=exchange) for exchange in (False, True))
    assert still.time.communication_s == piped.time.communication_s


def test_what_compute_adds_to_a_halo_is_that_of_exchanges() -> None:
    one_way = measured("send_recv", 1e-4)
    slower = measured("exchange", 1e-3)
    alike = predicted("s2", one_way, exchange=True)
    assert any("exchange at level 'node' after-compute: as send_recv" in text for text in alike.provenance.extrapolated)
    own = predicted("s2", one_way, slower, exchange=True)
    assert not any("exchange at level 'node' after-compute" in text for text in own.provenance.extrapolated)
    assert own.time.communication_s > alike.time.communication_s
