"""The tuner: picks a candidate from the store, by measuring, or by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..plan import Plan
from ..planner import Candidate, Survey


@dataclass(frozen=True)
class Choice:
    """The chosen plan and how it was found."""

    plan: Plan
    candidate: Candidate
    source: str
    """'model', 'tuned', 'stored' or 'forced'."""
    timings: tuple[tuple[str, float], ...] = ()
    failures: tuple[tuple[str, str], ...] = field(default=())


def by_model(found: Survey, lower: Callable[[Candidate], Plan]) -> Choice:
    """The cheapest guess whose plan fits in memory."""
    from ..errors import AlgorithmRefusedError

    failures = []
    for candidate in found.candidates:
        try:
            plan = lower(candidate)
        except AlgorithmRefusedError as error:
            failures.append((candidate.label, str(error)))
            continue
        return Choice(plan, candidate, "model", failures=tuple(failures))
    reasons = "; ".join(f"{label}: {why}" for label, why in failures)
    raise AlgorithmRefusedError(f"no algorithm can compute {found.problem}: {reasons}")
