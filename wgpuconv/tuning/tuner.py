"""The tuner: finds the best candidate in the store, by measuring, or by the cost model."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ..errors import (
    AlgorithmRefusedError,
    OutOfDeviceMemoryError,
    ShaderError,
    TuningError,
    TuningWarning,
    counted,
)
from ..facts import Facts
from ..plan import Config, Plan, candidate_label
from ..planner import Candidate, Survey
from ..problem import ConvProblem
from . import speeds as device_speeds
from .session import Lower, Progress, Ready, Session, make_ready
from .store import Entry, Key, Speeds, Store, Trial
from .timing import HARDWARE, SOFTWARE
from .workbench import Machine

MODES = ("auto", "full", "stored", "off")
MEASURING = ("auto", "full")
ENV_MODE = "WGPUCONV_TUNE"
ENV_BUDGET = "WGPUCONV_TUNE_BUDGET"
BUDGET = 1.0
"""Seconds a problem that mode 'auto' spends on compiling, verifying and timing."""

TINY = 1 << 20
"""Multiply-adds below which a launch costs more than the work: nothing to choose."""
FAMILY = 4
"""Sizes of one family (problems that differ in batch and image size only) that are measured;
further ones are served by their neighbours."""
FAR = math.log(4)
"""Distance between sizes, in natural logarithms, past which a neighbour says little. It takes
few sizes to leave no other one that far away, so this cannot make a program wait for ever."""


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
        self._speeds: Speeds | None = None
        self._looked_up = False

    # ---- the device ----

    @property
    def facts(self) -> Facts:
        """The machine's facts, with stored speeds in place of guesses, whatever the mode."""
        return device_speeds.with_speeds(self.machine.facts, self.speeds)

    @property
    def speeds(self) -> Speeds | None:
        """What was measured of the device; None where nothing was."""
        if not self._looked_up:
            self._speeds = self.store.speeds(device_speeds.device_key(self.machine.identity))
            self._looked_up = True
        return self._speeds

    def measure_device(self, problem: ConvProblem, scope: str) -> None:
        """Measures the device's speeds where the problem will be the first one tuned on it.

        To be called before the survey of which ``choose`` gets the candidates: they follow from
        the facts. Software drivers and backends with kernels of their own are not measured.
        """
        if self.mode not in MEASURING or self.speeds is not None or problem.empty:
            return
        if self.machine.facts.software or not getattr(self.machine, "runs_wgsl", False):
            return
        if self.mode == "auto" and problem.multiply_adds < TINY:
            return
        if self.store.get(self.key(problem, scope)) is not None:
            return
        self._speeds = device_speeds.measure(self.machine, self._tell_device, _now())
        if self._speeds.complete:  # else the next process tries again
            self.store.put_speeds(self._speeds)

    def forget_device(self) -> None:
        """Has the speeds looked up anew, since the store may have others."""
        self._looked_up = False

    def _tell_device(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress("device", done, total)

    # ---- choosing ----

    def choose(
        self, found: Survey, lower: Lower, *, scope: str, every_size: bool = False
    ) -> tuple[Choice, Any]:
        """The choice among the survey's candidates, and its compiled plan.

        ``scope`` says what the caller left open: see store.Key. With ``every_size`` no
        neighbour stands in for a size: the problem was asked for by name.
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
            similar = None if every_size else self._by_similar(found, lower, key, sources)
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
        return {a.name: a.source() for a in self.machine.algorithms if a.name in names}

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
                ready = make_ready(candidate, lower, self.machine)
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

    # ---- the store ----

    def _from_store(
        self, found: Survey, lower: Lower, key: Key, sources: dict[str, str]
    ) -> tuple[Choice, Any] | None:
        """The stored winner, or the next best that still fits; None where nothing does."""
        entry = self.store.get(key)
        if entry is None or not _fresh(entry.sources, sources):
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
        known = [winner for winner in self.store.family(key) if _fresh(winner.sources, sources)]
        if len(known) < FAMILY:
            return None
        distances = [_distance(found.problem, winner.problem) for winner in known]
        if min(distances) > FAR:
            return None
        nearest = known[distances.index(min(distances))]
        ready = self._stored_ready(found, lower, nearest.algorithm, nearest.config)
        note = f"{len(known)} sizes are known; the nearest is {nearest.problem}"
        if isinstance(ready, str):
            failure = (candidate_label(nearest.algorithm, nearest.config), ready)
            return self._by_model(found, lower, f"{note}, whose winner fails here", [failure])
        return Choice(ready.plan, ready.candidate, "similar", note=note), ready.compiled

    def _stored_ready(
        self, found: Survey, lower: Lower, algorithm: str, config: Config
    ) -> Ready | str:
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
            return make_ready(candidate, lower, self.machine)
        except (AlgorithmRefusedError, ShaderError) as error:
            return str(error)

    # ---- measuring ----

    def _by_measuring(
        self, found: Survey, lower: Lower, key: Key, sources: dict[str, str]
    ) -> tuple[Choice, Any]:
        full = self.mode == "full"
        try:
            session = Session(
                self.machine,
                found,
                lower,
                rules=SOFTWARE if self.machine.facts.software else HARDWARE,
                budget=None if full else self.budget,
                clock=self._clock,
                progress=self.progress,
            )
            session.run()
        except (OutOfDeviceMemoryError, MemoryError) as error:
            return self._by_model(found, lower, f"too large to measure here ({error})")
        if not session.ranked:
            if session.only_refusals:
                raise _nothing_works(found, session.failures)
            failures = "; ".join(f"{label}: {why}" for label, why in session.failures.items())
            raise ShaderError(f"no candidate computes {found.problem} right here: {failures}")
        winner, _ = session.ranked[0]
        entry = Entry(
            key,
            winner.candidate.algorithm,
            winner.candidate.config,
            tuple(_trials(session, found)),
            sources,
            "full" if full else "auto",
            _now(),
        )
        self.store.put(entry)
        return _choice(winner, "tuned", entry), winner.compiled


def _trials(session: Session, found: Survey) -> Iterator[Trial]:
    """Those that were timed, fastest first, then those that failed."""
    for ready, timing in session.ranked:
        candidate = ready.candidate
        yield Trial(candidate.algorithm, candidate.config, timing.median, timing.best)
    for candidate in found.candidates:
        if candidate.label in session.failures:
            failure = session.failures[candidate.label]
            yield Trial(candidate.algorithm, candidate.config, failure=failure)


def _fresh(stored: Mapping[str, str], today: Mapping[str, str]) -> bool:
    """Whether today's kernels were measured, every algorithm of today in the running."""
    return all(stored.get(name) == hashed for name, hashed in today.items())


def _without(entry: Entry, failed: dict[str, str], winner: Candidate) -> Entry:
    """The entry with another winner, and the former ones marked as failed."""
    trials = tuple(
        replace(t, seconds=None, best=None, failure=failed[t.label]) if t.label in failed else t
        for t in entry.trials
    )
    return replace(
        entry, algorithm=winner.algorithm, config=winner.config, trials=trials, date=_now()
    )


def _choice(ready: Ready, source: str, entry: Entry) -> Choice:
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
        note=f"measured {entry.date}, {counted(len(ranked), 'candidate')}, mode {entry.mode!r}",
    )


def _distance(problem: ConvProblem, text: str) -> float:
    other = ConvProblem.parse(text)
    sizes = ((problem.n, other.n), (problem.h, other.h), (problem.w, other.w))
    return math.hypot(*(math.log(a / b) for a, b in sizes))


def _nothing_works(found: Survey, failed: dict[str, str]) -> AlgorithmRefusedError:
    """One reason an algorithm is enough; their configurations fail alike."""
    reasons: dict[str, str] = {}
    for candidate in found.candidates:
        reasons.setdefault(candidate.algorithm, failed[candidate.label])
    text = "; ".join(f"{name}: {why}" for name, why in {**reasons, **found.refusals}.items())
    return AlgorithmRefusedError(f"cannot compute {found.problem} as asked: {text}")


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
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _warn(text: str) -> None:
    warnings.warn(text, TuningWarning, stacklevel=3)


def _warn_replaced(problem: str, failed: dict[str, str], instead: str) -> None:
    reasons = "; ".join(f"{label} ({why})" for label, why in failed.items())
    _warn(f"the stored choice for {problem} no longer fits: {reasons}; {instead}")
