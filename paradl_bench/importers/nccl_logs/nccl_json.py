"""JSON reports of nccl-tests (``-J FILE``, from 2.17 on; versions 1 to 3 of its format, ``src/util.cu``)."""

from __future__ import annotations

import json
import re
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
    found = Imported(device="cuda")
    count = ranks_per_host = 0
    for report, broken in _reports(log):
        results = _add_report(found, report, broken, count, log, options)
        count, ranks_per_host = count + results, max(ranks_per_host, found.ranks_per_host)
    found.ranks_per_host = ranks_per_host
    if not (found.rows or found.dropped):
        raise NotOfFormat(f"{log.path} holds no result of nccl-tests")
    return found


def _add_report(
    found: Imported, report: dict[str, Any], broken: bool, before: int, log: LogFile, options: ImportOptions
) -> int:
    """Add one report, behind so many results of others; gives the number of its own."""
    results, config = report.get("results"), report.get("config")
    if not isinstance(results, list) or not isinstance(config, dict):
        raise NotOfFormat(f"{log.path} is no report of nccl-tests: it has no config and results")
    _describe(found, report, config)
    rows: list[Row] = []
    for number, entry in enumerate(results, start=before + 1):
        row = _row(entry, number)
        if isinstance(row, str):
            found.drop(number, json.dumps(entry), f"result {number}: {row}")
        else:
            rows.append(row)
    if rows:
        sweep = _sweep(report, config, rows, results, broken, found.ranks_per_host)
        add_sweep(found, sweep, options, library="nccl", tool="nccl-tests", path=log.path)
    return len(results)


def _reports(log: LogFile) -> list[tuple[dict[str, Any], bool]]:
    """Every report of the file, as several runs append them, and whether it breaks off: the last one may."""
    text = log.json_text
    decoder = json.JSONDecoder()
    found: list[tuple[dict[str, Any], bool]] = []
    place = _behind(_SPACE, text, 0)
    while place < len(text):
        begin = place
        try:
            report, place = decoder.raw_decode(text, begin)
            place = _behind(_SPACE, text, place)
        except (ValueError, RecursionError):
            return [*found, (_torn(log, text[begin:]), True)]
        if not isinstance(report, dict):
            raise NotOfFormat(f"{log.path} is no report of nccl-tests: no JSON object")
        if place < len(text) and text[place] != "{":
            return [*found, (_torn(log, text[begin:]), True)]
        found.append((report, False))
    return found


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


def _describe(found: Imported, report: dict[str, Any], config: dict[str, Any]) -> None:
    version = report.get("nccl_version")
    if isinstance(version, int):
        found.versions["nccl"] = library_version(version)
    if isinstance(report.get("version"), int):
        found.versions["nccl-tests report"] = str(report["version"])
    devices = _devices(config)
    found.device_names |= {str(device["device_info"]) for device in devices if device.get("device_info")}
    hosts = [str(device["hostname"]) for device in devices if device.get("hostname")]
    found.hosts |= set(hosts)
    each = _number(config.get("nthreads"), 1) * _number(config.get("ngpus"), 1)
    found.ranks_per_host = max((hosts.count(host) * each for host in set(hosts)), default=0)
    for name in ("validation", "graph", "blocking_collectives"):
        if isinstance(config.get(name), (int, str)):
            found.settings[name] = str(config[name])
    if _texts(report.get("args")):
        found.command_lines.append(" ".join(_texts(report.get("args"))))
    for variable in _texts(report.get("env")):
        name, equals, value = variable.partition("=")
        if equals and name.startswith(_VARIABLES):
            found.variables[name] = value


def _devices(config: dict[str, Any]) -> list[dict[str, Any]]:
    devices = config.get("devices")
    return [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []


def _texts(value: object) -> list[str]:
    return [part for part in value if isinstance(part, str)] if isinstance(value, list) else []


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**7 else otherwise


def _sweep(
    report: dict[str, Any],
    config: dict[str, Any],
    rows: list[Row],
    results: list[object],
    broken: bool,
    ranks_per_host: int,
) -> Sweep:
    devices = _devices(config)
    each = _number(config.get("nthreads"), 1) * _number(config.get("ngpus"), 1)
    # One entry a process, though a process may drive several devices.
    ranks = {len(devices), len(devices) * each} - {0}
    programs = programs_named(PurePath(_texts(report.get("args"))[0]).name) if _texts(report.get("args")) else []
    names = [
        operation_of_experiment(str(entry["experiment_name"]))
        for entry in results
        if isinstance(entry, dict) and entry.get("experiment_name")
    ]
    groups = {str(device.get("group")) for device in devices}
    hosts = {str(device["hostname"]) for device in devices if device.get("hostname")}
    errors = _texts(report.get("errors"))
    failure = "its report breaks off" if broken else next((text for text in errors if text.strip()), None)
    aggregated = _number(config.get("aggregated_iterations"), 1)
    return Sweep(
        line=1,
        rows=rows,
        stated=next((name for name in [*programs, *names] if name), None),
        named=(),
        columns=_COLUMNS,
        ranks=tuple(sorted(ranks)),
        hosts=len(hosts) or None,
        ranks_per_node=ranks_per_host,
        groups=max(len(groups), 1),
        calls=_number(config.get("iterations"), 1) * aggregated if config.get("iterations") else None,
        failure=failure,
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


def _half(values: object, each: object, buffers: Buffers) -> Half | None:
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
        samples_s=_single_calls(each),
    )


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        return None
    return float(value)


def _single_calls(each: object) -> tuple[tuple[float, ...], ...]:
    """Times of single calls in seconds, a list a process, or the slowest of all processes; empty where not kept."""
    if not isinstance(each, dict):
        return ()
    skipped = each.get("skipped_iterations")
    first = skipped if isinstance(skipped, int) and not isinstance(skipped, bool) and skipped > 0 else 0
    of_processes = each.get("per_process_max_times_us")
    lists = of_processes if isinstance(of_processes, list) and of_processes else [each.get("times_us")]
    samples = []
    for values in lists:
        if not isinstance(values, list):
            return ()
        times = [_positive(value) for value in values[first:]]
        if not times or None in times:
            return ()
        samples.append(tuple(time * 1e-6 for time in times if time is not None))
    return tuple(samples) if len({len(times) for times in samples}) == 1 else ()
