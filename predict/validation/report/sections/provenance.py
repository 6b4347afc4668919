"""What the page was made from and by."""

from __future__ import annotations

import shlex
import subprocess
from importlib import metadata

from calibrate.report.sections.roofline_show import device_lines
from paradl_bench.ranks.environment import source_commit
from paradl_bench.records.measurement import Environment
from predict.validation.report.content import Content, Section
from predict.validation.shown.cells import Table


def section(content: Content) -> Section:
    """Profile, its devices and versions, and the command."""
    profile = content.profile
    rows = [
        ("profile", content.profile_path),
        ("made", profile.created_utc),
        *(("measured on", _environment(environment)) for environment in profile.environments),
        *(("device", line) for line in device_lines(profile.devices)),
        *(("note", note) for note in profile.notes),
        ("ParaDL", _version()),
    ]
    sources = [
        (source.path, source.kind, source.created_utc, shlex.join(source.command_line)) for source in profile.sources
    ]
    if profile.command_line:
        sources.append((content.profile_path, "profile", profile.created_utc, shlex.join(profile.command_line)))
    tables = {"Profile and program": Table(("of", "what it is"), rows)}
    if sources:
        tables["Measurements"] = Table(("directory", "kind", "when", "command"), sources)
    return Section(
        name="provenance",
        title="Provenance",
        lines=["Command that made this page"],
        commands=[content.command],
        tables=tables,
        documents={"provenance": {"command": content.command, "rows": rows}},
    )


def _environment(environment: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    place = f"{environment.hostname or 'several hosts'}: {environment.device_count} x {environment.device_name}"
    commit = f", commit {environment.commit}" if environment.commit else ""
    return f"{place}; {versions or 'versions not known'}{commit}"


def _version() -> str:
    """The installed version, and of a working tree its commit."""
    try:
        version = metadata.version("paradl")
    except metadata.PackageNotFoundError:
        version = "not installed"
    try:
        commit = source_commit()
    except (OSError, subprocess.TimeoutExpired):  # of no use to the page's reader, who still wants the rest
        return version
    return f"{version}, commit {commit}" if commit else version
