"""Examples are run from their pages.

Those of docs/extending.md are whole files that do what the page says; those of docs/python.md print what stands below.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from paradl_bench.network.kinds.kind import Call, LayerKind, TensorArgument, kind_of_function
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.terms import CollectiveOperation

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
IN_PYTHON = PAGE.with_name("python.md")
EXAMPLES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    path = tmp_path / Path(request.param).name
    path.write_text(EXAMPLES[request.param])
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["paradl_bench/network/kinds/pixel_shuffle.py"], indirect=True)
def test_the_layer_kind(example: ModuleType) -> None:
    kind = example.KIND
    assert isinstance(kind, LayerKind)
    assert not set(kind.functions) & set(kind_of_function()), "an example covers what is not covered yet"
    call = Call("pixel_shuffle", (TensorArgument((2, 8, 3, 3)), 2), {}, ((2, 2, 6, 6),), batch=2)
    assert kind.facts(call).attributes == {"factor": 2}
    assert kind.build is not None
    batch = torch.rand(2, 8, 3, 3)
    output = kind.build({"factor": 2})([batch], [])
    assert torch.equal(output, torch.nn.PixelShuffle(2)(batch))


@pytest.mark.parametrize("example", ["paradl_bench/plan/collectives/all_to_all.py"], indirect=True)
def test_the_collective(example: ModuleType) -> None:
    operation, routine = example.OPERATION, example.ROUTINE
    assert isinstance(operation, CollectiveOperation)
    assert isinstance(routine, Routine)
    terms = operation.algorithms[operation.default_algorithm].terms(np.array([1, 2, 4]), 1000)
    assert terms.beta_bytes.tolist() == [0.0, 1000.0, 3000.0]
    every = [Buffers(*map(torch.zeros, routine.elements(600, 2))) for _ in range(2)]
    for rank, buffers in enumerate(every):
        routine.fill(buffers, rank)
        assert not routine.correct(buffers, rank, 2)
    for rank, buffers in enumerate(every):
        buffers.output.copy_(torch.cat([other.input.view(2, -1)[rank] for other in every]))
        assert routine.correct(buffers, rank, 2)


def test_no_example_is_left_untried() -> None:
    tried_here = {"paradl_bench/network/kinds/pixel_shuffle.py", "paradl_bench/plan/collectives/all_to_all.py"}
    # A model of one's own is tried beside the other models, in tests/unit/paradl_bench/network/test_models.py.
    assert set(EXAMPLES) == {*tried_here, "mine.py"}


def number(word: str) -> float | None:
    return float(word) if word[-1:].isdigit() and word[:1] in "-0123456789" else None


def test_examples_in_python_print_what_stands_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", IN_PYTHON.read_text(), flags=re.DOTALL)
    assert len(shown) == IN_PYTHON.read_text().count("```python")
    script = tmp_path / "examples.py"
    script.write_text("print('<next>')\n".join(code for code, _ in shown))
    monkeypatch.chdir(PAGE.parents[1])
    runpy.run_path(str(script))
    printed = capsys.readouterr().out.split("<next>\n")
    for (_, told), found in zip(shown, printed, strict=True):
        words = list(zip(told.split(), found.split(), strict=True))
        # Numbers are those of today's model within 5%; what it is measured by stands in results/.
        unlike = [pair for pair in words if pair[0] != pair[1] and None in map(number, pair)]
        assert not unlike
        assert [number(said) for said, _ in words if number(said)] == pytest.approx(
            [number(word) for said, word in words if number(said)], rel=0.05, abs=5e-4
        )
