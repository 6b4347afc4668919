"""What a profile of published measurements says of itself: whose numbers it holds, and how far to trust them."""

from __future__ import annotations

import msgspec


class Publication(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published measurements.

    Attributes:
        name: as predictions call it. source: repository and commit, or a data sheet. licence: of the measurements.
        holds: what was taken of it: kinds of kernels with dtype, collectives with message sizes.
    """

    name: str
    source: str
    licence: str
    holds: tuple[str, ...]


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile of published measurements is of.

    Attributes:
        device: its data sheet's name. dtypes: that it predicts.
        valid: where it holds, in words. lacks: what no table has, in words.
        accuracy: of kernels that regressors had not seen, and of whole iterations, where that was proven.
    """

    device: str
    dtypes: tuple[str, ...]
    publications: tuple[Publication, ...]
    valid: str
    lacks: tuple[str, ...]
    accuracy: tuple[str, ...]
