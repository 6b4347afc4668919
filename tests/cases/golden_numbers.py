"""What golden commands print, as numbers by their paths."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from golden_cases import Case, cases, emulated

from calibrate.cli import group as calibrate
from predict.cli import group as predict

GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"
KEPT = ("iteration_s", "interval_s", "memory_bytes", "communication_s", "compute_s", "probability", "error")
"""Names of the numbers that are committed; the others follow from the same tasks."""

Numbers = dict[str, float]


def record(directory: Path) -> dict[str, Numbers]:
    """Every number of every case, by its path in what the command prints; a refusal is one number, named by its text.

    Args:
        directory: for profiles and what commands write.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        profile = emulated(directory)
    return {case.name: _numbers_of(case) for case in cases(profile, directory)}


def _numbers_of(case: Case) -> Numbers:
    program = {"predict": predict, "calibrate": calibrate}[case.program]
    ended = CliRunner().invoke(program, list(case.words))
    if ended.exit_code:
        return {f"refused: {ended.exception or ended.output}".split("\n", maxsplit=1)[0][:300]: 1.0}
    written = Path(case.words[-1])
    text = written.read_text() if written.suffix == ".json" else ended.stdout
    return dict(_numbers(json.loads(text)))


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, (int, float)):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if key not in ("created_utc", "command_line", "sources"):
            yield from _numbers(item, f"{path}/{key}" if path else str(key))


def kept(found: dict[str, Numbers]) -> dict[str, Numbers]:
    """The numbers that are committed."""
    return {
        name: {path: value for path, value in numbers.items() if path.startswith("refused") or _is_kept(path)}
        for name, numbers in found.items()
    }


def _is_kept(path: str) -> bool:
    return any(part in KEPT for part in path.split("/"))


def moved(before: dict[str, Numbers], after: dict[str, Numbers], *, relative: float = 0.0) -> list[str]:
    """What differs, in words."""
    found = [f"{name}: is there no more" for name in before.keys() - after.keys()]
    for name, numbers in after.items():
        earlier = before.get(name, {})
        for path in sorted(earlier.keys() | numbers.keys()):
            old, new = earlier.get(path), numbers.get(path)
            if old is None or new is None:
                found.append(f"{name}: {path}: {old} became {new}")
            elif abs(new - old) > relative * abs(old):
                found.append(f"{name}: {path}: {old!r} became {new!r}")
    return found
