"""JSON reports of nccl-tests (``-J FILE``, from 2.17 on; versions 1 to 3 of its format, ``src/util.cu``)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import PurePath
from typing import Any, cast

from paradl_bench.importers.importer import Imported, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.nccl_logs.nccl_collectives import Sweep, add_sweep
from paradl_bench.importers.nccl_logs.nccl_operations import operation_of_experiment, programs_named
from paradl_bench.importers.nccl_logs.nccl_rows import DTYPES, Bandwidth, Buffers, Half, Row
from paradl_bench.importers.nccl_logs.nccl_text import library_version

_COLUMNS = ("size", "count", "type", "redop", "root")
_PRECISION = 0.5e-6
"""Numbers are printed with six decimals."""
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[, \n\r\t]*")
_VARIABLES = ("NCCL_", "CUDA_", "OMP_", "SLURM_JOB", "SLURM_N")


def is_report(text: str) -> bool:
    """Whether the text begins as a report does; text logs begin otherwise."""
    return text.lstrip()[:1] == "{"


def read_report(log: LogFile, options: ImportOptions) -> Imported:
    """Read one report or several; one that breaks off, because its run did, gives the rows up to there.

    Raises:
        UserError: the file is no report.
    """
    imported = Imported(device="cuda")
    count = 0
    for report, broken in _reports(log):
        results, config = report.get("results"), report.get("config")
        if not isinstance(results, list) or not isinstance(config, dict):
            raise NotOfFormat(f"{log.path} is no report of nccl-tests: it has no config and results")
        run = _Run(report, config, results, broken)
        _describe(imported, run)
        rows: list[Row] = []
        for number, entry in enumerate(results, start=count + 1):
            row = _row(entry, number)
            if isinstance(row, str):
                imported.drop(number, json.dumps(entry), f"result {number}: {row}")
            else:
                rows.append(row)
        if rows:
            add_sweep(imported, _sweep(run, rows), options, library="nccl", tool="nccl-tests", path=log.path)
        count += len(results)
    if not (imported.rows or imported.dropped):
        raise NotOfFormat(f"{log.path} holds no result of nccl-tests")
    return imported


class _Run:
    """What a report says of its run; ``broken`` where it breaks off."""

    def __init__(self, report: dict[str, Any], config: dict[str, Any], results: list[object], broken: bool) -> None:
        self.report, self.config, self.results, self.broken = report, config, results, broken
        devices = config.get("devices")
        self.devices = [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
        self.arguments = _texts(report.get("args"))
        # One entry a process, though a process may drive several devices.
        self.ranks_per_process = _number(config.get("nthreads"), 1) * _number(config.get("ngpus"), 1)
        self.hosts = [str(device["hostname"]) for device in self.devices if device.get("hostname")]
        most_processes = max(Counter(self.hosts).values(), default=0)
        self.ranks_per_host = most_processes * self.ranks_per_process


def _reports(log: LogFile) -> list[tuple[dict[str, Any], bool]]:
    """Every report of the file, as several runs append them, and whether it breaks off: the last one may."""
    text = log.json_text
    decoder = json.JSONDecoder()
    reports: list[tuple[dict[str, Any], bool]] = []
    place = _behind(_SPACE, text, 0)
    while place < len(text):
        begin = place
        try:
            report, place = decoder.raw_decode(text, begin)
            place = _behind(_SPACE, text, place)
        except (ValueError, RecursionError):
            return [*reports, (_torn(log, text[begin:]), True)]
        if not isinstance(report, dict):
            raise NotOfFormat(f"{log.path} is no report of nccl-tests: no JSON object")
        if place < len(text) and text[place] != "{":
            return [*reports, (_torn(log, text[begin:]), True)]
        reports.append((report, False))
    return reports


def _behind(gap: re.Pattern[str], text: str, place: int) -> int:
    match = gap.match(text, place)
    return match.end() if match else place


def _torn(log: LogFile, text: str) -> dict[str, Any]:
    """What a report holds up to where it breaks off."""
    report: dict[str, Any] = {}
    for key in ("version", "args", "env", "nccl_version", "config"):
        value = _value_after(text, f'"{key}":')
        if value is not None:
            report[key] = value
    start = re.search(r'"results":\s*\[', text)
    if start is None or not isinstance(report.get("config"), dict):
        raise NotOfFormat(f"{log.path} is no JSON report of nccl-tests (truncated before its first result?)")
    results, place = [], start.end()
    decoder = json.JSONDecoder()
    while True:
        place = _behind(_BETWEEN, text, place)
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        results.append(entry)
    report["results"] = results
    return report


def _value_after(text: str, key: str) -> object:
    place = text.find(key)
    if place < 0:
        return None
    rest = text[place + len(key) :].lstrip()
    try:
        value: object = json.JSONDecoder().raw_decode(rest)[0]
    except (ValueError, RecursionError):
        return None
    return value


def _describe(imported: Imported, run: _Run) -> None:
    version = run.report.get("nccl_version")
    if isinstance(version, int):
        imported.versions["nccl"] = library_version(version)
    if isinstance(run.report.get("version"), int):
        imported.versions["nccl-tests report"] = str(run.report["version"])
    imported.device_names |= {str(device["device_info"]) for device in run.devices if device.get("device_info")}
    imported.hosts |= set(run.hosts)
    imported.ranks_per_host = max(imported.ranks_per_host, run.ranks_per_host)
    for name in ("validation", "graph", "blocking_collectives"):
        if isinstance(run.config.get(name), (int, str)):
            imported.settings[name] = str(run.config[name])
    if run.arguments:
        imported.command_lines.append(" ".join(run.arguments))
    for variable in _texts(run.report.get("env")):
        name, equals, value = variable.partition("=")
        if equals and name.startswith(_VARIABLES):
            imported.variables[name] = value


def _texts(value: object) -> list[str]:
    return [part for part in value if isinstance(part, str)] if isinstance(value, list) else []


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**7 else otherwise


def _sweep(run: _Run, rows: list[Row]) -> Sweep:
    processes = len(run.devices)
    programs = programs_named(PurePath(run.arguments[0]).name) if run.arguments else []
    names = [
        operation_of_experiment(str(entry["experiment_name"]))
        for entry in run.results
        if isinstance(entry, dict) and entry.get("experiment_name")
    ]
    groups = {str(device.get("group")) for device in run.devices}
    errors = [text for text in _texts(run.report.get("errors")) if text.strip()]
    aggregated = _number(run.config.get("aggregated_iterations"), 1)
    return Sweep(
        line=1,
        rows=rows,
        stated=next((name for name in [*programs, *names] if name), None),
        named=(),
        columns=_COLUMNS,
        ranks=tuple(sorted({processes, processes * run.ranks_per_process} - {0})),
        hosts=len(set(run.hosts)) or None,
        ranks_per_node=run.ranks_per_host,
        groups=max(len(groups), 1),
        calls=_number(run.config.get("iterations"), 1) * aggregated if run.config.get("iterations") else None,
        failure="its report breaks off" if run.broken else next(iter(errors), None),
    )


def _row(entry: object, number: int) -> Row | str:
    if not isinstance(entry, dict):
        return "no object"
    size, count, kind = entry.get("size"), entry.get("count"), entry.get("type")
    if not (isinstance(size, int) and isinstance(count, int) and 0 <= size < 2**63 and 0 <= count < 2**63):
        return "size or count is no number"
    if not isinstance(kind, str) or kind not in DTYPES:
        return f"unknown type {kind!r}"
    dtype, element_bytes = DTYPES[kind]
    halves: list[Half] = []
    for buffers in cast(tuple[Buffers, ...], ("out_of_place", "in_place")):
        values = entry.get(buffers)
        if values is None:
            continue
        half = _half(values, entry.get(f"{buffers}_per_iter"), buffers)
        if half is None:
            return f"{buffers} holds no time"
        halves.append(half)
    if not halves:
        return "no time"
    return Row(
        line=number,
        text=json.dumps(entry),
        size_bytes=size,
        count=count,
        dtype=dtype,
        element_bytes=element_bytes,
        halves=tuple(halves),
        redop=str(entry.get("redop") or "").strip(),
        root=str(entry.get("root") or "").strip(),
    )


def _half(values: object, calls: object, buffers: Buffers) -> Half | None:
    if not isinstance(values, dict):
        return None
    cpu_time = "cpu_time" in values
    numbers = [_positive(values.get(name)) for name in ("cpu_time" if cpu_time else "time", "alg_bw", "bus_bw")]
    if any(number is None for number in numbers):
        return None
    time_us, algbw, busbw = (number for number in numbers if number is not None)
    return Half(
        buffers=buffers,
        seconds=time_us * 1e-6,
        rounding_s=_PRECISION * 1e-6,
        algbw=Bandwidth(algbw, _PRECISION),
        busbw=Bandwidth(busbw, _PRECISION),
        cpu_time=cpu_time,
        wrong=_positive(values.get("nwrong")),
        samples_s=_single_calls(calls),
    )


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        return None
    return float(value)


def _single_calls(calls: object) -> tuple[tuple[float, ...], ...]:
    """Times of single calls in seconds, a list a process, or the slowest of all processes; empty where not kept."""
    if not isinstance(calls, dict):
        return ()
    skipped = calls.get("skipped_iterations")
    first = skipped if isinstance(skipped, int) and not isinstance(skipped, bool) and skipped > 0 else 0
    of_processes = calls.get("per_process_max_times_us")
    lists = of_processes if isinstance(of_processes, list) and of_processes else [calls.get("times_us")]
    samples = []
    for values in lists:
        if not isinstance(values, list):
            return ()
        times = [_positive(value) for value in values[first:]]
        if not times or None in times:
            return ()
        samples.append(tuple(time * 1e-6 for time in times if time is not None))
    return tuple(samples) if len({len(times) for times in samples}) == 1 else ()
