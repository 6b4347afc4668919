"""An axis is one folder: a new one works everywhere at once, and nobody else asks for one by its name."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import axis_kinds, read_options
from paradl_bench.plan.axis_planner import FurtherPlanner, ShardingPlanner, StagingPlanner, axis_planner

ROOT = Path(__file__).parents[3]
STRATEGIES = ROOT / "paradl_bench" / "strategies"
OF_AXES = {STRATEGIES / name for name in axis_kinds()}
# What other programs call an axis stands where their settings are read and written.
OF_PROGRAMS = ROOT / "paradl_bench" / "importers" / "training_programs"
SOURCES = [
    path
    for package in ("paradl_bench", "calibrate", "predict")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not {*OF_AXES, OF_PROGRAMS}.intersection(path.parents)
]
PROFILE = ROOT / "results/cpu-2core/2026-11-21-ffbe79c/accuracy/profile.json"

NAMES_AN_AXIS = {"kind", "name", "axis", "kinds"}
"""Attributes, variables and parameters that hold an axis' name."""
ASK = {"degree_of", "group_axes", "group_along", "kinds_with", "axis_kind", "Axis", "has", "index", "get"}
"""Functions that would be asked for an axis."""


def words_of(node: ast.AST) -> Iterator[str]:
    """Strings that a node is, or a literal of several holds."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for each in node.elts:
            yield from words_of(each)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from words_of(key) if key is not None else ()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set"):
        for each in node.args:
            yield from words_of(each)


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def asked_for(tree: ast.AST, kinds: set[str]) -> Iterator[tuple[int, str]]:
    """Places that ask for an axis by one of its kinds' names: compared, given to what asks, or listed beside others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(name_of(side) in NAMES_AN_AXIS for side in sides):
                yield from ((node.lineno, word) for side in sides for word in words_of(side) if word in kinds)
        elif isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)] if name_of(node.func) in ASK else []
            given += [keyword.value for keyword in node.keywords if keyword.arg in NAMES_AN_AXIS]
            yield from ((node.lineno, word) for each in given for word in words_of(each) if word in kinds)
        elif isinstance(node, ast.Subscript):
            yield from ((node.lineno, word) for word in words_of(node.slice) if word in kinds)
        elif isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set):
            # Two of the six beside each other are a list of axes, whatever it is used for.
            found = [word for word in words_of(node) if word in kinds]
            yield from ((node.lineno, word) for word in found if len(set(found)) > 1)


@pytest.mark.parametrize(
    "text",
    [
        'axis.kind == "data"',
        '"pipeline" != axis.kind',
        'degree_of(strategy, "pipeline")',
        'kind in ("filter", "channel")',
        'Axis(kind="spatial", extents=(2,))',
        'axis_kind("tensor")',
        '_CUTS = {"filter": 1, "channel": 2}',
        'strategy.name == "pipeline"',
        'runners["data"]',
        'kinds.index("pipeline")',
        '_WHOLE = frozenset({"data", "pipeline"})',
        'Strategy(axes=(make(kind="data"),))',
    ],
)
def test_a_question_by_name_is_found(text: str) -> None:
    assert list(asked_for(ast.parse(text), set(axis_kinds())))


@pytest.mark.parametrize(
    "text",
    ['folder / "data"', 'layer.kind == "linear"', 'VIEWS = ("T", "data")', 'print("a pipeline")', 'LAYER = "data"'],
)
def test_the_same_words_in_other_meanings_are_none(text: str) -> None:
    assert not list(asked_for(ast.parse(text), set(axis_kinds())))


def test_nobody_asks_for_an_axis_by_its_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in SOURCES
        for line, word in asked_for(ast.parse(path.read_text()), set(axis_kinds()))
    ]
    assert not found, "\n".join(found)


def test_what_an_axis_declares_goes_with_its_planner() -> None:
    for kind in axis_kinds().values():
        planner = axis_planner(kind)
        assert planner.name == kind.name
        assert isinstance(planner, ShardingPlanner) == kind.has(Trait.SHARDS_LAYERS)
        assert isinstance(planner, StagingPlanner) == kind.has(Trait.STAGES)
        assert isinstance(planner, FurtherPlanner) == (kind.has(Trait.CUTS_TOKENS) or kind.has(Trait.CUTS_EXPERTS))


def test_options_of_an_axis_are_written_as_read() -> None:
    given = {"bucket_cap_mb": 2.0, "exchange": "leaders:2", "split": "a,b*", "spatial_until": "fc", "stages": "a,b"}
    axes, rest = read_options(given | {"micro_batches": 4, "schedule": "1f1b", "other": 1})
    assert rest == {"other": 1}
    for options in axes:
        texts = {shown.name: shown.text(options) for shown in options.shown}
        again, _ = read_options(
            {
                name: float(text) if name == "bucket_cap_mb" else int(text) if text.isdigit() else text
                for name, text in texts.items()
                if text is not None
            }
        )
        assert options in again


TOY_AXIS = '''
from typing import ClassVar

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions, Shown


class ToyOptions(AxisOptions, frozen=True, kw_only=True):
    """Of which layers ranks compute some of the features."""

    toy_layers: int = 2

    of_shards: ClassVar[bool] = True
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(name="toy_layers", value=int, least=1, help="The first layers of the toy that are shared."),
    )


AXIS = AxisKind(
    name="toy",
    letter="y",
    package=__package__,
    options=(ToyOptions,),
    traits=frozenset({Trait.SHARDS_LAYERS}),
)
'''

TOY_PLAN = '''
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axis_planner import ShardedLayers, shard_label
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.settings import Limit
from paradl_bench.strategies.toy.axis import AXIS, ToyOptions


class ToyPlanner:
    """Ranks compute a part of the first layers' FLOPs, and add up what they made."""

    name = AXIS.name

    def check(self, network, strategy, axis, settings):
        if network.layers and strategy.axes[axis].degree > self.limit(network, settings).ranks:
            raise UserError(f"strategy {strategy}: {self.limit(network, settings)}")

    def limit(self, network, settings):
        return Limit(axis=self.name, ranks=4, reason="a toy has four parts")

    def shard(self, network, place, settings):
        shards = {}
        heavy = [index for index, layer in enumerate(network.layers) if layer.parameters and layer.fw_flops]
        for index in heavy[: settings.of(ToyOptions).toy_layers]:
            layer = network.layers[index]
            part = msgspec.structs.replace(layer, fw_flops=layer.fw_flops // place.axis.degree)
            summed = place.collective("all_reduce", layer.output_elements, batchless=False)
            shards[index] = LayerShard(part, shard_label(place.axis, settings), after_fw=(summed,))
        return ShardedLayers(shards, network)

    def parts_held(self, network, axis, position, settings):
        return {}


PLANNER = ToyPlanner()
'''

WITH_TOY = """
import sys
import paradl_bench.strategies
paradl_bench.strategies.__path__.append(sys.argv.pop(1))
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of axes, in which there is one."""
    folder = tmp_path_factory.mktemp("axes")
    (folder / "toy").mkdir()
    (folder / "toy" / "__init__.py").write_text("")
    (folder / "toy" / "axis.py").write_text(TOY_AXIS)
    (folder / "toy" / "plan.py").write_text(TOY_PLAN)
    return folder


def with_toy(toy: Path, program: str, *arguments: str) -> str:
    """What a program prints that runs in a process of its own with the toy among its axes."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITH_TOY + program, str(toy), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMAND = "from {0}.__main__ import main\nsys.argv[0] = '{0}'\nmain()\n"


def predicted(toy: Path, *words: str) -> list[dict[str, object]]:
    known = ("--from-profile", str(PROFILE), "--model", "resnet18", "--batch", "8", "--json")
    rows: list[dict[str, object]] = json.loads(with_toy(toy, COMMAND.format("predict"), *known, *words))
    return rows


def test_a_toy_axis_parses_and_plans(toy: Path) -> None:
    program = """
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy, parse_strategy_kinds
from paradl_bench.strategies.nesting.catalog import planner_for
from calibrate.profile.profile import read_profile
network = next(iter(read_profile(sys.argv[1]).network.values()))
for text in ("y2", "d2y2", "p2y2"):
    strategy = parse_strategy(text)
    plan = planner_for(strategy).plan(network, strategy, plan_settings(batch=8, toy_layers=1))
    shards = {work.shard for work in plan.works if getattr(work, "shard", "")}
    print(text, strategy.name, str(strategy), plan.local_batch, *sorted(shards))
print(parse_strategy_kinds("d+y"))
"""
    lines = with_toy(toy, program, str(PROFILE)).splitlines()
    assert lines == [
        "y2 toy y2 8 y2[toy_layers=1]",
        "d2y2 data+toy d2y2 4 y2[toy_layers=1]",
        "p2y2 pipeline+toy p2y2 8 y2[toy_layers=1]",
        "('data', 'toy')",
    ]


def test_a_toy_axis_is_predicted_with_its_option(toy: Path) -> None:
    of_two, of_one, nested = (
        predicted(toy, "--strategy", *words) for words in (("y2",), ("y2", "--toy-layers", "1"), ("d2y2",))
    )
    assert [row["strategy"] for row in (*of_two, *of_one, *nested)] == ["y2", "y2", "d2y2"]
    assert of_one[0]["options"] == {"toy_layers": "1"}
    assert of_two[0]["iteration_s"] != of_one[0]["iteration_s"]
    assert of_two[0]["memory_bytes"]


def test_a_run_of_a_toy_axis_keeps_its_option(toy: Path) -> None:
    program = """
import msgspec
from paradl_bench.plan.settings import plan_settings
from paradl_bench.records.training.training_record import TrainingRun, fields_of_plan
settings = plan_settings(batch=8, toy_layers=1, micro_batches=4, blocking=True)
about = dict(model="m", input_shape=(3,), strategy="y2", ranks=2, dtype="fp32")
about |= dict(backend="gloo", launcher="own", iterations=1, warmup=3, network_digest="")
run = TrainingRun(**about, **fields_of_plan(settings))
assert msgspec.json.decode(msgspec.json.encode(run), type=TrainingRun).settings == settings
print(run.axis_options, run.micro_batches)
"""
    assert with_toy(toy, program).strip() == "{'toy_layers': 1} 4"


def test_a_toy_axis_is_searched(toy: Path) -> None:
    words = ("search", "--from-profile", str(PROFILE), "--model", "resnet18", "--ranks", "2", "--batch", "8")
    found = json.loads(with_toy(toy, COMMAND.format("predict"), *words, "--top", "60", "--json"))
    strategies = {row["prediction"]["strategy"]: row for row in found["rows"]}
    assert "y2" in strategies
    assert "d2" in strategies


@pytest.mark.parametrize(
    ("program", "words"),
    [("predict", ()), ("predict", ("search",)), ("paradl_bench", ("train",)), ("paradl_bench", ("layers",))],
)
def test_the_option_of_a_toy_axis_shows_in_help(toy: Path, program: str, words: tuple[str, ...]) -> None:
    text = with_toy(toy, COMMAND.format(program), *words, "--help-all")
    assert "--toy-layers" in with_toy(toy, COMMAND.format(program), *words, "--help")
    assert "--toy-layers" in text
    assert "The first layers of the toy" in text


def test_an_option_of_another_axis_is_refused(toy: Path) -> None:
    known = ("--from-profile", str(PROFILE), "--model", "resnet18", "--batch", "8", "--strategy", "d2")
    with pytest.raises(AssertionError, match="--toy-layers is for toy parallelism, not for d2"):
        with_toy(toy, COMMAND.format("predict"), *known, "--toy-layers", "1")


def test_two_axes_that_share_layers_are_refused(toy: Path) -> None:
    known = ("--from-profile", str(PROFILE), "--model", "resnet18", "--batch", "8", "--strategy", "f2y2")
    with pytest.raises(AssertionError, match="filter and toy both share layers out"):
        with_toy(toy, COMMAND.format("predict"), *known)


def test_each_axis_is_light_to_import() -> None:
    program = "from paradl_bench.plan.axes.registry import option_types\noption_types()\n"
    program += "print(sorted({'torch', 'numpy', 'scipy', 'click', 'rich', 'yaml'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
