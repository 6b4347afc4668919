"""What a run says of the proof that its strategy trains the model as serial training does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paradl_bench.core.bounds import Count, Relative
from paradl_bench.core.files.storage import read_json
from paradl_bench.core.units import counted

VERIFICATION_FILE = "verification.json"


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proof, or why there is none.

    Attributes:
        why_not: in words; empty where the strategy was proved.
        dtype: of the proof. ``fp32`` where the model computes in it whatever it is given; empty where there was none.
        samples: of the mini-batch.
        largest_difference: of all that was compared, over the largest exact value of its tensor.
        mixes_samples: the first layer whose result for a sample depends on others; the serial model was then applied
            to the same parts of the mini-batch. Empty for none, or where that was not looked for.
    """

    why_not: str = ""
    dtype: Literal["", "fp64", "fp32"] = ""
    samples: Count = 0
    largest_difference: Relative = 0.0
    mixes_samples: str = ""

    def line(self) -> str:
        """What the summary says of it."""
        if self.why_not:
            return f"not verified against serial training: {self.why_not}"
        parts = ""
        if self.mixes_samples:
            parts = f" applied to the same parts of the mini-batch, since {self.mixes_samples} mixes samples,"
        return (
            f"verified against serial training{parts} on {counted(self.samples, 'sample')} in {self.dtype}: the largest"
            f" difference is {self.largest_difference:.1g} of a tensor's largest value"
        )


class VerifiedShards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a measurement of layers says of the parts of a model that it holds (file ``verification.json``).

    Attributes:
        shards: the strategy whose ranks hold them.
    """

    model: str
    shards: str
    verified: Verification


def read_verified_shards(directory: Path) -> tuple[VerifiedShards, ...]:
    """Of a measurement directory; nothing where it holds no parts, or is of before.

    Raises:
        UserError: unreadable, or a wrong field.
    """
    file = directory / VERIFICATION_FILE
    return read_json(file, tuple[VerifiedShards, ...]) if file.exists() else ()
