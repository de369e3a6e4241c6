"""The tuner: finds the best candidate in the store, by measuring, or by the cost model."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from ..algorithms import Algorithm
from ..errors import (
    AlgorithmRefusedError,
    DeviceLostError,
    ForkedProcessError,
    OutOfDeviceMemoryError,
    ShaderError,
    TuningError,
    TuningWarning,
)
from ..plan import Config, Plan, candidate_label
from ..planner import Candidate, Survey
from ..problem import ConvProblem
from ..shader import source_hash
from .store import Entry, Key, Store, Trial
from .timing import HARDWARE, SOFTWARE, Rules, Timing, measure, spin_up
from .verify import Check
from .workbench import Machine, Workbench

MODES = ("auto", "full", "stored", "off")
ENV_MODE = "WGPUCONV_TUNE"
ENV_BUDGET = "WGPUCONV_TUNE_BUDGET"
BUDGET = 1.0
"""Seconds a problem that mode 'auto' spends on compiling, verifying and timing."""

MOST_CANDIDATES = 12
MOST_CONFIGS = 3
"""Of each algorithm, in mode 'auto'."""
COST_RANGE = 4.0
"""How many times the least guess a candidate's guess may be, to be worth measuring."""
PREPARATION = 0.5
"""Share of the budget after which no further candidate is compiled before the first timing."""
TINY = 1 << 20
"""Multiply-adds below which a launch costs more than the work: nothing to choose."""
FAMILY = 8
"""Sizes of one family (problems that differ in batch and image size only) that are measured;
further ones are served by their neighbours."""
FAR = math.log(4)
"""Distance between sizes, in natural logarithms, past which a neighbour says little. It takes
few sizes to leave no other one that far away, so this cannot make a program wait for ever."""

_FATAL = (DeviceLostError, ForkedProcessError)
"""Failures of the device, not of a candidate."""


class Progress(Protocol):
    """Told how far tuning is; ``stage`` is 'verify' or 'time'."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Choice:
    """The chosen plan and how it was found."""

    plan: Plan
    candidate: Candidate
    source: str
    """'model' (the cost model), 'tuned' (measured now), 'stored' (measured before), or 'similar'
    (measured before for a problem that differs in batch and image size only)."""
    timings: tuple[tuple[str, float], ...] = ()
    """Label and median seconds of each candidate that was timed, fastest first."""
    failures: tuple[tuple[str, str], ...] = ()
    """Label of each candidate that failed, and why."""
    tied: tuple[str, ...] = ()
    """Labels of those that were not slower than the choice beyond the spread of the samples."""
    note: str = ""
    """Why it was found this way."""

    @property
    def seconds(self) -> float | None:
        """The choice's own time, where it was measured."""
        return dict(self.timings).get(self.candidate.label)


@dataclass(frozen=True)
class _Ready:
    """A candidate that lowers and compiles here."""

    candidate: Candidate
    plan: Plan
    compiled: Any


Lower = Callable[[Candidate], Plan]


class Tuner:
    """Chooses for one device. Its caller holds a lock: two threads never tune at once."""

    def __init__(
        self,
        machine: Machine,
        store: Store,
        *,
        mode: str | None = None,
        budget: float | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.machine = machine
        self.store = store
        self.mode = _mode(mode)
        self.budget = _budget(budget)
        self.progress = progress
        self._clock = clock

    def choose(self, found: Survey, lower: Lower, *, scope: str) -> tuple[Choice, Any]:
        """The choice among the survey's candidates, and its compiled plan.

        ``scope`` says what the caller left open: see store.Key.
        """
        problem = found.problem
        if self.mode == "off":
            return self._by_model(found, lower, "tune='off'")
        if problem.empty:
            return self._by_model(found, lower, "nothing to compute")
        key = self.key(problem, scope)
        sources = self._sources(found)
        stored = self._from_store(found, lower, key, sources)
        if stored is not None:
            return stored
        if self.mode == "stored":
            return self._by_model(found, lower, "nothing stored")
        if self.mode == "auto":
            if self.machine.facts.software:
                return self._by_model(found, lower, "a software driver is not measured")
            if problem.multiply_adds < TINY:
                return self._by_model(found, lower, "too little work to measure")
            if len(found.candidates) == 1:
                return self._by_model(found, lower, "the only candidate")
            similar = self._by_similar(found, lower, key, sources)
            if similar is not None:
                return similar
        return self._by_measuring(found, lower, key, sources)

    def key(self, problem: ConvProblem, scope: str) -> Key:
        identity, facts = self.machine.identity, self.machine.facts
        return Key(
            identity.backend,
            identity.adapter,
            identity.driver,
            identity.versions,
            hashlib.sha256(repr(facts.limits).encode()).hexdigest()[:8],
            scope,
            str(problem),
        )

    def _sources(self, found: Survey) -> dict[str, str]:
        names = {candidate.algorithm for candidate in found.candidates}
        return {a.name: _source(a) for a in self.machine.algorithms if a.name in names}

    # ---- the cost model ----

    def _by_model(
        self, found: Survey, lower: Lower, note: str, failures: Iterable[tuple[str, str]] = ()
    ) -> tuple[Choice, Any]:
        """The cheapest guess that fits in memory and compiles."""
        failed = dict(failures)
        broken: ShaderError | None = None
        for candidate in found.candidates:
            if candidate.label in failed:
                continue
            try:
                ready = self._ready(candidate, lower)
            except AlgorithmRefusedError as error:
                failed[candidate.label] = str(error)
            except ShaderError as error:
                failed[candidate.label] = str(error)
                broken = error
                _warn(f"{candidate.label} is left out on this device: {error}")
            else:
                choice = Choice(
                    ready.plan, candidate, "model", failures=tuple(failed.items()), note=note
                )
                return choice, ready.compiled
        if broken is not None:
            raise broken
        raise _nothing_works(found, failed)

    def _ready(self, candidate: Candidate, lower: Lower) -> _Ready:
        plan = lower(candidate)
        return _Ready(candidate, plan, self.machine.compile(plan))

    # ---- the store ----

    def _from_store(
        self, found: Survey, lower: Lower, key: Key, sources: dict[str, str]
    ) -> tuple[Choice, Any] | None:
        """The stored winner, or the next best that still fits; None where nothing does."""
        entry = self.store.get(key)
        if entry is None or not _fresh(entry, sources):
            return None
        if self.mode == "full" and entry.mode != "full":
            return None
        failed: dict[str, str] = {}
        for trial in entry.ranked:
            ready = self._stored_ready(found, lower, trial.algorithm, trial.config)
            if isinstance(ready, str):
                failed[trial.label] = ready
                continue
            if failed:
                entry = _without(entry, failed, ready.candidate)
                self.store.put(entry)
                _warn_replaced(key.problem, failed, f"the next best, {trial.label}, is used")
            return _choice(ready, "stored", entry), ready.compiled
        if failed:
            _warn_replaced(key.problem, failed, "none is left, so the choice is made anew")
        return None

    def _by_similar(
        self, found: Survey, lower: Lower, key: Key, sources: dict[str, str]
    ) -> tuple[Choice, Any] | None:
        """The winner of the nearest size, where enough sizes are known; None where not."""
        known = [entry for entry in self.store.family(key) if _fresh(entry, sources)]
        if len(known) < FAMILY:
            return None
        by_distance = sorted((_distance(found.problem, entry), i) for i, entry in enumerate(known))
        nearest, number = by_distance[0]
        if nearest > FAR:
            return None
        entry = known[number]
        ready = self._stored_ready(found, lower, entry.algorithm, entry.config)
        note = f"{len(known)} sizes are known; the nearest is {entry.key.problem}"
        if isinstance(ready, str):
            failure = (candidate_label(entry.algorithm, entry.config), ready)
            return self._by_model(found, lower, f"{note}, whose winner fails here", [failure])
        return Choice(ready.plan, ready.candidate, "similar", note=note), ready.compiled

    def _stored_ready(
        self, found: Survey, lower: Lower, algorithm: str, config: Config
    ) -> _Ready | str:
        """A candidate known by name, made ready; or why it cannot be used."""
        if algorithm in found.refusals:
            return found.refusals[algorithm]
        offered = [c for c in found.candidates if c.algorithm == algorithm]
        if not offered:
            return "no such algorithm is in the running"
        candidate = next((c for c in offered if c.config == config), None)
        if candidate is None:
            return "this configuration is no longer offered"
        try:
            return self._ready(candidate, lower)
        except (AlgorithmRefusedError, ShaderError) as error:
            return str(error)

    # ---- measuring ----

    def _by_measuring(
        self, found: Survey, lower: Lower, key: Key, sources: dict[str, str]
    ) -> tuple[Choice, Any]:
        begin = self._clock()
        try:
            session = _Session(self, found, lower, begin)
            with session.bench:
                session.run()
        except (OutOfDeviceMemoryError, MemoryError) as error:
            return self._by_model(found, lower, f"too large to measure here ({error})")
        if not session.ready:
            if session.only_refusals:
                raise _nothing_works(found, session.failures)
            failures = "; ".join(f"{label}: {why}" for label, why in session.failures.items())
            raise ShaderError(f"no candidate computes {found.problem} right here: {failures}")
        entry = session.entry(key, sources)
        self.store.put(entry)
        return _choice(session.winner, "tuned", entry), session.winner.compiled

    def report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


class _Session:
    """One problem being measured."""

    def __init__(self, tuner: Tuner, found: Survey, lower: Lower, begin: float) -> None:
        self._tuner = tuner
        self._found = found
        self._lower = lower
        self._full = tuner.mode == "full"
        self._deadline = math.inf if self._full else begin + tuner.budget
        self._first_deadline = math.inf if self._full else begin + PREPARATION * tuner.budget
        self._rules: Rules = SOFTWARE if tuner.machine.facts.software else HARDWARE
        self.bench = Workbench(tuner.machine, Check(found.problem))
        self.ready: list[_Ready] = []
        self.failures: dict[str, str] = {}
        self.only_refusals = True
        self._estimates: dict[str, float] = {}
        self._timings: dict[str, Timing] = {}

    def run(self) -> None:
        candidates = self._found.candidates
        first = list(candidates) if self._full else shortlist(candidates)
        self._admit(first, self._first_deadline)
        if not self.ready:  # the promising ones all failed: any that is right will do
            rest = [c for c in candidates if c not in first]
            self._admit(rest, -math.inf)
        if not self.ready:
            return
        estimate = self._estimates[self.ready[0].candidate.label]
        spin_up(self._sampler(self.ready), self._rules, estimate, self._tuner._clock)
        self._time(self.ready)
        if not self._full:
            self._try_siblings()

    def _admit(self, candidates: Sequence[Candidate], deadline: float) -> list[_Ready]:
        """Compiles and verifies candidates, at least one that works, until the deadline."""
        admitted: list[_Ready] = []
        for number, candidate in enumerate(candidates):
            if admitted and self._tuner._clock() > deadline:
                break
            self._tuner.report("verify", number, len(candidates))
            try:
                ready = self._tuner._ready(candidate, self._lower)
                self.bench.verify(ready.compiled)
                (estimate,) = self.bench.time([ready.compiled], [1])
            except _FATAL:
                raise
            except Exception as error:  # whatever it is, it is this candidate's, and is listed
                self.failures[candidate.label] = str(error) or type(error).__name__
                self.only_refusals &= isinstance(error, AlgorithmRefusedError)
                continue
            admitted.append(ready)
            self._estimates[candidate.label] = estimate
        self._tuner.report("verify", len(candidates), len(candidates))
        self.ready += admitted
        return admitted

    def _sampler(
        self, ready: Sequence[_Ready]
    ) -> Callable[[Sequence[int], Sequence[int]], list[float]]:
        def sample(numbers: Sequence[int], repeats: Sequence[int]) -> list[float]:
            return self.bench.time([ready[i].compiled for i in numbers], repeats)

        return sample

    def _time(self, ready: Sequence[_Ready]) -> None:
        labels = [r.candidate.label for r in ready]
        timings = measure(
            self._sampler(ready),
            [self._estimates[label] for label in labels],
            self._rules,
            deadline=self._deadline + self._rules.spin_up,
            clock=self._tuner._clock,
            progress=lambda done, total: self._tuner.report("time", done, total),
        )
        self._timings.update(zip(labels, timings, strict=True))

    def _try_siblings(self) -> None:
        """Measures what the cost model cannot tell from the winner, as far as time allows."""
        leader = self.winner
        met = {*self._timings, *self.failures}
        siblings = [
            c
            for c in self._found.candidates
            if c.algorithm == leader.candidate.algorithm
            and math.isclose(c.cost, leader.candidate.cost)
            and c.label not in met
        ]
        deadline = self._deadline + self._rules.spin_up
        if siblings and self._tuner._clock() < deadline:
            admitted = self._admit(siblings, deadline)
            self._time([leader, *admitted])

    @property
    def winner(self) -> _Ready:
        return min(self.ready, key=lambda r: self._timings[r.candidate.label].median)

    def entry(self, key: Key, sources: dict[str, str]) -> Entry:
        winner = self.winner.candidate
        timed = sorted(self.ready, key=lambda r: self._timings[r.candidate.label].median)
        trials = [
            Trial(
                r.candidate.algorithm,
                r.candidate.config,
                self._timings[r.candidate.label].median,
                self._timings[r.candidate.label].best,
            )
            for r in timed
        ]
        trials += [
            Trial(c.algorithm, c.config, failure=self.failures[c.label])
            for c in self._found.candidates
            if c.label in self.failures
        ]
        mode = "full" if self._full else "auto"
        return Entry(key, winner.algorithm, winner.config, tuple(trials), sources, mode, _now())


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The few most promising of candidates sorted by cost, the best of each algorithm first.

    Of configurations that the model gives the same cost, one stands for all.
    """
    if not candidates:
        return []
    limit = COST_RANGE * candidates[0].cost
    by_algorithm: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        chosen = by_algorithm.setdefault(candidate.algorithm, [])
        distinct = all(not math.isclose(candidate.cost, other.cost) for other in chosen)
        if candidate.cost <= limit and distinct and len(chosen) < MOST_CONFIGS:
            chosen.append(candidate)
    ranked = sorted(
        (rank, candidate.cost, number, candidate)
        for number, chosen in enumerate(by_algorithm.values())
        for rank, candidate in enumerate(chosen)
    )
    return [candidate for *_, candidate in ranked][:MOST_CANDIDATES]


def _fresh(entry: Entry, sources: dict[str, str]) -> bool:
    """Whether it was measured with today's kernels, every algorithm of today in the running."""
    return all(entry.sources.get(name) == hashed for name, hashed in sources.items())


def _without(entry: Entry, failed: dict[str, str], winner: Candidate) -> Entry:
    """The entry with another winner, and the former ones marked as failed."""
    trials = tuple(
        replace(t, seconds=None, best=None, failure=failed[t.label]) if t.label in failed else t
        for t in entry.trials
    )
    return replace(
        entry, algorithm=winner.algorithm, config=winner.config, trials=trials, date=_now()
    )


def _choice(ready: _Ready, source: str, entry: Entry) -> Choice:
    ranked = entry.ranked
    usual = ranked[0].seconds or 0.0
    tied = [t.label for t in ranked[1:] if t.best is not None and t.best <= usual]
    return Choice(
        ready.plan,
        ready.candidate,
        source,
        timings=tuple((t.label, t.seconds) for t in ranked if t.seconds is not None),
        failures=tuple((t.label, t.failure) for t in entry.trials if t.failure is not None),
        tied=tuple(tied),
        note=f"measured {entry.date}, {len(ranked)} candidate(s), mode {entry.mode!r}",
    )


def _distance(problem: ConvProblem, entry: Entry) -> float:
    other = ConvProblem.parse(entry.key.problem)
    sizes = ((problem.n, other.n), (problem.h, other.h), (problem.w, other.w))
    return math.hypot(*(math.log(a / b) for a, b in sizes))


def _nothing_works(found: Survey, failed: dict[str, str]) -> AlgorithmRefusedError:
    """One reason an algorithm is enough; their configurations fail alike."""
    reasons: dict[str, str] = {}
    for candidate in found.candidates:
        reasons.setdefault(candidate.algorithm, failed[candidate.label])
    text = "; ".join(f"{name}: {why}" for name, why in {**reasons, **found.refusals}.items())
    return AlgorithmRefusedError(f"no algorithm can compute {found.problem}: {text}")


def _source(algorithm: Algorithm) -> str:
    return source_hash(algorithm.shaders)


def _mode(mode: str | None) -> str:
    origin = "tune" if mode is not None else f"the environment variable {ENV_MODE}"
    value = mode if mode is not None else os.environ.get(ENV_MODE) or "auto"
    if value not in MODES:
        raise TuningError(f"{origin} must be one of {', '.join(MODES)}, got {value!r}")
    return value


def _budget(budget: float | None) -> float:
    text = os.environ.get(ENV_BUDGET) if budget is None else budget
    if text is None or text == "":
        return BUDGET
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        origin = f"the environment variable {ENV_BUDGET}" if budget is None else "the budget"
        raise TuningError(f"{origin} must be a number of seconds, got {text!r}")
    return seconds


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _warn(text: str) -> None:
    warnings.warn(text, TuningWarning, stacklevel=3)


def _warn_replaced(problem: str, failed: dict[str, str], instead: str) -> None:
    reasons = "; ".join(f"{label} ({why})" for label, why in failed.items())
    _warn(f"the stored choice for {problem} no longer fits: {reasons}; {instead}")
