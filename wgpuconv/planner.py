"""Which algorithms and configurations can compute a problem, and the plan of one of them.

Pure: everything here works from the problem and the device's facts, without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import tiling
from .algorithms import ALGORITHMS, Algorithm, find
from .errors import AlgorithmRefusedError
from .facts import Facts
from .plan import Config, Plan, candidate_label
from .problem import ConvProblem


@dataclass(frozen=True)
class Candidate:
    """One algorithm with one configuration, and the seconds that its cost model guesses."""

    algorithm: str
    config: Config
    cost: float

    @property
    def label(self) -> str:
        return candidate_label(self.algorithm, self.config)


@dataclass(frozen=True)
class Survey:
    """Everything that could compute a problem, cheapest guess first, and why others cannot."""

    problem: ConvProblem
    candidates: tuple[Candidate, ...]
    refusals: Mapping[str, str]


def survey(
    problem: ConvProblem,
    facts: Facts,
    algorithms: tuple[Algorithm, ...] = ALGORITHMS,
    *,
    workspace_limit: int | None = None,
) -> Survey:
    """All candidates for a problem on a device with these facts.

    Where a tensor is too large for one binding, an algorithm must take every part; its
    configurations and its cost are those of the largest part.
    """
    limit = facts.workspace_limit if workspace_limit is None else workspace_limit
    problems = [_one_image(problem)]
    if not tiling.fits(problem, facts.limits):
        problems = [part.problem for part in tiling.parts(problem, facts.limits, limit)]
    largest = max(problems, key=lambda p: p.multiply_adds)
    shapes = dict.fromkeys(problems)
    candidates: list[Candidate] = []
    refusals: dict[str, str] = {}
    for algorithm in algorithms:
        reasons = (algorithm.refusal(shape, facts) for shape in shapes)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            refusals[algorithm.name] = reason
            continue
        candidates += [
            Candidate(
                algorithm.name, config, algorithm.cost(largest, config, facts) * len(problems)
            )
            for config in algorithm.configs(largest, facts)
        ]
    candidates.sort(key=lambda c: c.cost)
    return Survey(problem, tuple(candidates), refusals)


def _one_image(problem: ConvProblem) -> ConvProblem:
    """An empty batch is planned as one image, so that no algorithm need know of it.

    Whoever runs the plan of an empty problem runs nothing.
    """
    return problem.with_(n=1) if problem.empty else problem


def lower(
    problem: ConvProblem,
    candidate: Candidate,
    facts: Facts,
    algorithms: tuple[Algorithm, ...] = ALGORITHMS,
    *,
    workspace_limit: int | None = None,
) -> Plan:
    """The plan of one candidate. Raises AlgorithmRefusedError where memory does not suffice."""
    if problem.empty:
        plan = lower(
            _one_image(problem), candidate, facts, algorithms, workspace_limit=workspace_limit
        )
        return replace(plan, problem=problem)
    limit = facts.workspace_limit if workspace_limit is None else workspace_limit
    algorithm = find(candidate.algorithm, algorithms)
    if not tiling.fits(problem, facts.limits):
        return tiling.lower(problem, algorithm, candidate.config, facts, limit)
    return algorithm.lower(problem, candidate.config, facts, limit)


def only(found: Survey, name: str) -> Survey:
    """The survey's candidates of one algorithm; says why where there are none."""
    candidates = tuple(c for c in found.candidates if c.algorithm == name)
    if not candidates:
        fitting = ", ".join(dict.fromkeys(c.algorithm for c in found.candidates))
        raise AlgorithmRefusedError(
            f"algorithm {name!r} does not apply to {found.problem}: {found.refusals[name]}; "
            f"those that apply: {fitting}"
        )
    return Survey(found.problem, candidates, found.refusals)
