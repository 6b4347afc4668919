"""The measurement directory of what this process measures itself."""

from __future__ import annotations

from pathlib import Path

from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.environment import capture_environment
from paradl_bench.records.measurement import MeasurementKind


def open_directory(
    output: Path,
    kind: MeasurementKind,
    arguments: dict[str, str],
    command_line: tuple[str, ...],
    device: str,
    settings: dict[str, str],
) -> MeasurementDirectory:
    """Capture the environment, open the directory, or go on in it, and watch the host from now on.

    Raises:
        UserError: the directory holds something else.
    """
    environment = capture_environment(device, settings=settings)
    return MeasurementDirectory.open(
        output, kind=kind, arguments=arguments, command_line=command_line, environment=environment, watch=True
    )
