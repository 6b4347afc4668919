"""Options that several commands take in the same words: a plan and a run are asked for alike. Imports little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import msgspec

from paradl_bench.core.bounds import MOST_ACCUMULATED, MOST_NORM
from paradl_bench.core.checks import refuse_fp8
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.terminal.help import Decorator, option_group, together
from paradl_bench.core.units import parse_sample_shape
from paradl_bench.plan.axes.options import Shown
from paradl_bench.plan.axes.registry import option_types

_AS_DECLARED: Mapping[str, Mapping[str, str]] = MappingProxyType({})


class SampleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What :data:`sample_options` give."""

    input_shape: str | None
    sequence: int | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of a sample; None for the model's own.

        Raises:
            UserError: both are given, or an extent is no positive whole number.
        """
        return parse_sample_shape(self.input_shape, self.sequence)


sample_options = together(
    click.option("--input-shape", metavar="CxHxW", help="Shape of one sample. Default: the model's own (3x224x224)."),
    click.option(
        "--sequence",
        metavar="N",
        type=click.IntRange(1),
        help="Tokens in one sample, for a model that reads token ids.",
    ),
)


class _Dtypes(click.Choice[str]):
    """Dtypes that are trained in; fp8 is refused by its name."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        refuse_fp8(value)
        return super().convert(value, param, ctx)


def not_fp8(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Of a dtype that is given freely, a callback: the same; a UserError of fp8."""
    refuse_fp8(value)
    return value


measured_dtype_option = click.option(
    "--dtype", callback=not_fp8, help="fp32, bf16, bf16-weights. Default: the one that was measured."
)
"""Of what is predicted."""

dtype_option = click.option(
    "--dtype",
    type=_Dtypes(["fp32", "bf16", "bf16-weights"]),
    default="fp32",
    show_default=True,
    help="bf16: autocast rounds forward and loss; parameters, gradients and messages stay fp32. bf16-weights:"
    " parameters, gradients and messages are bf16 too, and the optimizer keeps fp32 copies of the parameters.",
)

device_options = option_group(
    "Where and in what",
    click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
    dtype_option,
    folded=False,
)

directory_options = option_group(
    "Output",
    click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path)),
    summary_format("All but table hold a summary with numbers."),
    folded=False,
)
"""Of a command that measures into a directory."""

kernel_options = option_group(
    "Kernels",
    click.option(
        "--channels-last/--no-channels-last",
        default=None,
        help="Store images and volumes with the channels innermost (torch.channels_last).",
    ),
    click.option("--tf32/--no-tf32", default=None, help="On a GPU, multiply fp32 matrices in TensorFloat-32."),
    click.option(
        "--cudnn-benchmark/--no-cudnn-benchmark",
        default=None,
        help="On a GPU, let cuDNN choose the fastest algorithm for each shape.",
    ),
    click.option(
        "--compile/--no-compile",
        default=None,
        help="Use torch.compile: on the whole model for training, on each layer alone for timing layers.",
    ),
)
"""What changes a kernel besides the dtype. Measurements take what nobody gives as off."""

hang_option = click.option(
    "--hang-timeout",
    "hang_timeout_s",
    default=300.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds without progress that a rank may take, long iterations included. Then every rank's stack is printed"
    " and all ranks are ended.",
)

verify_option = click.option(
    "--verify/--no-verify",
    default=None,
    help="First prove on a small mini-batch in fp64 that outputs and gradients equal those of serial training. If they"
    " differ, nothing is timed and the exit code is 3. Default: prove where it takes a few seconds at most.",
)

nodes_option = click.option(
    "--nodes",
    metavar="[RACKSx]N",
    help="Emulate N nodes on this host, as root: network namespaces that each have a link of --link-bandwidth. 2x4:"
    " two racks of four nodes.",
)
link_option = click.option(
    "--link-bandwidth",
    metavar="RATE[,RATE]",
    help="Bandwidth of each emulated node's link, in each direction: 1Gbit/s, 125MB/s. Needed with --nodes. With"
    " racks, add the bandwidth of each rack's uplink: 1Gbit/s,200Mbit/s.",
)
ranks_per_node_option = click.option(
    "--ranks-per-node",
    metavar="R",
    type=click.IntRange(1),
    help="Ranks on each emulated node. Default: all ranks, spread evenly.",
)

batch_norm_option = click.option(
    "--batch-norm",
    type=click.Choice(["local", "sync"]),
    default="local",
    show_default=True,
    help="Batch norm's statistics are taken over each rank's own samples and positions (local), or over the whole"
    " mini-batch (sync).",
)

accumulate_option = click.option(
    "--accumulate",
    metavar="K",
    type=click.IntRange(1, MOST_ACCUMULATED),
    default=1,
    show_default=True,
    help="Micro-batches that a rank computes one after the other, adding up their gradients before the exchange and"
    " the weight update.",
)


def _finite_norm(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    # A range lets through what compares with nothing.
    if value is None or 0 < value <= MOST_NORM:
        return value
    raise click.BadParameter(f"{value:g} has to be a number larger than 0, and at most {MOST_NORM:g}")


clip_option = click.option(
    "--clip-norm",
    metavar="MAX",
    type=float,
    callback=_finite_norm,
    help="Scale gradients before each weight update so that their norm over all parameters is at most MAX. Default: no"
    " clipping.",
)

memory_options = option_group(
    "Memory",
    click.option(
        "--recompute",
        metavar="none|all|attention|MODULE[,...]",
        help="Recompute activations in backward instead of keeping them: in all blocks, in modules that call"
        " attention, or in modules given by name, pattern (layer1.*) or range of a Sequential (features.3:8). full"
        " stands for all, selective for attention. Default: none.",
    ),
    click.option(
        "--offload",
        type=click.Choice(["none", "optimizer"]),
        help="Keep the optimizer's state (momentum, Adam's moments) in host memory: it is copied to the device for each"
        " weight update, and back. Default: none; predict search tries both where memory is limited.",
    ),
)


def axis_options(texts: Mapping[str, Mapping[str, str]] = _AS_DECLARED, *, of_shards: bool = False) -> Decorator:
    """Options of all kinds of axes, as these declare them.

    Args:
        texts: by the name of an option, what a command says otherwise of it: ``help``, ``metavar``.
        of_shards: only those that decide what ranks run of layers that they shard.
    """
    return option_group(
        "Axes of a strategy",
        *(
            _axis_option(shown, texts.get(shown.name, {}))
            for options in option_types()
            if options.of_shards or not of_shards
            for shown in options.shown
        ),
    )


def _axis_option(shown: Shown, texts: Mapping[str, str]) -> Decorator:
    kind: Any = shown.value
    if shown.choices:
        kind = click.Choice(shown.choices)
    elif shown.least is not None or shown.most is not None:
        kind = click.IntRange(shown.least, shown.most)
    said: dict[str, Any] = {"help": shown.help, "metavar": shown.metavar, **texts}
    if shown.default is not None:
        said |= {"default": shown.default, "show_default": True}
    return click.option(shown.flag, shown.name, type=kind, **said)


emulation_options = option_group(
    "Emulated compute",
    click.option(
        "--emulate",
        metavar="FILE",
        help="Let layers sleep instead of compute, for the seconds in predict ghost's file or in a profile."
        " Parameters, gradients and messages are real.",
    ),
    click.option(
        "--dilate",
        metavar="K",
        type=float,
        help="With --emulate: sleep K times as long, so that the host's own time is small beside it. Default: 1.",
    ),
    click.option(
        "--slow-rank",
        metavar="FACTOR[@RANK]",
        help="With --emulate: one rank (0 unless given) sleeps FACTOR times as long as the others: 1.5@3.",
    ),
    click.option(
        "--spread",
        is_flag=True,
        help="With --emulate: draw every sleep from the profile's spread of iterations and layers. Default: equal"
        " sleeps.",
    ),
    click.option(
        "--seed", metavar="N", type=click.IntRange(0), help="Seed of the sleeps that --spread draws. Default: 0."
    ),
)

input_options = option_group(
    "Input",
    click.option(
        "--preset",
        metavar="P",
        help="With --evaluator simulate or dag: the framework whose order of reading and copying is predicted: naive,"
        " caffe-mpi, mxnet, tensorflow, cntk, pytorch (the default). megatron and llm-foundry read as pytorch does."
        " Memory, sums of gradients and their exchange are those of Megatron-LM; the loss is that of llm-foundry.",
    ),
    click.option(
        "--prefetch",
        metavar="N",
        type=click.IntRange(0),
        help="Mini-batches fetched ahead. Default: 1, or 0 with preset naive or a loader without workers.",
    ),
    click.option("--io-seconds", type=float, help="Time to read one rank's mini-batch. Default: as measured."),
    click.option("--h2d-seconds", type=float, help="Time to copy it to the device. Default: as measured."),
    click.option(
        "--io-workers",
        type=click.IntRange(0),
        help="Loader processes for all ranks of a host. Default: the fastest number measured.",
    ),
    click.option("--from-disk", is_flag=True, help="Read files from disk instead of the page cache."),
    click.option(
        "--input", "input_source", metavar="SOURCE", help="Which input to use, where the profile holds several."
    ),
)
