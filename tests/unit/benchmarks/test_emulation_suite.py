"""The emulation suite: its commands, its configurations, the synthetic device, and what its table says of runs."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "emulation"))

import emulated_profile
import emulation
import emulation_cases
import emulation_distsim
import emulation_table
import emulation_transformers
from profile_factory import make_network, make_profile

from calibrate.profile.profile import CopyTime
from paradl_bench.measure.training.calls.recorder import planned_collectives
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

STRATEGIES, DISTSIM = emulation_cases.STRATEGIES, emulation_distsim.DISTSIM
TRANSFORMERS = emulation_transformers.TRANSFORMERS
LAYOUTS = {
    ranks: [
        NodeLayout(nodes=nodes, ranks_per_node=ranks, link_bytes_per_s=emulation_cases.LINK_BYTES_PER_S)
        for nodes in counts
    ]
    for ranks, counts in emulation_cases.NODES_OF.items()
}


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts], ids=str)
def test_a_layout_sweeps_whatever_its_configurations_send(layout: NodeLayout, tmp_path: Path) -> None:
    sweeps = STRATEGIES.sweeps(tmp_path, layout)
    assert msgspec.json.decode(msgspec.json.encode(sweeps), type=list[emulated_profile.Sweep]) == sweeps
    for sweep in sweeps:
        # Requests check themselves; all ranks of the layout take part.
        assert sweep.request.all_ranks == layout.ranks
        assert not sweep.complete
    # As far as segments reach, and what leaders send by whole buckets.
    led = layout.ranks <= emulated_profile.FEW_RANKS
    inside = [sweep for sweep in sweeps if sweep.request.side_by_side == layout.ranks_per_node]
    assert len(inside) == (layout.nodes > 1) * (3 + led)
    # What ghosts and collectives cost each other, at every level.
    beside = [sweep for sweep in sweeps if "with-compute" in sweep.request.contexts]
    assert [sweep in inside for sweep in beside] == ([False, True] if layout.nodes > 1 else [False])
    # Gradients are in flight over all nodes where there are several, and beside all that is waited for where not.
    assert [sweep in inside for sweep in sweeps if "with-all-reduce" in sweep.request.contexts] == (
        [True] if layout.nodes > 1 else [False, False]
    )
    # Groups share links only where there are several.
    assert any(sweep.request.concurrent > 1 for sweep in sweeps) == (layout.ranks > 2)
    whole: dict[str, int] = {}
    for sweep in sweeps:
        if sweep.request.concurrent == 1 and sweep not in inside:
            largest = max(sweep.request.sizes)
            whole |= {name: max(largest, whole.get(name, 0)) for name in sweep.request.operations}
    network = STRATEGIES.traced("resnet50")
    for case in emulation_cases.cases_of(tmp_path, STRATEGIES, "resnet50", layout):
        strategy = case.request.strategy
        plan = planner_for(strategy).plan(network, strategy, case.request.settings)
        for issued in planned_collectives(plan, 0):
            if issued.when == "iteration" and len(issued.group) == layout.ranks:
                # A bucket ends with the gradient that fills it.
                assert issued.message_bytes <= 1.25 * whole[issued.operation], (strategy, issued)


MODELS_OF = [(name, model) for name, suite in emulation.SUITES.items() for model in suite.models]


@pytest.mark.parametrize(("name", "model"), MODELS_OF)
def test_every_configuration_is_plannable_and_survives_encoding(name: str, model: str, tmp_path: Path) -> None:
    suite = emulation.SUITES[name]
    network = suite.traced(model)
    counts = LAYOUTS.items() if suite is STRATEGIES else [(4, LAYOUTS[4])]
    for layout in (layout for _, layouts in counts for layout in layouts):
        cases = emulation_cases.cases_of(tmp_path, suite, model, layout)
        profile = emulation_cases.profile_of(tmp_path, layout)
        profile.parent.mkdir(exist_ok=True)
        profile.write_text("{}")
        assert len({case.directory for case in cases}) == len(cases)
        assert msgspec.json.decode(msgspec.json.encode(cases), type=list[emulation_cases.Case]) == cases
        for case in cases:
            case.request.check()
            assert case.request.strategy.ranks == layout.ranks
            planner_for(case.request.strategy).plan(network, case.request.strategy, case.request.settings)
            assert not case.complete


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts], ids=str)
def test_a_slower_cluster_sleeps_longer_in_the_same_runs(layout: NodeLayout, tmp_path: Path) -> None:
    usual = emulation_cases.cases_of(tmp_path, STRATEGIES, "resnet50", layout)
    slower = emulation_cases.cases_of(tmp_path, STRATEGIES, "resnet50", layout, dilate=3.0)
    assert [case.directory for case in slower] == [case.directory for case in usual]
    assert [case.dilate for case in slower] == pytest.approx([3 * case.dilate for case in usual], rel=1e-3)


@pytest.mark.parametrize("suite", [DISTSIM, TRANSFORMERS], ids=["distsim", "transformers"])
@pytest.mark.parametrize("layout", LAYOUTS[4], ids=str)
def test_every_group_of_a_configuration_is_swept(
    suite: emulation_cases.Suite, layout: NodeLayout, tmp_path: Path
) -> None:
    on_node = layout.ranks_per_node
    swept: dict[tuple[str, bool], int] = {}
    for sweep in suite.sweeps(tmp_path, layout):
        assert sweep.request.all_ranks == layout.ranks
        over_nodes = layout.nodes > 1 and sweep.request.side_by_side is None
        for name in sweep.request.operations:
            swept[name, over_nodes] = max(*sweep.request.sizes, swept.get((name, over_nodes), 0))
    for case in (case for model in suite.models for case in emulation_cases.cases_of(tmp_path, suite, model, layout)):
        strategy = case.request.strategy
        plan = planner_for(strategy).plan(suite.traced(case.model), strategy, case.request.settings)
        issued = [issued for rank in range(layout.ranks) for issued in planned_collectives(plan, rank)]
        for each in (each for each in issued if each.when == "iteration" and len(each.group) > 1):
            over_nodes = len({rank // on_node for rank in each.group}) > 1
            assert each.message_bytes <= 1.25 * swept[each.operation, over_nodes], (case.directory, each)


def test_the_grid_has_every_product_of_ways() -> None:
    assert sorted(emulation_distsim.grid(4)) == ["1M1P4D", "1M2P2D", "1M4P1D", "2M1P2D", "2M2P1D", "4M1P1D"]
    assert len(emulation_distsim.grid(8)) == 8
    assert len(emulation_distsim.grid(16)) == 9
    assert {parse_strategy(name).ranks for name in emulation_distsim.grid(16)} == {16}


def test_layers_sleep_longer_when_more_ranks_share_the_cores(tmp_path: Path) -> None:
    serial_s = sum(emulated_profile.phase_seconds(STRATEGIES.traced("resnet50")).values())
    for layout in LAYOUTS[4]:
        for case in emulation_cases.cases_of(tmp_path, STRATEGIES, "resnet50", layout):
            assert case.dilate * serial_s == pytest.approx({4: 3.0, 8: 3.0, 16: 6.0}[layout.ranks], rel=1e-3)


def test_the_synthetic_device_follows_its_roofline_and_is_predicted_exactly() -> None:
    wide = make_network((64, 4096, 4096))
    product = wide.layers[2]
    assert emulated_profile.synthetic_seconds(product, wide, "FW", 16384) == pytest.approx(
        5e-6 + 2 * 4096**2 * 16384 / (0.5 * 15.7e12)
    )
    # One sample reads the weight, and does little with it.
    read = 4 * (4096 * 4096 + 4096 + 2 * 4096)
    assert emulated_profile.synthetic_seconds(product, wide, "FW", 1) == pytest.approx(5e-6 + read / (0.75 * 900e9))
    copies = tuple(
        CopyTime(direction=way, ranks_on_host=8, alpha_s=0.0, beta_s_per_byte=1e-10, relative_sd=0.1, models=("m",))
        for way in ("into", "out")
    )
    profile = emulated_profile.with_synthetic_layers(make_profile(wide, copies=copies), [wide])
    # Eight ranks of two nodes copied at once: so fast are a node's.
    assert {copy.ranks_on_host for copy in profile.copies} == {profile.cluster.ranks_per_node}
    assert len(profile.copies) == 2
    point = Configuration(strategy=parse_strategy("serial"), settings=PlanSettings(batch=16))
    predicted = Predictor(CostModel(profile=profile, network=wide), evaluator_named("simulate")).predict(point)
    phases = ("FW", "BW")
    layers_s = sum(
        emulated_profile.synthetic_seconds(layer, wide, phase, 16) for layer in wide.layers for phase in phases
    )
    update_s = 3 * sum(parameter.bytes for parameter in wide.parameters) / (0.75 * 900e9)
    assert predicted.iteration_s == pytest.approx(layers_s + update_s)


def row(strategy: str, predicted_s: float, measured_s: float, *, layout: str = "1x4") -> emulation_table.Row:
    return emulation_table.Row(
        model="small",
        layout=layout,
        strategy=strategy,
        options="",
        predicted_s=predicted_s,
        measured_s=measured_s,
        error=predicted_s / measured_s - 1,
        holds=predicted_s == measured_s,
        noise_floor=0.01,
        explained_by="",
        issued_equals_plan=True,
        activity=(0.02, 0.03) if strategy == "d4" else None,
    )


def test_the_table_ranks_strategies_of_a_size_among_themselves() -> None:
    rows = [row("d4", 1.0, 1.5), row("f4", 1.2, 1.2), row("d4", 3.0, 3.0, layout="2x2")]
    text = emulation_table.table(rows)
    assert "| small | 1x4 | d4 |  | 1 | 1.5 | -33.3% | no | 2.0% (3.0%) | yes |" in text
    assert "| small | 1x4 | f4 |  | 1.2 | 1.2 | +0.0% | yes | not known | yes |" in text
    # Taken for the best, it takes a quarter longer than what was.
    assert "| small | 1x4 | d4 | f4 | 25.0% | 1.0% | -1.00 |" in text
    assert "| small | 2x2 | d4 | d4 | 0.0% | 1.0% |  |" in text
    # Of two the second is the median, and the worst.
    assert "| small | 1x4 | second: f4 | 1.2 | 1.2 | 1.20 | 0.80 |" in text
    assert "| small | 1x4 | worst: f4 | 1.2 | 1.2 | 1.20 | 0.80 |" in text
    assert "mean accuracy 88.9%, intervals hold 67% of 3, activity error 2.0% in the mean" in text


def test_the_table_has_each_kind_of_strategy() -> None:
    rows = [row("d4", 1.1, 1.0), row("d8", 1.0, 1.0, layout="2x4"), row("z3d4", 0.9, 1.0), row("d2t2", 1.0, 1.0)]
    text = emulation_table.table(rows)
    assert "| data | 2 | 95.0% | +10.0% | 1 |" in text
    assert "| data, ZeRO 3 | 1 | 90.0% | -10.0% | 0 |" in text
    assert "| data+tensor | 1 | 100.0% | +0.0% | 1 |" in text


def test_activity_has_a_line_a_rank() -> None:
    units = ({"FW1": 0.0, "FW2": 0.01, "BW1": 0.02, "BW2": 0.03, "WU": 0.04}, {"FW1": 0.0, "FW2": 0.02})
    of_row = msgspec.structs.replace(row("2M2P1D", 1.0, 1.0), units=units)
    assert of_row.in_turns
    assert not row("d4", 1.0, 1.0).in_turns
    lines = emulation_table.activity_table([of_row]).splitlines()
    assert lines[0] == "small, 1x4, 2M2P1D"
    assert lines[2] == "| rank | all | FW1 | FW2 | BW1 | BW2 | WU |"
    assert lines[4:6] == ["| 0 | 2.0% | 0.0% | 1.0% | 2.0% | 3.0% | 4.0% |", "| 1 | 1.0% | 0.0% | 2.0% |  |  |  |"]
    # Weight updates are no turns.
    assert ", of single turns 1.5% in the median and 3.0% at most" in emulation_table.table([of_row])
