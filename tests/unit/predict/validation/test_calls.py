"""Calls of a run beside their prediction, in validation and diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest
from profile_factory import make_network, make_profile, ring_fit, write_training_run

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.hosts.host_record import HOSTS_FILE, RankHost
from paradl_bench.records.training.timed_call import TimedCall
from paradl_bench.records.training.training_record import TRAINING_FILE, CallTiming, TrainingIterations
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.validation.ranks.calls import predicted_in_calls
from predict.validation.runs import read_runs
from predict.validation.shown.report import csv_row, markdown
from predict.validation.validation import validate_runs
from predict.workload import Configuration, evaluators

CHAIN = make_network()
PROFILE = make_profile(communication=(ring_fit(), ring_fit("send_recv")))
FW_S, BW_S, GE_S, WU_S = 0.010, 0.020, 0.008, 0.002
COUNT = 6


def timed_run(directory: Path, *, others: int = COUNT) -> Path:
    """Rank 1 comes 1 ms after rank 0 to the one call, which then takes 6 ms; an iteration is of 40 ms."""
    timing = CallTiming(timed=COUNT, others=COUNT, disturbance=0.02, spread=0.01)
    run = write_training_run(directory, CHAIN, phases_s=[[(FW_S, BW_S, GE_S, WU_S)] * others] * 2, call_timing=timing)
    for rank in range(2):
        call = TimedCall(
            operation="all_reduce",
            message_bytes=1000,
            group=(0, 1),
            begin_s=(0.030 + 0.001 * rank,) * COUNT,
            end_s=(0.037,) * COUNT,
        )
        record = TrainingIterations(
            rank=rank,
            first_iteration=3 + COUNT,
            iteration_s=(1.0,) * COUNT,
            fw_s=(FW_S,) * COUNT,
            bw_s=(BW_S,) * COUNT,
            exposed_ge_s=(GE_S,) * COUNT,
            wu_s=(1.0 - FW_S - BW_S - GE_S,) * COUNT,
            host_begin_s=tuple(float(index) for index in range(COUNT)),
            attempt=1,
            calls=(call,),
        )
        append_lines(run / TRAINING_FILE, [record])
        append_lines(run / HOSTS_FILE, [RankHost(rank=rank, host="n", attempt=1, clock_at_s=0.0)])
    return run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", PROFILE)
    return tmp_path / "p.json"


def test_validation_shows_waits_and_transfers(tmp_path: Path, profile: Path) -> None:
    report = validate_runs(profile, [timed_run(tmp_path / "run")], cluster_path=None, force=True)
    pair = report.pairs[0]
    # The iteration is of those whose calls were not timed.
    assert pair.measured_median_s == pytest.approx(0.040)
    assert pair.calls is not None
    assert pair.calls.measured.waiting_s == pytest.approx(0.0005)
    assert pair.calls.measured.transferring_s == pytest.approx(0.006)
    assert all(other.calls is None for other in report.pairs[1:])
    assert csv_row(pair)["calls.measured.transferring_s"] == pytest.approx(0.006)
    assert "calls.ranks" not in csv_row(pair)
    text = markdown(report)
    assert "## Calls timed one by one" in text
    assert "calls were timed one by one in 6 of 12 iterations" in text


def test_predicted_transfers_are_the_ledgers_communication() -> None:
    costs = CostModel(profile=PROFILE, network=CHAIN)
    point = Configuration(strategy=parse_strategy("d2"), settings=plan_settings(batch=16))
    ledger = Predictor(costs, evaluators()["simulate"]).explain(point)
    found = predicted_in_calls(ledger)
    (role,) = ledger.roles
    assert found.transferring_s == pytest.approx(sum(e.total_s for e in role.entries if e.details.get("group")))
    assert found.transferring_s > 0


def test_a_short_run_says_that_timed_calls_count_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 iteration on all ranks besides those of --time-collectives; at least 5"):
        read_runs([timed_run(tmp_path / "run", others=1)])
