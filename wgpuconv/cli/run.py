"""``wgpuconv run``: one convolution over a file."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.lib.format import MAGIC_PREFIX

from .. import ops
from ..errors import DtypeError, ProblemError, counted
from ..filters import FILTERS, depthwise, kernel
from ..images import SUFFIXES, is_image, read_image, write_image
from ..problem import parse_activation
from .options import (
    AlgorithmOption,
    DeviceOption,
    JsonOption,
    TuneOption,
    open_device,
)
from .output import Work, check_folder, emit_json, hint, line

EXAMPLES = (
    "wgpuconv run photo.jpg sharpen sharp.png",
    "wgpuconv run photo.jpg sobel_x edges.png --stretch",
    "wgpuconv run x.npy w.npy y.npy --stride 2 --padding 1 --activation relu",
)


def command(
    input: Annotated[
        Path, typer.Argument(help="An image, or an .npy array (N, C, H, W) or (C, H, W).")
    ],
    weight: Annotated[
        str,
        typer.Argument(help=f"An .npy array, or a filter for each channel: {', '.join(FILTERS)}."),
    ],
    output: Annotated[Path, typer.Argument(help="Where to: an image or an .npy file.")],
    bias: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE",
            help="An .npy array with a value an output channel, or one number for all.",
        ),
    ] = None,
    stride: Annotated[
        str, typer.Option(metavar="N", help="A number, or vertical,horizontal.")
    ] = "1",
    padding: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="A number, vertical,horizontal, top,bottom,left,right, 'valid' or 'same'; "
            "a filter keeps the size where nothing is said.",
        ),
    ] = None,
    dilation: Annotated[
        str, typer.Option(metavar="N", help="A number, or vertical,horizontal.")
    ] = "1",
    groups: Annotated[
        int | None,
        typer.Option(metavar="N", help="Groups of channels (a filter: one a channel)."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="relu, sigmoid, ..., with parameters as in clip,0,6."),
    ] = None,
    transpose: Annotated[
        bool, typer.Option("--transpose", help="Run conv_transpose2d instead of conv2d.")
    ] = False,
    output_padding: Annotated[
        str | None,
        typer.Option(metavar="N", help="For --transpose: a number, or vertical,horizontal."),
    ] = None,
    layout: Annotated[str, typer.Option(metavar="NCHW|NHWC", help="Of .npy arrays.")] = "NCHW",
    precision: Annotated[
        str,
        typer.Option(
            metavar="default|tf32", help="tf32: float32 is multiplied as TF32 (CUDA devices)."
        ),
    ] = "default",
    stretch: Annotated[
        bool,
        typer.Option("--stretch", help="Into an image: spread the values from black to white."),
    ] = False,
    algorithm: AlgorithmOption = "auto",
    device: DeviceOption = None,
    tune: TuneOption = None,
    as_json: JsonOption = False,
) -> None:
    """Convolve an image or an .npy array with given weights into a file.

    An image has values from 0 to 1; what a written image cannot show is clipped.
    """
    # All that can be wrong with the arguments is said before a device is opened.
    if not _is_file_of_ours(output):
        raise ProblemError(f"the output's name must end in {_SUFFIXES}, got {str(output)!r}")
    if stretch and not is_image(output):
        raise ProblemError(f"--stretch is for an image, got the output {str(output)!r}")
    if output_padding is not None and not transpose:
        raise ProblemError("--output-padding is for --transpose")
    check_folder(output)
    layout = layout.upper()
    x = _read_input(input, layout)
    channels = x.shape[-1 if layout == "NHWC" else -3]
    named = not weight.endswith(".npy")
    if named:
        w = depthwise(kernel(weight), channels).astype(x.dtype)
        groups = channels if groups is None else groups
        padding = _keep_size(w.shape[-1], dilation) if padding is None else padding
    else:
        w = _read_weight(weight, transpose)
    filters = w.shape[1] * (groups or 1) if transpose else w.shape[0]
    arguments: dict[str, Any] = {
        "bias": _read_bias(bias, filters, x.dtype),
        "stride": _numbers("stride", stride),
        "padding": _padding("0" if padding is None else padding, transpose),
        "dilation": _numbers("dilation", dilation),
        "groups": 1 if groups is None else groups,
        "activation": None if activation is None else parse_activation(activation),
        "layout": layout,
        "precision": precision,
        "algorithm": algorithm,
    }
    function: Any = ops.conv2d
    if transpose:
        function = ops.conv_transpose2d
        arguments["output_padding"] = _numbers("output-padding", output_padding or "0")
    on = open_device(device, tune, quiet=as_json)
    with Work(1) as work:
        on.tuner.progress = work.stage
        work.tell(f"{input} on {on.name}")
        y = function(x, w, **arguments, device=on)
    _write_output(output, y, layout, stretch, alpha=is_image(input) and channels == 4)
    spoilt = int(np.count_nonzero(~np.isfinite(y.astype(np.float32))))
    if spoilt:
        hint(f"{spoilt} of {counted(y.size, 'value')} are NaN or infinite")
    if as_json:
        emit_json(
            {
                "output": str(output),
                "shape": list(y.shape),
                "dtype": str(y.dtype),
                "minimum": _number(y.min()) if y.size else None,
                "maximum": _number(y.max()) if y.size else None,
                "device": on.name,
            }
        )
    else:
        line(f"{output}: {_size(output, y, layout)}, computed on {on.name}")


_SUFFIXES = f"{', '.join(SUFFIXES)} or .npy"


def _number(value: Any) -> float | None:
    """As JSON has it, where NaN and infinity are no numbers."""
    return float(value) if np.isfinite(value) else None


def _is_file_of_ours(path: Path) -> bool:
    return path.suffix == ".npy" or is_image(path)


def _read_input(path: Path, layout: str) -> np.ndarray:
    if not path.exists():
        raise ProblemError(f"there is no file {path}")
    if not _is_file_of_ours(path):
        raise ProblemError(f"the input's name must end in {_SUFFIXES}, got {str(path)!r}")
    if path.suffix == ".npy":
        array = _read_array(str(path))
        if array.ndim not in (3, 4):
            form = ", ".join(layout)
            raise ProblemError(
                f"{path} must hold an input of 4 dimensions ({form}), or 3 without the batch, got "
                f"shape {array.shape}"
            )
        return array
    image = read_image(path)
    return image if layout == "NCHW" else np.ascontiguousarray(image.transpose(1, 2, 0))


def _read_weight(path: str, transpose: bool) -> np.ndarray:
    array = _read_array(path)
    if array.ndim != 4:
        form = "(C, K/groups, R, S)" if transpose else "(K, C/groups, R, S)"
        raise ProblemError(
            f"{path} must hold a weight of 4 dimensions {form}, got shape {array.shape}"
        )
    return array


def _read_array(path: str) -> np.ndarray:
    """The array of an .npy file; float64, which numpy saves where nothing is said, as float32."""
    try:
        with open(path, "rb") as file:  # numpy leaves a broken archive open
            array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ProblemError(
            f"{path} {_fault(path)}; an array of numbers is expected, as numpy.save writes it"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ProblemError(f"{path} is an archive of arrays; one .npy array is expected")
    if array.dtype == np.float64:
        hint(f"{path} holds float64, computed as float32")
        return array.astype(np.float32)
    return array


def _fault(path: str) -> str:
    """What is wrong with a file that numpy cannot read, as one sentence that is not numpy's."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:
            return "is no .npy file"
    return "is an .npy file of Python objects, or the rest of it is missing"


def _read_bias(text: str | None, filters: int, dtype: Any) -> np.ndarray | None:
    if text is None:
        return None
    if text.endswith(".npy"):
        return _read_array(text)
    try:
        return np.full(filters, float(text), dtype)
    except ValueError:
        raise DtypeError(f"--bias must be an .npy file or a number, got {text!r}") from None


def _numbers(name: str, text: str) -> int | tuple[int, ...]:
    if not re.fullmatch(r"-?\d+(,-?\d+)*", text):
        raise ProblemError(f"--{name} takes whole numbers as in 2 or 2,1, got {text!r}")
    values = tuple(int(v) for v in text.split(","))
    return values[0] if len(values) == 1 else values


def _padding(text: str, transpose: bool) -> Any:
    words = () if transpose else ("valid", "same")
    if text in words:
        return text
    values = text.split(",")
    if len(values) not in (1, 2, 4) or not all(re.fullmatch(r"\d+", v) for v in values):
        forms = ["a number", "vertical,horizontal", "top,bottom,left,right", *map(repr, words)]
        raise ProblemError(
            f"--padding takes {', '.join(forms[:-1])} or {forms[-1]}, in pixels, got {text!r}"
        )
    pixels = tuple(map(int, values))
    return (pixels[:2], pixels[2:]) if len(pixels) == 4 else pixels


def _keep_size(taps: int, dilation: str) -> str:
    spread = _numbers("dilation", dilation)
    pairs = spread if isinstance(spread, tuple) else (spread, spread)
    return ",".join(str(d * (taps - 1) // 2) for d in pairs)


def _size(path: Path, y: np.ndarray, layout: str) -> str:
    """An image's width and height, as its viewers say it; an array's shape and dtype."""
    if is_image(path):
        height, width = y.shape[-3:-1] if layout == "NHWC" else y.shape[-2:]
        return f"{width} x {height}"
    return f"{' x '.join(str(v) for v in y.shape)} {y.dtype}"


def _write_output(path: Path, y: np.ndarray, layout: str, stretch: bool, *, alpha: bool) -> None:
    """``alpha`` says whether a fourth channel is the input image's transparency."""
    if path.suffix == ".npy":
        np.save(path, y)
        return
    if y.ndim == 4 and len(y) == 1:
        y = y[0]
    if y.ndim != 3:
        raise ProblemError(
            f"an image holds one result, got shape {y.shape}; write an .npy file instead"
        )
    y = y.astype(np.float32)
    if layout == "NHWC":
        y = y.transpose(2, 0, 1)
    if len(y) not in (1, 3) and not (alpha and len(y) == 4):
        raise ProblemError(
            f"1 or 3 channels make an image, got {len(y)}; write an .npy file instead"
        )
    if stretch:
        finite = y[np.isfinite(y)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        y = (y - low) / ((high - low) or 1.0)
    write_image(path, y)
