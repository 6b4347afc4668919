"""What every module keeps to, found by looking: what it loads, what it says of itself, where its words stand.

Which module may import which is checked by `make contracts`; here it is what really gets loaded, imports inside
functions and by discovery included.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as bench
from predict.cli import group as predict

ROOT = Path(__file__).parents[2]
PACKAGES = ("paradl_bench", "calibrate", "predict")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TORCH = {"torch", "torchvision", "transformers"}
HEAVY = (*TORCH, "pandas", "scipy", "click", "rich", "yaml")

UNREAD = {"__pycache__", "data", "golden"}
ONE_FILE_A_THING = {
    "paradl_bench/commands",
    "paradl_bench/importers",
    "paradl_bench/network/kinds",
    "paradl_bench/strategies",
    "predict/costs/kinds",
}

_IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(set(json.loads(sys.argv[2])) & set(sys.modules))))
"""


def loaded_by(*modules: str) -> set[str]:
    """Which of the heavy packages a fresh process has loaded after importing ``modules``."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, json.dumps(modules), json.dumps(HEAVY)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(package: str) -> list[str]:
    path = ROOT.joinpath(*package.split("."))
    below = [info.name for info in pkgutil.walk_packages([str(path)], prefix=f"{package}.")]
    return [package, *(name for name in below if not name.endswith("__main__"))]


def test_records_networks_and_plans_load_only_numpy_and_msgspec() -> None:
    network = [f"paradl_bench.network.{name}" for name in ("graph", "kernel", "partition")]
    plan = [f"paradl_bench.plan.{name}" for name in ("strategy", "tasks")]
    assert loaded_by(*network, *plan, *modules_of("paradl_bench.records")) == set()


@pytest.mark.parametrize(
    "package", ["predict", "calibrate", "paradl_bench.network.kinds", "paradl_bench.plan.collectives"]
)
def test_no_module_of_these_loads_torch(package: str) -> None:
    assert not loaded_by(*modules_of(package)) & TORCH


def test_no_plan_of_a_strategy_loads_torch() -> None:
    plans = [name for name in modules_of("paradl_bench.strategies") if name.endswith((".plan", ".catalog", ".region"))]
    assert plans
    assert not loaded_by(*plans) & TORCH


def test_predict_starts_without_what_is_slow_to_import() -> None:
    assert not loaded_by("predict.cli") & (TORCH | {"pandas", "scipy", "rich"})


def test_the_other_commands_start_without_torch() -> None:
    assert not loaded_by("calibrate.cli") & TORCH
    assert not loaded_by("paradl_bench.cli", *modules_of("paradl_bench.commands")) & TORCH


def test_packages_hold_their_code_in_modules() -> None:
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        body = ast.parse(path.read_text()).body
        # The three packages load the names that they offer to Python when these are asked for.
        faces = (ast.If, ast.Assign, ast.FunctionDef) if path.parent.parent == ROOT else ()
        defined = [type(node).__name__ for node in body if not isinstance(node, (ast.Expr, ast.ImportFrom, *faces))]
        assert not defined, f"{path.relative_to(ROOT)} defines something"


def test_every_folder_is_a_package_and_gets_installed() -> None:
    assert not [path for path in SOURCES if not (path.parent / "__init__.py").is_file()]


def test_no_file_or_folder_has_a_vague_name() -> None:
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in SOURCES if path.stem in vague or vague & set(path.relative_to(ROOT).parts)]


def entries(folder: Path) -> list[str]:
    """What a reader finds in a folder, beside what says what it is, how it starts, and what it is in Python."""
    named = {
        path.stem if path.suffix == ".py" else path.name for path in folder.iterdir() if path.suffix in ("", ".py")
    }
    return sorted(named - {"__init__", "__main__", "__pycache__", "api", "cli", "conftest"})


@pytest.mark.parametrize("folder", ["paradl_bench", "calibrate", "predict", "tests", "benchmarks"])
def test_a_folder_has_at_most_twelve_entries(folder: str) -> None:
    inside = (path for path in (ROOT / folder).rglob("*") if path.is_dir() and not set(path.parts) & UNREAD)
    found = {str(path.relative_to(ROOT)): len(entries(path)) for path in (ROOT / folder, *inside)}
    assert {path: count for path, count in found.items() if count > 12 and path not in ONE_FILE_A_THING} == {}


def test_a_file_has_at_most_400_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > 400} == {}


def test_every_package_is_typed_for_those_who_import_it() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_function_fits_on_a_screen(path: Path) -> None:
    for function in functions(path):
        first = function.body[0]
        docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        body = function.body[1:] if docstring and len(function.body) > 1 else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1
        assert lines <= 45, f"{function.name} has {lines} lines under its docstring"


def commands() -> Iterator[tuple[str, click.Command]]:
    waiting: list[tuple[str, click.Command]] = [("paradl-bench", bench), ("calibrate", calibrate), ("predict", predict)]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            inner = ((each, command.get_command(context, each)) for each in command.list_commands(context))
            waiting += [(f"{name} {each}", found) for each, found in inner if found is not None]


def test_a_command_has_at_most_twelve_parameters() -> None:
    found = dict(commands())
    assert "paradl-bench train" in found
    counts = {
        name: len(inspect.signature(command.callback).parameters) for name, command in found.items() if command.callback
    }
    assert {name: count for name, count in counts.items() if count > 12} == {}


def test_a_tests_name_has_at_most_ten_words() -> None:
    names = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def test_(\w+)", path.read_text())
    }
    assert not [name for name in sorted(names) if len(name.split("_")) > 10]
