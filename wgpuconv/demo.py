"""The demo: a photograph through a bank of filters and back up, on the device.

Every panel of the picture is the result of real convolutions; tensors stay on the device from
the first filter to the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench import summary
from .bench.result import ProblemResult
from .device import Device
from .filters import bilinear, depthwise, kernel
from .images import pillow, read_image, to_image
from .ops import conv2d, conv_transpose2d
from .suites import Entry, parse_suite, varied
from .tensor import Tensor, tensor

PHOTOGRAPH = Path(__file__).parent / "data" / "cat.jpg"
PANELS = 9
"""Pictures on the sheet."""

# Layers of real networks, different enough that different algorithms win.
_PROBLEMS = """
resnet50-3x3:        conv2d f32 n1 c64 h56 w56 k64 r3 s3 stride1 pad1 bias act:relu
mobilenet-depthwise: conv2d f32 n1 c384 h14 w14 k384 r3 s3 stride1 pad1 groups384 bias act:relu6
unet-upconv:         conv_transpose2d f32 n1 c128 h28 w28 k64 r2 s2 stride2 pad0 bias
resnet50-1x1:        conv2d f32 n1 c256 h28 w28 k128 r1 s1 stride1 pad0 bias act:relu
"""
_GPU_BATCH = 16


@dataclass(frozen=True)
class Panel:
    """One picture of the sheet."""

    title: str
    how: str
    """The operation, in a few words."""
    values: np.ndarray
    """(C, H, W), 0 to 1."""


def problems(*, software: bool) -> list[Entry]:
    """The problems on which the demo compares the algorithms.

    A software driver computes slowly and compiles a GEMM kernel in seconds, so it gets fewer
    and smaller ones; on a GPU a larger batch gives the kernels something to do.
    """
    entries = parse_suite(_PROBLEMS, "the demo")
    return entries[:3] if software else [varied(entry, batch=_GPU_BATCH) for entry in entries]


def filter_photograph(device: Device) -> Iterator[Panel]:
    """The photograph and eight things that convolutions make of it, one by one."""
    photograph = read_image(PHOTOGRAPH)
    yield Panel("photograph", "448 x 296, three channels", photograph)
    x = tensor(photograph, device)

    def show(title: str, how: str, result: Tensor) -> Panel:
        return Panel(title, how, result.numpy())

    def on(array: np.ndarray) -> Tensor:
        return tensor(np.ascontiguousarray(array, np.float32), device)

    def each(taps: np.ndarray) -> Tensor:
        return on(depthwise(taps, 3))

    yield show("blur", "conv2d 5x5, groups 3, five times over", _blurred(x, each(kernel("blur"))))
    yield show(
        "sharpen",
        "conv2d 3x3, groups 3, clip",
        conv2d(x, each(kernel("sharpen")), padding=1, groups=3, activation=("clip", 0, 1)),
    )
    grey = conv2d(x, on(_LUMA[None, :, None, None]))
    yield show(
        "emboss",
        "conv2d 1x1, 3 channels to 1; 3x3, bias, clip",
        conv2d(
            grey,
            on((kernel("emboss") - _IDENTITY)[None, None]),
            on(np.array([0.5])),
            padding=1,
            activation=("clip", 0, 1),
        ),
    )
    oriented = conv2d(grey, on(_oriented_edges()), padding=1, activation="relu")
    yield show(
        "edges by direction",
        "conv2d 3x3, 1 channel to 8, relu; 1x1, 8 to 3",
        conv2d(oriented, on(_direction_colours()), activation=("clip", 0, 1)),
    )
    yield show(
        "coarse edges",
        "conv2d 3x3, dilation 4, sigmoid",
        conv2d(
            _blurred(x, each(kernel("blur"))),
            each(2 * kernel("laplacian")),
            padding=4,
            dilation=4,
            groups=3,
            activation="sigmoid",
        ),
    )
    small = conv2d(x, each(bilinear(8) / 64), stride=8, padding=4, groups=3)
    yield show(
        "down to an eighth",
        "conv2d 16x16, stride 8; conv_transpose2d 8x8",
        conv_transpose2d(small, each(np.ones((8, 8))), stride=8, groups=3),
    )
    up = conv_transpose2d(small, each(bilinear(8)), stride=8, padding=4, groups=3)
    yield show("and smoothly back up", "conv_transpose2d 16x16, stride 8 (bilinear)", up)
    # Photograph minus what came back, with more contrast, around a middle grey.
    both = tensor(np.concatenate([photograph, up.numpy()]), device)
    difference = 2 * np.concatenate([np.eye(3), -np.eye(3)], axis=1)[:, :, None, None]
    yield show(
        "what was lost on the way",
        "conv2d 1x1, 6 channels to 3, bias, clip",
        conv2d(both, on(difference), on(np.full(3, 0.5)), activation=("clip", 0, 1)),
    )


_LUMA = np.array([0.299, 0.587, 0.114])
_IDENTITY = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])


def _blurred(x: Any, weight: Tensor) -> Any:
    for _ in range(5):
        x = conv2d(x, weight, padding=2, groups=3)
    return x


def _angles() -> np.ndarray:
    return np.arange(8) * (np.pi / 4)


def _oriented_edges() -> np.ndarray:
    """(8, 1, 3, 3): the gradient along eight directions."""
    along = [np.cos(a) * kernel("sobel_x") + np.sin(a) * kernel("sobel_y") for a in _angles()]
    return np.stack(along)[:, None]


def _direction_colours() -> np.ndarray:
    """(3, 8, 1, 1): a hue for each direction, opposite ones alike."""
    turn = 2 * _angles()
    hues = np.stack([1 + np.cos(turn - shift) for shift in (0, 2 * np.pi / 3, 4 * np.pi / 3)])
    return np.asarray(hues * 0.22)[:, :, None, None]


def why(result: ProblemResult) -> str:
    """The choice of the one device's tuner on a problem, and its grounds, in a sentence."""
    ((on, label),) = result.choice.items()
    name = label.partition("(")[0]
    text = f"The tuner takes {name}, {_GROUNDS[result.source[on]]} ({result.note[on]})"
    fastest = summary.fastest(result.sides)
    chosen = result.chosen(on)
    ratio = None if chosen is None else summary.ratio(chosen, fastest)
    if ratio is None or fastest is None:
        return f"{text}."
    if ratio == 1:
        return f"{text}; it is the fastest here."
    return f"{text}; {fastest.what} took {1 / ratio:.0%} of its time here."


_GROUNDS = {
    "model": "the cheapest by the cost model",
    "tuned": "the fastest of those measured now",
    "stored": "the fastest when it was measured before",
    "similar": "the fastest for a similar size",
}

# ---- the sheet ----

_COLUMNS, _GAP, _TOP, _CAPTION = 3, 24, 76, 54
_PAPER, _INK, _FAINT = (250, 249, 246), (32, 33, 36), (120, 122, 126)


def draw_sheet(panels: list[Panel], device_name: str) -> Any:
    """All panels with their captions, as one pillow image."""
    from PIL import ImageDraw, ImageFont

    rows = -(-len(panels) // _COLUMNS)
    width, height = panels[0].values.shape[2], panels[0].values.shape[1]
    sheet = pillow().new(
        "RGB",
        (
            _COLUMNS * (width + _GAP) + _GAP,
            _TOP + rows * (height + _CAPTION + _GAP) + _GAP // 2,
        ),
        _PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    heading, body, small = (ImageFont.load_default(points) for points in (30, 19, 15))
    draw.text((_GAP, 22), "wgpuconv", _INK, heading)
    draw.text((sheet.width - _GAP, 34), f"computed on {device_name}", _FAINT, small, anchor="ra")
    for index, panel in enumerate(panels):
        left = _GAP + index % _COLUMNS * (width + _GAP)
        top = _TOP + index // _COLUMNS * (height + _CAPTION + _GAP)
        sheet.paste(to_image(panel.values).convert("RGB"), (left, top))
        draw.text((left, top + height + 7), panel.title, _INK, body)
        draw.text((left, top + height + 31), panel.how, _FAINT, small)
    return sheet
