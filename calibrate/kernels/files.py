"""The archive of a profile's kernel regressors: NumPy arrays, no pickle, checked by hash before they are read."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import tokenize
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole, write_bytes_atomically

Arrays = dict[str, NDArray[Any]]

_MOST_BYTES = 1 << 30


def archive_beside(profile: Path) -> Path:
    """Where the regressors of a profile lie: ``profile.json`` has ``profile.kernels.npz``."""
    return profile.with_name(f"{profile.stem}.kernels.npz")


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Write an archive atomically, bytes that depend on the arrays alone; returns its SHA-256."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(arrays[name]), allow_pickle=False)
            # A fixed date: the same fit gives the same bytes.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())
    content = buffer.getvalue()
    write_bytes_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def copy_archive(path: Path, sha256: str, profile: Path) -> Path:
    """Put an archive beside another profile, unless it lies there; two archives of one profile differ in name.

    Raises:
        UserError: as :func:`read_arrays`. WorkError: it can't be written.
    """
    read_arrays(path, sha256)
    copied = profile.with_name(f"{profile.stem}.kernels-{sha256[:8]}.npz")
    write_bytes_atomically(copied, read_whole(path, most_bytes=_MOST_BYTES))
    return copied


@lru_cache(maxsize=4)
def read_arrays(path: Path, sha256: str) -> Mapping[str, NDArray[Any]]:
    """Arrays of an archive by name.

    Raises:
        UserError: missing, broken, or of another hash than the profile's.
    """
    # Few profiles have regressors, and every prediction would wait for it.
    import zipfile

    try:
        content = read_whole(path, most_bytes=_MOST_BYTES)
    except UserError as error:
        raise UserError(
            f"{error}; this file holds the profile's kernel regressors: keep it beside the profile"
        ) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(
            f"{path} is not the file that was written with the profile (its SHA-256 differs); run calibrate fit again"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                raise ValueError(f"it holds more than {_MOST_BYTES} bytes")
            return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in archive.infolist()}
    except (ValueError, TypeError, OSError, EOFError, KeyError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise UserError(f"{path} is not an archive of arrays: {error}") from None
    except (zipfile.BadZipFile, SyntaxError, tokenize.TokenError, MemoryError, RecursionError, struct.error) as error:
        raise UserError(f"{path} is not an archive of arrays: {error}") from None


def _array(content: bytes) -> NDArray[Any]:
    """An array of numbers from a ``.npy`` file; memory is asked for only once it is seen to be there."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"array of format {version[0]}.{version[1]}, not 1.0")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    data = content[stream.tell() :]
    if dtype.kind not in "fi" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"array of {dtype} and shape {shape} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")
