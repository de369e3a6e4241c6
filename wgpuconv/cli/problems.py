"""The problems that a command works on: suites, files, texts, and a model of one's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ProblemError
from ..suites import Entry, gather, suite_names, varied
from .output import busy

ProblemsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"Suites ({', '.join(suite_names())}), files of that form, "
        "texts of problems in quotes.",
        show_default=False,
    ),
]
OnnxOption = Annotated[
    Path | None,
    typer.Option(metavar="MODEL", help="Every convolution of an ONNX model, with its count."),
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="HEIGHT,WIDTH", help="Of the model's input, where the model leaves it open."
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Instead of the suite's or the model's."),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="nchw|nhwc|channels_last",
        help="Instead of the problems' own. PyTorch's channels_last is that of weights too.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Only the first so many.")
]


def chosen(
    problems: Sequence[str] | None,
    onnx: Path | None,
    *,
    batch: int | None,
    size: str | None,
    dtype: str | None,
    layout: str | None,
    limit: int | None,
    quiet: bool,
) -> list[Entry]:
    """The problems named on the command line, then the model's, each varied as asked for."""
    if not problems and onnx is None:
        raise typer.BadParameter("a suite, a file, a problem's text, or --onnx must be given")
    if size is not None and onnx is None:
        raise ProblemError("--size is for a model, given by --onnx")
    entries = [varied(entry, batch=batch) for entry in gather(problems or ())]
    if onnx is not None:
        pixels = None if size is None else _pair(size)
        with busy(f"reading {onnx.name} ...", quiet):
            from ..onnx_model import read_model  # takes onnx's import when there is need of it

            entries += read_model(onnx, batch=batch, size=pixels)
    return [varied(entry, dtype=dtype, layout=layout) for entry in entries[:limit]]


def _pair(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+(,\d+)?", text):
        raise ProblemError(f"--size takes one number or height,width as in 480,640, got {text!r}")
    first, _, second = text.partition(",")
    return int(first), int(second or first)
