"""Random modules that once trained otherwise than serial, or issued other collectives than planned; one a kind."""

from __future__ import annotations

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
}


def _found(cases: list[Case]) -> dict[str, Any]:
    return {f"{result.number} {result.case}": (result.outcome, result.reasons) for result in run(cases)}


def test_cases_that_failed_once_are_equal() -> None:
    cases = list(FAILED_ONCE.values())
    assert _found(cases) == {f"{case.number} {case.label}": ("equal", ()) for case in cases}
