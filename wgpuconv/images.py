"""Images as arrays: (C, H, W), float32, 0 to 1. The only module that imports pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .errors import MissingExtraError, ProblemError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_BITS, _FORMAT, _SIGNED = 258, 339, 2
"""A TIFF's tags of how many bits a sample has and of what kind it is, and that kind of integers."""


def pillow() -> Any:
    """The module ``PIL.Image``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            f"reading and writing images needs pillow ({error}); "
            "install it with: pip install 'wgpuconv[image]'"
        ) from error
    return Image


def is_image(path: Path) -> bool:
    """Whether the name ends as an image's does."""
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path) -> np.ndarray:
    """An image with 1, 3 or 4 channels as it has them; others become RGB.

    One channel may be of 16 or 32 bits, whose largest integer is 1, or of floats, which stay as
    they are. Of several channels in 16 bits pillow reads the upper 8.
    Raises ProblemError where the file holds no image, FileNotFoundError where there is none.
    """
    image_module = pillow()
    try:
        with image_module.open(path) as image:
            white = _white(image)
            if white == 255 and image.mode not in _MODES.values():
                image = image.convert("RGB")
            pixels = np.asarray(image)
            if white == 2**32 - 1:  # which pillow reads as signed
                pixels = pixels.view(np.uint32)
            pixels = pixels.astype(np.float32)
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError) as error:  # pillow raises these for broken files
        raise ProblemError(f"{path} cannot be read as an image: {error}") from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    values: np.ndarray = np.ascontiguousarray(pixels.transpose(2, 0, 1)) / np.float32(white)
    return values


def _white(image: Any) -> int:
    """What a pixel of an opened image holds where it is white, which a TIFF's tags say where pillow
    has a single mode for several depths."""
    mode = image.mode.partition(";")[0]
    if mode != "I":
        return 1 if mode == "F" else 255
    tags = getattr(image, "tag_v2", {})
    bits, kind = tags.get(_BITS, (16,))[0], tags.get(_FORMAT, (1,))[0]
    return int(2 ** (bits - (kind == _SIGNED)) - 1)


def to_pixels(values: np.ndarray) -> np.ndarray:
    """(H, W, C) bytes of (C, H, W) values, clipped to 0..1."""
    clipped = np.nan_to_num(np.clip(values, 0, 1))
    return np.ascontiguousarray(np.rint(clipped * 255).astype(np.uint8).transpose(1, 2, 0))


def to_image(values: np.ndarray) -> Any:
    """A pillow image of (C, H, W) values, clipped to 0..1."""
    if len(values) not in _MODES:
        raise ProblemError(
            f"an image holds 1, 3 or 4 channels, got {len(values)}; write an .npy file instead"
        )
    pixels = to_pixels(values)
    return pillow().fromarray(pixels[..., 0] if len(values) == 1 else pixels)


def write_image(path: Path, values: np.ndarray) -> None:
    """Writes (C, H, W) values, clipped to 0..1; the file's name decides about its format."""
    image = to_image(values)
    if image.mode == "RGBA" and path.suffix.lower() in (".jpg", ".jpeg", ".bmp"):
        raise ProblemError(f"{path.suffix} holds no transparency; write a .png file instead")
    image.save(path)
