"""Examples are run from their pages.

Those of docs/extending.md are whole files that do what the page says. Those of docs/python.md, of tutorials and how-tos
print what stands below them: commands in blocks called shell, and Python. Blocks called sh are not run: they measure,
or need a GPU, a Slurm or files of one's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

import calibrate.cli
import paradl_bench.cli
import predict.cli
from paradl_bench.core.terminal.command_line import run_command
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


GUIDES = sorted(path for folder in ("tutorials", "how-to") for path in (PAGE.parent / folder).glob("*.md"))
# Tens of seconds each: a search over 64 ranks, and diagnoses with their remedies.
SLOW = ("best-strategy", "what-is-slow")
PROGRAMS = {"paradl-bench": paradl_bench.cli.group, "calibrate": calibrate.cli.group, "predict": predict.cli.group}
NUMBER = re.compile(r"[-+]?\d{1,15}(\.\d{1,9})?(e[-+]\d\d)?")
RUN = re.compile(r"```(shell|python)\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def number(word: str) -> float | None:
    plain = word.replace(",", "").rstrip("%")
    return float(plain) if NUMBER.fullmatch(plain) else None


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
        assert len(told.split()) == len(found.split())
        assert alike(told, found)


def alike(told: str, found: str) -> bool:
    """Equal but for numbers: those are of today's model within 5%; what it is measured by stands in results/."""
    pairs = itertools.zip_longest(told.split(), found.split(), fillvalue="")
    return all(one == other or close(number(one), number(other)) for one, other in pairs)


def close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(other - one) <= max(0.05 * abs(one), 5e-4)


def unlike(told: str, found: str) -> str:
    """What of a page an output does not have, in order; a line of three dots stands for any lines."""
    lines = [line for line in found.splitlines() if line.strip()]
    parts = [part.strip("\n").splitlines() for part in re.split(r"^\.\.\.$", told, flags=re.MULTILINE)]
    at = 0
    for index, part in enumerate(parts):
        wanted = [line for line in part if line.strip()]
        starts = range(at, len(lines) - len(wanted) + 1) if index else [0]
        fitting = (s for s in starts if all(map(alike, wanted, lines[s : s + len(wanted)])))
        start = next(fitting, None)
        if start is None:
            return "\n".join(wanted)
        at = start + len(wanted)
    return "" if not parts[-1] or at == len(lines) else "\n".join(lines[at:])


def run_command_line(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "cp":
        shutil.copyfile(*words)
        return
    with mock.patch.object(sys, "argv", [program, *words]), pytest.raises(SystemExit) as ended:
        run_command(PROGRAMS[program], program)
    assert not ended.value.code


def run_block(kind: str, code: str, names: dict[str, object]) -> str:
    """What a block prints, errors and progress too."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if kind == "shell":
            for line in code.splitlines():
                run_command_line(line)
        else:
            Path("block.py").write_text(code)
            names.update(runpy.run_path("block.py", init_globals=names))
    printed.seek(0)
    return printed.read()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in GUIDES],
)
def test_examples_of_guides_print_what_stands_below(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("results", "tests", "docs", "slurm"):
        (tmp_path / folder).symlink_to(PAGE.parents[1] / folder)
    monkeypatch.chdir(tmp_path)
    # As wide as the pages' blocks, whatever the terminal has.
    monkeypatch.setenv("COLUMNS", "100")
    names: dict[str, object] = {}
    for kind, code, told in RUN.findall(page.read_text()):
        if code.startswith("# mine.py"):
            compile(code, "mine.py", "exec")
            continue
        found = run_block(kind, code, names)
        assert unlike(told or "...", found) == "", f"not in:\n{found}"


def test_guides_are_compared_line_by_line() -> None:
    found = "title 1\n\na 100 x\nb 2 y\nc\n"
    assert unlike("...\na 101 x\nb 2 y\n...\n", found) == ""
    assert unlike("...\na 110 x\n...\n", found) == "a 110 x"
    assert unlike("...\nb 2 y\n...\na 100 x\n...\n", found) == "a 100 x"
    assert unlike("title 1\n...\na 100 x\n", found) == "b 2 y\nc"
    assert unlike("a 100 x\n...\n", found) == "a 100 x"
