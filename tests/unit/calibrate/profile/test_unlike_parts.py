"""Profiles put together from different machines, and parts that nothing tells: said wherever they are used."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from profile_factory import make_network, make_profile
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, write_collectives, write_layers

from calibrate.cli import group as calibrate
from calibrate.fitting.fit import fit_profile
from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.profile import Device, Profile, read_profile, write_profile
from calibrate.profile.unlike_parts import unlike_parts
from paradl_bench.records.cluster import ClusterFile, Level
from paradl_bench.records.measurement import UNKNOWN_DEVICE
from predict.cli import group as predict
from predict.costs.cost_model import CostModel

H100 = msgspec.structs.replace(
    ENVIRONMENT, device="cuda", device_name="NVIDIA H100", hostname="gpu1", versions={"nccl": "2.22"}, settings={}
)
SAID = (
    "layers were measured on Example CPU on node1, collectives on NVIDIA H100 on gpu1: no machine is known to have both"
)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Profile, Profile]:
    """A profile of a CPU's layers, and one of a GPU cluster's collectives."""
    layers = write_layers(tmp_path / "layers")
    sweep = write_collectives(tmp_path / "nccl", CollectivesSpec(library="nccl"), environment=H100)
    layers_alone, collectives_alone = (fit_profile([each], command_line=(), force=False) for each in (layers, sweep))
    return layers_alone, collectives_alone


def test_merged_parts_of_unlike_machines_are_named_everywhere(parts: tuple[Profile, Profile], tmp_path: Path) -> None:
    for order in (parts, parts[::-1]):
        merged = merge_profiles(order, ("a", "b"), command_line=(), force=True)
        assert SAID in merged.notes
        path = tmp_path / f"{order[0].environments[0].device}.json"
        write_profile(path, msgspec.structs.replace(merged, notes=()))
        assert SAID in CliRunner().invoke(calibrate, ["show", str(path)], env={"COLUMNS": "200"}).output
        asked = ["--from-profile", str(path), "--model", "toy", "--strategy", "d2", "--batch", "8", "--backend", "nccl"]
        result = CliRunner().invoke(predict, [*asked, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)[0]["extrapolated"][0] == SAID
        assert "extrapolated: parts of different machines" in CliRunner().invoke(predict, asked).output
        assert SAID in CliRunner().invoke(predict, [*asked, "--why"]).output


def test_parts_of_one_machine_are_not_named(parts: tuple[Profile, Profile], tmp_path: Path) -> None:
    assert unlike_parts(parts[0]) == unlike_parts(parts[1]) == ()
    directories = [write_layers(tmp_path / "more"), write_collectives(tmp_path / "sweep")]
    assert unlike_parts(fit_profile(directories, command_line=(), force=False)) == ()


def test_an_environment_unknown_to_a_log_is_not_unlike(tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(ENVIRONMENT, device_name=UNKNOWN_DEVICE, hostname="")
    directories = [write_layers(tmp_path / "l"), write_collectives(tmp_path / "c", environment=unknown)]
    assert unlike_parts(fit_profile(directories, command_line=(), force=True)) == ()


def test_layers_of_two_hosts_are_named(tmp_path: Path) -> None:
    other = msgspec.structs.replace(ENVIRONMENT, hostname="node2")
    from synthetic_measurements import LayersSpec

    directories = [write_layers(tmp_path / "a"), write_layers(tmp_path / "b", LayersSpec(seed=1), environment=other)]
    (text,) = unlike_parts(fit_profile(directories, command_line=(), force=True))
    assert text == "layers were measured on different machines: Example CPU on node1 and Example CPU on node2"


NETWORK = make_network()


def layers_alone(**device: object) -> Profile:
    """As of imported layers: no iterations, copies or rates."""
    made = make_profile(NETWORK)
    devices = (Device(name=UNKNOWN_DEVICE, kind="cuda", memory_bytes=0, devices_per_host=1, **device),)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, model_times=(), shard_times=(), copies=(), devices=devices)


@pytest.mark.parametrize("peak", [None, 1e12])
def test_rates_of_the_cluster_file_fill_gaps_of_the_profile(peak: float | None) -> None:
    cluster = ClusterFile(
        name="c",
        levels=(Level(name="node", ranks=4),),
        device_name="Example GPU",
        memory_bandwidth_bytes_per_s=2e9,
        peak_flops=peak,
    )
    updates = {}
    for name, given in (("stated", cluster), ("none", None)):
        costs = CostModel(profile=layers_alone(), network=NETWORK, cluster=given)._model
        updates[name] = costs.weight_update(8, 1)
    assert updates["none"].seconds == 0
    assert "taken as none" in updates["none"].remarks[0].text
    # SGD with momentum reads gradients, parameters and momenta, and writes the latter two.
    assert updates["stated"].seconds == pytest.approx(5 * NETWORK.parameter_bytes / 2e9)
    assert "at the bandwidth of memory" in updates["stated"].remarks[0].text


def test_a_rate_that_was_measured_stays(tmp_path: Path) -> None:
    cluster = ClusterFile(
        name="c",
        levels=(Level(name="node", ranks=4),),
        device_name="Example GPU",
        memory_bandwidth_bytes_per_s=1e9,
    )
    profile = layers_alone(memory_bandwidth_bytes_per_s=4e9)
    update = CostModel(profile=profile, network=NETWORK, cluster=cluster)._model.weight_update(8, 1)
    assert update.seconds == pytest.approx(5 * NETWORK.parameter_bytes / 4e9)


def test_an_interval_without_any_known_error_is_called_unknown(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", layers_alone())
    asked = [
        "--from-profile",
        str(tmp_path / "p.json"),
        "--model",
        NETWORK.name,
        "--strategy",
        "serial",
        "--batch",
        "8",
    ]
    printed = CliRunner().invoke(predict, asked).output
    assert "not known" in printed
    assert "+0%" not in printed
    assert "100% of layers" in printed
    assert read_profile(tmp_path / "p.json").model_times == ()
