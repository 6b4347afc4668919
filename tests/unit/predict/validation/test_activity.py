"""Activity errors: none where ranks worked when the simulation says, and the shift where they did not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from profile_factory import make_network, make_profile, ring_fit, write_training_run

from calibrate.profile.profile import write_profile
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.hosts.host_record import HOSTS_FILE, RankHost
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, Turn
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.cost_model import CostModel
from predict.simulation.prepared import price
from predict.timeline.timeline import timeline_of
from predict.validation.ranks.activity import Activity, Unit, simulated_units
from predict.validation.shown.report import markdown
from predict.validation.validation import validate_runs
from predict.validation.validation_report import Report
from predict.workload import Configuration

CHAIN = make_network()
PROFILE = make_profile(communication=(ring_fit(), ring_fit("send_recv")))
COUNT = 7
CASES: dict[str, dict[str, Any]] = {
    "serial": {},
    "d2": {},
    "d2 accumulated": {"accumulate": 2},
    "p2": {"micro_batches": 2},
    "p2 in turns": {"micro_batches": 4, "schedule": "1f1b"},
    "p2 in parts": {"micro_batches": 2, "schedule": "zb"},
}


class Simulated:
    """Units of every rank of a configuration, and when it ends."""

    def __init__(self, name: str) -> None:
        self.settings = CASES[name]
        self.strategy = parse_strategy(name.split()[0])
        settings = plan_settings(batch=16, **self.settings)
        priced = price(
            CostModel(profile=PROFILE, network=CHAIN), Configuration(strategy=self.strategy, settings=settings)
        )
        timeline = timeline_of(priced, settings.of(PipelineOptions).schedule)
        roles = [timeline.roles[timeline.plan.role_of(rank)] for rank in range(self.strategy.ranks)]
        self.units = [simulated_units(role) for role in roles]
        self.finish_s = [role.finish_s for role in roles]
        self.iteration_s = timeline.iteration_s
        assert [units[-1].end_s for units in self.units] == pytest.approx(self.finish_s)

    def write(self, directory: Path, *, shift_s: Sequence[float], late_s: Sequence[float], clock: bool) -> Path:
        """A run whose ranks work when the simulation says.

        Args:
            shift_s: of every stamp of a rank. late_s: of the moment at which its iterations begin. clock: whether
                ranks' clocks were compared.
        """
        write_training_run(
            directory, CHAIN, strategy=str(self.strategy), ranks=self.strategy.ranks, phases_s=[[(1, 1, 1, 1)] * COUNT],
            **self.settings,
        )  # fmt: skip
        (directory / TRAINING_FILE).unlink()
        records = [
            _record(rank, [_moved(unit, shift_s[rank]) for unit in units], self.iteration_s, late_s[rank])
            for rank, units in enumerate(self.units)
        ]
        append_lines(directory / TRAINING_FILE, records)
        if clock:
            hosts = [RankHost(rank=rank, host="h", clock_at_s=0.0, attempt=1) for rank in range(len(records))]
            append_lines(directory / HOSTS_FILE, hosts)
        return directory


def _moved(unit: Unit, by_s: float) -> Unit:
    return unit._replace(begin_s=unit.begin_s + by_s, end_s=unit.end_s + by_s)


def _record(rank: int, units: Sequence[Unit], iteration_s: float, late_s: float) -> TrainingIterations:
    turns = [unit for unit in units if unit.name in ("FW", "BW")]
    spans = {
        name: sum(float(u.end_s - u.begin_s) for u in units if u.name == name) for name in ("FW", "BW", "GE", "WU")
    }
    in_turns = len(turns) > 2
    # The exchange is part of the last backward's call.
    ends = [float(unit.end_s) + (spans["GE"] if unit is turns[-1] else 0.0) for unit in turns]
    whole_s = float(units[-1].end_s)
    return TrainingIterations(
        rank=rank,
        first_iteration=0,
        iteration_s=(whole_s,) * COUNT,
        fw_s=(spans["FW"],) * COUNT,
        bw_s=(spans["BW"],) * COUNT,
        exposed_ge_s=(spans["GE"],) * COUNT,
        wu_s=(spans["WU"],) * COUNT,
        host_begin_s=tuple(late_s + iteration_s * index for index in range(COUNT)),
        attempt=1,
        turns=tuple(
            Turn(
                way="FW" if unit.name == "FW" else "BW",
                begin_s=(float(unit.begin_s),) * COUNT,
                end_s=(end,) * COUNT,
            )
            for unit, end in zip(turns, ends, strict=True)
        )
        if in_turns
        else (),
    )


def validated(tmp_path: Path, run: Path) -> tuple[Activity | None, Report]:
    write_profile(tmp_path / "p.json", PROFILE)
    report = validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=True)
    (pair,) = (pair for pair in report.pairs if pair.evaluator == "simulate")
    return pair.activity, report


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_work_when_the_simulation_says_have_no_error(name: str, clock: bool, tmp_path: Path) -> None:
    simulated = Simulated(name)
    ranks = simulated.strategy.ranks
    # By its own clock, a rank that is done early begins early.
    early_s = [0.0 if clock else simulated.iteration_s - finish_s for finish_s in simulated.finish_s]
    run = simulated.write(tmp_path / "run", shift_s=early_s, late_s=[0.0] * ranks, clock=clock)
    activity, report = validated(tmp_path, run)
    assert activity is not None
    assert activity.one_clock == clock
    assert activity.worst_error == pytest.approx(0, abs=1e-9)
    assert [each.units for each in activity.ranks] == [len(units) for units in simulated.units]
    assert "## Activity" in markdown(report)
    assert "activity error (begin and end of every rank's work, relative to the iteration): 0.0%" in markdown(report)


def test_a_late_stage_alone_carries_its_activity_error(tmp_path: Path) -> None:
    simulated = Simulated("p2 in turns")
    first, second = simulated.finish_s
    assert first > second
    late_s = 0.2 * simulated.iteration_s
    run = simulated.write(tmp_path / "run", shift_s=[0.0, 0.0], late_s=[3.0, 3.0 + late_s], clock=True)
    activity, _ = validated(tmp_path, run)
    assert activity is not None
    assert [each.mean_error for each in activity.ranks] == pytest.approx([0.0, 0.2], abs=1e-9)
    assert activity.worst_error == pytest.approx(0.2)
    assert (activity.worst_rank_error, activity.mean_error) == pytest.approx((0.2, 0.1))


def test_one_turn_that_ends_late_is_named(tmp_path: Path) -> None:
    simulated = Simulated("p2")
    units = simulated.units[0]
    place = [index for index, unit in enumerate(units) if unit.name == "FW"][1]
    units[place] = units[place]._replace(end_s=units[place].end_s + 0.1 * simulated.iteration_s)
    run = simulated.write(tmp_path / "run", shift_s=[0.0, 0.0], late_s=[0.0, 0.0], clock=True)
    activity, report = validated(tmp_path, run)
    assert activity is not None
    own = activity.ranks[0]
    assert (own.worst_unit, own.worst_error) == ("FW2", pytest.approx(0.1))
    assert own.mean_error == pytest.approx(0.1 / (2 * len(units)))
    # Half of it, since the turn begins as predicted.
    assert own.by_unit == pytest.approx({"FW1": 0.0, "FW2": 0.05, "BW1": 0.0, "BW2": 0.0, "WU": 0.0}, abs=1e-9)
    assert "| rank | FW1 | FW2 | BW1 | BW2 | WU |" in markdown(report)
    assert "| 0 | 0.0% | 5.0% | 0.0% | 0.0% | 0.0% |" in markdown(report)


def test_errors_are_of_medians_over_iterations(tmp_path: Path) -> None:
    simulated = Simulated("d2")
    run = simulated.write(tmp_path / "run", shift_s=[0.0, 0.0], late_s=[0.0, 0.0], clock=True)
    records = [
        msgspec.structs.replace(record, fw_s=(9.0, *record.fw_s[1:]))
        for record in map(
            msgspec.json.Decoder(TrainingIterations).decode, (run / TRAINING_FILE).read_bytes().splitlines()
        )
    ]
    (run / TRAINING_FILE).unlink()
    append_lines(run / TRAINING_FILE, records)
    activity, _ = validated(tmp_path, run)
    assert activity is not None
    assert activity.worst_error == pytest.approx(0, abs=1e-9)


def test_a_run_without_turns_reports_no_activity_error(tmp_path: Path) -> None:
    simulated = Simulated("p2")
    run = simulated.write(tmp_path / "run", shift_s=[0.0, 0.0], late_s=[0.0, 0.0], clock=True)
    lines = (run / TRAINING_FILE).read_bytes().splitlines()
    records = [
        msgspec.structs.replace(record, turns=(), pipeline_idle_s=record.fw_s)
        for record in map(msgspec.json.Decoder(TrainingIterations).decode, lines)
    ]
    (run / TRAINING_FILE).unlink()
    append_lines(run / TRAINING_FILE, records)
    activity, report = validated(tmp_path, run)
    assert activity is None
    why = "no activity error, the run did not record begin and end"
    assert any(note.startswith(why) and str(run) in note for note in report.notes)
    assert "## Activity" not in markdown(report)


def test_turns_have_a_begin_and_an_end_for_every_iteration() -> None:
    turn = Turn(way="FW", begin_s=(0.0,), end_s=(1.0,))
    phases = {name: (1.0, 1.0) for name in ("fw_s", "bw_s", "exposed_ge_s", "wu_s")}
    with pytest.raises(ValueError, match="turns have to have a begin and an end for each of 2 iterations"):
        TrainingIterations(rank=0, first_iteration=0, iteration_s=(4.0, 4.0), turns=(turn,), **phases)
    with pytest.raises(ValueError, match="end_s"):
        Turn(way="FW", begin_s=(0.0, 1.0), end_s=(1.0,))
