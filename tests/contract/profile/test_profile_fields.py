"""Every field of a profile is compared by ``calibrate diff`` or named as nothing to compare, and merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.entries import IDENTITIES, identity
from calibrate.profile.profile import SCHEMA_VERSION, Profile, read_profile
from calibrate.report.diff import compare
from calibrate.report.quantities import NOT_COMPARED, quantities
from paradl_bench.core.errors import UserError

CASE = read_profile(Path(__file__).parents[2] / "data" / f"profile-v{SCHEMA_VERSION}.json")
FIELDS = Profile.__struct_fields__
OPTIONAL = [field.name for field in msgspec.structs.fields(Profile) if not field.required]
LISTS = [name for name in OPTIONAL if name not in ("notes", "network", "published", "compared_runs")]
REFITTED = {"memory_factors", "memory_reuse"}
"""What a merge makes anew of ``memory_runs``."""


def without(*names: str) -> Profile:
    empty = {name: type(getattr(CASE, name))() for name in names}
    return msgspec.structs.replace(CASE, **empty)


def test_the_test_case_holds_something_of_every_field() -> None:
    # What was published has profiles of its own, which come with the tool; compared runs have tests of their own.
    assert [name for name in OPTIONAL if not getattr(CASE, name)] == ["notes", "published", "compared_runs"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_compared_or_named_as_nothing_to_compare(field: str) -> None:
    compared = {group for group, _, _ in quantities(CASE, CASE)}
    assert (field in compared) != (field in NOT_COMPARED)


def test_names_of_numbers_are_their_own() -> None:
    names = [(group, name) for group, name, _ in quantities(CASE, CASE)]
    assert len(names) == len(set(names))


def test_nothing_differs_from_itself_and_every_kind_shows_its_change() -> None:
    assert compare(CASE, CASE).moved == ()
    for group in {group for group, _, _ in quantities(CASE, CASE)} - {"devices", "memory_factors"}:
        changed = tuple(map(far, getattr(CASE, group)))
        found = compare(CASE, msgspec.structs.replace(CASE, **{group: changed}))
        assert {m.group for m in (*found.moved, *found.without_spread)} == {group}


def far(entry: msgspec.Struct) -> msgspec.Struct:
    """An entry with every number a hundred times as large, or as small where it would be too large."""
    try:
        return msgspec.convert(dict(scaled(entry, 100.0)), type(entry))
    except msgspec.ValidationError:
        return msgspec.convert(dict(scaled(entry, 0.01)), type(entry))


def scaled(entry: msgspec.Struct, factor: float) -> Iterator[tuple[str, object]]:
    for label, value in msgspec.to_builtins(entry).items():
        grows = isinstance(value, float) and not label.endswith(("_sd", "_iqr", "_error", "_relative", "deviations_90"))
        if isinstance(value, dict) and "typical_s" in value:
            value = {k: factor * v if k.endswith("_s") else v for k, v in value.items()}
        yield label, factor * value if grows else value


@pytest.mark.parametrize("field", LISTS)
def test_a_field_of_one_profile_comes_through_a_merge(field: str) -> None:
    own = without(*(name for name in LISTS if name != field), *(["network"] if field != "network" else []))
    rest = without(field)
    found = merge_profiles([own, rest], ["own", "rest"], command_line=(), force=False)
    for name in set(LISTS) - REFITTED:
        assert getattr(found, name) == getattr(CASE, name), name
    assert found.environments == CASE.environments


@pytest.mark.parametrize("field", [field for field in LISTS if field not in {*REFITTED, "layer_times", "copies"}])
def test_merge_refuses_conflicting_numbers_and_takes_the_first_by_force(field: str) -> None:
    entries = getattr(CASE, field)
    changed = tuple(msgspec.convert(dict(changed_numbers(field, entry)), type(entry)) for entry in entries)
    assert changed != entries
    other = msgspec.structs.replace(CASE, **{field: changed})
    with pytest.raises(UserError, match="with different numbers: fit their directories together"):
        merge_profiles([CASE, other], ["a", "b"], command_line=(), force=False)
    found = merge_profiles([CASE, other], ["a", "b"], command_line=(), force=True)
    assert getattr(found, field) == entries
    assert any("taken from a because of --force" in note for note in found.notes)


def changed_numbers(field: str, entry: msgspec.Struct) -> Iterator[tuple[str, object]]:
    """The first number of an entry that does not identify it, changed."""
    done, known = False, identity(field, entry)
    for label, value in msgspec.to_builtins(entry).items():
        named = label in IDENTITIES.get(field, ()) or (field not in IDENTITIES and value in known)
        if not done and not named and label != "environment" and isinstance(value, (int, float)):
            yield label, value + 1
            done = True
        else:
            yield label, value
