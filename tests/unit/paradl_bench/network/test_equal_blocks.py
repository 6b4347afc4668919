"""Equal blocks of a network are left out where few stand for all, and the whole network follows from these."""

from __future__ import annotations

import msgspec
import pytest
from network_factory import NetworkFactory

from paradl_bench.network.equal_blocks import KEPT, without_equal_blocks
from paradl_bench.network.graph import ModelGraph


def stack(*widths: int) -> ModelGraph:
    """16 -> a block of two linear layers for each width, which end in 16 features -> loss."""
    factory = NetworkFactory(16)
    for number, width in enumerate(widths):
        factory.linear(f"body.{number}.one", width)
        factory.relu(f"body.{number}.act")
        factory.linear(f"body.{number}.two", 16)
    factory.linear("head", 4)
    factory.loss()
    return factory.network("stack")


def test_blocks_that_others_equal_are_left_out() -> None:
    network = stack(*[32] * 9)
    few = without_equal_blocks(network)
    assert len(few.network.layers) == len(network.layers) - 3 * (9 - KEPT)
    assert len(few.layers) == len(network.layers)
    assert [few.network.layers[at].operation for at in few.layers] == [layer.operation for layer in network.layers]
    shapes = [few.network.parameters[at].shape for at in few.parameters]
    assert shapes == [parameter.shape for parameter in network.parameters]
    assert sorted(set(few.layers)) == list(range(len(few.network.layers)))
    # What stands behind is read under its own name.
    assert few.network.layers[-2].inputs == (f"body.{KEPT - 1}.two",)


@pytest.mark.parametrize("widths", [[32] * KEPT, [32] * 4 + [64] + [32] * 4], ids=["few", "one that is another"])
def test_a_network_whose_blocks_are_needed_stays_whole(widths: list[int]) -> None:
    network = stack(*widths)
    few = without_equal_blocks(network)
    assert few.network is network
    assert few.layers == tuple(range(len(network.layers)))


def test_a_block_that_is_read_from_afar_stays() -> None:
    network = stack(*[32] * 9)
    layers = list(network.layers)
    layers[-2] = msgspec.structs.replace(layers[-2], inputs=("body.4.two",))
    network = msgspec.structs.replace(network, layers=tuple(layers))
    assert without_equal_blocks(network).network is network
