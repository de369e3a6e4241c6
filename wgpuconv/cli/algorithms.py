"""``wgpuconv algorithms``: the names that ``--algorithm`` takes."""

from __future__ import annotations

from .options import DeviceOption, JsonOption, open_device
from .output import emit_json, show, table

EXAMPLES = ("wgpuconv algorithms",)


def command(device: DeviceOption = None, as_json: JsonOption = False) -> None:
    """List the algorithms, what each computes and how."""
    found = open_device(device, quiet=as_json).algorithms
    if as_json:
        emit_json(
            [{"name": a.name, "operations": list(a.ops), "summary": a.summary} for a in found]
        )
        return
    shown = table("algorithm", "operations", "how")
    for algorithm in found:
        shown.add_row(algorithm.name, "\n".join(algorithm.ops), algorithm.summary)
    show(shown)
