"""The profile of an emulated cluster: collectives and copies as measured there, layers of a synthetic device.

The seconds that layers sleep are those of a device of a V100's rates, half of its peak and three quarters of its
bandwidth (15.7 TFLOP/s in fp32 and 900 GB/s, NVIDIA's data sheet of the V100 SXM2), by flops and bytes of every layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from repetitions import run

from calibrate.profile.profile import Device, LayerTime, ModelTime, Profile, read_profile, write_profile
from paradl_bench.core.statistics import Summary
from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
from paradl_bench.records.contexts.context import OfGroup
from paradl_bench.records.measurement import is_complete

BATCH = 16
"""Global, at every size: strategies of a size are ranked."""
BLOCKS = 2
LAYER_SIZES = (4 * 1024, 64 * 1024, 256 * 1024, 1024**2)
"""Of messages between layers, stages and parts of images, which the models send 1 MiB of at most."""
CROSSED_SIZES = (64 * 1024, 1024**2)
"""Likewise, of what is inside of a node while gradients go over all nodes: an all-reduce of those takes a second."""
_SEGMENT_SIZE = 8 * 1024**2
BUCKET_SIZES = (4 * 1024, 256 * 1024, 4 * 1024**2, 16 * 1024**2, 32 * 1024**2)
"""Of gradients: 8 to 35 MB at DDP's bucket size, 4 MB and more at the small one, and statistics of images."""
FEW_RANKS = 8
"""That train by every strategy: more do not exchange gradients by leaders, and share no layers over nodes."""
AT_ONCE = ("all_reduce",)
"""What replicas of shared layers, and segments of buckets, do at once over nodes."""
FLOPS, BYTES_PER_S, CALL_S = 0.5 * 15.7e12, 0.75 * 900e9, 5e-6
"""Rates of the synthetic device, and what every operation takes at least."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of a layout, as its ranks measure them.

    Attributes:
        directory: that they are measured into.
    """

    directory: str
    request: CollectivesRequest

    @property
    def complete(self) -> bool:
        """Whether it was measured to its end."""
        return is_complete(Path(self.directory))


def sweeps_of(base: Path, layout: NodeLayout) -> list[Sweep]:
    """What calibrates a layout: messages between layers, buckets of gradients, and groups that share links.

    Those inside of nodes are swept as far as segments of buckets reach, which gather and reduce there, and what leaders
    send there as far as whole buckets. All nodes call at once: they share this host's cores, and what a node's ranks do
    is to be seen while others do as much, which they begin together in runs.
    """
    lone = layout.nodes == 1
    between = ("all_gather", "broadcast", "send_recv", "exchange")
    of_node = (*between, "reduce_scatter")
    to_segments = (*LAYER_SIZES, _SEGMENT_SIZE)
    # Groups of one rank on each node; of two where there is one node.
    groups = layout.ranks // 2 if lone and layout.ranks > 2 else layout.ranks_per_node
    # Over more nodes buffers are broadcast, and layers' messages stay inside of them.
    over_nodes = between if layout.ranks <= FEW_RANKS else ("broadcast",)
    found = {
        "layers": asked(layout, of_node if lone else over_nodes, to_segments if lone else LAYER_SIZES, waited=True),
        "buckets": asked(layout, ("all_reduce",), BUCKET_SIZES, waited=True),
        "beside": asked(layout, ("all_reduce",), LAYER_SIZES[:1], beside=True, blocks=1),
    }
    if not lone:
        on_node = layout.ranks_per_node
        # What layers send inside of nodes while gradients are reduced over all of them.
        found["crossed"] = asked(layout, ("all_gather", "exchange"), CROSSED_SIZES, side_by_side=on_node, crossed=True)
        exchanged = (*(name for name in of_node if name != "broadcast"), "all_reduce")
        found["inside"] = asked(layout, exchanged, to_segments, side_by_side=on_node, waited=True)
        found["beside-inside"] = asked(
            layout, ("all_reduce",), LAYER_SIZES[:1], side_by_side=on_node, beside=True, blocks=1
        )
        # What leaders send, by whole buckets: on more nodes no run has them.
        if layout.ranks <= FEW_RANKS:
            found["inside-buckets"] = asked(layout, ("reduce", "broadcast"), BUCKET_SIZES, side_by_side=on_node)
    if groups < layout.ranks:
        at_once = (*AT_ONCE, *(("broadcast", "all_gather", "send_recv", "exchange") if lone else ()))
        found["at-once"] = asked(layout, at_once, to_segments, concurrent=groups)
    return named(base, layout, found)


def named(base: Path, layout: NodeLayout, requests: Mapping[str, CollectivesRequest]) -> list[Sweep]:
    """Sweeps of a layout, each in a directory of its name."""
    return [
        Sweep(directory=str(base / f"{layout}" / f"sweep-{name}"), request=request)
        for name, request in requests.items()
    ]


def asked(
    layout: NodeLayout,
    operations: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    concurrent: int = 1,
    side_by_side: int | None = None,
    waited: bool = False,
    crossed: bool = False,
    beside: bool = False,
    blocks: int = BLOCKS,
) -> CollectivesRequest:
    """A sweep of a layout.

    Args:
        side_by_side: among so many ranks each, of all nodes at once. waited: measure calls also as layers wait for
            them: behind ghosts, and where there is one node beside gradients in flight. crossed: beside such that are
            in flight over all nodes.
        beside: measure what ghosts and all-reduces side by side cost each other.
    """
    contexts: dict[OfGroup, bool] = {
        "with-compute": beside,
        "after-compute": waited,
        # Over nodes replicas reduce gradients while layers inside of one communicate, which is measured apart.
        "with-all-reduce": crossed or (waited and layout.nodes == 1),
    }
    return CollectivesRequest(
        ranks=layout.ranks // concurrent,
        concurrent=concurrent,
        side_by_side=side_by_side,
        layout=layout,
        operations=operations,
        sizes=sizes,
        blocks=blocks,
        point_s=0.1,
        backend="gloo",
        device="cpu",
        seed=0,
        contexts=tuple(context for context, asked in contexts.items() if asked),
    )


def measure_copies(host: Path, layout: NodeLayout) -> None:
    """Copies of gradients, which ghosts' ranks make for real, all ranks at once; what layers take is not used."""
    command = (
        f"layers resnet18 --input-shape 3x32x32 --batch 2 --ranks-on-host {layout.ranks} --isolated none --blocks 2"
    )
    if not is_complete(host):
        run("paradl_bench", [*command.split(), "-o", str(host)])


def fit(profile: Path, sweeps: Iterable[Sweep], host: Path, networks: Sequence[ModelGraph]) -> None:
    """Write a cluster's profile: its collectives as measured, layers as the synthetic device has them."""
    fitted = profile.with_name("measured.json")
    complete = [sweep.directory for sweep in sweeps if sweep.complete]
    run("calibrate", ["fit", *complete, str(host), "--force", "-o", str(fitted)])
    write_profile(profile, with_synthetic_layers(read_profile(fitted), networks))


def with_synthetic_layers(profile: Profile, networks: Sequence[ModelGraph]) -> Profile:
    """The profile with the seconds of these networks' layers on the synthetic device, and none of what was measured.

    Its copies of gradients become those of a node's ranks while the ranks of all other nodes copy as well.
    """
    layers = {layer.operation: (layer, network) for network in networks for layer in network.layers}
    device = Device(
        name="synthetic: half of a V100's peak, three quarters of its bandwidth",
        kind="cpu",
        memory_bytes=16 * 1024**3,
        devices_per_host=profile.cluster.ranks_per_node,
        peak_flops=FLOPS,
        memory_bandwidth_bytes_per_s=BYTES_PER_S,
    )
    return msgspec.structs.replace(
        profile,
        devices=(device,),
        network={network.name: network for network in networks},
        copies=tuple(
            msgspec.structs.replace(copy, ranks_on_host=profile.cluster.ranks_per_node) for copy in profile.copies
        ),
        layer_times=tuple(
            LayerTime(
                operation=operation,
                phase=phase,
                mode="in_situ",
                batch=batch,
                dtype="fp32",
                ranks_on_host=1,
                time=_exactly(synthetic_seconds(layer, network, phase, batch)),
                block_relative_sd=0.0,
            )
            for operation, (layer, network) in layers.items()
            for phase in ("FW", "BW")
            for batch in (1, 2, 4, 8, 16)
        ),
        model_times=tuple(_model_time(network) for network in networks),
    )


def synthetic_seconds(layer: Layer, network: ModelGraph, phase: str, batch: int) -> float:
    """What a layer takes: its call, and its flops or bytes, whichever takes longer; backward moves twice as many."""
    held = {parameter.name: parameter.bytes for parameter in network.parameters}
    moved = layer.fw_bytes * batch + sum(held.get(name, 0) for name in layer.parameters)
    if phase == "FW":
        return CALL_S + max(layer.fw_flops * batch / FLOPS, moved / BYTES_PER_S)
    flops = (layer.bw_input_flops + layer.bw_weight_flops) * batch
    return CALL_S + max(flops / FLOPS, 2 * moved / BYTES_PER_S)


def _exactly(seconds: float) -> Summary:
    return Summary(median_s=seconds, typical_s=seconds, iqr_s=0.0, minimum_s=seconds, samples=1)


def phase_seconds(network: ModelGraph) -> dict[str, float]:
    """Seconds of a serial iteration on the whole batch, by phase."""
    of_layers = {
        phase: sum(synthetic_seconds(layer, network, phase, BATCH) for layer in network.layers)
        for phase in ("FW", "BW")
    }
    # Parameters and gradients are read, parameters written.
    return {**of_layers, "WU": 3 * sum(parameter.bytes for parameter in network.parameters) / BYTES_PER_S}


def _model_time(network: ModelGraph) -> ModelTime:
    seconds = phase_seconds(network)
    return ModelTime(
        model=network.name,
        batch=BATCH,
        dtype="fp32",
        optimizer="sgd",
        ranks_on_host=1,
        fw=_exactly(seconds["FW"]),
        bw=_exactly(seconds["BW"]),
        wu=_exactly(seconds["WU"]),
        iteration=_exactly(sum(seconds.values())),
        fw_between=_exactly(0.0),
        bw_between=_exactly(0.0),
        remainder_relative=0.0,
        remainder_interval=(0.0, 0.0),
        noise_floor_relative=0.0,
        common_relative_sd=0.0,
        iteration_relative_quantiles=(1.0, 1.0),
    )
