"""Real training on gloo ranks: what is issued against the plan, and gradients against serial's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from training_programs import GRADIENTS, NETWORKS, issued_and_planned, launch

pytestmark = pytest.mark.distributed


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(NETWORKS)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_replicas_issue_is_what_is_planned(workplace: Path, ranks: int) -> None:
    networks = ("BatchNormed", "Biased", "Shared", "Recurrent", "Unused")
    cases = [f"{name} d{ranks} {cap} local" for name in networks for cap in ("-", "0.001", "0.004")]
    for found in issued_and_planned(workplace, cases, ranks):
        for case, result in found.items():
            assert result["recorded"] == result["collectives"], case
        of_cap = {cap: found[f"Biased d{ranks} {cap} local"]["all_reduces"] for cap in ("-", "0.001", "0.004")}
        assert of_cap["-"] == 1
        assert of_cap["0.001"] > of_cap["0.004"] > 1


def test_what_zero_issues_is_what_is_planned(workplace: Path) -> None:
    """Over three ranks, where rows of most parameters are padded and some ranks hold none."""
    names = ("BatchNormed", "Biased", "Shared", "Unused")
    cases = [f"{name} z{stage}d3 0.004 local" for name in names for stage in (1, 2, 3)]
    (found, *_) = issued_and_planned(workplace, cases, 3)
    for case, result in found.items():
        assert result["recorded"] == result["collectives"], case
        assert min(result["chunk"]["exposed_ge_s"]) > 0, case
        gathered = [f"{phase}_communication_s" for phase in ("fw", "bw") if result["chunk"][f"{phase}_communication_s"]]
        assert (len(gathered) > 0) == ("z1" not in case), case


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [(2, "f2 c2 s2 s1x2"), pytest.param(3, "f3 c3 s3", marks=pytest.mark.slow), (4, "s2x2 d2f2 d2c2 d2s2")],
)
def test_what_is_issued_for_shared_layers_is_what_is_planned(workplace: Path, ranks: int, strategies: str) -> None:
    cases = [f"{name} {strategy} 0.001 local" for name in ("BatchNormed", "Biased") for strategy in strategies.split()]
    cases += [f"BatchNormed {strategy} - sync" for strategy in strategies.split()]
    # What has no positions, or parameters that several layers or none use.
    whole = [strategy for strategy in strategies.split() if "s" not in strategy]
    cases += [f"{name} {strategy} - local" for name in ("Shared", "Querying", "Unused") for strategy in whole]
    cases += [f"Biased {s} - local split=two+h*" for s in strategies.split() if "s" not in s]
    cases += [f"Biased {s} - local filter_backward=reduce-scatter" for s in strategies.split() if "f" in s]
    cases += [f"BatchNormed {s} - sync spatial_until=two" for s in strategies.split() if "s" in s]
    cases += [f"Recalling {s} - local" for s in strategies.split()]
    cases += [f"Recalling {s} - local spatial_until=two" for s in strategies.split() if "s" in s]
    for found in issued_and_planned(workplace, cases, ranks):
        for case, result in found.items():
            chunk, timed = result["chunk"], {}
            for phase in ("fw", "bw"):
                of_kinds = chunk[f"{phase}_communication_s"]
                timed[phase] = [sum(values) for values in zip(*of_kinds.values(), strict=True)]
                # It is a part of the phase, timed inside of it.
                assert all(part < whole for part, whole in zip(timed[phase], chunk[f"{phase}_s"], strict=False)), case
            assert bool(result["of_layers"]) == bool(timed["fw"]), case
            exchanges = any(letter in case.split()[1] for letter in "ds")
            assert all((seconds > 0) == exchanges for seconds in chunk["exposed_ge_s"]), case


def test_what_is_issued_for_accumulated_gradients_is_what_is_planned(workplace: Path) -> None:
    """Once an iteration what is exchanged, for each micro-batch what layers share; ZeRO gathers and reduces anew."""
    runs = ("BatchNormed d2 0.004", "Unused d2 -", "BatchNormed f2 -", "Biased s2 0.001", "Biased z1d2 0.004")
    sharded = ("BatchNormed z2d2 -", "BatchNormed z3d2 -")
    cases = [f"{run} local accumulate={count}" for run in (*runs, *sharded) for count in (1, 2, 4)]
    (found, *_) = issued_and_planned(workplace, cases, 2)
    for run in (*runs, *sharded):
        once, twice, often = (found[f"{run} local accumulate={count}"] for count in (1, 2, 4))
        shared = "of_layers" if "d2" not in run or "z2" in run or "z3" in run else None
        if shared:
            assert [later[shared] for later in (twice, often)] == [2 * once[shared], 4 * once[shared]], run
        else:
            assert once["collectives"] == twice["collectives"] == often["collectives"] > 0, run
        phases = zip(*(often["chunk"][f"{name}_s"] for name in ("fw", "bw", "exposed_ge", "wu")), strict=True)
        assert [sum(parts) for parts in phases] == pytest.approx(often["chunk"]["iteration_s"]), run


def test_what_is_issued_again_in_backward_is_what_is_planned(workplace: Path) -> None:
    """Communication for layers that are computed again is issued again; what is exchanged for gradients is not."""
    runs = ("d2 0.001 local", "z1d2 - local", "f2 - local", "c2 - local", "s2 0.001 local", "s2 0.001 sync")
    runs += ("f2 - local filter_backward=reduce-scatter", "s2 - local spatial_until=body.1.two", "s1x2 - local")
    more = ("", " recompute=all", " recompute=body.1+stem accumulate=2")
    (found, *_) = issued_and_planned(workplace, [f"Blocks {run}{options}" for run in runs for options in more], 2)
    for run in runs:
        kept, again, some = (found[f"Blocks {run}{options}"] for options in more)
        if "d2" in run:
            assert kept["collectives"] == again["collectives"] == some["collectives"], run
        else:
            assert kept["of_layers"] < again["of_layers"], run
            in_backward = (sum(map(sum, each["chunk"]["bw_communication_s"].values())) for each in (kept, again))
            assert all(seconds > 0 for seconds in in_backward), run


@pytest.mark.slow
def test_what_is_issued_over_nodes_is_what_is_planned(workplace: Path) -> None:
    """Four ranks as two nodes of two: leaders issue other things than those that they lead."""
    forms = ("flat", "leader ranks_per_node=2", "leaders:2 ranks_per_node=2", "segmented ranks_per_node=2")
    runs = ("BatchNormed d4 0.001", "Biased d4 -", "Biased d4 0.004", "Unused d4 -", "Unused z1d4 0.0001")
    cases = [f"{run} local exchange={form}" for run in runs for form in forms]
    cases += [f"BatchNormed {strategy} 0.001 sync exchange={form}" for strategy in ("d2s2", "s2d2") for form in forms]
    of_ranks = issued_and_planned(workplace, cases, 4)
    for case, result in of_ranks[0].items():
        assert ("s2" in case) or result["recorded"] == result["collectives"], case
        assert min(result["chunk"]["exposed_ge_s"]) > 0, case
    led, by_two = (f"BatchNormed d4 0.001 local exchange={form}" for form in forms[1:3])
    assert of_ranks[0][led]["all_reduces"] > 1
    assert [found[led]["all_reduces"] > 0 for found in of_ranks] == [True, False, True, False]
    assert all(found[by_two]["all_reduces"] > 0 for found in of_ranks)


def test_gradients_are_those_of_serial_training(workplace: Path) -> None:
    launch(workplace, GRADIENTS)


@pytest.mark.parametrize(("ranks", "strategies"), [(2, "d2 f2 z1d2 z3d2"), (4, "d2f2 d2z3d2 d2c2")])
def test_what_is_issued_to_clip_gradients_is_what_is_planned(workplace: Path, ranks: int, strategies: str) -> None:
    """One number is summed where ranks hold other gradients, and nothing where all hold the same."""
    cases = [f"Biased {strategy} - local clip_norm=1" for strategy in strategies.split()]
    for found in issued_and_planned(workplace, cases, ranks):
        for case, result in found.items():
            assert result["recorded"] == result["collectives"], case
