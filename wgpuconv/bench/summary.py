"""What the samples of a run say: who stands for whom, ratios, ties, the roofline. Pure.

A *group* is everything that one device or peer did in one precision on problems of one dtype:
``torch-cuda tf32`` on f32 problems. Of each problem its fastest side stands for it, among those
that did the same work with weights prepared within their time. In the precision that a problem
allows, TF32 say, a more precise side may be the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..problem import ConvProblem
from .result import DeviceFacts, ProblemResult, Run, Side, geometric_mean

FAR_APART = 2.0
"""Medians that differ by more than that many times are told apart, whatever the samples."""


def told_apart(one: Side, other: Side) -> bool:
    """Whether the samples tell which of two timed sides is faster.

    They do not where the ranges from minimum to median overlap: samples above the median are
    left out, since a disturbance can only make a run longer. One lucky sample makes no tie of
    medians that are far apart.
    """
    assert one.seconds is not None
    assert other.seconds is not None
    if max(one.seconds, other.seconds) > FAR_APART * min(one.seconds, other.seconds):
        return True
    return min(other.samples) > one.seconds or min(one.samples) > other.seconds


def dtype_of(result: ProblemResult) -> str:
    """As ``--dtype`` names it: problems that allow TF32 are apart from those in f32."""
    return _dtype(result.problem)


@lru_cache(maxsize=4096)
def _dtype(text: str) -> str:
    return ConvProblem.parse(text).arithmetic


def lossless(side: Side, dtype: str) -> bool:
    """Whether a side computes as precisely as problems of a dtype ask for."""
    return side.precision == dtype or (side.precision, dtype) == ("f32", "tf32")


def best_of(result: ProblemResult, on: str, precision: str) -> Side | None:
    """The side that stands for a device or peer in a precision, where one was timed."""
    own = precision == dtype_of(result)
    return fastest(
        [
            side
            for side in result.sides
            if side.on == on and (lossless(side, precision) if own else side.precision == precision)
        ]
    )


def fastest(sides: Sequence[Side]) -> Side | None:
    """Among those that were timed, did the same work and prepared weights within their time."""
    fair = [side for side in sides if side.samples and side.same_work and not side.prepared]
    return min(fair, key=lambda side: side.seconds or math.inf, default=None)


def leaders(result: ProblemResult) -> tuple[Side, ...]:
    """The fastest side without loss of precision, and those that cannot be told from it, with
    all that are faster than the slowest of these."""
    dtype = dtype_of(result)
    fair = [side for side in result.sides if lossless(side, dtype) and fastest([side])]
    fair.sort(key=lambda side: side.seconds or math.inf)
    last = max((n for n, side in enumerate(fair) if not told_apart(fair[0], side)), default=-1)
    return tuple(fair[: last + 1])


def baseline_of(run: Run, result: ProblemResult) -> Side | None:
    """What ratios of this problem refer to: the baseline's best without loss of precision."""
    dtype = dtype_of(result)
    return fastest([s for s in result.sides if s.on == run.baseline and lossless(s, dtype)])


def ratio(side: Side, reference: Side | None) -> float | None:
    """Time over the reference's, where both were timed."""
    if side.seconds is None or reference is None or not reference.seconds:
        return None
    return side.seconds / reference.seconds


@dataclass(frozen=True)
class Group:
    """One device or peer in one precision, on problems of one dtype."""

    dtype: str
    on: str
    precision: str
    ours: bool

    @property
    def name(self) -> str:
        return f"{self.on} {self.precision}"

    def best(self, result: ProblemResult) -> Side | None:
        return best_of(result, self.on, self.precision) if dtype_of(result) == self.dtype else None


def groups(run: Run) -> tuple[Group, ...]:
    """All that timed anything: f32 problems first, in them ours first, then as the run lists its
    devices and peers, each without loss of precision first."""
    found: dict[Group, None] = {}
    for result in run.results:
        for side in result.sides:
            if fastest([side]):
                found[Group(dtype_of(result), side.on, side.precision, side.ours)] = None
    places = [device.name for device in run.devices] + [peer.name for peer in run.peers]

    def rank(group: Group) -> tuple[Any, ...]:
        place = places.index(group.on) if group.on in places else len(places)
        lossy = group.precision != group.dtype
        return (group.dtype != "f32", group.dtype, not group.ours, place, lossy)

    return tuple(sorted(found, key=rank))


@dataclass(frozen=True)
class Standing:
    """A group against a reference, over the problems that both were timed on."""

    problems: int
    mean: float
    """Geometric mean of the ratios; NaN without problems."""
    worst: float
    worst_at: str
    """The label of the problem of the worst ratio."""
    wins: int
    ties: int
    losses: int


def standing(group: Group, run: Run, reference: Group | None = None) -> Standing:
    """Against another group, or against the run's baseline."""
    ratios: list[tuple[float, str]] = []
    counts = {-1: 0, 0: 0, 1: 0}
    for result in run.results:
        side = group.best(result)
        other = reference.best(result) if reference else baseline_of(run, result)
        found = None if side is None else ratio(side, other)
        if side is not None and other is not None and found is not None:
            ratios.append((found, result.label))
            counts[(1 if found > 1 else -1) if told_apart(side, other) else 0] += 1
    worst, at = max(ratios, default=(math.nan, ""))
    mean = geometric_mean(value for value, _ in ratios)
    return Standing(len(ratios), mean, worst, at, counts[-1], counts[0], counts[1])


def total(group: Group, run: Run) -> float | None:
    """Seconds of all problems of the group's dtype, each as often as the network has it; None
    where the group lacks one."""
    sides = [(r.count, group.best(r)) for r in run.results if dtype_of(r) == group.dtype]
    seconds = [count * side.seconds for count, side in sides if side and side.seconds]
    return sum(seconds) if sides and len(seconds) == len(sides) else None


def intensity(result: ProblemResult) -> float | None:
    """Operations a byte of a direct method that moves each array once."""
    return result.flop / result.nbytes if min(result.flop, result.nbytes) > 0 else None


def roof_of(device: DeviceFacts) -> tuple[float, float] | None:
    """Bytes and f32 operations a second, where both were measured."""
    bandwidth, rate = device.bandwidth or 0.0, device.fma_rate or 0.0
    return (bandwidth, rate) if min(bandwidth, rate) > 0 else None


def attainable(device: DeviceFacts, result: ProblemResult) -> float | None:
    """Operations a second that the roofline allows a direct f32 method on this problem."""
    at = intensity(result)
    roof = roof_of(device)
    if at is None or roof is None:
        return None
    bandwidth, rate = roof
    return min(rate, at * bandwidth)
