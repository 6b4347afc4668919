"""What measurements on emulated nodes say of themselves, and with what they mix."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from profile_factory import ENVIRONMENT as TEST_HOST
from profile_factory import make_network, make_profile, model_times, write_training_run
from rich.console import Console
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, LayersSpec, write_collectives, write_layers

from calibrate.fitting.fit import fit_profile
from calibrate.profile.profile import Profile, write_profile
from calibrate.report.diff import compare
from calibrate.report.explanation import weaknesses
from calibrate.report.show import print_profile
from paradl_bench.core.errors import UserError
from paradl_bench.measure.collectives.summary import print_collectives, summarise_collectives
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.emulation import EmulatedNodes, Emulation
from paradl_bench.records.measurement import Environment, read_manifest
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Predictor
from predict.validation.validation import validate_runs
from predict.workload import Configuration, evaluator_named


def nodes(count: int, per_node: int, *, rate: float = 125e6, one_level: str = "") -> Environment:
    """The synthetic environment, on emulated nodes."""
    emulated = EmulatedNodes(
        nodes=count,
        ranks_per_node=per_node,
        link_bytes_per_s=rate,
        shaping="" if one_level else "tbf",
        one_level=one_level,
    )
    return msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(nodes=emulated))


def fit(*directories: Path, force: bool = False) -> Profile:
    return fit_profile(directories, command_line=("calibrate", "fit"), force=force)


def sweeps_of_one_cluster(path: Path) -> tuple[Path, Path]:
    """Two ranks inside a node, and two nodes of two ranks each, whose link is ten times slower."""
    inside = write_collectives(path / "inside", CollectivesSpec(ranks=(2,)), environment=nodes(1, 2))
    across = CollectivesSpec(ranks=(4,), level="system", beta_s_per_byte=1e-8)
    return inside, write_collectives(path / "across", across, environment=nodes(2, 2))


def test_sweeps_of_one_emulated_cluster_make_a_two_level_profile(tmp_path: Path) -> None:
    profile = fit(*sweeps_of_one_cluster(tmp_path))
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 2), ("system", 4)]
    assert {fit.level for fit in profile.communication} == {"node", "system"}
    # Four ranks share the memory of the one host.
    assert profile.cluster.memory_bytes_per_rank == ENVIRONMENT.memory_bytes / 4


def test_a_one_rank_node_keeps_its_rank_count_as_level(tmp_path: Path) -> None:
    sweep = CollectivesSpec(ranks=(2,), level="system")
    profile = fit(write_collectives(tmp_path / "sweep", sweep, environment=nodes(2, 1)))
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 1), ("system", 2)]


@pytest.mark.parametrize(
    "other",
    [ENVIRONMENT, nodes(2, 2, rate=25e6), nodes(2, 2, one_level="this process is not root")],
    ids=["real", "another link", "one level"],
)
def test_what_was_measured_elsewhere_does_not_mix_with_emulated_nodes(tmp_path: Path, other: Environment) -> None:
    emulated = write_collectives(tmp_path / "emulated", environment=nodes(2, 2))
    another = write_collectives(tmp_path / "other", CollectivesSpec(seed=1), environment=other)
    with pytest.raises(
        UserError, match=r"different environments \(emulated 'nodes with links of 125 MB/s \(tbf\)'"
    ) as it:
        fit(emulated, another)
    assert "\n" not in str(it.value)


def test_host_layers_join_emulated_nodes_only_by_force_and_visibly(tmp_path: Path) -> None:
    layers = write_layers(tmp_path / "layers", LayersSpec())
    inside, across = sweeps_of_one_cluster(tmp_path)
    with pytest.raises(UserError, match="different environments"):
        fit(layers, inside, across)
    profile = fit(layers, inside, across, force=True)
    assert [(level.name, level.ranks) for level in profile.cluster.levels] == [("node", 2), ("system", 4)]
    out = io.StringIO()
    print_profile(profile, Console(file=out, width=250))
    assert "emulated: 2 x 2 ranks, nodes with links of 125 MB/s (tbf)" in out.getvalue()
    assert "merged because of --force" in out.getvalue()


def test_an_emulated_profile_proposes_sweeps_of_its_emulated_cluster(tmp_path: Path) -> None:
    commands = {
        each.command.split(" --ops")[0].split(" -o")[0] for each in weaknesses(fit(*sweeps_of_one_cluster(tmp_path)))
    }
    sweeps = {command for command in commands if command.startswith("paradl-bench collectives")}
    assert sweeps
    assert all("--link-bandwidth 1Gbit/s" in command for command in sweeps)
    assert (
        "paradl-bench collectives --nodes 2 --ranks-per-node 2 --link-bandwidth 1Gbit/s --contexts groups=2" in sweeps
    )
    assert "paradl-bench collectives --nodes 1 --ranks-per-node 2 --link-bandwidth 1Gbit/s" in sweeps
    assert "paradl-bench collectives --nodes 4 --ranks-per-node 2 --link-bandwidth 1Gbit/s" in sweeps
    assert not any("srun" in command for command in commands)


def test_two_profiles_differ_in_what_was_emulated(tmp_path: Path) -> None:
    real = fit(write_collectives(tmp_path / "real"))
    emulated = fit(write_collectives(tmp_path / "emulated", environment=nodes(1, 2)))
    changes = {change.what: (change.first, change.second) for change in compare(real, emulated).changes}
    assert changes["emulated"][1] == ("nodes with links of 125 MB/s (tbf)",)


def test_the_summary_of_a_sweep_names_it_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_collectives(tmp_path / "sweep", environment=nodes(2, 1))
    assert summarise_collectives(sweep).emulated == "2 x 1 ranks, nodes with links of 125 MB/s (tbf)"
    print_collectives(sweep, as_json=False)
    assert capsys.readouterr().out.startswith("emulated: 2 x 1 ranks, ")
    print_collectives(sweep, as_json=True)
    assert json.loads(capsys.readouterr().out)["emulated"].startswith("2 x 1 ranks")


def test_a_manifest_says_what_was_emulated_or_that_nothing_was(tmp_path: Path) -> None:
    sweep = write_collectives(tmp_path / "sweep", environment=nodes(2, 1, one_level="not root"))
    emulated = read_manifest(sweep).environment.emulated
    assert isinstance(emulated, Emulation)
    assert emulated.words == "2 x 1 ranks, nodes on one level (not root)"
    real = write_collectives(tmp_path / "real")
    assert json.loads((real / "manifest.json").read_text())["environment"]["emulated"] is False
    assert read_manifest(real).environment.emulated is False


def test_an_emulation_has_to_say_what_it_was() -> None:
    with pytest.raises(ValueError, match="what was emulated"):
        Emulation()
    with pytest.raises(ValueError, match="what was emulated, or be false"):
        msgspec.structs.replace(ENVIRONMENT, emulated=True)
    for both in ({}, {"shaping": "tbf", "one_level": "not root"}):
        with pytest.raises(ValueError, match="links that are shaped, or say why"):
            EmulatedNodes(nodes=1, ranks_per_node=1, link_bytes_per_s=1e6, **both)


def test_predictions_and_validations_of_an_emulated_cluster_name_it(tmp_path: Path) -> None:
    emulated = Emulation(nodes=EmulatedNodes(nodes=2, ranks_per_node=1, link_bytes_per_s=125e6, shaping="tbf"))
    environment = msgspec.structs.replace(TEST_HOST, emulated=emulated)
    chain = make_network()
    profile = make_profile(model_times=model_times(chain, common_sd=0.02), environments=(environment,))
    model = CostModel(profile=profile, network=chain)
    point = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=8))
    notes = Predictor(model, evaluator_named("simulate")).predict(point).provenance.notes
    assert "measured on an emulated cluster: nodes with links of 125 MB/s (tbf)" in notes
    write_profile(tmp_path / "profile.json", profile)
    rows = [[(1.0, 2.0, 0.5, 0.1)] * 12] * 2
    on_nodes = write_training_run(
        tmp_path / "on-nodes", chain, strategy="d2", batch=8, phases_s=rows, environment=environment
    )
    report = validate_runs(tmp_path / "profile.json", [on_nodes], cluster_path=None, force=False)
    assert f"emulated, 2 x 1 ranks, nodes with links of 125 MB/s (tbf): {on_nodes}" in report.notes
    real = write_training_run(tmp_path / "real", chain, strategy="d2", batch=8, phases_s=rows)
    with pytest.raises(UserError, match="ran in another environment than the profile's: emulated 'nodes with"):
        validate_runs(tmp_path / "profile.json", [real], cluster_path=None, force=False)
