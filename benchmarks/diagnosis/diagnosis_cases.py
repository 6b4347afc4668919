"""Runs that are made worse on purpose, runs that are not, and the profiles that they are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from predict.validation.diagnosis import limitations as of

SHAPES = {
    "convolutions": "3x32x32",
    "many_channels": "3x8x8",
    "large_kernels": "3x16x16",
    "large_images": "3x64x64",
    "wide_linear": "2048x1x1",
    "depthwise": "8x512x512",
}
"""Of one sample, by network of :mod:`diagnosis_networks`."""
FAST_LINK = "--nodes 2 --link-bandwidth 10Gbit/s"
"""That limits nothing here. On emulated nodes ranks come before all else on their cores, so that the host's other
processes disturb none but those runs that are to be disturbed."""
SLOW_LINK = "--nodes 2 --link-bandwidth 100Mbit/s"
UPLINK = "--nodes 2 --link-bandwidth 1Gbit/s"
NODES_OF_FOUR = "--nodes 2 --ranks-per-node 4 --link-bandwidth 200Mbit/s"
Beside = Literal["", "process beside rank 1", "processes beside all ranks", "traffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and its diagnosis.

    Attributes:
        name: of its directory. made: how it was made worse, in words.
        cause: the row that has to be named first; empty for a clean run.
        train: strategy, batch and further options of ``paradl-bench train``.
        beside: what else runs on the host meanwhile. profile: of :data:`PROFILES`. diagnose: options of its own.
        emulated: whether layers sleep.
    """

    name: str
    model: str
    train: str
    cause: str = ""
    made: str = ""
    beside: Beside = ""
    profile: str = "fast-link"
    diagnose: str = ""
    iterations: int = 24
    emulated: bool = False


_LAYERS = "--ranks-on-host 2 --isolated none --blocks 3 --iterations 2 --warmup 1 --no-verify"
"""Ranks of emulated nodes share this host too: layers are measured with two."""
_SWEEP = "--blocks 2 --point-seconds 0.05"
_BETWEEN = "--ops all_reduce,all_gather,reduce_scatter,broadcast,send_recv,exchange"
LAYERS = {
    "layers-convolutions": ("convolutions", "--batch 1,4,8,16 --shards f2,c2,s2"),
    "layers-many_channels": ("many_channels", "--batch 4,8,16,32 --shards f2"),
    "layers-large_kernels": ("large_kernels", "--batch 4 --shards f2,c2"),
    "layers-large_images": ("large_images", "--batch 2 --shards s2"),
    "layers-wide_linear": ("wide_linear", "--batch 1,4,16 --shards f2"),
    "layers-wide_linear-adam": ("wide_linear", "--batch 4 --shards f2 --optimizer adam"),
    "layers-depthwise": ("depthwise", "--batch 1,4 --shards s2"),
}
"""Networks and what is measured of them, by directory."""
SWEEPS = {
    "sweep-fast-link": f"{FAST_LINK} --ranks-per-node 1 {_BETWEEN} --sizes 1K:64M:16 --contexts after-compute {_SWEEP}",
    "sweep-slow-link": f"{SLOW_LINK} --ranks-per-node 1 {_BETWEEN} --sizes 1K:4M:8 {_SWEEP}",
    "sweep-uplink": f"{UPLINK} --ranks-per-node 1 --ops all_reduce,broadcast --sizes 1K:64M:16 {_SWEEP}",
    "sweep-inside": f"{NODES_OF_FOUR} --side-by-side 4 --ops all_gather,all_reduce --sizes 1K:2M:8 {_SWEEP}",
    "sweep-across": f"{NODES_OF_FOUR} --ops all_reduce,broadcast --sizes 1K,64K,1M,8M {_SWEEP}",
    "sweep-at-once": f"{NODES_OF_FOUR} --ranks 2 --contexts groups=4 --ops all_reduce --sizes 1K,64K,1M,8M {_SWEEP}",
    "sweep-host": f"--ranks 2 --ops all_reduce,all_gather,broadcast,send_recv --sizes 1K:16M:16 {_SWEEP}",
}
"""Collectives and where, by directory."""
PROFILES = {
    "fast-link": ("sweep-fast-link",),
    "slow-link": ("sweep-slow-link",),
    "uplink": ("sweep-uplink",),
    "nodes-of-four": ("sweep-inside", "sweep-across", "sweep-at-once"),
    "host": ("sweep-host",),
}
"""Sweeps that a profile is fitted from, beside all layers."""


def layers_arguments(directory: str) -> list[str]:
    """Arguments of ``paradl-bench`` that measure a network's layers."""
    model, options = LAYERS[directory]
    return ["layers", f"diagnosis_networks:{model}", "--input-shape", SHAPES[model], *options.split(), *_LAYERS.split()]


def train_arguments(case: Case, profile: str) -> list[str]:
    """Arguments of ``paradl-bench`` that make a case's run.

    Args:
        profile: whose seconds layers sleep where they do.
    """
    shape = ["--input-shape", SHAPES[case.model]]
    length = ["--iterations", str(case.iterations), "--warmup", "3"]
    slept = ["--emulate", profile] if case.emulated else ["--no-verify"]
    return ["train", f"diagnosis_networks:{case.model}", *shape, *case.train.split(), *length, *slept]


CAUSES = (
    Case(
        name="many-parameters",
        cause=of.GRADIENT_EXCHANGE,
        made="67 MB of gradients, 4 samples a rank, a link of 1 Gbit/s",
        model="wide_linear",
        train=f"--strategy d2 --batch 8 {UPLINK}",
        profile="uplink",
        iterations=10,
    ),
    Case(
        name="slow-link-d2",
        cause=of.GRADIENT_EXCHANGE,
        made="a link of 100 Mbit/s",
        model="convolutions",
        train=f"--strategy d2 --batch 8 {SLOW_LINK}",
        profile="slow-link",
    ),
    Case(
        name="slow-link-f2",
        cause=of.LAYER_WISE,
        made="a link of 100 Mbit/s",
        model="convolutions",
        train=f"--strategy f2 --batch 8 {SLOW_LINK}",
        profile="slow-link",
        iterations=10,
    ),
    Case(
        name="slow-link-c2",
        cause=of.LAYER_WISE,
        made="a link of 100 Mbit/s",
        model="convolutions",
        train=f"--strategy c2 --batch 8 {SLOW_LINK}",
        profile="slow-link",
        iterations=10,
    ),
    Case(
        name="slow-link-s2",
        cause=of.HALO,
        made="a link of 100 Mbit/s",
        model="depthwise",
        train=f"--strategy s2 --batch 4 {SLOW_LINK}",
        profile="slow-link",
    ),
    Case(
        name="slow-link-p2",
        cause=of.PIPELINE_MESSAGES,
        made="a link of 100 Mbit/s, 8 micro-batches",
        model="convolutions",
        train=f"--strategy p2 --batch 8 --micro-batches 8 {SLOW_LINK}",
        profile="slow-link",
        iterations=10,
    ),
    Case(
        name="one-micro-batch",
        cause=of.BUBBLES,
        made="one micro-batch",
        model="convolutions",
        train=f"--strategy p2 --batch 8 --micro-batches 1 {FAST_LINK}",
    ),
    Case(
        name="uneven-stages",
        cause=of.IMBALANCE,
        made="one layer on the first stage, 16 micro-batches",
        model="convolutions",
        train=f"--strategy p2 --batch 16 --micro-batches 16 --stages 4 {FAST_LINK}",
        iterations=12,
    ),
    Case(
        name="busy-rank-d2",
        cause=of.IMBALANCE,
        made="a busy process on the core of rank 1",
        model="convolutions",
        train="--strategy d2 --batch 8",
        profile="host",
        beside="process beside rank 1",
    ),
    Case(
        name="busy-rank-f2",
        cause=of.IMBALANCE,
        made="a busy process on the core of rank 1",
        model="many_channels",
        train="--strategy f2 --batch 8",
        profile="host",
        beside="process beside rank 1",
        iterations=10,
    ),
    Case(
        name="shared-links",
        cause=of.CONTENTION,
        made="four groups on each link of 200 Mbit/s",
        model="many_channels",
        train=f"--strategy d2f4 --batch 16 {NODES_OF_FOUR}",
        profile="nodes-of-four",
        iterations=8,
        emulated=True,
    ),
    Case(
        name="foreign-traffic",
        cause=of.CONGESTION,
        made="60 MB of foreign traffic every 1.5 s on a link of 1 Gbit/s",
        model="convolutions",
        train=f"--strategy d2 --batch 32 {UPLINK}",
        beside="traffic",
        profile="uplink",
        iterations=60,
    ),
    Case(
        name="little-memory",
        cause=of.REDUNDANT_MEMORY,
        made="--memory 64MiB a rank",
        model="many_channels",
        train=f"--strategy d2 --batch 32 {FAST_LINK}",
        diagnose="--memory 64MiB",
        iterations=8,
    ),
    Case(
        name="adam",
        cause=of.WEIGHT_UPDATE,
        made="Adam on 67 MB of parameters, 4 samples",
        model="wide_linear",
        train=f"--strategy f2 --batch 4 --optimizer adam {FAST_LINK}",
    ),
    Case(
        name="small-micro-batches",
        cause=of.REDUNDANT_COMPUTE,
        made="16 micro-batches of a sample, which take as long as all at once",
        model="wide_linear",
        train=f"--strategy p2 --batch 16 --micro-batches 16 {FAST_LINK}",
        iterations=12,
    ),
    Case(
        name="much-cutting",
        cause=of.SPLIT_AND_CONCATENATE,
        made="convolutions of one channel, whose images are cut and padded",
        model="depthwise",
        train=f"--strategy s2 --batch 4 {FAST_LINK}",
    ),
    Case(
        name="few-samples",
        cause=of.RANKS,
        made="two samples for two ranks",
        model="depthwise",
        train=f"--strategy d2 --batch 2 {FAST_LINK}",
    ),
    Case(
        name="busy-host",
        cause=of.SLOWER_LAYERS,
        made="a busy process on each core",
        model="convolutions",
        train="--strategy d2 --batch 8",
        profile="host",
        beside="processes beside all ranks",
    ),
)

CLEAN = (
    # Sizes are such that all communication, and all waiting for other stages, is predicted far below the share from
    # which on it is present: what is as long as predicted there is a limitation, and the run not clean.
    Case(name="clean-d2", model="convolutions", train=f"--strategy d2 --batch 8 {FAST_LINK}"),
    Case(name="clean-d2-large", model="convolutions", train=f"--strategy d2 --batch 16 {FAST_LINK}", iterations=12),
    Case(
        name="clean-d2-accumulate",
        model="convolutions",
        train=f"--strategy d2 --batch 16 --accumulate 2 {FAST_LINK}",
        iterations=12,
    ),
    Case(name="clean-z1d2", model="convolutions", train=f"--strategy z1d2 --batch 8 {FAST_LINK}"),
    Case(name="clean-z3d2", model="large_images", train=f"--strategy z3d2 --batch 4 {FAST_LINK}", iterations=12),
    Case(name="clean-many-d2", model="many_channels", train=f"--strategy d2 --batch 64 {FAST_LINK}", iterations=8),
    Case(name="clean-f2", model="large_kernels", train=f"--strategy f2 --batch 4 {FAST_LINK}", iterations=12),
    Case(name="clean-c2", model="large_kernels", train=f"--strategy c2 --batch 4 {FAST_LINK}", iterations=12),
    Case(name="clean-s2", model="large_images", train=f"--strategy s2 --batch 2 {FAST_LINK}", iterations=12),
    Case(
        name="clean-p2",
        model="many_channels",
        train=f"--strategy p2 --batch 192 --micro-batches 48 --schedule 1f1b {FAST_LINK}",
        iterations=8,
    ),
)
