"""``paradl-bench export``: measurements in the formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from paradl_bench.core.bounds import LONGEST_S
from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.command_line import refuse_overwrite, say, write_output
from paradl_bench.core.units import check_bounds
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.records.measurement import read_manifest


@click.command("export")
@click.argument("format_name", metavar="FORMAT", type=click.Choice(["ssgd-trace"]))
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="The model, if DIR holds several.")
@click.option("--batch", type=click.IntRange(1), help="The local batch, if DIR holds several.")
@click.option(
    "--sweep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory of a sweep, whose all-reduce times become the exchanges.",
)
@click.option("--io-seconds", default=0.0, type=float, help="Seconds to read one mini-batch.")
@click.option(
    "--run",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory of a training run that read images, whose reading times are written.",
)
@click.option("-o", "--output", required=True, metavar="FILE", help="- for standard output.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def COMMAND(  # noqa: N802
    format_name: str,
    directory: Path,
    model: str | None,
    batch: int | None,
    sweep: Path | None,
    io_seconds: float,
    run: Path | None,
    output: str,
    force: bool,
) -> None:
    """Write layer times that DIR holds as an S-SGD trace: forward, backward and exchange of every layer.

    Reading a mini-batch is that of every iteration of --run, or --io-seconds.
    """
    from paradl_bench.measure.layers.ssgd_writing import trace_lines

    check_bounds(io_seconds, "--io-seconds", "seconds are a finite number", most=LONGEST_S)
    refuse_overwrite(output, force=force)
    network = _network(directory, model)
    lines, notes = trace_lines(directory, network, batch=batch, sweep=sweep, io_s=io_seconds, run=run)
    write_output(output, ("\n".join(lines) + "\n").encode(), force=force)
    for note in notes:
        say(f"note: {note}")


def _network(directory: Path, model: str | None) -> ModelGraph:
    networks = {}
    for path in sorted(directory.glob("network*.json")):
        network = read_network(path)
        networks[network.name] = network
    if model is None and len(networks) == 1:
        return next(iter(networks.values()))
    if not networks:
        kind = read_manifest(directory).kind
        raise UserError(f"{directory} holds {kind} without a network: give a directory of paradl-bench layers")
    if model not in networks:
        raise UserError(f"{directory} holds several models ({', '.join(networks)}): say which by --model")
    return networks[model]
