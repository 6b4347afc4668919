"""Sweeps whose messages a simulator computed: never merged with real ones, and named so wherever they are read."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from profile_factory import ENVIRONMENT as TEST_HOST
from profile_factory import make_network, make_profile
from rich.console import Console
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, LayersSpec, write_collectives, write_layers

from calibrate.fitting.fit import fit_profile
from calibrate.profile.profile import Profile
from calibrate.report.explanation import weaknesses
from calibrate.report.show import print_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.emulation import EmulatedLayers, EmulatedNodes, Emulation, SimulatedMessages
from paradl_bench.records.measurement import Environment, read_manifest
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

TREE = SimulatedMessages(simulator="SimGrid 3.32", platform="a tree of 6 nodes", platform_sha256="ab" * 32)
WORDS = "messages simulated by SimGrid 3.32: a tree of 6 nodes (platform abababababab)"


def simulated(messages: SimulatedMessages = TREE) -> Environment:
    return msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(messages=messages))


def fit(*directories: Path, force: bool = False) -> Profile:
    return fit_profile(directories, command_line=("calibrate", "fit"), force=force)


def sweep(path: Path, environment: Environment, **spec: object) -> Path:
    return write_collectives(path, CollectivesSpec(**spec), environment=environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        ENVIRONMENT,
        simulated(msgspec.structs.replace(TREE, platform_sha256="cd" * 32)),
        simulated(msgspec.structs.replace(TREE, simulator="SimGrid 3.35")),
    ],
    ids=["real", "another platform", "another version"],
)
def test_simulated_sweeps_do_not_mix_with_others(tmp_path: Path, other: Environment) -> None:
    of_tree, of_other = sweep(tmp_path / "tree", simulated()), sweep(tmp_path / "other", other, seed=1)
    with pytest.raises(
        UserError, match=r"different environments \(emulated 'messages simulated by SimGrid 3.32: a tree"
    ):
        fit(of_tree, of_other)
    again = sweep(tmp_path / "again", simulated(), ranks=(4,), level="system")
    assert {each.level for each in fit(of_tree, again).communication} == {"node", "system"}


def test_a_profile_and_its_predictions_name_them(tmp_path: Path) -> None:
    directory = sweep(tmp_path / "tree", simulated())
    kept = read_manifest(directory).environment.emulated
    assert isinstance(kept, Emulation)
    assert (kept.messages, kept.words) == (TREE, WORDS)
    out = io.StringIO()
    print_profile(fit(directory), Console(file=out, width=300))
    assert f"; {WORDS}" in out.getvalue()
    chain = make_network()
    environment = msgspec.structs.replace(TEST_HOST, emulated=Emulation(messages=TREE))
    model = CostModel(profile=make_profile(chain, environments=(TEST_HOST, environment)), network=chain)
    point = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=8))
    assert f"not measured: {WORDS}" in Predictor(model, evaluator_named("simulate")).predict(point).provenance.notes


def test_no_real_sweep_is_proposed_for_simulated_messages(tmp_path: Path) -> None:
    layers = write_layers(tmp_path / "layers", LayersSpec())
    tree = sweep(tmp_path / "tree", simulated(), library="smpi-ring")
    profile = fit(layers, tree, force=True)
    found = [each for each in weaknesses(profile) if "smpi-ring" in f"{each.text} {each.command}"]
    assert [each.text for each in found] == [
        f"smpi-ring was simulated ({WORDS}), not measured: no machine is known to behave so"
    ]
    assert not any("only serial training" in each.text for each in weaknesses(profile))
    # Beside real sweeps, which are looked at as ever.
    real = sweep(tmp_path / "gloo", ENVIRONMENT)
    texts = [each.text for each in weaknesses(fit(layers, tree, real, force=True))]
    assert any(text.startswith("gloo all_reduce") for text in texts)
    assert sum("smpi-ring" in text for text in texts) == 1


def test_layers_that_compute_leave_messages_simulated() -> None:
    both = Emulation(messages=TREE, layers=EmulatedLayers(profile_sha256="ef" * 32))
    assert both.words.endswith(f"; {WORDS}")
    assert msgspec.structs.replace(ENVIRONMENT, emulated=both).computing == simulated()
    asleep = Emulation(layers=both.layers)
    assert msgspec.structs.replace(ENVIRONMENT, emulated=asleep).computing == ENVIRONMENT


def test_a_simulation_says_of_what() -> None:
    with pytest.raises(ValueError, match="of which platform"):
        SimulatedMessages(simulator="SimGrid 3.32", platform="", platform_sha256="ab")
    sent = EmulatedNodes(nodes=2, ranks_per_node=1, link_bytes_per_s=1e6, shaping="tbf")
    with pytest.raises(ValueError, match="sent, not simulated"):
        Emulation(nodes=sent, messages=TREE)
