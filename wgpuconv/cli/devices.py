"""``wgpuconv devices``: what could run a convolution here."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ..device import Device, DeviceInfo, default_device, devices
from ..errors import WgpuConvError
from ..tuning.speeds import device_key
from ..tuning.store import Store, default_path
from .options import JsonOption
from .output import busy, emit_json, note, show, speed, table, warn

EXAMPLES = ("wgpuconv devices",)


def command(as_json: JsonOption = False) -> None:
    """List the devices that can run convolutions, and why others cannot."""
    store = Store(default_path())
    with busy("looking for devices ...", as_json):
        rows = [_row(info, store) for info in devices()]
        default = _default_spec([row for row in rows if row["problem"] is None])
    for row in rows:
        row["default"] = row["spec"] == default
    if as_json:
        emit_json(rows)
        return
    shown = table("", "device", "name and driver", "kind", "f16", "timer")
    for row in rows:
        lines = Text(row["name"] or "")
        if row["driver"]:
            lines.append(f"\n{row['driver']}", style="dim")
        if row["bandwidth"] or row["fma_rate"]:
            rates = ((row["bandwidth"], "B/s"), (row["fma_rate"], "FLOP/s"))
            lines.append(f"\nmeasured: {', '.join(speed(r, unit) for r, unit in rates if r)}")
        elif row["problem"] is None and row["identity"]:  # by which speeds would be stored
            lines.append(f"\n{_why_no_speeds(row['kind'])}", style="dim")
        if row["problem"]:
            lines.append(f"{row['name'] and chr(10)}{row['problem']}", style="red")
        if row["warning"]:
            lines.append(f"\nwarning: {row['warning']}", style="yellow")
        usable = row["problem"] is None
        shown.add_row(
            "*" if row["default"] else "",
            Text(row["spec"], style="bold" if usable else "dim"),
            lines,
            row["kind"],
            _yes("shader-f16" in row["features"]) if usable else "",
            _yes("timestamp-query" in row["features"]) if usable else "",
        )
    show(shown)
    if default:
        note(
            "* is used where none is named; choose another with --device or the environment "
            "variable WGPUCONV_DEVICE."
        )


def _why_no_speeds(kind: str) -> str:
    if kind == "CPU":
        return "speeds: not measured on a software driver"
    return "speeds: not measured yet; 'wgpuconv tune' begins with them"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _row(info: DeviceInfo, store: Store) -> dict[str, Any]:
    speeds = store.speeds(device_key(info.identity)) if info.identity else None
    row = asdict(info) | {
        "warning": None,
        "bandwidth": speeds.bandwidth if speeds else None,
        "fma_rate": speeds.fma_rate if speeds else None,
    }
    if info.problem is None and info.kind == "CPU":
        # Opening a software driver tells whether it miscompiles.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Device(info.spec)
            except WgpuConvError as error:
                row["problem"] = str(error)
        row["warning"] = " ".join(str(warning.message) for warning in caught) or None
    return row


def _default_spec(usable: list[dict[str, Any]]) -> str | None:
    """The row that stands for the default device: the same adapter through the same API."""
    if not usable:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown in its row
            identity = default_device().backend.identity
    except WgpuConvError as error:  # WGPUCONV_DEVICE names none of them, say
        warn(str(error))
        return None
    for row in usable:
        if identity.backend == row["spec"].partition(":")[0] and identity.adapter.startswith(
            row["name"]
        ):
            return str(row["spec"])
    return None
