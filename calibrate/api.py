"""Profiles in Python: fit one, put several together, compare two. Loads what it needs when it is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_type_hints

from paradl_bench.core.frames import Drawn, Shown, frame_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from calibrate.profile.profile import Profile
    from calibrate.report.diff import Difference

PathLike = str | os.PathLike[str]
_OF_COVARIANCE = (0, 0), (0, 1), (1, 1)
"""Rows and columns of a covariance of two numbers, without what stands in it twice."""


class CalibratedProfile(Drawn):
    """A profile that has been read.

    Attributes:
        path: the profile's file. profile: its contents.
    """

    _TABLES = (
        *("communication", "layer_times", "model_times", "shard_times", "copies", "contexts", "communication_choices"),
        *("memory_runs", "memory_factors", "memory_reuse", "input_side", "kernel_models", "devices", "sources"),
        "environments",
    )
    _columns = (
        *("library", "operation", "level", "algorithm", "regime", "ranks_range_low", "ranks_range_high", "alpha_s"),
        *("beta_s_per_byte", "held_out_relative_error", "points"),
    )

    def __init__(self, path: PathLike) -> None:
        from calibrate.profile.profile import read_profile

        self.path = Path(path)
        self.profile: Profile = read_profile(self.path)

    @property
    def tables(self) -> dict[str, int]:
        """How many rows each table of :meth:`to_frame` has; empty tables are left out."""
        return {name: len(rows) for name in self._TABLES if (rows := getattr(self.profile, name))}

    def to_frame(self, table: str = "communication") -> DataFrame:
        """One table of the profile, with one entry in each row; columns are the fields of the profile's format.

        Lists of records, such as the measured points of a fit, are no columns: :attr:`profile` has them. The covariance
        of alpha and beta is three columns of numbers: ``covariance_00`` (the variance of alpha), ``covariance_01``,
        and ``covariance_11`` (the variance of beta).

        Args:
            table: communication (fits of collectives), layer_times, model_times, ... as :attr:`tables` names them.

        Raises:
            UserError: no table of a profile has this name.
        """
        from paradl_bench.core.errors import unknown_choice

        if table not in self._TABLES:
            raise unknown_choice("table of a profile", table, self._TABLES)
        return table_of(self.profile, table)

    @property
    def title(self) -> str:
        """The file, its devices and its models."""
        devices = ", ".join(device.name for device in self.profile.devices)
        models = ", ".join(self.profile.network) or "no model"
        held = ", ".join(f"{name} ({count})" for name, count in self.tables.items())
        return f"Profile {self.path} of {devices}: {models}. Tables: {held}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of the profile, or merged because of ``force``."""
        return self.profile.notes

    def _figure(self) -> Figure:
        from calibrate.report.drawing import profile_figure

        return profile_figure(self.profile)


class ProfileDifference(Shown):
    """What moved from one profile to another beyond its 90% interval, worst first.

    Attributes:
        difference: everything that moved, and what differs between the environments.
    """

    def __init__(self, difference: Difference) -> None:
        self.difference = difference

    def to_frame(self) -> DataFrame:
        """The numbers that moved, one in each row, with the fields of :class:`~calibrate.report.diff.Movement`."""
        from calibrate.report.diff import Movement

        return frame_of(Movement, self.difference.moved)

    @property
    def title(self) -> str:
        """How many numbers moved, and how many would have moved by chance."""
        apart = self.difference
        return (
            f"{len(apart.moved)} of {apart.compared} numbers moved beyond their 90% interval; {apart.stand_out} stand"
            f" out. By chance {apart.expected_by_chance:.3g} would have moved."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs between the environments, and what only one profile holds."""
        apart = self.difference
        changed = (
            f"{change.what}: {', '.join(change.first)} against {', '.join(change.second)}" for change in apart.changes
        )
        lists = (("first", apart.only_in_first), ("second", apart.only_in_second))
        return (*changed, *(f"only in the {which}: {what}" for which, names in lists for what in names))


def fit(
    directories: PathLike | Iterable[PathLike],
    output: PathLike,
    *,
    memory_runs: PathLike | Iterable[PathLike] = (),
    force: bool = False,
) -> CalibratedProfile:
    """Fit measurement directories into one profile and write its file, as ``calibrate fit`` does.

    Args:
        output: the profile's file; regressors of kernels lie beside it.
        memory_runs: training runs, or directories of them. Only their peaks of memory are used.
        force: merge different environments, and replace an existing profile.

    Raises:
        UserError: a wrong directory, a training run, different environments, nothing measured, or the file exists.
        WorkError: LightGBM is missing where kernels were measured, or a file can't be written.
    """
    from calibrate.fitting.fit import fit_profile
    from paradl_bench.core.files.storage import encode_pretty
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output

    refuse_overwrite(str(output), force=force)
    paths, runs = paths_of(directories), paths_of(memory_runs)
    of_memory = (word for run in runs for word in ("--memory-runs", str(run)))
    words = (*map(str, paths), "-o", str(output), *of_memory, *(["--force"] if force else []))
    command_line = ("calibrate", "fit", *words)
    profile = fit_profile(paths, command_line=command_line, force=force, memory_runs=runs, beside=Path(output))
    write_output(str(output), encode_pretty(profile), force=force)
    return CalibratedProfile(output)


def merge(profiles: Iterable[PathLike], output: PathLike, *, force: bool = False) -> CalibratedProfile:
    """Merge partial calibrations into one profile and write its file, as ``calibrate merge`` does.

    Args:
        force: merge different environments, take the first of equal entries, and replace an existing file.

    Raises:
        UserError: fewer than two profiles, profiles that contradict each other, or the file exists.
    """
    from calibrate.fitting.merging.merge import merge_files

    paths = paths_of(profiles)
    words = (*map(str, paths), "-o", str(output), *(["--force"] if force else []))
    merge_files(paths, str(output), command_line=("calibrate", "merge", *words), force=force)
    return CalibratedProfile(output)


def diff(first: PathLike, second: PathLike, *, order: Literal["sd", "relative"] = "sd") -> ProfileDifference:
    """What moved from one profile to another, as ``calibrate diff`` says it.

    Args:
        order: sort by the change in standard deviations, or by the relative change; the largest first.

    Raises:
        UserError: a profile can't be read, or the order is unknown.
    """
    from calibrate.profile.profile import read_profile
    from calibrate.report.diff import Order, compare
    from paradl_bench.core.errors import unknown_choice

    if order not in get_args(Order):
        raise unknown_choice("order", order, get_args(Order))
    return ProfileDifference(compare(read_profile(first), read_profile(second), order=order))


def paths_of(given: PathLike | Iterable[PathLike]) -> list[Path]:
    """The paths, given as one or several."""
    return [Path(given)] if isinstance(given, (str, os.PathLike)) else [Path(path) for path in given]


def table_of(profile: Profile, table: str) -> DataFrame:
    """One table of a profile, with one entry in each row.

    The covariance of two numbers is three columns, named by their place in the matrix: ``covariance_00``,
    ``covariance_01`` and ``covariance_11``. Lists of records are left out.
    """
    from pandas import Series

    kind = _kind_of(table)
    frame = frame_of(kind, getattr(profile, table))
    frame = frame.drop(columns=_lists_of_records(kind))
    for name in [name for name in frame.columns if name.endswith("covariance")]:
        place, matrices = list(frame.columns).index(name), frame.pop(name)
        for offset, (row, column) in enumerate(_OF_COVARIANCE):
            values = [None if matrix is None else matrix[row][column] for matrix in matrices]
            frame.insert(place + offset, f"{name}_{row}{column}", Series(values, dtype="float64"))
    return frame


def _lists_of_records(kind: type) -> list[str]:
    """Names of the fields that hold records, any number of them."""
    from msgspec import inspect

    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return [
        field.name
        for field in described.fields
        if isinstance(field.type, inspect.VarTupleType) and isinstance(field.type.item_type, inspect.StructType)
    ]


def _kind_of(table: str) -> type:
    """The type of a table's rows, as the profile declares it."""
    from calibrate.profile.profile import Profile

    kind: type = get_args(get_type_hints(Profile)[table])[0]
    return kind
