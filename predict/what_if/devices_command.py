"""``predict devices``: the catalogue that ``--device`` takes names of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.help import GroupedCommand
from predict.prediction.command_options import OutputOptions, output_options

if TYPE_CHECKING:
    from pandas import DataFrame


@click.command("devices", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@output_options
@collected(written=OutputOptions)
def devices(written: OutputOptions, **_: Any) -> None:
    """List the GPUs that --device and what-if --vary device=... know, with their makers' numbers.

    Dense peaks, without sparsity; links one way. --format json and -o give every number with its source.
    """
    from paradl_bench.records.devices.sheet import device_sheets
    from predict.prediction.presentation import flat_row

    def frame() -> DataFrame:
        from pandas import DataFrame

        return DataFrame([flat_row(sheet) for sheet in sheets])

    written.check()
    sheets = list(device_sheets().values())
    if written.write(sheets, frame):
        _print(sheets)


def _print(sheets: list[Any]) -> None:
    from paradl_bench.core.terminal.command_line import open_console
    from paradl_bench.core.terminal.tables import table

    rows = [
        [
            sheet.name,
            *(f"{sheet.peak_flops[dtype] / 1e12:.4g}" if dtype in sheet.peak_flops else "-" for dtype in _DTYPES),
            f"{sheet.memory_bytes / 1e9:.4g}",
            f"{sheet.memory_bandwidth_bytes_per_s / 1e9:.4g}",
            "-" if sheet.device_link_bytes_per_s is None else f"{sheet.device_link_bytes_per_s / 1e9:.4g}",
        ]
        for sheet in sheets
    ]
    columns = ["device", *(f"{dtype} TFLOP/s" for dtype in _DTYPES), "memory GB", "memory GB/s", "links GB/s"]
    console = open_console()
    console.print(table(columns, rows, title="devices by their makers' data sheets"))
    console.print(
        "Peaks are dense (without sparsity). Links are to GPUs of the same node, one way. Sources: --json.",
        highlight=False,
    )


_DTYPES = ("fp32", "tf32", "bf16", "fp8")
