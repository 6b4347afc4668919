"""``paradl-bench describe``: a model's layers, shapes, bytes and FLOPs, without measuring."""

from __future__ import annotations

import click

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import open_console, refuse_overwrite, write_output
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.options import SampleOptions, sample_options


@click.command("describe")
@click.argument("model")
@sample_options
@click.option("-o", "--output", metavar="FILE", help="Write the network as JSON; - for standard output.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print the network as JSON instead of a table.")
@collected(sample=SampleOptions)
def COMMAND(  # noqa: N802
    model: str, sample: SampleOptions, output: str | None, force: bool, as_json: bool
) -> None:
    """Trace MODEL and list its layers: shapes, parameters, FLOPs, bytes and dependencies. Measures nothing.

    MODEL is a name that paradl-bench models lists, a Hugging Face config.json, or package.module:factory.
    """
    shape = sample.shape
    if output:
        refuse_overwrite(output, force=force)
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model

    network = trace_network(load_model(model, shape, device="meta"))
    if output or as_json:
        write_output(output or "-", encode_pretty(network), force=force)
    if not output and not as_json:
        _print(network)


def _print(network: ModelGraph) -> None:
    elements = {tensor.name: tensor.elements for tensor in network.parameters}
    rows = [
        (
            layer.name,
            layer.kind,
            ", ".join(layer.inputs),
            "x".join(map(str, layer.output_shape)) or "scalar",
            f"{sum(elements.get(name, 0) for name in layer.parameters):,}",
            f"{layer.fw_flops / 1e6:,.2f}",
            f"{(layer.bw_input_flops + layer.bw_weight_flops) / 1e6:,.2f}",
        )
        for layer in network.layers
    ]
    console = open_console()
    columns = ("layer", "kind", "reads", "output", "parameters", "FW MFLOP", "BW MFLOP")
    title = f"{network.name}, input {'x'.join(map(str, network.input_shape))}, per sample"
    console.print(table(columns, rows, title=title))
    console.print(
        f"{len(network.layers)} layers, {network.parameter_elements:,} parameters "
        f"({format_bytes(network.parameter_bytes)}), FW {network.fw_flops / 1e9:.2f} and BW "
        f"{network.bw_flops / 1e9:.2f} GFLOP a sample"
    )
