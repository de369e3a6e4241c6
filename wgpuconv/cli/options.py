"""The options that several commands take."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ..device import Device
from ..problem import ACTIVATIONS
from .output import busy


class Tune(str, Enum):
    """When to measure: see the tuner."""

    auto = "auto"
    full = "full"
    off = "off"
    stored = "stored"


DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        "-d",
        metavar="SPEC",
        help="A device as 'wgpuconv devices' lists it, or a part of its name.",
    ),
]
TuneOption = Annotated[
    Tune | None,
    typer.Option(
        "--tune",
        help="auto: measure a few candidates in about a second; full: all of them; "
        "off: none; stored: only use what was measured before.",
    ),
]
AlgorithmOption = Annotated[
    str,
    typer.Option("--algorithm", "-a", metavar="NAME", help="Force one; see 'algorithms'."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]


_OTHERS = [name for name in ACTIVATIONS if name not in ("identity", "relu", "clip")]
GRAMMAR = f"""\
[bold]A problem's text[/bold]: an operation, then words in any order, all in quotes

conv2d, conv_transpose2d    the operation, first
f32, f16, bf16              f32 where absent; bf16 on CUDA devices
n1 c64 h56 w48 k32 r3 s3    batch, channels, height, width; output channels;
                            the kernel's height and width
stride2, stride2,1          1 where absent; two are vertical,horizontal
pad1, pad1,0, pad0,1,0,1    0 where absent; four are top,bottom,left,right
dil2, dil2,1                dilation, 1 where absent
outpad1, outpad1,0          of conv_transpose2d, 0 where absent
groups32                    1 where absent
nchw, nhwc                  nchw where absent
bias, residual              none where absent
tf32                        f32 may be multiplied as TF32, on CUDA devices
act:relu, act:clip,0,6      none where absent; also {", ".join(_OTHERS[:2])},
                            {", ".join(_OTHERS[2:])}"""
"""The form of a problem's text, for the help of the commands that take one."""


def open_device(spec: str | None, tune: Tune | None = None, *, quiet: bool) -> Device:
    """The device asked for, or the default one, tuning as asked; says so unless ``quiet``."""
    with busy(f"opening {f'the device {spec}' if spec else 'the best device'} ...", quiet):
        return Device(spec, tune=None if tune is None else tune.value)
