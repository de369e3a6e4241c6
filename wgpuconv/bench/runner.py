"""The simple bench: times every algorithm on a suite of problems, on one device.

Each algorithm runs with its best known configuration; all algorithms of a problem are timed
interleaved, on the same data, and each result is checked against float64 on samples.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..algorithms import find
from ..device import Device
from ..errors import (
    AlgorithmRefusedError,
    DeviceError,
    OutOfDeviceMemoryError,
    ProblemError,
    ShaderError,
)
from ..plan import Config, Plan
from ..suites import Entry
from ..tuning import timing
from ..tuning.verify import Check
from ..tuning.workbench import Workbench, WrongResultError

Step = Callable[[str, str], None]
"""Told what is about to happen, for a progress line: the problem's label and the step."""


@dataclass(frozen=True)
class Measurement:
    """One algorithm with one configuration on one problem."""

    algorithm: str
    config: Config
    label: str
    samples: tuple[float, ...]
    """Device seconds of one run, a value a round; empty where it failed."""
    error: float | None
    """Largest error of the sampled outputs, in units of the largest of them."""
    scratch: int
    """Bytes of memory beside the arguments."""
    dispatches: int
    failure: str | None = None

    @property
    def seconds(self) -> float | None:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Result:
    """All algorithms on one problem."""

    entry: Entry
    measurements: tuple[Measurement, ...]
    """Fastest first, those that failed last."""
    refusals: dict[str, str]
    """Reason by the name of each algorithm that does not apply."""
    choice: str
    """The label of what the tuner takes."""
    source: str
    """How it was found; see tuner.Choice."""
    note: str
    """Why it was found this way."""
    failure: str | None = None
    """Why nothing could be measured at all."""

    @property
    def fastest(self) -> Measurement | None:
        first = self.measurements[0] if self.measurements else None
        return first if first is not None and first.seconds is not None else None

    @property
    def ratio(self) -> float | None:
        """The time of the tuner's choice over the fastest's, where both were timed."""
        best = None if self.fastest is None else self.fastest.seconds
        chosen = next((m.seconds for m in self.measurements if m.label == self.choice), None)
        return None if best is None or chosen is None else chosen / best

    @property
    def failed(self) -> bool:
        """Whether anything that should have been timed was not."""
        return self.failure is not None or any(m.failure for m in self.measurements)

    def to_json(self) -> dict[str, Any]:
        problem = self.entry.problem
        return {
            "name": self.entry.name,
            "problem": str(problem),
            "count": self.entry.count,
            "flop": 2 * problem.multiply_adds,
            "choice": self.choice,
            "source": self.source,
            "note": self.note,
            "failure": self.failure,
            "measurements": [
                {
                    "algorithm": m.algorithm,
                    "config": m.config,
                    "seconds": m.seconds,
                    "samples": list(m.samples),
                    "error": m.error,
                    "scratch": m.scratch,
                    "dispatches": m.dispatches,
                    "failure": m.failure,
                }
                for m in self.measurements
            ],
            "refusals": self.refusals,
        }


def geometric_mean(values: Iterable[float]) -> float:
    """NaN where there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def run(
    entries: Iterable[Entry],
    device: Device,
    *,
    algorithms: tuple[str, ...] = (),
    tell: Step = lambda label, step: None,
) -> Iterator[Result]:
    """Measures the entries one after the other; ``algorithms`` names some of them."""
    for name in algorithms:
        find(name, device.algorithms)
    for entry in entries:
        try:
            yield _measure(entry, device, algorithms, tell)
        except (DeviceError, AlgorithmRefusedError, OutOfDeviceMemoryError) as error:
            if not device.backend.usable:
                raise
            yield Result(entry, (), {}, "", "", "", str(error))  # one too large problem, say


def _measure(entry: Entry, device: Device, algorithms: tuple[str, ...], tell: Step) -> Result:
    problem = entry.problem
    if problem.empty:
        raise ProblemError(f"a problem without images takes no time: {problem}")
    found = device.survey(problem)
    names = [a.name for a in device.algorithms if a.name not in found.refusals]
    refusals = dict(found.refusals)
    tell(entry.label, "choosing")
    choice = device.choose(problem)
    plans = [choice.plan]
    for name in algorithms or names:
        if name != choice.plan.algorithm and name not in refusals:
            try:
                plans.append(device.choose(problem, algorithm=name).plan)
            except AlgorithmRefusedError as error:
                refusals[name] = str(error)
    if algorithms:
        plans = [plan for plan in plans if plan.algorithm in algorithms]
        refusals = {name: why for name, why in refusals.items() if name in algorithms}
    measured = _Session(entry, device, tell).measure(plans)
    measured.sort(key=lambda m: math.inf if m.seconds is None else m.seconds)
    return Result(entry, tuple(measured), refusals, choice.plan.label, choice.source, choice.note)


class _Session:
    """One problem, whose plans are verified and timed side by side."""

    def __init__(self, entry: Entry, device: Device, tell: Step) -> None:
        self._label, self._device, self._tell = entry.label, device, tell
        self._check = Check(entry.problem)
        self._bench = Workbench(device.backend, self._check)

    def measure(self, plans: Sequence[Plan]) -> list[Measurement]:
        found: list[Measurement] = []
        trials: list[tuple[Measurement, Any]] = []
        with self._bench:
            for plan in plans:
                self._tell(self._label, f"checking {plan.algorithm}")
                measurement, compiled = self._verified(plan)
                if compiled is None:
                    found.append(measurement)
                else:
                    trials.append((measurement, compiled))
            self._tell(self._label, "timing")
            timings = self._time([compiled for _, compiled in trials])
        return found + [
            replace(measurement, samples=timed.samples)
            for (measurement, _), timed in zip(trials, timings, strict=True)
        ]

    def _verified(self, plan: Plan) -> tuple[Measurement, Any]:
        """The measurement without its times, and the compiled plan where it is right."""
        result = Measurement(
            plan.algorithm, plan.config, plan.label, (), None, plan.scratch, plan.dispatches
        )
        try:
            compiled = self._device.backend.compile(plan)
            self._bench.verify(compiled)
        except (ShaderError, WrongResultError, OutOfDeviceMemoryError) as trouble:
            return replace(result, failure=str(trouble)), None
        return replace(result, error=self._check.error(self._bench.output)), compiled

    def _time(self, compiled: Sequence[Any]) -> list[timing.Timing]:
        if not compiled:
            return []

        def sample(which: Sequence[int], repeats: Sequence[int]) -> Sequence[float]:
            return self._bench.time([compiled[i] for i in which], repeats)

        rules = timing.SOFTWARE if self._device.facts.software else timing.HARDWARE
        estimates = sample(range(len(compiled)), [1] * len(compiled))
        timing.spin_up(sample, rules, estimates[0], time.perf_counter)
        return timing.measure(sample, estimates, rules, deadline=math.inf, clock=time.perf_counter)


METHOD = (
    "device time of one run by timestamp queries (wall clock where there are none), weight "
    "preparation, workspace passes and fused bias and activation included; the algorithms of a "
    "problem interleaved after a spin-up; repeats to fill a sample; slower ones dropped early; "
    "each output checked against float64 on samples first; data random, zero mean"
)


def report(results: Iterable[Result], device: Device) -> dict[str, Any]:
    """Everything that was measured and where, as JSON holds it."""
    return {
        "wgpuconv": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "method": METHOD,
        "machine": machine(device),
        "results": [result.to_json() for result in results],
    }


def machine(device: Device) -> dict[str, Any]:
    """What the figures depend on."""
    identity = device.backend.identity
    return {
        "backend": identity.backend,
        "adapter": identity.adapter,
        "driver": identity.driver,
        "versions": identity.versions,
        "software": device.facts.software,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "nvidia_smi": _output(
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw",
            "--format=csv",
        ),
    }


def _commit() -> str | None:
    """Of the checkout that this package runs from; an installed package has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    """What a command prints; None where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
