"""Explanation: everything that was weighed for one problem on one device, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .plan import Config


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
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists that ``json.dumps`` takes."""
        return asdict(self)
