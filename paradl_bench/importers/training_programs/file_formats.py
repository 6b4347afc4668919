"""Files that programs that train read: JSON, YAML, TOML, and arguments of a command line; settings by dotted names.

Names of arguments are read with underscores, whichever dashes they have.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.core.files.yaml_file import read_yaml
from paradl_bench.core.terminal.printed import plain
from paradl_bench.importers.training_programs.launch import Settings

ARGUMENTS = "arguments"
_WHAT = "configuration"
_LONGEST_BYTES = 1 << 18
_LONGEST_COMMAND_BYTES = 1 << 15
"""To take words apart takes as long as the square of the longest one: a fraction of a second for this."""
_DEEPEST = 64
_MOST = 20_000
_SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
_RANKS = "# ranks:"
SUBCOMMAND = "activation-checkpoint"
"""Of torchtitan's arguments, the one that has no dashes in front: ``activation-checkpoint:full``."""


def format_of(path: Path) -> str:
    """By the file's suffix; arguments for any other."""
    return _SUFFIXES.get(path.suffix.lower(), ARGUMENTS)


def read_settings(path: Path) -> dict[str, object]:
    """All settings of a file, flat; numbers and words as they stand there.

    Raises:
        UserError: unreadable, too large, not of its format, or nested too deep.
    """
    kind = format_of(path)
    if kind == "yaml":
        return _flat(read_yaml(path, _WHAT), path)
    longest = _LONGEST_COMMAND_BYTES if kind == ARGUMENTS else _LONGEST_BYTES
    content = read_whole(path, what=_WHAT, most_bytes=longest)
    try:
        text = content.decode("utf-8-sig")
        return _arguments(text) if kind == ARGUMENTS else _flat(_decoder(kind)(text), path)
    except (ValueError, RecursionError) as error:
        said = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{_WHAT} {path} is no valid {kind}: {said}") from None


def _decoder(kind: str) -> Callable[[str], Any]:
    if kind == "json":
        return json.loads
    import tomllib

    return tomllib.loads


def _flat(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, dict):
        raise UserError(f"{_WHAT} {path} holds no settings by name")
    settings: dict[str, object] = {}
    pending: list[tuple[str, int, object]] = [(str(name), 1, value) for name, value in document.items()]
    for name, depth, value in pending:
        if len(pending) > _MOST:
            raise UserError(f"{_WHAT} {path} holds more than {_MOST} settings")
        if isinstance(value, dict):
            if depth >= _DEEPEST:
                raise UserError(f"{_WHAT} {path} is nested deeper than {_DEEPEST} levels")
            pending += [(f"{name}.{key}", depth + 1, part) for key, part in value.items()]
        else:
            # Aliases make short files of lists that are too long to be written out; no degree is a list.
            settings[name] = "[...]" if isinstance(value, list) else value
    return settings


def _arguments(text: str) -> dict[str, object]:
    """Options of a command line, with the word behind each; a flag alone is true, and the last of several holds."""
    options: dict[str, object] = {}
    for line in text.splitlines():
        if line.startswith(_RANKS):
            options["ranks"] = line.removeprefix(_RANKS).strip()
    name = None
    for word in shlex.split(text, comments=True):
        head, _, behind = word.partition(":")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = value if equals else True
            name = None if equals else name
        elif head.replace("_", "-") == SUBCOMMAND and behind:
            options[SUBCOMMAND] = behind
            name = None
        elif name is not None:
            options[name], name = word, None
    return options


def encode_settings(settings: Settings, kind: str, comments: Sequence[str], ranks: int) -> bytes:
    """A file of these settings, below the comments where the format has any."""
    said = [f"# {' '.join(plain(line).split())}" for line in comments]
    if kind == ARGUMENTS:
        lines = [*said, f"{_RANKS} {ranks}", *(_argument(name, value) for name, value in settings.items())]
        return ("\n".join(lines) + "\n").encode()
    nested = _nested(settings)
    if kind == "json":
        return (json.dumps(nested, indent=2) + "\n").encode()
    body = _yaml(nested) if kind == "yaml" else _toml(nested)
    return ("\n".join([*said, body]).rstrip("\n") + "\n").encode()


def _argument(name: str, value: str | int | float | bool) -> str:
    if ":" in name:
        return name
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"


def _nested(settings: Settings) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return nested


def _yaml(nested: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(nested, sort_keys=False))


def _toml(nested: Mapping[str, Any]) -> str:
    """Sections of plain values, of which torchtitan's have one level; JSON's words for these are TOML's."""
    lines: list[str] = []
    for section, values in nested.items():
        lines += ["", f"[{section}]", *(f"{name} = {_toml_value(value)}" for name, value in values.items())]
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    # JSON has another word for infinity.
    return repr(value) if isinstance(value, float) else json.dumps(value)
