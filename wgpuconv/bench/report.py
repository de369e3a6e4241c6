"""One page of HTML that shows results of the benchmark: self-contained, no network, no framework.

All numbers are computed here and travel in the page as one JSON value; page.js draws from it and
writes texts as text, never as HTML, so nothing that stands in a result file can become markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from ..errors import BenchError
from . import summary
from .compare import Comparison, compare
from .result import DeviceFacts, ProblemResult, Run, Side

Named = tuple[str, Run]
"""A result and what to call it: its file's name."""


def page(results: Sequence[Named]) -> str:
    """The page. With several results, each later one is compared with the first. Raises
    BenchError where a result holds no problem, or shares none with the first."""
    for name, run in results:
        if not run.results:
            raise BenchError(f"{name} holds no problem, so there is nothing to show")
    text = json.dumps(view(results), separators=(",", ":"), allow_nan=False)
    # In a script element only these could end it or open a comment; JSON reads the escapes back.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Template(_file("page.html")).substitute(
        style=_file("page.css"), data=text, script=_file("page.js")
    )


def view(results: Sequence[Named]) -> dict[str, Any]:
    """What the page shows, as JSON holds it. Times are in seconds."""
    first_name, first = results[0]
    shown: dict[str, Any] = _finite(
        {
            "runs": [_run(name, run) for name, run in results],
            "differences": [
                _comparison(first_name, name, compare(first, run)) for name, run in results[1:]
            ],
        }
    )
    return shown


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run(name: str, run: Run) -> dict[str, Any]:
    groups = summary.groups(run)
    return {
        "name": name,
        "date": run.date,
        "wgpuconv": run.wgpuconv,
        "commit": run.commit,
        "method": run.method,
        "baseline": run.baseline,
        "machine": [[key, str(value)] for key, value in run.machine.items() if value is not None],
        "devices": [
            {
                "name": device.name,
                "adapter": device.adapter,
                "driver": device.driver,
                "versions": _versions(device.versions),
                "software": device.software,
                "roof": summary.roof_of(device),
            }
            for device in run.devices
        ],
        "peers": [
            {
                "name": peer.name,
                "device": peer.device,
                "versions": _versions(peer.versions),
                "absent": peer.absent,
            }
            for peer in run.peers
        ],
        "groups": [_group(group, run) for group in groups],
        "matrix": [
            {
                "group": group.name,
                "dtype": group.dtype,
                "cells": [
                    {"against": other.name, **_standing(summary.standing(group, run, other))}
                    for other in groups
                    if other.dtype == group.dtype and other != group
                ],
            }
            for group in groups
            if group.ours
        ],
        "problems": [_problem(result, run, groups) for result in run.results],
    }


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _group(group: summary.Group, run: Run) -> dict[str, Any]:
    return {
        "name": group.name,
        "dtype": group.dtype,
        "on": group.on,
        "precision": group.precision,
        "ours": group.ours,
        "timed": len(stands := [r for r in run.results if group.best(r) is not None]),
        "led": sum(group.best(result) in summary.leaders(result) for result in stands),
        "total": summary.total(group, run),
        **_standing(summary.standing(group, run)),
    }


def _standing(found: summary.Standing) -> dict[str, Any]:
    return {
        "problems": found.problems,
        "mean": found.mean,
        "worst": found.worst,
        "worst_at": found.worst_at,
        "wins": found.wins,
        "ties": found.ties,
        "losses": found.losses,
    }


def _finite(value: Any) -> Any:
    """With None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _problem(result: ProblemResult, run: Run, groups: Sequence[summary.Group]) -> dict[str, Any]:
    dtype = summary.dtype_of(result)
    baseline = summary.baseline_of(run, result)
    leaders = summary.leaders(result)
    stand = {id(side) for group in groups if (side := group.best(result)) is not None}
    devices = {device.name: device for device in run.devices}
    return {
        "label": result.label,
        "text": result.problem,
        "dtype": dtype,
        "count": result.count,
        "flop": result.flop,
        "nbytes": result.nbytes,
        "intensity": summary.intensity(result),
        "failure": result.failure,
        "refusals": list(result.refusals.items()),
        "found": [
            [on, ": ".join(filter(None, (source, result.note.get(on))))]
            for on, source in result.source.items()
        ],
        "leaders": [result.sides.index(side) for side in leaders],
        "baseline": None if baseline is None else result.sides.index(baseline),
        "sides": [
            {
                **_side(side, result, devices.get(side.on)),
                "best": id(side) in stand,
                "ratio": summary.ratio(side, baseline),
                "told": bool(baseline and side.samples and summary.told_apart(side, baseline)),
            }
            for side in result.sides
        ],
    }


def _side(side: Side, result: ProblemResult, device: DeviceFacts | None) -> dict[str, Any]:
    rate = result.flop / side.seconds if side.seconds and result.flop > 0 else None
    roof = summary.attainable(device, result) if device and side.ours else None
    return {
        "on": side.on,
        "what": side.what,
        "precision": side.precision,
        "group": f"{side.on} {side.precision}",
        "ours": side.ours,
        "prepared": side.prepared,
        "same_work": side.same_work,
        "choice": side is result.chosen(side.on),
        "label": side.label,
        "seconds": side.seconds,
        "low": min(side.samples, default=None),
        "high": max(side.samples, default=None),
        "samples": len(side.samples),
        "rate": rate,
        "share": rate / roof if rate and roof else None,
        "error": side.error,
        "workspace": side.workspace,
        "call": side.call,
        "end_to_end": side.end_to_end,
        "first_call": side.first_call,
        "failure": side.failure,
    }


def _comparison(before: str, after: str, found: Comparison) -> dict[str, Any]:
    return {
        "before": before,
        "after": after,
        "mean": found.mean,
        "slower": sum(each.verdict == "slower" for each in found.ours),
        "faster": sum(each.verdict == "faster" for each in found.ours),
        "same": sum(each.verdict == "same" for each in found.ours),
        "ours": [each.to_json() for each in found.ours],
        "sides": [each.to_json() for each in found.sides],
        "lost": list(found.lost),
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
        "warnings": list(found.warnings),
    }
