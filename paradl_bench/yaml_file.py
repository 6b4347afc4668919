"""YAML files that people write: cluster and site files."""

from __future__ import annotations

from pathlib import Path

from paradl_bench.spec.errors import UserError

_LONGEST_BYTES = 1 << 18


def read_yaml(path: Path, what: str) -> object:
    """Lists and mappings of a YAML file; all else in it is text, for a schema to read.

    YAML 1.1 reads ``16e9`` as text and ``1:30`` as a number, and constructors of other types fail in ways of their own.

    Args:
        what: the file is, in words: ``cluster file``.

    Raises:
        UserError: unreadable, too large for what it is, or no YAML.
    """
    import yaml

    try:
        with open(path, "rb") as stream:
            content = stream.read(_LONGEST_BYTES + 1)
        if len(content) > _LONGEST_BYTES:
            raise UserError(f"{what} {path} is larger than {_LONGEST_BYTES} bytes: it is no {what}")
        found: object = yaml.load(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{what} {path} is no valid YAML: {error}") from None
    return found
