"""Blocks that are another one's with two dims in turn, as s1x2 is s2 on square inputs: predicted alike, found once."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.strategies.spatial.region import spatial_region


def like_dims(network: ModelGraph, until: str | None = None) -> tuple[int, ...]:
    """Per spatial dim of the input, the first one that is like it before ``until``: in extents and in windows."""
    dims = len(network.input_shape) - 1
    try:
        region = spatial_region(network, (1,) * dims, until=until)
    except UserError:
        return tuple(range(dims))
    kinds = layer_kinds()
    of_dims: list[list[object]] = [[extent] for extent in network.input_shape[1:]]
    for index in region.layers:
        layer = network.layers[index]
        windows = kinds[layer.kind].windows
        along: list[Sequence[object]] = [shape[1:] for shape in (*layer.input_shapes, layer.output_shape)]
        along += [windows(layer.attributes)] if windows is not None else []
        for dim, features in enumerate(of_dims):
            features += [values[dim] for values in along]
    return tuple(of_dims.index(features) for features in of_dims)


def mirrored_dims(profile: Profile, network: ModelGraph, until: str | None = None) -> tuple[int, ...]:
    """As :func:`like_dims`; but every dim by itself where the profile may tell blocks of one shape from another's.

    Shards that were measured, layers of networks that are not square, and regressors of kernels have a block of 4x8
    take other seconds than one of 8x4.
    """
    oblong = any(len(known.input_shape) > 2 and len(set(like_dims(known))) > 1 for known in profile.network.values())
    shards = {time.shard for time in profile.layer_times} | {time.shard for time in profile.shard_times}
    of_blocks = any(shard.startswith(kind.letter) for shard in shards for kind in kinds_with(Trait.CUTS_POSITIONS))
    if oblong or of_blocks or profile.kernel_models:
        return tuple(range(len(network.input_shape) - 1))
    return like_dims(network, until)


def is_first_written(parts: Sequence[int], like: Sequence[int]) -> bool:
    """Whether of all blocks alike (by :func:`mirrored_dims`) this is the one with most parts along the first dims."""
    last: dict[int, int] = {}
    for count, dim in zip(parts, like, strict=False):
        if count > last.get(dim, count):
            return False
        last[dim] = count
    return True
