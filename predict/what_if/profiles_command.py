"""``predict profiles``: profiles that come with the tool, made of published measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.terminal.collected import collected
from predict.prediction.command_options import OutputOptions, output_options

if TYPE_CHECKING:
    from pandas import DataFrame


@click.command("profiles", context_settings={"help_option_names": ["-h", "--help"]})
@output_options
@collected(written=OutputOptions)
def profiles(written: OutputOptions, **_: Any) -> None:
    """List the profiles that come with the tool: --from-profile takes their names.

    Each is fitted to published measurements of one device. --format json and -o give all that each holds.
    """
    from calibrate.profile.profile import read_profile
    from calibrate.profile.shipped.catalog import shipped_profiles
    from predict.prediction.presentation import flat_row

    def frame() -> DataFrame:
        from pandas import DataFrame

        return DataFrame([flat_row(record) for record in records])

    written.check()
    records = [_record(name, read_profile(path)) for name, path in shipped_profiles().items()]
    if written.write(records, frame):
        _print(records)


def _record(name: str, profile: Any) -> dict[str, Any]:
    import msgspec

    from paradl_bench.core.units import counted

    told = msgspec.to_builtins(profile.published)
    kinds = dict.fromkeys(model.kind for model in profile.kernel_models)
    collectives = dict.fromkeys(fit.operation for fit in profile.communication)
    return {
        "name": name,
        **told,
        "device_names": [device.name for device in profile.devices],
        "kernels": f"{counted(len(profile.kernel_models), 'regressor')}: {', '.join(kinds)}",
        "collectives": ", ".join(collectives) or "none",
        "ranks_swept": profile.cluster.levels[-1].ranks,
        "ranks_per_node": profile.cluster.ranks_per_node,
    }


def _print(records: list[dict[str, Any]]) -> None:
    from paradl_bench.core.terminal.command_line import open_console
    from paradl_bench.core.terminal.tables import table

    rows = [
        [
            record["name"],
            ", ".join(record["dtypes"]),
            record["kernels"].partition(":")[0].partition(" ")[0],
            record["collectives"],
            str(record["ranks_swept"]),
            ", ".join(dict.fromkeys(of["licence"] for of in record["publications"][:-1])),
        ]
        for record in records
    ]
    console = open_console()
    columns = ["profile", "dtypes", "regressors", "collectives", "ranks", "licences"]
    console.print(table(columns, rows, title="profiles of published measurements, for --from-profile"))
    for record in records:
        console.print(f"{record['name']}: {'; '.join(record['accuracy'])}", highlight=False)
        console.print(f"  from {', '.join(_cited(of) for of in record['publications'])}", highlight=False)
        console.print(f"  lacks {'; '.join(record['lacks'])}", highlight=False)


def _cited(publication: dict[str, Any]) -> str:
    return f"{publication['name']} ({publication['source']}, {publication['licence']})"
