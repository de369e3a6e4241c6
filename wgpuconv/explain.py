"""Explanation: everything that was weighed for one problem on one device, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import AlgorithmRefusedError, counted
from .facts import Facts
from .plan import Config, Plan
from .planner import Candidate, Survey
from .tuning.store import Speeds
from .tuning.tuner import Choice

BEST = 3
"""Candidates of each algorithm that are listed beside those that were measured."""


@dataclass(frozen=True)
class Chosen:
    """The choice, and how it was found."""

    label: str
    algorithm: str
    config: Config
    source: str
    """'model' (cost model), 'tuned' (measured now), 'stored' (measured before) or 'similar'
    (measured before for a problem that differs in n, h and w only)."""
    seconds: float | None
    """Device seconds of one run, where measured."""


@dataclass(frozen=True)
class Basis:
    """What the guesses know of the device's speeds."""

    bandwidth: float
    """Bytes a second of a copy, read plus written."""
    flops: float
    """f32 operations a second, a multiply-add counting as two."""
    cores: int
    """A guess, from the measured rate where there is one."""
    measured: tuple[str, ...]
    """Which of bandwidth and flops were measured; the other one is a guess as well."""
    date: str | None
    """When they were; UTC, ISO 8601."""


def basis(facts: Facts, speeds: Speeds | None) -> Basis:
    rates = {"bandwidth": speeds.bandwidth, "flops": speeds.fma_rate} if speeds else {}
    measured = tuple(name for name, rate in rates.items() if rate is not None)
    date = speeds.date if speeds and measured else None
    return Basis(facts.bandwidth, facts.flops, facts.cores, measured, date)


@dataclass(frozen=True)
class Row:
    """One candidate: an algorithm with one configuration."""

    algorithm: str
    config: Config
    label: str
    cost: float
    """Seconds that the cost model guesses."""
    seconds: float | None
    """Device seconds of one run, the weight's preparation included, where measured."""
    scratch: int | None
    """Bytes of memory beside the arguments; None where there is no plan."""
    dispatches: int | None
    failure: str | None
    """Why it cannot be used here, where it cannot."""


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns."""

    problem: str
    device: str
    choice: Chosen
    rows: tuple[Row, ...]
    """Candidates, those measured first (fastest first), then by the guess."""
    refusals: dict[str, str]
    """Reason by the name of each algorithm that does not apply."""
    basis: Basis
    """What the costs were guessed from."""
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return (
            f"Explanation({self.problem!r}, device={self.device!r}, chosen {self.choice.label}, "
            f"{counted(len(self.rows), 'candidate')}; print() shows all)"
        )

    def __str__(self) -> str:
        """What ``wgpuconv explain`` prints, as wide as the terminal."""
        from .cli.explain import text  # imports typer and rich

        return text(self)

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists that ``json.dumps`` takes."""
        return asdict(self)


def explanation(
    found: Survey,
    choice: Choice,
    lower: Callable[[Candidate], Plan],
    *,
    device: str,
    basis: Basis,
    everything: bool = False,
) -> Explanation:
    """Lists the candidates of a survey beside the choice that was made among them."""
    timings, failures = dict(choice.timings), dict(choice.failures)
    listed = {choice.candidate.label, *timings, *failures}
    seen: dict[str, int] = {}
    rows = []
    for candidate in found.candidates:
        seen[candidate.algorithm] = seen.get(candidate.algorithm, 0) + 1
        if everything or candidate.label in listed or seen[candidate.algorithm] <= BEST:
            rows.append(
                _row(candidate, lower, timings.get(candidate.label), failures.get(candidate.label))
            )
    rows.sort(key=lambda row: (row.seconds is None, row.seconds or row.cost))
    candidate = choice.candidate
    return Explanation(
        problem=str(found.problem),
        device=device,
        choice=Chosen(
            candidate.label, candidate.algorithm, candidate.config, choice.source, choice.seconds
        ),
        rows=tuple(rows),
        refusals=dict(found.refusals),
        basis=basis,
        notes=tuple(_notes(found, choice, len(rows))),
    )


def _row(
    candidate: Candidate,
    lower: Callable[[Candidate], Plan],
    seconds: float | None,
    failure: str | None,
) -> Row:
    plan = None
    try:
        plan = lower(candidate)
    except AlgorithmRefusedError as error:
        failure = failure or str(error)
    return Row(
        candidate.algorithm,
        candidate.config,
        candidate.label,
        candidate.cost,
        seconds,
        None if plan is None else plan.scratch,
        None if plan is None else plan.dispatches,
        failure,
    )


def _notes(found: Survey, choice: Choice, listed: int) -> list[str]:
    notes = [choice.note] if choice.note else []
    if choice.tied:
        notes.append(f"within the spread of the winner: {', '.join(choice.tied)}")
    known = {c.label for c in found.candidates}
    gone = [f"{label} ({why})" for label, why in choice.failures if label not in known]
    notes += [f"no longer a candidate: {text}" for text in gone]
    if listed < len(found.candidates):
        notes.append(f"{listed} of {len(found.candidates)} candidates are listed")
    return notes
