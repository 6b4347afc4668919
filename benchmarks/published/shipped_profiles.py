"""Rebuild the profiles that come with the tool, from published measurements.

    python benchmarks/published/shipped_profiles.py [--data ../shared/data] [-o DIR] [NAME...]

A profile holds what was fitted, and no row of a table: regressors of kernels, alpha and beta of collectives, numbers of
data sheets. It names whose measurements they are, under which licence, and what no table has. About two minutes; the
same data give the same bytes on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
from imports import DATA  # noqa: E402
from shipped.devices import DEVICES  # noqa: E402
from shipped.proof import Held, accuracy_line, held_against_runs  # noqa: E402
from shipped.regressors import (  # noqa: E402
    Regressors,
    borrowed,
    combined,
    like_product_error,
    own_regressors,
    read_records,
    transfer_errors,
)
from shipped.tables import Device, Table, read_sweeps  # noqa: E402

from calibrate.fitting.collectives.communication_fit import fit_communication  # noqa: E402
from calibrate.fitting.collectives.communication_spread import with_comparable_scaling  # noqa: E402
from calibrate.fitting.kernels.kernel_trial import prefixed  # noqa: E402
from calibrate.kernels.files import Arrays, archive_beside, write_arrays  # noqa: E402
from calibrate.kernels.model import KernelModel  # noqa: E402
from calibrate.profile.collectives.communication import CommunicationFit  # noqa: E402
from calibrate.profile.profile import SCHEMA_VERSION, Profile, Source, read_profile, write_profile  # noqa: E402
from calibrate.profile.profile import Device as ProfiledDevice  # noqa: E402
from calibrate.profile.roofline_rates import DATA_SHEET, DeviceRate  # noqa: E402
from calibrate.profile.shipped.published import Publication, Published  # noqa: E402
from paradl_bench.core.units import format_bytes  # noqa: E402
from paradl_bench.plan.collectives.catalog import operations  # noqa: E402
from paradl_bench.records.cluster import NODE, Cluster, Level  # noqa: E402
from paradl_bench.records.devices.sheet import DeviceSheet, device_sheet  # noqa: E402
from paradl_bench.records.measurement import Environment  # noqa: E402

FARTHEST_FIT = 0.25
"""A fit of a collective that misses sizes it has not seen by more, in the mean, tells nothing."""
MADE = "2026-11-25T00:00:00Z"
"""Fixed, so that the same data give the same bytes."""
FOLDER = ROOT / "calibrate" / "profile" / "shipped" / "data"


def all_regressors(data: Path, devices: Sequence[Device] = DEVICES) -> dict[str, Regressors]:
    """Of every device: its own tables', like products', and those of the device that it borrows from."""
    pairs = {device.name: own_regressors(read_records(device, data)) for device in devices}
    own = {name: pair[0] for name, pair in pairs.items()}
    like_error = like_product_error(own.values(), [pair[1] for pair in pairs.values()])
    errors = transfer_errors({device.name: (device, own[device.name]) for device in devices})
    whole = {name: combined(*pair, like_error) for name, pair in pairs.items()}
    by_name = {device.name: device for device in devices}
    found = {}
    for device in devices:
        of_device = dict(whole[device.name])
        for donor in dict.fromkeys(name for names in device.borrows.values() for name in names):
            of_device |= borrowed(of_device, device, by_name[donor], whole[donor], errors)
        peaks = device_sheet(device.sheet).peak_flops
        found[device.name] = {key: each for key, each in of_device.items() if key[3] in peaks}
    return found


def fits_of(table: Table, data: Path) -> tuple[list[CommunicationFit], list[str]]:
    """Alpha and beta of a table's sweeps, and the collectives that no form fits."""
    fitted = fit_communication(read_sweeps(table, data), operations())
    bad = {fit.key for fit in fitted.fits if fit.held_out_relative_error > FARTHEST_FIT}
    kept = [msgspec.structs.replace(each, published=table.name) for each in fitted.fits if each.key not in bad]
    lines = [f"{operation} at level {level}: its times follow no form" for _, operation, level in sorted(bad)]
    # Those left out say nothing of how far the scaling of the others may be off either.
    return list(with_comparable_scaling(kept)), lines


def _device(device: Device, sheet: DeviceSheet) -> ProfiledDevice:
    rates = [("compute", dtype, sheet.peak(dtype)) for dtype in ("fp32", "bf16") if dtype in sheet.peak_flops]
    rates.append(("memory", "fp32", sheet.memory_bandwidth_bytes_per_s))
    return ProfiledDevice(
        name=device.device_name,
        kind="cuda",
        memory_bytes=int(sheet.memory_bytes),
        devices_per_host=device.ranks_per_node,
        peak_flops=sheet.peak("fp32"),
        memory_bandwidth_bytes_per_s=sheet.memory_bandwidth_bytes_per_s,
        rates_from=DATA_SHEET,
        rates=tuple(
            DeviceRate(
                resource=resource,  # type: ignore[arg-type]
                dtype=dtype,
                ranks_on_host=1,
                per_s=rate,
                relative_sd=0.0,
                kernel=DATA_SHEET,
                working_set_bytes=int(sheet.memory_bytes),
                spread_over_kernels=(rate, rate),
            )
            for resource, dtype, rate in rates
        ),
    )


def _cluster(device: Device, sheet: DeviceSheet) -> Cluster:
    levels = [Level(name=NODE, ranks=device.ranks_per_node)]
    if device.ranks > device.ranks_per_node:
        levels.append(Level(name="system", ranks=device.ranks))
    return Cluster(name=device.name, levels=tuple(levels), memory_bytes_per_rank=float(sheet.memory_bytes))


def _source(table: Table, kind: str, data: Path) -> Source:
    digest = hashlib.sha256(f"{kind} {table.name}".encode())
    for path in table.paths(data):
        digest.update(path.read_bytes())
    return Source(
        path=f"{table.source} ({table.licence})",
        kind=kind,
        command_line=(),
        created_utc=MADE,
        sha256=digest.hexdigest(),
        environment=0,
        complete=True,
    )


def _published(
    device: Device, models: Sequence[KernelModel], fits: Sequence[CommunicationFit], bad: Sequence[str]
) -> Published:
    by_name = {table.name: table for each in (*DEVICES, device) for table in (*each.kernels, *each.sweeps)}
    holds: dict[str, list[str]] = {}
    for model in models:
        name, _, how = str(model.published).partition(", ")
        holds.setdefault(name, []).append(model.title + (f" ({how})" if how else ""))
    for key in dict.fromkeys(fit.key for fit in fits):
        own = [fit for fit in fits if fit.key == key]
        holds.setdefault(str(own[0].published), []).append(_swept(own))
    sheet = device_sheet(device.sheet)
    return Published(
        device=device.sheet,
        dtypes=tuple(dtype for dtype in ("fp32", "bf16") if dtype in sheet.peak_flops),
        publications=(
            *(
                Publication(name=name, source=by_name[name].source, licence=by_name[name].licence, holds=tuple(held))
                for name, held in holds.items()
            ),
            Publication(
                name=DATA_SHEET,
                source=sheet.sources["peak_flops"],
                licence="numbers of the maker",
                holds=("peak FLOP/s", "memory bandwidth", "memory"),
            ),
        ),
        valid=_valid(device, fits),
        lacks=(*device.lacks, *bad),
        accuracy=tuple(_accuracy(models)),
    )


def _swept(fits: Sequence[CommunicationFit]) -> str:
    """Of one operation at one level: which messages, among how many ranks."""
    sizes = [end for fit in fits for end in fit.bytes_range]
    ranks = [end for fit in fits for end in fit.ranks_range]
    among = f"{min(ranks)} to {max(ranks)}" if min(ranks) < max(ranks) else f"{max(ranks)}"
    messages = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    return f"{fits[0].operation} at level {fits[0].level}, {messages}, {among} ranks"


def _valid(device: Device, fits: Sequence[CommunicationFit]) -> str:
    of_node = f"nodes of {device.ranks_per_node}, swept up to {device.ranks} ranks" if fits else "one device"
    return f"one sort of node of one site: {of_node}; whatever lies beyond is said to be extrapolated"


def _accuracy(models: Sequence[KernelModel]) -> list[str]:
    """In the words of each dtype: how far regressors are off kernels that they had not seen."""
    lines = []
    for dtype in ("fp32", "bf16"):
        own = [
            model.candidates[0].held_out_re
            for model in models
            if model.dtype == dtype and ", of " not in str(model.published)
        ]
        other = [model for model in models if model.dtype == dtype and ", of " in str(model.published)]
        if own:
            middle = f"{statistics.median(own):.1%} in the median, {max(own):.1%} at most"
            lines.append(f"{dtype} kernels not seen: mean error {middle}, over {len(own)} sorts of kernels")
        if other:
            widest = max(model.interval_log for model in other)
            lines.append(f"{dtype} kernels of another device: 90% within a factor of {math.exp(widest):.2f}")
    return lines


def build(device: Device, regressors: Regressors, data: Path, folder: Path) -> Path:
    """Write the profile of a device and the archive beside it; returns its path."""
    sheet, path = device_sheet(device.sheet), folder / f"{device.name}.json"
    arrays: Arrays = {}
    models = []
    for number, key in enumerate(sorted(regressors, key=str)):
        each = regressors[key]
        models.append(msgspec.structs.replace(each.model, arrays=str(number)))
        arrays |= prefixed(str(number), each.arrays)
    archive = archive_beside(path)
    sha256 = write_arrays(archive, arrays)
    models = [msgspec.structs.replace(model, file=str(archive), sha256=sha256) for model in models]
    swept = [fits_of(table, data) for table in device.sweeps]
    fits = [fit for own, _ in swept for fit in own]
    environment = Environment(
        device="cuda",
        device_name=device.device_name,
        device_count=device.ranks_per_node,
        memory_bytes=int(sheet.memory_bytes),
        hostname="",
        kernel="",
        versions={},
        settings={},
    )
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        created_utc=MADE,
        command_line=(),
        environments=(environment,),
        sources=(
            *(_source(table, "kernels", data) for table in device.kernels),
            *(_source(table, "collectives", data) for table in device.sweeps),
        ),
        devices=(_device(device, sheet),),
        cluster=_cluster(device, sheet),
        communication=tuple(fits),
        kernel_models=tuple(models),
        published=_published(device, models, fits, [line for _, lines in swept for line in lines]),
    )
    write_profile(path, profile)
    return path


def prove(path: Path, device: Device, data: Path) -> list[Held]:
    """Hold a written profile against published iterations, and write into it how far it was off."""
    runs, profile = held_against_runs(path, device, data), read_profile(path)
    assert profile.published
    accuracy = (*profile.published.accuracy, accuracy_line(runs))
    published = msgspec.structs.replace(profile.published, accuracy=accuracy)
    write_profile(path, msgspec.structs.replace(profile, published=published))
    return runs


def main() -> None:
    """Build all profiles, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the profiles to write; all unless given")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published measurements")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder of the profiles")
    given = parser.parse_args()
    if not given.data.is_dir():
        sys.exit(f"{given.data} is not here: the published measurements lie beside the repository")
    unknown = sorted(set(given.names) - {device.name for device in DEVICES})
    if unknown:
        sys.exit(f"no profile is called {', '.join(unknown)}: {', '.join(device.name for device in DEVICES)}")
    regressors = all_regressors(given.data)
    given.output.mkdir(parents=True, exist_ok=True)
    for device in DEVICES:
        if not given.names or device.name in given.names:
            path = build(device, regressors[device.name], given.data, given.output)
            runs = prove(path, device, given.data)
            size = path.stat().st_size + archive_beside(path).stat().st_size
            print(f"{path}: {len(regressors[device.name])} regressors, {format_bytes(size)}")
            for each in runs:
                print(f"  {each.name}: {each.error:+.1%}{'' if each.holds else ', outside of the interval'}")


if __name__ == "__main__":
    main()
