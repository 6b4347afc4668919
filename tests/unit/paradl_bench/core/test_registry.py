"""Discovery: one file or folder a thing, found by looking."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from paradl_bench.core.errors import UserError
from paradl_bench.core.registry import discover, lookup, named

_numbers = itertools.count()
_THING = "class Thing:\n    name = {name!r}\n    size = 1\nTHING = Thing()\n"


@runtime_checkable
class Sized(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A new name each time: what was found in a package is remembered by its name.
    folder = tmp_path / f"things{next(_numbers)}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_file_is_found_without_being_named(package: Path) -> None:
    (package / "one.py").write_text(_THING.format(name="first"))
    (package / "two.py").write_text(_THING.format(name="second"))
    (package / "kind.py").write_text("NOT_A_THING = 1\n")
    found = discover(package.name, "THING", Sized)
    assert sorted(found) == ["first", "second"]
    assert lookup(found, "second", "thing") is found["second"]


def test_a_folder_is_registered_only_with_its_module(package: Path) -> None:
    for folder in ("serial", "shared"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
    (package / "serial" / "plan.py").write_text(_THING.format(name="serial"))
    (package / "catalog.py").write_text("")
    assert list(discover(package.name, "THING", Sized, submodule="plan")) == ["serial"]


def test_a_module_that_cannot_be_imported_is_not_hidden(package: Path) -> None:
    (package / "serial").mkdir()
    (package / "serial" / "__init__.py").touch()
    (package / "serial" / "plan.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        discover(package.name, "THING", Sized, submodule="plan")


def test_two_of_one_name_are_refused(package: Path) -> None:
    (package / "one.py").write_text(_THING.format(name="same"))
    (package / "two.py").write_text(_THING.format(name="same"))
    with pytest.raises(UserError, match="two modules declare THING 'same'"):
        discover(package.name, "THING", Sized)


def test_an_entry_of_another_type_is_refused(package: Path) -> None:
    (package / "one.py").write_text("class Thing:\n    name = 'first'\nTHING = Thing()\n")
    with pytest.raises(TypeError, match="'first' is no Sized"):
        discover(package.name, "THING", Sized)


def test_an_unknown_name_shows_the_choices(package: Path) -> None:
    (package / "one.py").write_text(_THING.format(name="first"))
    with pytest.raises(UserError, match="unknown thing 'fist': did you mean first"):
        lookup(discover(package.name, "THING", Sized), "fist", "thing")


def test_what_is_found_can_be_changed_without_changing_the_registry(package: Path) -> None:
    (package / "one.py").write_text(_THING.format(name="first"))
    discover(package.name, "THING", Sized).clear()
    assert list(discover(package.name, "THING", Sized)) == ["first"]


def test_a_name_is_found_without_importing_the_others(package: Path) -> None:
    (package / "first.py").write_text(_THING.format(name="first"))
    (package / "broken.py").write_text("raise RuntimeError\n")
    assert named(package.name, "THING", Sized, "first", "thing").name == "first"
    with pytest.raises(RuntimeError):
        named(package.name, "THING", Sized, "second", "thing")


def test_a_name_is_found_in_a_module_called_otherwise(package: Path) -> None:
    (package / "first.py").write_text(_THING.format(name="second"))
    assert named(package.name, "THING", Sized, "second", "thing").name == "second"
    for unknown in ("first", "../first", "third"):
        with pytest.raises(UserError, match=f"unknown thing {unknown!r}"):
            named(package.name, "THING", Sized, unknown, "thing")
