"""Kernel settings put into effect: the layout of images and their weights, and modes of a GPU's libraries."""

from __future__ import annotations

import torch

from paradl_bench.core.errors import UserError
from paradl_bench.records.kernel_settings import KernelSettings
from paradl_bench.strategies.running.autocast import as_given

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By dims, the batch among them: images and volumes."""


def set_modes(settings: KernelSettings, device: torch.device) -> None:
    """Set the modes of a GPU's libraries, on or off, for this process; a CPU has none of them."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = settings.tf32
        torch.backends.cudnn.allow_tf32 = settings.tf32
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark


def laid_out(tensor: torch.Tensor, settings: KernelSettings) -> torch.Tensor:
    """An image or a volume with its channels innermost, where that is asked for; other tensors as they are."""
    if not settings.channels_last or tensor.dim() not in _FORMATS:
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])


def as_read(inputs: torch.Tensor, dtype: str, settings: KernelSettings) -> torch.Tensor:
    """A mini-batch as a model that is trained in ``dtype`` with these settings reads it."""
    return laid_out(as_given(inputs, dtype), settings)


def lay_out(module: torch.nn.Module, settings: KernelSettings) -> None:
    """Lay out the parameters and buffers of a module, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = laid_out(tensor.data, settings)


def refuse_without_channels(model: str, input_shape: tuple[int, ...], settings: KernelSettings) -> None:
    """Refuse a layout that no tensor of a model would take.

    Raises:
        UserError: the model reads neither images nor volumes.
    """
    if settings.channels_last and len(input_shape) + 1 not in _FORMATS:
        shape = "x".join(map(str, input_shape))
        raise UserError(f"--channels-last is for images and volumes; a sample of {model} is {shape}")
