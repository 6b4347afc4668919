"""What is fuzzed of a profile's regressors: the archive's bytes, and the numbers in its arrays.

An archive carries sums of its members, and its profile carries the archive's: changed bytes would be refused at once by
either. So the sums are made of the changed content, as somebody would who wrote such a file by a program of their own.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calibrate.kernels.features import kernels_of, process_features
from calibrate.kernels.files import write_arrays
from calibrate.kernels.model import KernelModel, SizeRange, estimate
from calibrate.kernels.trees import arrays_of
from paradl_bench.core.errors import UserError
from paradl_bench.network.kernel import KernelShape

_MEMBER = re.compile(rb"^>>> ([a-z0-9/]{1,40}\.npy)\n", re.MULTILINE)
_SHAPE = KernelShape(
    kind="linear", stage="FW", sizes={"batch": 8, "in_features": 32, "out_features": 16}, flops=8192, bytes=5000
)
_MODEL = KernelModel(
    kind="linear",
    stage="FW",
    dtype="fp32",
    kernels=60,
    model="trees and mlp",
    inputs=tuple(SizeRange(name=name, low=1, high=64) for name in _SHAPE.sizes),
    floor_s=1e-6,
    peak_flops=1e11,
    bandwidth_bytes_per_s=1e10,
    interval_log=0.1,
    typical_distance=0.5,
    candidates=(),
    file="",
    sha256="",
    arrays="0",
)


def _arrays() -> dict[str, Any]:
    """Regressors of every kind, as small as they can be."""
    leaf = {"leaf_value": 0.1}
    tree = {"split_feature": 0, "threshold": 1.5, "left_child": leaf, "right_child": leaf}
    deeper = {"split_feature": 1, "threshold": 3.0, "left_child": tree, "right_child": leaf}
    grown = arrays_of({"tree_info": [{"tree_structure": deeper}, {"tree_structure": leaf}]})
    widths = [3, 2, 2, 2, 2, 2, 1]
    network: dict[str, Any] = {}
    for index, (wide, out) in enumerate(itertools.pairwise(widths)):
        network |= {f"weight{index}": np.full((out, wide), 0.1), f"bias{index}": np.zeros(out)}
    found = {f"0/{kind}/{name}": array for kind in ("trees", "plain") for name, array in grown.items()}
    features = process_features(kernels_of([_SHAPE]), tuple(_SHAPE.sizes)).shape[1]
    process = {name: np.ones(features) for name in ("mean", "scale", "length")}
    process |= {"points": np.full((4, features), 0.5), "weights": np.full(4, 0.1), "plane": np.zeros(features + 1)}
    process |= {"offset": np.zeros(1), "variances": np.ones(3)}
    found |= {f"0/process/{name}": array for name, array in process.items()}
    return found | {f"0/mlp/{name}": array for name, array in network.items()} | {"0/seen": np.ones((4, 3))}


def archive_target(folder: Path) -> Callable[[Path], object]:
    """Of a file of members, or of the bytes of a whole archive."""
    archive = folder / "profile.kernels.npz"

    def read(path: Path) -> object:
        content = path.read_bytes()
        parts = _MEMBER.split(content)
        if len(parts) > 1:
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as out:
                for name, member in dict(zip(parts[1::2], parts[2::2], strict=True)).items():
                    out.writestr(name.decode(), member[:-1])
            content = packed.getvalue()
        archive.write_bytes(content)
        return _asked(_MODEL, archive, hashlib.sha256(content).hexdigest())

    return read


def values_target(folder: Path) -> Callable[[Path], object]:
    """Of a JSON document: the regressor as a profile has it, and the arrays as lists."""
    archive = folder / "profile.kernels.npz"

    def read(path: Path) -> object:
        try:
            document = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
            model = msgspec.convert(document.get("model", {}), KernelModel)
            arrays = {name: np.array(values) for name, values in document.get("arrays", {}).items()}
            sha256 = write_arrays(archive, arrays)
        except (ValueError, UnicodeError, OverflowError, TypeError, RecursionError) as error:
            # Nobody's arrays: this is no reader of ours.
            raise UserError(f"no arrays: {error}") from None
        return _asked(model, archive, sha256)

    return read


def _asked(model: KernelModel, archive: Path, sha256: str) -> None:
    for regressor in ("trees and mlp", "plain trees", "process"):
        asked = msgspec.structs.replace(model, model=regressor, file=str(archive), sha256=sha256)
        found = estimate(asked, _SHAPE)
        if found is not None:
            assert math.isfinite(found.seconds)
            assert found.seconds > 0


def regressor_seeds() -> Mapping[str, list[bytes]]:
    """What the two targets start from."""
    members = b""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for name, array in _arrays().items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array))
            members += b">>> " + name.encode() + b".npy\n" + member.getvalue() + b"\n"
            out.writestr(f"{name}.npy", member.getvalue())
    document = {
        "model": msgspec.to_builtins(_MODEL),
        "arrays": {name: array.tolist() for name, array in _arrays().items()},
    }
    return {"regressors.npz": [members, packed.getvalue()], "regressors": [json.dumps(document).encode()]}
