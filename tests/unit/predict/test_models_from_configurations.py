"""Predictions of models that no profile holds: a ``config.json``, or a size known by name, traced when asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from profile_factory import make_profile
from small_language_models import write_configuration

from paradl_bench.core.errors import UserError
from predict.costs.files import choose_network

PROFILE = Path("p.json")


def test_a_configuration_is_traced_at_the_length_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_configuration(tmp_path, "llama")
    network = choose_network(make_profile(), path, None, PROFILE, 24)
    assert (network.name, network.input_shape) == (path, (24,))
    known = msgspec.structs.replace(make_profile(), network={path: network})
    assert choose_network(known, path, None, PROFILE) is network
    assert choose_network(known, path, None, PROFILE, 24) is network
    assert choose_network(known, path, None, PROFILE, 12).input_shape == (12,)


def test_without_torch_a_line_says_what_else_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paradl_bench.measure.tracing.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"built by torch, which is not installed: .* or give --network"):
        choose_network(make_profile(), write_configuration(tmp_path, "llama"), None, PROFILE)


def test_another_length_of_a_profiled_network_is_refused() -> None:
    profile = make_profile()
    name, network = next(iter(profile.network.items()))
    length = network.input_shape[-1] + 1
    with pytest.raises(UserError, match=rf"--sequence {length}: profile p\.json holds {name} with samples of"):
        choose_network(profile, name, None, PROFILE, length)
    with pytest.raises(UserError, match="--sequence and --network exclude each other: the network file says how many"):
        choose_network(profile, name, Path("n.json"), PROFILE, length)


def test_a_wrong_layer_of_another_network_is_refused() -> None:
    profile = make_profile()
    name, network = next(iter(profile.network.items()))
    layer = msgspec.structs.replace(network.layers[0], name="aside", kind="conv", attributes={"kernel": -1.0})
    other = msgspec.structs.replace(network, name="other", layers=(layer, *network.layers))
    profile = msgspec.structs.replace(profile, network={name: network, "other": other})
    with pytest.raises(UserError, match=r"profile p\.json, network 'other': layer 'aside' of kind conv"):
        choose_network(profile, name, None, PROFILE)
