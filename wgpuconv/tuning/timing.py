"""The timing protocol: interleaved rounds, losers dropped early, minimum and median kept.

Pure: what takes a sample and what tells the time are handed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sample = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Given candidates (by number) and repeats of each: seconds of one run of each, in that order."""


@dataclass(frozen=True)
class Rules:
    """How long to measure."""

    spin_up: float
    """Seconds of continuous work before the first sample, for the clock to rise."""
    sample: float
    """Seconds that one sample should last; 0 takes single runs."""
    rounds: int
    """Rounds that the finalists go through."""


HARDWARE = Rules(spin_up=0.5, sample=2e-3, rounds=7)
"""A GPU's clock idles at a fraction of its speed; without the spin-up, whoever runs last wins."""
SOFTWARE = Rules(spin_up=0.0, sample=0.0, rounds=3)

MOST_REPEATS = 1000
DROPPED = ((2, 1.5), (4, 1.1))
"""After that many rounds, candidates slower than that many times the fastest are dropped."""


@dataclass(frozen=True)
class Timing:
    """The samples of one candidate, in seconds of one run."""

    samples: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


SETTLED = 1.02
"""Samples of a risen clock differ by less than that."""
LONGEST_SPIN = 4
"""Times the usual spin-up after which a clock that still rises is taken as it is."""


def spin_up(sample: Sample, rules: Rules, estimate: float, clock: Callable[[], float]) -> None:
    """Keeps the device busy with the first candidate until its clock has risen.

    That takes a fraction of a second on most GPUs and longer on some after a rest, so it goes
    on while the samples still become faster.
    """
    if not rules.spin_up:
        return
    begin, previous, settled, spent = clock(), math.inf, False, 0.0
    while spent < rules.spin_up or not settled:
        # Samples longer than those that count, so that the gaps between them weigh little.
        seconds = sample([0], [_repeats(estimate, 10 * rules.sample)])[0]
        spent = clock() - begin
        settled = seconds * SETTLED >= previous or spent >= LONGEST_SPIN * rules.spin_up
        previous = seconds


def measure(
    sample: Sample,
    estimates: Sequence[float],
    rules: Rules,
    *,
    deadline: float,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] | None = None,
) -> list[Timing]:
    """Times all candidates, given a first guess of each one's seconds.

    Every candidate gets at least one round; past the ``deadline`` no further one begins.
    """
    samples: list[list[float]] = [[] for _ in estimates]
    guesses = list(estimates)
    active = list(range(len(estimates)))
    for number in range(rules.rounds):
        if number and clock() > deadline:
            break
        # Backwards every second time: nobody always follows the same neighbour.
        order = active if number % 2 == 0 else active[::-1]
        repeats = [_repeats(guesses[i], rules.sample) for i in order]
        for i, seconds in zip(order, sample(order, repeats), strict=True):
            samples[i].append(seconds)
            guesses[i] = min(samples[i])
        active = _survivors(active, guesses, number + 1)
        if progress is not None:
            progress(number + 1, rules.rounds)
    return [Timing(tuple(taken)) for taken in samples]


def _repeats(estimate: float, seconds: float) -> int:
    if estimate <= 0:
        return MOST_REPEATS if seconds else 1
    return min(max(math.ceil(seconds / estimate), 1), MOST_REPEATS)


def _survivors(active: list[int], best: list[float], rounds: int) -> list[int]:
    fastest = min(best[i] for i in active)
    for after, factor in DROPPED:
        if rounds == after:
            return [i for i in active if best[i] <= factor * fastest]
    return active
