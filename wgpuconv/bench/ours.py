"""Our own sides of the benchmark: every algorithm on a device, each with its best configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..algorithms import find
from ..device import Device
from ..errors import AlgorithmRefusedError, UnsupportedFeatureError
from ..plan import Plan
from ..planner import Candidate, Survey, lower
from ..problem import ConvProblem
from ..tuning import roofline
from ..tuning.tuner import Choice
from ..tuning.workbench import Workbench
from . import calls
from .accuracy import Judge
from .result import DeviceFacts, Side
from .runner import Contender, Offer

AUTO = "auto"
"""The name of the tuner's choice, beside those of algorithms."""
FAR_BEHIND, UNLIKELY = 1.25, 2.0
"""Times the choice's time, and times the cheapest guess; see _far_behind. (A session of its own for
each algorithm takes most of the time of a run on a cold store.)"""


class OurDevice:
    """A device of ours as a participant of the benchmark, with the algorithms that are named
    ('auto': what the tuner takes) or, where none is, all of them."""

    ours = True

    def __init__(
        self, device: Device, *, spec: str | None = None, algorithms: Sequence[str] = ()
    ) -> None:
        self.device = device
        self.name = spec or device.backend.identity.backend
        """As it was asked for."""
        self.spec = spec or ""
        self.algorithms = tuple(algorithms)
        self._bench: Workbench | None = None
        self._prepared: list[Any] = []

    def facts(self, measured: roofline.Roofline | None = None) -> DeviceFacts:
        identity = self.device.backend.identity
        versions = [each.rpartition(" ") for each in identity.versions.split(", ")]
        return DeviceFacts(
            name=self.name,
            backend=identity.backend,
            adapter=identity.adapter,
            driver=identity.driver,
            versions={package or identity.backend: version for package, _, version in versions},
            software=self.device.facts.software,
            bandwidth=measured.bandwidth if measured else None,
            fma_rate=measured.fma_rate if measured else None,
        )

    def roofline(self) -> roofline.Roofline | None:
        """None for a backend without the probes' kernels."""
        backend = self.device.backend
        return roofline.measure(backend) if getattr(backend, "has_probes", False) else None

    def offer(self, problem: ConvProblem, tell: Callable[[str], None]) -> Offer:
        tell(f"choosing on {self.name}")
        try:
            choice = self.device.choose(problem)
        except UnsupportedFeatureError as error:
            return Offer(refusals={self.name: str(error)})
        # Candidates follow from the device's speeds, which the first choice may measure.
        found = self.device.survey(problem)
        refusals = dict(found.refusals)
        plans = {AUTO: choice.plan}
        for name in (algorithm.name for algorithm in self.device.algorithms):
            if name in refusals or name == choice.plan.algorithm or not self._wanted(name):
                continue
            try:
                tell(f"choosing {name} on {self.name}")
                plans[name] = self._best(problem, name, choice, found)
            except AlgorithmRefusedError as error:
                refusals[name] = str(error)
        contenders: list[Contender] = []
        for asked, plan in plans.items():
            if self._wanted(plan.algorithm) or self._wanted(asked):
                contenders.append(_Ours(self, problem, plan, asked))
                if plan is choice.plan and plan.prepare:
                    contenders.append(_Prepared(self, problem, plan, asked))
        return Offer(
            contenders,
            {f"{self.name} {name}": why for name, why in refusals.items() if self._wanted(name)},
            choice.plan.label,
            choice.source,
            choice.note,
        )

    def _wanted(self, algorithm: str) -> bool:
        return not self.algorithms or algorithm in self.algorithms

    def _best(self, problem: ConvProblem, name: str, choice: Choice, found: Survey) -> Plan:
        """An algorithm's plan with the best configuration known."""
        # One that was asked for by name is worth a session of its own.
        behind = None if self.algorithms else _far_behind(choice, found, name)
        if behind is None:
            return self.device.choose(problem, algorithm=name).plan
        return lower(problem, behind, self.device.facts, self.device.algorithms)

    def bench(self, judge: Judge) -> Workbench:
        """The problem's data on the device, from the first who needs it to ``leave``."""
        if self._bench is None:
            self._bench = Workbench(self.device.backend, judge.check).__enter__()
        return self._bench

    def prepared(self, nbytes: int) -> Any:
        """A buffer for prepared weights, until ``leave``."""
        buffer = self.device.backend.allocate(nbytes)
        self._prepared.append(buffer)
        return buffer

    def leave(self) -> None:
        for buffer in self._prepared:
            self.device.backend.free(buffer)
        self._prepared.clear()
        if self._bench is not None:
            self._bench.__exit__(None, None, None)
            self._bench = None


def _far_behind(choice: Choice, found: Survey, algorithm: str) -> Candidate | None:
    """An algorithm's best configuration known, where tuning it on its own would change nothing:
    it was measured and took so much longer than the choice, or it was not worth measuring and is
    guessed to take so much longer than the cheapest."""
    own = [c for c in found.candidates if c.algorithm == algorithm]  # cheapest first
    for label, seconds in choice.timings:  # fastest first
        if label.partition("(")[0] == algorithm:
            if seconds <= FAR_BEHIND * choice.timings[0][1]:
                return None
            return next((c for c in own if c.label == label), None)
    if choice.timings and own and own[0].cost > UNLIKELY * found.candidates[0].cost:
        return own[0]
    return None


class _Ours:
    """An algorithm, weights prepared within its time."""

    alone = True

    def __init__(self, device: OurDevice, problem: ConvProblem, plan: Plan, asked: str) -> None:
        self._device = device
        self._problem = problem
        self._plan = plan
        self._asked = asked
        """By which a call finds this plan: 'auto' or the algorithm's name."""
        self._precision = find(plan.algorithm, device.device.algorithms).arithmetic(problem)
        self.side = Side(device.name, plan.algorithm, self._precision, True, label=plan.label)

    def verify(self, judge: Judge) -> float:
        self._bench = self._device.bench(judge)
        self._data = judge.check.data
        self._compiled = self._device.device.backend.compile(self._plan)
        self._bench.verify(self._compiled)
        return judge.check.error(self._bench.output)

    def sample(self, repeats: int) -> float:
        return self._bench.time([self._compiled], [repeats])[0]

    def workspace(self) -> int | None:
        return self._plan.scratch

    def call(self) -> float | None:
        return calls.call_seconds(self._device.device, self._problem, self._data, self._asked)

    def end_to_end(self) -> float | None:
        return calls.end_to_end_seconds(self._device.device, self._problem, self._data, self._asked)

    def first_call(self) -> float | None:
        device = self._device
        return calls.first_call_seconds(
            device.spec, self._problem, self._asked, device.device.tuner.mode
        )


class _Prepared(_Ours):
    """The same with weights prepared beforehand, as a module keeps them."""

    def __init__(self, device: OurDevice, problem: ConvProblem, plan: Plan, asked: str) -> None:
        super().__init__(device, problem, plan, asked)
        self.side = Side(
            device.name,
            f"{plan.algorithm}, prepared weights",
            self._precision,
            True,
            prepared=True,
        )

    def verify(self, judge: Judge) -> float:
        error = super().verify(judge)  # which prepares the weights apart, too
        backend = self._device.device.backend
        self._buffers = dict(self._bench.buffers)
        self._buffers["prepared"] = self._device.prepared(self._plan.prepared)
        backend.prepare(self._compiled, self._buffers)
        return error

    def sample(self, repeats: int) -> float:
        backend = self._device.device.backend
        seconds: float = backend.time([(self._compiled, self._buffers)], repeats=[repeats])[0]
        return seconds
