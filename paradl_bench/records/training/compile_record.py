"""What compiling took and made of a model: in ``run.json``, and in ``compiled.jsonl`` beside measured layers."""

from __future__ import annotations

from typing import Literal

import msgspec

from paradl_bench.core.bounds import PositiveCount, RankIndex, Seconds

COMPILED_FILE = "compiled.jsonl"


class CompileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank compiled before anything was timed; no iteration holds any of its time.

    Attributes:
        batch: of this rank.
        what: the model ``whole``, as it is trained, or its ``layers``, each operation by itself.
        compile_s: in the compiler, forward's and backward's kernels; what an earlier run left in torch's cache on disk
            is not compiled again.
        graphs: that were compiled. Of a whole model more than one where its code could not be followed, and ran as it
            stands.
    """

    rank: RankIndex
    model: str
    batch: PositiveCount
    what: Literal["whole", "layers"]
    compile_s: Seconds
    graphs: PositiveCount
