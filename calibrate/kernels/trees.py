"""Gradient-boosted trees: grown by LightGBM, kept as arrays, evaluated with numpy alone.

LightGBM rather than scikit-learn: it gives its trees away as JSON (``dump_model`` is public), needs numpy and scipy
only, and its L1 loss finds the median, which a few kernels of twice the usual time do not move. The boosting itself is
no place for own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.kernels.files import Arrays
from paradl_bench.core.statistics import Floats

ROUNDS = 600
PARAMETERS: dict[str, Any] = {
    "objective": "l1",
    "learning_rate": 0.05,
    "num_leaves": 31,
    "min_data_in_leaf": 10,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.6,
}
UNTUNED: dict[str, Any] = {}
"""LightGBM's own defaults, 100 rounds: what trees do that nobody thought about."""
UNTUNED_ROUNDS = 100


def grow_trees(
    features: Floats, target: Floats, *, seed: int, rounds: int = ROUNDS, parameters: Mapping[str, Any] = PARAMETERS
) -> Arrays:
    """Fit trees to a target per row of features; on one thread, so that they are the same on every machine."""
    import lightgbm

    settings = {**parameters, "seed": seed, "deterministic": True, "force_row_wise": True, "num_threads": 1}
    # A leaf that needs more kernels than there are could not be split at all.
    settings["min_data_in_leaf"] = min(settings.get("min_data_in_leaf", 20), max(2, len(target) // 20))
    settings["verbose"] = -1
    booster = lightgbm.train(settings, lightgbm.Dataset(features, target), rounds)
    return arrays_of(booster.dump_model())


def arrays_of(dumped: Mapping[str, Any]) -> Arrays:
    """The trees of LightGBM's JSON as arrays: inner nodes of all trees one after the other.

    Attributes of the answer:
        ``feature``, ``threshold``: values up to the threshold go left. ``left``, ``right``: index of the next inner
        node, or -1 - index of a leaf. ``leaf``: values. ``root``: per tree, an index likewise.
    """
    feature: list[int] = []
    threshold: list[float] = []
    left: list[int] = []
    right: list[int] = []
    leaf: list[float] = []
    root: list[int] = []
    for tree in dumped["tree_info"]:
        # An own stack: trees may be deeper than Python recurses.
        pending: list[tuple[Mapping[str, Any], list[int], int]] = [(tree["tree_structure"], root, len(root))]
        root.append(0)
        while pending:
            node, links, at = pending.pop()
            if "split_feature" not in node:
                links[at] = -1 - len(leaf)
                leaf.append(float(node["leaf_value"]))
                continue
            links[at] = len(feature)
            feature.append(int(node["split_feature"]))
            threshold.append(float(node["threshold"]))
            left.append(0)
            right.append(0)
            pending += [(node["left_child"], left, len(left) - 1), (node["right_child"], right, len(right) - 1)]
    return {
        "feature": np.array(feature, np.int32),
        "threshold": np.array(threshold, float),
        "left": np.array(left, np.int32),
        "right": np.array(right, np.int32),
        "leaf": np.array(leaf, float),
        "root": np.array(root, np.int32),
    }


def check_trees(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Make sure that every way through the trees ends in a leaf.

    Raises:
        ValueError: a link leads nowhere or back. KeyError: an array is missing.
    """
    feature, threshold, left, right, leaf, root = (
        arrays[name] for name in ("feature", "threshold", "left", "right", "leaf", "root")
    )
    nodes, leaves = feature.size, leaf.size
    if any(array.ndim != 1 for array in (feature, threshold, left, right, leaf, root)):
        raise ValueError("arrays of trees have one dimension")
    if any(array.size != nodes for array in (threshold, left, right)):
        raise ValueError("arrays of trees differ in length")
    if any(array.dtype.kind != "i" for array in (feature, left, right, root)):
        raise ValueError("links of trees are whole numbers")
    for links, least in ((left, np.arange(nodes) + 1), (right, np.arange(nodes) + 1), (root, np.zeros(root.size))):
        inner = links >= 0
        if (links[inner] < least[inner]).any() or (links >= nodes).any() or (links < -leaves).any():
            raise ValueError("a link of a tree leads nowhere")
    if (feature < 0).any():
        raise ValueError("a tree splits by no feature")


def evaluate_trees(arrays: Mapping[str, NDArray[Any]], features: Floats) -> Floats:
    """Sum of the leaves that each row of ``features`` falls into."""
    at = np.tile(arrays["root"], (len(features), 1))
    rows = np.arange(len(features))[:, None]
    while len(arrays["feature"]) and (inner := at >= 0).any():
        node = np.where(inner, at, 0)
        goes_left = features[rows, arrays["feature"][node]] <= arrays["threshold"][node]
        at = np.where(inner, np.where(goes_left, arrays["left"][node], arrays["right"][node]), at)
    return np.asarray(arrays["leaf"][-1 - at].sum(axis=1), float)
