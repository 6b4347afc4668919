"""All that is fuzzed: readers of files, what uses what they hold, what is typed, and the environment."""

from __future__ import annotations

from functools import cache

import option_targets
import parser_seeds
import parser_targets
import use_targets
from fuzz_changes import changed
from parser_targets import Target
from use_targets import Change


@cache
def targets() -> dict[str, Target]:
    """Every target by name."""
    return {**parser_targets.targets(), **use_targets.use_targets(), **option_targets.option_targets()}


@cache
def _changes() -> dict[str, Change]:
    return {**use_targets.use_changes(), **option_targets.option_changes()}


def change_of(name: str) -> Change:
    """How a target's inputs are changed: by their bytes, but for those that know their fields or options."""
    return _changes().get(name, changed)


def seeds(name: str) -> list[bytes]:
    """What a target takes well, to start from."""
    if name.startswith("used "):
        return use_targets.use_seeds(name)
    return option_targets.option_seeds(name) if name in option_targets.option_targets() else parser_seeds.seeds(name)


def is_slow(name: str) -> bool:
    """Whether an input runs a whole command."""
    return name.startswith(("used ", "typed "))
