"""A small bank of image filters, for the demo and for ``wgpuconv run``."""

from __future__ import annotations

import numpy as np

from .errors import ProblemError

_BINOMIAL = np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1])

FILTERS: dict[str, np.ndarray] = {
    "blur": _BINOMIAL / 256,
    "sharpen": np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]]),
    "emboss": np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]),
    "laplacian": np.array([[-1, -1, -1], [-1, 8, -1], [-1, -1, -1]]),
    "sobel_x": np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]),
    "sobel_y": np.array([[-1, -2, -1], [0, 0, 0], [1, 2, 1]]),
}
"""Kernels (R, S) by name. ``blur``, ``sharpen`` and ``emboss`` keep the mean brightness, the
others answer zero where the image is even."""


def kernel(name: str) -> np.ndarray:
    """A filter's kernel (R, S), float32."""
    if name not in FILTERS:
        raise ProblemError(f"no filter is named {name!r}; the filters are {', '.join(FILTERS)}")
    return FILTERS[name].astype(np.float32)


def depthwise(taps: np.ndarray, channels: int) -> np.ndarray:
    """The weight (C, 1, R, S) that applies a kernel to each channel, with ``groups=C``.

    It serves conv2d and conv_transpose2d alike.
    """
    return np.ascontiguousarray(np.broadcast_to(taps, (channels, 1, *taps.shape)), np.float32)


def bilinear(factor: int) -> np.ndarray:
    """The kernel with which a transposed convolution of stride ``factor`` interpolates.

    Its size is 2 * factor - factor % 2; with padding (size - factor) // 2 the result is
    ``factor`` times as large. The weights that meet in an output pixel sum to one.
    """
    size = 2 * factor - factor % 2
    ramp = 1 - np.abs(np.arange(size) - (size - 1) / 2) / factor
    return np.outer(ramp, ramp).astype(np.float32)
