"""Random modules that once trained otherwise than serial, or issued other collectives than planned; one a kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="products of experts in double precision are transformers' own")

from random_modules.case import Case
from random_modules.run import run

pytestmark = pytest.mark.distributed

SMALL = {"bucket_cap_mb": 0.001}
FAILED_ONCE = {
    "replicas begin the second iteration with the first one's running statistics": Case(
        number=112, strategy="d2", options=SMALL
    ),
    "gradients of a recurrent layer arrive in an order of the CPU's kernels": Case(
        number=398, strategy="z1d2", options=SMALL
    ),
    "the input's gradient is none of what filter parallelism parts": Case(
        number=179, strategy="f3", options=SMALL | {"filter_backward": "reduce-scatter"}
    ),
    "a module is called though nothing of it runs": Case(number=28001970, strategy="z3d2", options=SMALL),
    "a part of the sequence is changed in place": Case(
        number=28001970, family="decoder", strategy="t2", options=SMALL | {"sequence_parallel": "on"}
    ),
    "layers of several units gather one part of the sequence": Case(
        number=41000406, family="decoder", strategy="z2d2t2", options=SMALL | {"sequence_parallel": "on"}
    ),
    "a unit is given one tensor several times": Case(number=41000381, strategy="z3d2c2", options={}),
    "Adam divides the rounding of a gradient that is zero by its size": Case(
        number=51000569, strategy="z1d1s2", options={"optimizer": "adamw", "batch_norm": "sync", "accumulate": 3}
    ),
    "a module has parameters of two stages, and shards of one": Case(
        number=61000330, strategy="z3d2p2", options=SMALL | {"schedule": "1f1b", "micro_batches": 4}
    ),
    "two shared layers are used one after the other": Case(
        number=61000626, strategy="p2", options={"schedule": "zb", "micro_batches": 3}
    ),
    "one message sums the gradients of a layer on a part of the sequence": Case(
        number=71000299, family="decoder", strategy="z1d2t2", options=SMALL | {"sequence_parallel": "on"}
    ),
    "a unit's part of the sequence is changed in place": Case(
        number=61001556, family="decoder", strategy="z3d2t2", options={"sequence_parallel": "on"}
    ),
}


ALL = ("all",)


def _decoder(number: int, strategy: str, **options: Any) -> Case:
    return Case(number=number, family="decoder", strategy=strategy, options=options)


OF_KINDS = (
    _decoder(0, "z1d1e2", optimizer="adamw", bucket_cap_mb=0.001),
    _decoder(24, "d2e2", accumulate=2, bucket_cap_mb=0.001),
    _decoder(0, "z3d2e2", accumulate=2, clip_norm=0.5),
    _decoder(12, "x2", optimizer="adamw-fused", recompute=ALL),
    _decoder(6, "t2", sequence_parallel="on", accumulate=2, recompute=ALL),
    _decoder(6, "p2", schedule="1f1b", micro_batches=2, recompute=ALL),
    _decoder(6, "z3d2p2", schedule="1f1b", micro_batches=2, optimizer="adamw"),
    _decoder(6, "p2t2", schedule="zb", micro_batches=2, sequence_parallel="on"),
    _decoder(6, "p2t2", schedule="1f1b", micro_batches=2, sequence_parallel="on", recompute=ALL),
    _decoder(6, "p2x2", schedule="zb", micro_batches=2, context_exchange="ring"),
    _decoder(0, "p2e2", schedule="1f1b", micro_batches=2),
    _decoder(12, "z1d2x2", recompute=ALL),
    _decoder(23, "z3d1x2", bucket_cap_mb=0.001),
    _decoder(12, "x2t2", optimizer="adamw"),
    _decoder(6, "t2x2", context_exchange="ring", sequence_parallel="on", accumulate=2),
    _decoder(6, "z3d2t2", sequence_parallel="on", optimizer="adamw"),
    _decoder(23, "d2z3d2", optimizer="adamw", accumulate=2),
    _decoder(23, "z3d2", optimizer="adamw-fused", recompute=("blocks1.0.grouped_attention0_out",)),
    _decoder(6, "z3d2f2"),
    _decoder(23, "z3d2c2", optimizer="adamw-fused"),
    Case(number=22000053, strategy="z1d2s2", options=SMALL),
)
"""One of each kind of strategy and setting, which trains in seconds."""


def _found(cases: Iterable[Case]) -> dict[str, Any]:
    return {f"{result.number} {result.case}": (result.outcome, result.reasons) for result in run(cases)}


@pytest.mark.slow
def test_cases_of_each_kind_and_that_failed_once_are_equal() -> None:
    cases = (*FAILED_ONCE.values(), *OF_KINDS)
    assert _found(cases) == {f"{case.number} {case.label}": ("equal", ()) for case in cases}
