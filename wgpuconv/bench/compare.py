"""Two results of the benchmark, side by side: what became faster, what slower. Pure.

A difference counts only where the samples tell the two apart (``summary.told_apart``) and it is
larger than what two runs of the same kernel differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import BenchError
from .result import ProblemResult, Run, Side, geometric_mean
from .summary import fastest, told_apart

Verdict = Literal["faster", "slower", "same"]

DRIFT = 0.02
"""Two runs of one kernel on an H200 differed by up to 1.1 % while the samples within each agreed
to 0.3 % (18 kernels, the burn suite twice on one day), so a run's own spread says too little."""


@dataclass(frozen=True)
class Difference:
    """One side in both results, or what a device of ours offers on a problem."""

    problem: str
    """The problem's label."""
    on: str
    what: str
    precision: str
    ours: bool
    before: float
    """Median seconds."""
    after: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def side(self) -> str:
        return f"{self.on} {self.what} {self.precision}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Comparison:
    """What changed from one result to another."""

    sides: tuple[Difference, ...]
    """Every side that both timed, in the first one's order."""
    ours: tuple[Difference, ...]
    """What a user gets of us, by problem, device and precision: the tuner's choice where it was
    timed, else the fastest side."""
    lost: tuple[str, ...]
    """Where a device of ours, though it took part again, has nothing any more; with the reason."""
    only_before: tuple[str, ...]
    """Problems and sides that only the first result has."""
    only_after: tuple[str, ...]
    warnings: tuple[str, ...]
    """Why times may differ for other reasons than the code."""

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios of ``ours``; NaN without any."""
        return geometric_mean(each.ratio for each in self.ours)

    @property
    def worst(self) -> Difference | None:
        """Of ``ours``, the one that lost most."""
        return max(self.ours, key=lambda each: each.ratio, default=None)

    def over(self, limit: float) -> tuple[Difference, ...]:
        """Those of ours that became slower by more than the limit and the spread, worst first."""
        return tuple(d for d in by_change(self.ours) if d.verdict == "slower" and d.ratio > limit)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "geometric_mean": self.mean if self.ours else None,
            "worst": worst.to_json() if worst else None,
            "ours": [each.to_json() for each in self.ours],
            "sides": [each.to_json() for each in self.sides],
            "lost": list(self.lost),
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            "warnings": list(self.warnings),
        }


def compare(before: Run, after: Run) -> Comparison:
    """Raises BenchError where the two share no problem or no side of one."""
    first, second = _by_problem(before), _by_problem(after)
    common = [key for key in first if key in second]
    if not common:
        raise BenchError(
            f"the two results share no problem: one has {_some(before)}, the other {_some(after)}"
        )
    sides: list[Difference] = []
    ours: list[Difference] = []
    lost: list[str] = []
    only: tuple[list[str], list[str]] = (
        [
            f"{result.label} ({result.problem})"
            for key, result in first.items()
            if key not in second
        ],
        [
            f"{result.label} ({result.problem})"
            for key, result in second.items()
            if key not in first
        ],
    )
    devices = {device.name for device in after.devices}
    for key in common:
        old, new = first[key], second[key]
        _pair(old.label, _by_side(old), _by_side(new), sides, only)
        was, now = _offers(old), _offers(new)
        ours += [_difference(old.label, was[offer], now[offer]) for offer in was if offer in now]
        lost += [
            f"{old.label}: {on} {precision} has no time any more{_reason(new, on, precision)}"
            for on, precision in was
            if (on, precision) not in now and on in devices
        ]
    if not sides:
        raise BenchError("no side was timed in both results, so there is nothing to compare")
    return Comparison(
        sides=tuple(sides),
        ours=tuple(ours),
        lost=tuple(lost),
        only_before=tuple(only[0]),
        only_after=tuple(only[1]),
        warnings=_warnings(before, after),
    )


_ProblemKey = tuple[str, str]
_SideKey = tuple[str, str, str, bool, bool]


def _by_problem(run: Run) -> dict[_ProblemKey, ProblemResult]:
    return {(result.name, result.problem): result for result in run.results}


def _by_side(result: ProblemResult) -> dict[_SideKey, Side]:
    """The timed sides; of several with the same description the fastest, which comes first."""
    found: dict[_SideKey, Side] = {}
    for side in result.sides:
        if side.samples:
            key = (side.on, side.what, side.precision, side.prepared, side.same_work)
            found.setdefault(key, side)
    return found


def _pair(
    label: str,
    old: dict[_SideKey, Side],
    new: dict[_SideKey, Side],
    sides: list[Difference],
    only: tuple[list[str], list[str]],
) -> None:
    sides += [_difference(label, side, new[key]) for key, side in old.items() if key in new]
    for here, there, names in ((old, new, only[0]), (new, old, only[1])):
        names += [
            f"{label}: {side.name} {side.precision}"
            for key, side in here.items()
            if key not in there
        ]


def _offers(result: ProblemResult) -> dict[tuple[str, str], Side]:
    """What our devices offer, by device and precision."""
    found: dict[tuple[str, str], Side] = {}
    for side in result.sides:
        if side.ours and side.samples and (side.on, side.precision) not in found:
            same = [s for s in result.sides if (s.on, s.precision) == (side.on, side.precision)]
            chosen = result.chosen(side.on)
            offer = fastest([chosen] if chosen in same else []) or fastest(same)
            if offer is not None:
                found[side.on, side.precision] = offer
    return found


def _difference(label: str, old: Side, new: Side) -> Difference:
    assert old.seconds is not None
    assert new.seconds is not None
    verdict: Verdict = "same"
    ratio = new.seconds / old.seconds
    if told_apart(old, new) and not 1 / (1 + DRIFT) <= ratio <= 1 + DRIFT:
        verdict = "slower" if ratio > 1 else "faster"
    return Difference(
        label, new.on, new.what, new.precision, new.ours, old.seconds, new.seconds, verdict
    )


def _reason(result: ProblemResult, on: str, precision: str) -> str:
    failures = [result.failure] + [
        side.failure for side in result.sides if (side.on, side.precision) == (on, precision)
    ]
    return next((f": {failure}" for failure in failures if failure), "")


def _some(run: Run) -> str:
    labels = [result.label for result in run.results]
    if not labels:
        return "none"
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _warnings(before: Run, after: Run) -> tuple[str, ...]:
    """What else changed between the two runs."""
    found: list[str] = []

    def tell(what: str, old: Any, new: Any) -> None:
        if old != new and None not in (old, new):
            found.append(f"{what} differs: {old} before, {new} after")

    for name in _MACHINE:
        tell(f"the machine's {name}", before.machine.get(name), after.machine.get(name))
    old_devices = {device.name: device for device in before.devices}
    for device in after.devices:
        old = old_devices.get(device.name)
        if old is not None:
            tell(f"the adapter of {device.name}", old.adapter, device.adapter)
            tell(f"the driver of {device.name}", old.driver, device.driver)
            tell(f"the versions of {device.name}", _words(old.versions), _words(device.versions))
    old_peers = {peer.name: peer for peer in before.peers if peer.absent is None}
    for peer in after.peers:
        old_peer = old_peers.get(peer.name)
        if old_peer is not None and peer.absent is None:
            tell(f"the device of {peer.name}", old_peer.device, peer.device)
            tell(f"the versions of {peer.name}", _words(old_peer.versions), _words(peer.versions))
    tell("the method", before.method, after.method)
    if any(device.software for device in (*before.devices, *after.devices)):
        found.append(
            "a software driver took part: its times differ between runs of the same code by far "
            "more than between samples"
        )
    return tuple(found)


_MACHINE = ("processor", "processors", "system")
"""What of a machine's facts must agree for its times to compare."""


def _words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def percent(ratio: float) -> str:
    """How a ratio reads: ``+5.0 %``, ``-12.3 %``."""
    return "-" if math.isnan(ratio) else f"{(ratio - 1) * 100:+.1f} %"


def by_change(differences: Iterable[Difference]) -> list[Difference]:
    """Regressions first, the largest before."""
    return sorted(differences, key=lambda each: -each.ratio)
