"""One problem being measured: candidates compiled, verified, and timed against each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import AlgorithmRefusedError, DeviceLostError, ForkedProcessError
from ..plan import Plan
from ..planner import Candidate, Survey
from .timing import Rules, Timing, measure, spin_up
from .verify import Check
from .workbench import Machine, Workbench

MOST_CANDIDATES = 16
MOST_CONFIGS = 8
"""Of each algorithm, in mode 'auto'."""
COST_RANGE = 4.0
"""How many times the least guess a candidate's guess may be, to be worth measuring."""
UNLIKELY = 2.25
"""Likewise, to be measured early: the model is off by 1.5 times at most, as a rule, so two of its
guesses by the square of that."""
ALIKE = 1.1
"""Times that the guess of a sibling may differ from its leader's."""
PREPARATION, SIBLINGS = 0.5, 0.8
"""Shares of the budget after which no further candidate of the shortlist, and no further sibling
of its best, is compiled; the rest is for timing. (Making and uploading the data, and the spin-up,
come on top.)"""

LEAST = 3
"""Candidates of the shortlist that are measured whatever they take, where so many are right
among the first 2 * LEAST: a problem so large that verifying one takes half a second is worth the
time. They are of as many algorithms as are likely, since the shortlist begins with the best of
each."""

AT_ONCE = 8
"""Candidates whose kernels are compiled side by side."""

_FATAL = (DeviceLostError, ForkedProcessError)
"""Failures of the device, not of a candidate."""

Lower = Callable[[Candidate], Plan]


class Progress(Protocol):
    """Told how far tuning is; ``stage`` is 'device', 'verify' or 'time'."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Ready:
    """A candidate that lowers and compiles here."""

    candidate: Candidate
    plan: Plan
    compiled: Any


def make_ready(candidate: Candidate, lower: Lower, machine: Machine) -> Ready:
    """Raises AlgorithmRefusedError or ShaderError where there is no plan or no kernel."""
    plan = lower(candidate)
    return Ready(candidate, plan, machine.compile(plan))


class Session:
    """Measures the candidates of a survey: all of them, or what a budget of seconds allows.

    With a budget, a shortlist comes first, until half of it is spent and LEAST are right. Then
    come the siblings of its best, which the cost model hardly tells from it: one stood for all that
    it gives the same cost, and time may have run out before others. Then all that are right are
    timed together.
    """

    def __init__(
        self,
        machine: Machine,
        found: Survey,
        lower: Lower,
        *,
        rules: Rules,
        budget: float | None,
        clock: Callable[[], float],
        progress: Progress | None = None,
    ) -> None:
        self._machine = machine
        self._found = found
        self._lower = lower
        self._rules = rules
        self._budget = math.inf if budget is None else budget
        self._clock = clock
        self._progress = progress
        self._begin = 0.0
        self._grace = self._budget  # what compiling side by side may take beside the budget
        self._ready: list[Ready] = []
        self._estimates: list[float] = []
        self._bench = Workbench(machine, Check(found.problem))
        self.ranked: list[tuple[Ready, Timing]] = []
        """Those that compile and are right, fastest first; empty where there is none."""
        self.failures: dict[str, str] = {}
        """Why each other candidate that was tried cannot be used, by its label."""
        self.only_refusals = True
        """Whether all of these are refusals for want of memory, and none a fault."""

    def run(self) -> None:
        """Raises OutOfDeviceMemoryError where the problem's own arguments do not fit."""
        with self._bench:
            self._begin = self._clock()  # to make the data and to upload it is not measuring
            self._gather()
            if self._ready:
                self._time()

    def _gather(self) -> None:
        candidates, full = self._found.candidates, self._budget == math.inf
        first = list(candidates) if full else shortlist(candidates)
        self._admit(first, PREPARATION, least=LEAST if self._budget > 0 else 1)
        if not self._ready:  # the promising ones all failed: any that is right will do
            self._admit([c for c in candidates if c not in first], -1.0)
        if any(self._siblings(r) for r in self._ready):
            self._admit(self._siblings(self._leader()), SIBLINGS, least=0)

    def _after(self, share: float) -> float:
        """The time when that share of the budget is spent."""
        return self._begin + share * self._budget

    def _leader(self) -> Ready:
        """The fastest in two quick rounds, before the clock has risen."""
        timings = self._measure(replace(self._rules, rounds=2), self._after(SIBLINGS))
        fastest = min(range(len(timings)), key=lambda i: timings[i].best)
        return self._ready[fastest]

    def _siblings(self, of: Ready) -> list[Candidate]:
        """Those not met yet that the cost model hardly tells from it, the likest first."""
        met = {*(r.candidate.label for r in self._ready), *self.failures}
        algorithm, cost = of.candidate.algorithm, of.candidate.cost
        alike = [
            c
            for c in self._found.candidates
            if c.algorithm == algorithm and cost / ALIKE <= c.cost <= cost * ALIKE
            if c.label not in met
        ]
        return sorted(alike, key=lambda c: abs(c.cost - cost))

    def _admit(self, candidates: Sequence[Candidate], share: float, *, least: int = 1) -> None:
        """Compiles and verifies candidates for a share of the budget.

        Beyond it goes on until ``least`` are right, at most with the first ``2 * least``; but
        until one is there, with all.
        """
        admitted = 0
        for number, candidate in enumerate(candidates):
            enough = admitted >= least or (self._ready and number >= 2 * least)
            if enough and self._clock() > self._after(share):
                break
            if number % AT_ONCE == 0:
                self._warm(candidates[number : number + AT_ONCE])
            self._tell("verify", number, len(candidates))
            try:
                ready = make_ready(candidate, self._lower, self._machine)
                self._bench.verify(ready.compiled)
                (estimate,) = self._bench.time([ready.compiled], [1])
            except _FATAL:
                raise
            except Exception as error:  # whatever it is, it is this candidate's, and is listed
                self.failures[candidate.label] = str(error) or type(error).__name__
                self.only_refusals &= isinstance(error, AlgorithmRefusedError)
                continue
            admitted += 1
            self._ready.append(ready)
            self._estimates.append(estimate)
        self._tell("verify", len(candidates), len(candidates))

    def _warm(self, candidates: Sequence[Candidate]) -> None:
        """Has the next candidates' kernels compiled side by side.

        That is not held against the budget, up to as much again: a driver slow enough to spend
        it all on the first few would leave them unmeasured.
        """
        begin, plans = self._clock(), []
        for candidate in candidates:
            with contextlib.suppress(AlgorithmRefusedError):  # listed when its turn comes
                plans.append(self._lower(candidate))
        self._machine.warm(plans)
        free = min(self._clock() - begin, self._grace)
        self._grace -= free
        self._begin += free

    def _time(self) -> None:
        begin = self._clock()
        spin_up(self._sample, self._rules, self._estimates[0], self._clock)
        spent = self._clock() - begin
        timings = self._measure(self._rules, self._after(1.0) + spent)
        # Who was dropped early has fewer samples, and no claim to win by them.
        self.ranked = sorted(
            zip(self._ready, timings, strict=True),
            key=lambda pair: (-len(pair[1].samples), pair[1].median),
        )

    def _measure(self, rules: Rules, deadline: float) -> list[Timing]:
        return measure(
            self._sample,
            self._estimates,
            rules,
            deadline=deadline,
            clock=self._clock,
            progress=lambda done, total: self._tell("time", done, total),
        )

    def _sample(self, numbers: Sequence[int], repeats: Sequence[int]) -> list[float]:
        return self._bench.time([self._ready[i].compiled for i in numbers], repeats)

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The few most promising of candidates sorted by cost: first the best of each algorithm that
    may win, then their next ones, at last the best of the unlikely algorithms.

    Of configurations that the model gives the same cost, one stands for all.
    """
    if not candidates:
        return []
    least = candidates[0].cost
    by_algorithm: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        chosen = by_algorithm.setdefault(candidate.algorithm, [])
        distinct = all(not math.isclose(candidate.cost, other.cost) for other in chosen)
        if candidate.cost <= COST_RANGE * least and distinct and len(chosen) < MOST_CONFIGS:
            chosen.append(candidate)
    best = [chosen[0] for chosen in by_algorithm.values() if chosen]
    likely = [candidate for candidate in best if candidate.cost <= UNLIKELY * least]
    unlikely = best[len(likely) :]
    others = sorted((c for chosen in by_algorithm.values() for c in chosen[1:]), key=_cost)
    kept = max(MOST_CANDIDATES - len(best), 0)
    return (likely + others[:kept] + unlikely)[:MOST_CANDIDATES]


def _cost(candidate: Candidate) -> float:
    return candidate.cost
