"""A folder of images, and the classes that its folders stand for; torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paradl_bench.core.errors import UserError

SYNTHETIC = "synthetic"
"""In the place of a folder: images that are made, of ImageNet's sizes."""
IMAGES_FOLDER = ".images"
"""Of a measurement directory, where these lie."""
EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff", ".gif"))


def find_images(folder: Path) -> list[Path]:
    """Every image below a folder, classes nested however deep, by name; sorted, so that a seed means the same again.

    Raises:
        UserError: no folder, or no image in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a folder of images, or the word synthetic")
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    images = sorted(path for path in files if path.suffix.lower() in EXTENSIONS)
    if not images:
        raise UserError(f"{folder} holds no image; files of images end in {', '.join(sorted(EXTENSIONS))}")
    return images


def labels_of(images: Sequence[Path], classes: int, folder: Path) -> list[int]:
    """Of each image, the place of its folder among all of them by name, as in torchvision's ImageFolder.

    Args:
        classes: that the model tells apart.

    Raises:
        UserError: more folders than classes.
    """
    folders = {parent: number for number, parent in enumerate(sorted({image.parent for image in images}))}
    if len(folders) > classes:
        raise UserError(
            f"{folder} has images in {len(folders)} folders, and targets of this model have {classes} classes, as"
            " many as its last linear layer has outputs (2 without such a layer)"
        )
    return [folders[image.parent] for image in images]


def cropped_to(input_shape: Sequence[int], model: str, *, tokens: bool) -> int:
    """Pixels of the sides that an image is cut to for a model.

    Args:
        tokens: whether the model reads token ids.

    Raises:
        UserError: it reads something else than square images of three channels.
    """
    if tokens:
        raise UserError(f"--input reads images, and {model} reads token ids: leave it out")
    if len(input_shape) != 3 or input_shape[0] != 3 or input_shape[1] != input_shape[2]:
        shape = "x".join(map(str, input_shape))
        raise UserError(f"--input reads square images of 3 channels, and a sample of {model} is {shape}")
    return input_shape[1]
