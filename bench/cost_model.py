"""How good the cost model is: its picks against what sweeps over all candidates measured.

    python bench/cost_model.py bench/results/*sweep-[34578].json

A sweep has, for each problem, the seconds of every candidate. Printed are, over all problems, the
model's pick (its cheapest) and the tuner's shortlist against the best measured; and by algorithm
what the model predicts over what was measured, of candidates within three times the best.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from wgpuconv.algorithms import ALGORITHMS, find
from wgpuconv.facts import Facts, Limits
from wgpuconv.plan import Config
from wgpuconv.planner import Candidate
from wgpuconv.problem import ConvProblem
from wgpuconv.tuning.session import shortlist

H200 = Facts(
    limits=Limits(
        max_binding=(2 << 30) - 4,
        max_buffer=4 << 30,
        max_invocations=1024,
        max_workgroup_size=1024,
        max_workgroup_storage=48 << 10,
    ),
    f16=True,
    bandwidth=4.2e12,
    flops=59.7e12,
    cores=128,
    launch=2e-6,
    workspace_limit=1 << 30,
)
"""Where the sweeps were taken: what the tuner measured of it and its limits (Vulkan)."""
NEAR = 3.0
ALL = "all"


@dataclass
class Judgement:
    """Ratios to the best measured, by suite, and to what was predicted, by algorithm."""

    picks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    shortlists: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    predicted: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def lines(self) -> list[str]:
        found = ["suite            problems  pick  worst  shortlist  worst"]
        for suite in (*self.picks, ALL):
            picks, shortlists = (
                [ratio for name, each in ratios.items() if suite in (name, ALL) for ratio in each]
                for ratios in (self.picks, self.shortlists)
            )
            found.append(
                f"{suite:16} {len(picks):8} {_mean(picks):5.2f} {max(picks):6.2f} "
                f"{_mean(shortlists):10.3f} {max(shortlists):6.2f}"
            )
        found.append("predicted over measured: quarter, median, three quarters, within 1.5x, of")
        for name, ratios in sorted(self.predicted.items()):
            low, middle, high = statistics.quantiles(ratios, n=4)
            share = sum(1 / 1.5 <= r <= 1.5 for r in ratios) / len(ratios)
            found.append(f"{name:14} {low:.2f} {middle:.2f} {high:.2f} {share:4.0%} {len(ratios)}")
        return found


def judge(paths: list[Path]) -> Judgement:
    """Candidates that an algorithm does not offer any more are left out; a later sweep's take the
    place of an earlier one's."""
    measured: dict[ConvProblem, dict[str, tuple[str, Config, float]]] = defaultdict(dict)
    suites: dict[ConvProblem, str] = {}
    for path in paths:
        for name, entry in json.loads(path.read_text(encoding="utf-8"))["problems"].items():
            problem = ConvProblem.parse(entry["problem"])
            suites[problem] = name.partition(".")[0] if "." in name else "burn"
            for label, seconds, *_ in entry["candidates"]:
                algorithm, config = _parsed(label)
                if _unsplit(config) in _offered(problem, algorithm):
                    measured[problem][label] = (algorithm, config, seconds)
    judged = Judgement()
    for problem, by_label in measured.items():
        seconds = {label: each[2] for label, each in by_label.items()}
        best = min(seconds.values())
        candidates = [
            Candidate(name, config, find(name).cost(problem, config, H200))
            for name, config, _ in by_label.values()
        ]
        candidates.sort(key=lambda candidate: candidate.cost)
        suite = suites[problem]
        judged.picks[suite].append(seconds[candidates[0].label] / best)
        listed = (seconds[candidate.label] for candidate in shortlist(candidates))
        judged.shortlists[suite].append(min(listed) / best)
        for candidate in candidates:
            if seconds[candidate.label] < NEAR * best:
                ratio = candidate.cost / seconds[candidate.label]
                judged.predicted[candidate.algorithm].append(ratio)
    return judged


def _parsed(label: str) -> tuple[str, Config]:
    """``winograd(alpha=6,order=snake)`` as a name and a configuration."""
    name, _, text = label.removesuffix(")").partition("(")
    return name, {key: _value(value) for key, value in re.findall(r"(\w+)=([^,]+)", text)}


def _value(text: str) -> int | bool | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdigit() else text


@cache
def _offered(problem: ConvProblem, name: str) -> list[Config]:
    """What an algorithm has for a problem, without splits: those follow from the cores."""
    algorithm = next((a for a in ALGORITHMS if a.name == name), None)
    if algorithm is None or algorithm.refusal(problem, H200) is not None:
        return []
    return [_unsplit(config) for config in algorithm.configs(problem, H200)]


def _unsplit(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != "splits"}


def _mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios)


if __name__ == "__main__":
    print("\n".join(judge([Path(name) for name in sys.argv[1:]]).lines()))
