"""The options that several commands take."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ..device import Device


class Tune(StrEnum):
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
        metavar="MODE",
        help="auto: measure a few candidates within a second; full: all of them; "
        "off: none; stored: only use what was measured before.",
    ),
]
AlgorithmOption = Annotated[
    str,
    typer.Option("--algorithm", "-a", metavar="NAME", help="Force one; see 'algorithms'."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]


def open_device(spec: str | None, tune: Tune | None = None) -> Device:
    """The device asked for, or the default one, tuning as asked."""
    return Device(spec, tune=None if tune is None else tune.value)
