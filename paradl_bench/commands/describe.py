"""``paradl-bench describe``: a model's layers, shapes, bytes and FLOPs, without measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import frame_of
from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import open_console, refuse_overwrite, say, write_output
from paradl_bench.core.terminal.forms import JSON, MARKDOWN, TABLE, check_form, form_of, frame_bytes, table_format
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import format_bytes, format_input
from paradl_bench.network.graph import TARGET_DTYPE, Layer, ModelGraph
from paradl_bench.plan.options import SampleOptions, sample_options

_MOST_ROWS = 40
_KINDS = 3


@click.command("describe")
@click.argument("model")
@sample_options
@click.option("-o", "--output", metavar="FILE", help="Write the network to a file; - for standard output.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@table_format
@click.option("--all", "every_layer", is_flag=True, help="List each layer. Default for large networks: the modules.")
@collected(sample=SampleOptions)
def COMMAND(  # noqa: N802
    model: str, sample: SampleOptions, output: str | None, force: bool, form: str, every_layer: bool
) -> None:
    """Trace MODEL and list its layers: shapes, parameters, FLOPs, bytes and dependencies. Measures nothing.

    MODEL is a name that paradl-bench models lists, a Hugging Face config.json, or package.module:factory.
    """
    shape = sample.shape
    check_form(form, output)
    if output:
        refuse_overwrite(output, force=force)
    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model

    loaded = load_model(model, shape, device="meta")
    network = trace_network(loaded)
    loaded.say_guess()
    of_person = form in (TABLE, MARKDOWN)
    if output or not of_person:
        written = form_of(output, form)
        content = encode_pretty(network) if written == JSON else frame_bytes(frame_of(Layer, network.layers), written)
        write_output(output or "-", content, force=force)
    if output != "-" and of_person:
        _print(network, every_layer=every_layer)
    if output and output != "-":
        say(f"wrote {output}")


def _print(network: ModelGraph, *, every_layer: bool) -> None:
    console = open_console()
    sample = format_input(network.input_shape, tokens=network.input_dtype == TARGET_DTYPE)
    title = f"{network.name}, input {sample}, per sample"
    whole = every_layer or len(network.layers) <= _MOST_ROWS
    parts = {layer.name: [layer] for layer in network.layers} if whole else modules_of(network)
    console.print(
        table_of([_cells(name, layers, network, one_by_one=whole) for name, layers in parts.items()], title=title)
    )
    if not whole:
        console.print(f"Layers by module; {len(network.layers)} one by one: --all", highlight=False)
    console.print(
        f"{len(network.layers)} layers, {network.parameter_elements:,} parameters "
        f"({format_bytes(network.parameter_bytes)}), FW {network.fw_flops / 1e9:.2f} and BW "
        f"{network.bw_flops / 1e9:.2f} GFLOP a sample"
    )


def modules_of(network: ModelGraph) -> dict[str, list[Layer]]:
    """Layers by the module that they lie in, as deep as names go without more than so many modules."""
    deepest = max(layer.name.count(".") for layer in network.layers)
    for depth in range(deepest, 0, -1):
        parts = grouped(network.layers, lambda layer: ".".join(layer.name.split(".")[:depth]))  # noqa: B023
        if len(parts) <= _MOST_ROWS:
            return parts
    return parts


def _cells(name: str, layers: Sequence[Layer], network: ModelGraph, *, one_by_one: bool) -> dict[str, str]:
    """A layer, or several of one module."""
    elements = {tensor.name: tensor.elements for tensor in network.parameters}
    kinds = Counter(layer.kind for layer in layers)
    few = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_KINDS))
    single = len(layers) == 1
    parameters = {parameter for layer in layers for parameter in layer.parameters}
    return {
        "layer": name,
        "output": "x".join(map(str, layers[-1].output_shape)) or "scalar",
        "parameters": f"{sum(elements.get(parameter, 0) for parameter in parameters):,}",
        "FW MFLOP": f"{sum(layer.fw_flops for layer in layers) / 1e6:,.2f}",
        "BW MFLOP": f"{sum(layer.bw_input_flops + layer.bw_weight_flops for layer in layers) / 1e6:,.2f}",
        "kind": layers[0].kind if single else few + (", ..." if len(kinds) > _KINDS else ""),
        "reads": ", ".join(layers[0].inputs) if one_by_one else "",
    }
