"""YAML files that people write: cluster and site files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole

_LONGEST_BYTES = 1 << 18
_DEEPEST = 64
"""Lists and mappings in each other. Beyond a few hundred, PyYAML takes seconds to see that there is no key."""


def read_yaml(path: Path, what: str) -> object:
    """Lists and mappings of a YAML file; all else in it is text, for a schema to read.

    YAML 1.1 reads ``16e9`` as text and ``1:30`` as a number, and constructors of other types fail in ways of their own.

    Raises:
        UserError: unreadable, too large for what it is, or no YAML.
    """
    import yaml

    content = read_whole(path, what=what, most_bytes=_LONGEST_BYTES)
    try:
        document: object = yaml.load(content.decode("utf-8-sig"), Loader=_loader())  # nosec
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{what} {path} is no valid YAML: {error}") from None
    return document


def _loader() -> Any:
    """Fewer sorts than safe_load makes; refuses a key that stands twice, and what is nested deeper than our files."""
    import yaml

    class Loader(yaml.BaseLoader):
        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= _DEEPEST:
                raise yaml.YAMLError(f"line {self.line + 1}: nested deeper than {_DEEPEST} levels")
            super().fetch_flow_collection_start(token)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name = str(key.value)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line}: {name!r} occurs twice in one mapping: keep one of them")
                seen.add(name)
            return super().construct_mapping(node, deep=deep)

    return Loader
