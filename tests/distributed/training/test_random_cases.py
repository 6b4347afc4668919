"""Random modules that once trained otherwise than serial, or issued other collectives than planned."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from random_modules.run import run

pytestmark = pytest.mark.distributed

FAILED_ONCE = {
    112: "replicas begin the second iteration with the first one's running statistics",
    398: "gradients of a recurrent layer arrive in an order of the CPU's kernels",
    179: "the input's gradient is none of what filter parallelism parts",
}


def test_cases_that_failed_once_are_equal() -> None:
    found = {result.number: (result.outcome, result.reasons) for result in run(FAILED_ONCE)}
    assert found == {number: ("equal", ()) for number in FAILED_ONCE}
