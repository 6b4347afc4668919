"""Dtypes that nothing is trained or predicted in are refused by their name, in every command that takes one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from paradl_bench.cli import group
from paradl_bench.core.errors import UserError
from predict.cli import group as predict

POINT = "--from-profile p --model m --strategy d2 --batch 2"


@pytest.mark.parametrize("dtype", ["fp8", "float8", "FP8_E4M3", "float8_e5m2"])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (group, "train resnet18 --strategy d2 --batch 2 -o x"),
        (group, "layers resnet18 --batch 2 -o x"),
        (group, "kernels -o x"),
        (group, "doctor --measure -o x"),
        (group, "slurm -o x"),
        (group, "import kineto trace.json -o x"),
        (predict, POINT),
        (predict, f"search {POINT}"),
        (predict, f"diagnose {POINT}"),
        (predict, f"timeline {POINT} -o x"),
        (predict, f"what-if {POINT}"),
        (predict, f"ghost {POINT} -o x"),
        (predict, "validate-layers p.json"),
    ],
)
def test_fp8_is_refused_by_name(program: object, arguments: str, dtype: str) -> None:
    result = CliRunner().invoke(program, [*arguments.split(), "--dtype", dtype])
    assert isinstance(result.exception, UserError), result.output
    assert str(result.exception) == f"--dtype {dtype}: fp8 is not supported; give bf16 or fp32"
