"""The tuner: what it measures, whom it believes, and what it does when things go wrong.

Most of it runs against a machine of numpy, whose clock and kernels do as they are told.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import reference

from wgpuconv import ConvProblem, Device, conv2d, explain, prewarm
from wgpuconv.algorithms import Algorithm
from wgpuconv.errors import (
    AlgorithmRefusedError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    ShaderError,
    TuningError,
    TuningWarning,
)
from wgpuconv.explain import basis, explanation
from wgpuconv.facts import Facts
from wgpuconv.plan import Config, Plan
from wgpuconv.planner import Candidate, lower, survey
from wgpuconv.problem import ACTIVATIONS, Activation
from wgpuconv.tuning import tuner as tuner_module
from wgpuconv.tuning.session import LEAST, MOST_CANDIDATES, MOST_CONFIGS, shortlist
from wgpuconv.tuning.store import Entry, Store, Trial
from wgpuconv.tuning.timing import HARDWARE, SOFTWARE, Rules, Timing, measure, spin_up
from wgpuconv.tuning.tuner import FAMILY, Choice, Tuner
from wgpuconv.tuning.verify import Check, random_data
from wgpuconv.tuning.workbench import Workbench, WrongResultError

PROBLEM = ConvProblem.parse("conv2d f32 n2 c16 h31 w29 k16 r3 s3 pad1 bias")


# ---- a machine of numpy ----


class Fake(Algorithm):
    """Computes any problem; the config's number is all there is to choose."""

    ops = ("conv2d",)
    shaders: ClassVar[tuple[str, ...]] = ("direct",)

    def __init__(self, name: str, costs: Sequence[float], refusal: str | None = None) -> None:
        self.name = name  # type: ignore[misc]
        self._costs = costs
        self._refusal = refusal

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        return self._refusal

    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        return [{"number": i} for i in range(len(self._costs))]

    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        return self._costs[int(config["number"])]

    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        return Plan(problem, self.name, config, (), workspace=256)


@dataclass
class Identity:
    backend: str = "fake"
    adapter: str = "a machine of numpy"
    driver: str = "1"
    versions: str = "1"


@dataclass
class Compiled:
    plan: Plan


@dataclass
class Machine:
    """Runs are exact unless ``faults`` says otherwise; ``seconds`` are what they take."""

    algorithms: tuple[Algorithm, ...]
    seconds: dict[str, float | list[float]] = field(default_factory=dict)
    """By label: what each sample takes, or the samples one after the other."""
    faults: dict[str, Callable[[np.ndarray], None] | Exception] = field(default_factory=dict)
    """By label: what spoils an output, or what compiling raises."""
    compile_seconds: float = 0.0
    warm_seconds: float = 0.0
    upload_seconds: float = 0.0
    """Of each argument."""
    facts: Facts = field(default_factory=Facts)
    identity: Identity = field(default_factory=Identity)
    now: float = 0.0
    compiled: list[str] = field(default_factory=list)
    warmed: list[str] = field(default_factory=list)
    sampled: list[tuple[str, int]] = field(default_factory=list)
    held: int = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        self.held += 1
        return np.zeros(nbytes, np.uint8)

    def free(self, buffer: np.ndarray) -> None:
        self.held -= 1

    def write(self, buffer: np.ndarray, array: np.ndarray) -> None:
        self.now += self.upload_seconds
        data = array.reshape(-1).view(np.uint8)
        buffer[: data.size] = data

    def copy(self, source: np.ndarray, target: np.ndarray, nbytes: int) -> None:
        target[:nbytes] = source[:nbytes]

    def read(self, buffer: np.ndarray, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = buffer[: array.nbytes]

    def compile(self, plan: Plan) -> Compiled:
        self.now += self.compile_seconds
        self.compiled.append(plan.label)
        fault = self.faults.get(plan.label)
        if isinstance(fault, Exception):
            raise fault
        return Compiled(plan)

    def warm(self, plans: Sequence[Plan]) -> None:
        self.now += self.warm_seconds
        self.warmed += [plan.label for plan in plans]

    def prepare(self, compiled: Compiled, buffers: Mapping[str, Any]) -> None:
        raise AssertionError("these plans have nothing to prepare")

    def run(self, compiled: Compiled, buffers: Mapping[str, Any]) -> None:
        p = compiled.plan.problem
        assert (buffers["out"] == 0xFF).all(), "the output is poisoned before a run"
        assert (buffers["workspace"] == 0xFF).all(), "scratch memory is poisoned before a run"
        dtype = reference.NUMPY[p.dtype]
        shapes = {"input": p.input_shape, "weight": p.weight_shape, "bias": (p.k,)}
        x, w, b = (
            buffers[role].view(dtype).reshape(shape) if role in buffers else None
            for role, shape in shapes.items()
        )
        result = reference.convolve(p, x, w, b).astype(dtype)
        fault = self.faults.get(compiled.plan.label)
        if fault is not None:
            assert not isinstance(fault, Exception)
            fault(result.reshape(-1))
        buffers["out"][: result.nbytes] = result.reshape(-1).view(np.uint8)

    def time(
        self, trials: Sequence[tuple[Compiled, Mapping[str, Any]]], *, repeats: Sequence[int]
    ) -> list[float]:
        taken = []
        for (compiled, _), count in zip(trials, repeats, strict=True):
            label = compiled.plan.label
            scripted = self.seconds.get(label, 1e-3)
            one = scripted.pop(0) if isinstance(scripted, list) else scripted
            self.now += one * count
            self.sampled.append((label, count))
            taken.append(one)
        return taken

    def clock(self) -> float:
        return self.now


def fakes(*costs: float) -> tuple[Algorithm, ...]:
    """One algorithm a cost, named a, b, c, ..., with one configuration each."""
    return tuple(Fake("abcdefghijklmnop"[i], [cost]) for i, cost in enumerate(costs))


def label(name: str, number: int = 0) -> str:
    return f"{name}(number={number})"


def tuner(machine: Machine, store: Store | None = None, **options: Any) -> Tuner:
    options = {"mode": "auto", "budget": 100.0} | options
    return Tuner(machine, store or Store(None), clock=machine.clock, **options)


def choose(of: Tuner, problem: ConvProblem = PROBLEM, scope: str = "auto") -> Choice:
    machine = of.machine
    found = survey(problem, machine.facts, machine.algorithms)
    choice, compiled = of.choose(
        found, lambda c: lower(problem, c, machine.facts, machine.algorithms), scope=scope
    )
    assert compiled.plan == choice.plan
    assert getattr(machine, "held", 0) == 0, "all memory went back to the pool"
    return choice


def spoil(*, at: slice, by: float) -> Callable[[np.ndarray], None]:
    def fault(result: np.ndarray) -> None:
        result[at] += by

    return fault


# ---- choosing by measuring ----


def test_the_fastest_wins_whatever_the_model_thinks() -> None:
    machine = Machine(fakes(1.0, 1.1, 1.2), {label("a"): 3e-3, label("b"): 2e-3, label("c"): 1e-3})
    choice = choose(tuner(machine))
    assert (choice.candidate.algorithm, choice.source) == ("c", "tuned")
    assert choice.timings == ((label("c"), 1e-3), (label("b"), 2e-3), (label("a"), 3e-3))
    assert choice.seconds == 1e-3
    assert choice.tied == ()


def test_the_median_decides_and_a_tie_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "HARDWARE", replace(HARDWARE, spin_up=0.0))
    # The first sample is the estimate. Afterwards a's minimum is below b's median.
    seconds = {
        label("a"): [1e-3, 2.0e-3, 1.0e-3, 1.2e-3, 1.2e-3, 1.2e-3, 1.2e-3, 1.2e-3],
        label("b"): [1.1e-3] * 8,
    }
    choice = choose(tuner(Machine(fakes(1.0, 1.1), seconds)))
    assert choice.candidate.algorithm == "b"
    assert choice.tied == (label("a"),)


def test_a_wrong_candidate_is_dropped_and_listed() -> None:
    machine = Machine(
        fakes(1.0, 1.1, 1.2, 1.3, 1.4),
        {label("a"): 1e-6, label("b"): 1e-6, label("c"): 1e-6, label("d"): 1e-6},
        faults={
            label("a"): spoil(at=slice(-1, None), by=0.01),  # the last element
            label("b"): spoil(at=slice(0, 500), by=math.nan),
            label("c"): ShaderError("a kernel did not compile"),
            label("d"): OutOfDeviceMemoryError("no memory left"),
        },
    )
    choice = choose(tuner(machine))
    assert choice.candidate.algorithm == "e"
    failures = dict(choice.failures)
    assert "wrong result" in failures[label("a")]
    assert "n=1, k=15, y=30, x=28" in failures[label("a")], "the message says where"
    assert "nan" in failures[label("b")]
    assert failures[label("c")] == "a kernel did not compile"
    assert failures[label("d")] == "no memory left"
    assert not {name for name, _ in machine.sampled} & set(failures), "never timed"


def test_a_candidate_wrong_on_its_second_run_only() -> None:
    runs = iter(range(2))

    def second(result: np.ndarray) -> None:
        if next(runs) == 1:
            result[0] += 1

    machine = Machine(fakes(1.0, 1.1), faults={label("a"): second})
    choice = choose(tuner(machine))
    assert choice.candidate.algorithm == "b"
    assert "(second run)" in dict(choice.failures)[label("a")]


def test_beyond_the_promising_ones_when_they_all_fail() -> None:
    broken = ShaderError("no")
    machine = Machine(fakes(1.0, 1.1, 50.0), faults={label("a"): broken, label("b"): broken})
    choice = choose(tuner(machine))
    assert choice.candidate.algorithm == "c"
    assert len(choice.failures) == 2


def test_a_result_that_is_right_nowhere_is_an_error() -> None:
    machine = Machine(
        fakes(1.0, 1.1),
        faults=dict.fromkeys((label("a"), label("b")), spoil(at=slice(None), by=1.0)),
    )
    with pytest.raises(ShaderError, match=r"no candidate computes conv2d.*a\(number=0\).*wrong"):
        choose(tuner(machine))
    assert machine.held == 0


def test_a_lost_device_is_not_a_candidates_failure() -> None:
    machine = Machine(fakes(1.0, 1.1), faults={label("a"): DeviceLostError("gone")})
    with pytest.raises(DeviceLostError):
        choose(tuner(machine))
    assert machine.held == 0


def test_no_memory_for_the_arguments_leaves_the_model() -> None:
    machine = Machine(fakes(1.0, 1.1))
    allocate, calls = machine.allocate, []

    def limited(nbytes: int) -> np.ndarray:
        calls.append(nbytes)
        if len(calls) > 2:
            raise OutOfDeviceMemoryError("no memory left")
        return allocate(nbytes)

    machine.allocate = limited  # type: ignore[method-assign]
    choice = choose(tuner(machine))
    assert (choice.candidate.algorithm, choice.source) == ("a", "model")
    assert "no memory left" in choice.note


def test_losing_timings_and_failures_are_stored_too() -> None:
    machine = Machine(fakes(1.0, 1.1, 1.2), {label("b"): 5e-4}, {label("c"): ShaderError("no")})
    store = Store(None)
    choose(tuner(machine, store))
    (entry,) = store.entries()
    assert entry.algorithm == "b"
    assert entry.mode == "auto"
    assert {t.label: t.seconds for t in entry.trials} == {
        label("a"): 1e-3,
        label("b"): 5e-4,
        label("c"): None,
    }
    assert [t.failure for t in entry.trials] == [None, None, "no"]
    assert set(entry.sources) == {"a", "b", "c"}


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    machine = Machine(fakes(1.0, 1.1))
    choose(tuner(machine, progress=lambda *step: told.append(step)))
    assert told[:3] == [("verify", 0, 2), ("verify", 1, 2), ("verify", 2, 2)]
    assert told[-1] == ("time", 7, 7)


# ---- the budget ----


def test_compiling_counts_towards_the_budget() -> None:
    machine = Machine(fakes(*(1 + i / 100 for i in range(10))), compile_seconds=0.2)
    choose(tuner(machine, budget=1.0))
    assert len(machine.compiled) == 3  # at 0.6 seconds, half of the budget is over
    assert machine.now < 1.0 + HARDWARE.spin_up + 0.2


def test_compiling_side_by_side_has_a_budget_of_its_own() -> None:
    costs = [1 + i / 100 for i in range(16)]
    machine = Machine(fakes(*costs), warm_seconds=0.8)
    choice = choose(tuner(machine, budget=1.0))
    assert len(choice.timings) == 9  # of the second eight's 0.8 seconds only 0.2 were free
    slow = Machine(fakes(*costs), warm_seconds=5.0)
    assert len(choose(tuner(slow, budget=1.0)).timings) == 3  # as many as in any case


def test_making_and_uploading_data_does_not_count() -> None:
    machine = Machine(fakes(*(1 + i / 100 for i in range(10))), upload_seconds=2.0)
    assert len(choose(tuner(machine, budget=1.0)).timings) == 10


def test_a_few_are_measured_however_long_each_takes() -> None:
    """The cost model may be wrong about the largest problems too."""
    costs = fakes(1.0, 1.1, 1.2, 1.3)
    seconds = {label("a"): 2e-3, label("b"): 1.5e-3, label("c"): 1e-3, label("d"): 5e-4}
    choice = choose(tuner(Machine(costs, seconds, compile_seconds=5.0), budget=1.0))
    assert choice.candidate.algorithm == "c"
    assert len(choice.timings) == LEAST


@pytest.mark.parametrize(
    ("right", "tried"),
    [("a", 2 * LEAST), ("f", 2 * LEAST), ("kl", 11), ("cde", 5), ("", 16)],
)
def test_candidates_that_fail_slowly_are_not_all_tried(right: str, tried: int) -> None:
    """A few attempts past the deadline; further ones only until one is right."""
    names = "abcdefghijklmnop"
    faults = {label(name): ShaderError("no") for name in names if name not in right}
    machine = Machine(
        fakes(*(1 + i / 100 for i in range(16))), faults=dict(faults), compile_seconds=1.0
    )
    if not right:  # none of the shortlist: the others, then
        machine.algorithms = (*machine.algorithms, Fake("far", [50.0, 51.0]))
        assert choose(tuner(machine, budget=1.0)).candidate.label == label("far")
        assert machine.compiled[tried:] == [label("far")]
        return
    assert choose(tuner(machine, budget=1.0)).candidate.algorithm in right
    assert len(machine.compiled) == tried


def test_without_any_budget_one_is_verified_and_taken() -> None:
    machine = Machine(fakes(1.0, 1.1, 1.2), faults={label("a"): ShaderError("no")})
    choice = choose(tuner(machine, budget=0.0))
    assert choice.candidate.algorithm == "b"
    assert machine.compiled == [label("a"), label("b")]


def test_siblings_of_the_winner_are_measured_last() -> None:
    """Of configurations with one cost, one stands for all, until it leads."""
    algorithms = (Fake("a", [1.0, 1.0, 1.0]), Fake("b", [1.1, 1.1, 1.1]))
    seconds = {label("a"): 2e-3, label("b"): 1e-3, label("b", 2): 5e-4}
    machine = Machine(algorithms, seconds)
    choice = choose(tuner(machine))
    assert machine.compiled == [label("a"), label("b"), label("b", 1), label("b", 2)]
    assert choice.candidate.label == label("b", 2)


def test_likely_siblings_that_time_left_out_are_measured_last() -> None:
    """Two were measured in half of the budget; next come those most like the faster one."""
    algorithms = (Fake("a", [1.0, 1.05, 1.3]), Fake("b", [1.1, 1.15, 1.18, 1.3]))
    seconds = {label("a"): 2e-3, label("b"): 1e-3, label("b", 2): 5e-4}
    machine = Machine(algorithms, seconds, compile_seconds=0.2)
    choice = choose(tuner(machine, budget=1.0))
    assert machine.compiled[:3] == [label("a"), label("b"), label("a", 1)]
    assert machine.compiled[3:] == [label("b", 1)]
    machine = Machine(algorithms, seconds, compile_seconds=0.17)
    choice = choose(tuner(machine, budget=1.0))
    assert machine.compiled[3:] == [label("b", 1), label("b", 2)]
    assert choice.candidate.label == label("b", 2)


def test_full_measures_everything_in_spite_of_the_budget() -> None:
    algorithms = (Fake("a", [1.0, 1.0]), Fake("b", [90.0, 91.0, 92.0]))
    machine = Machine(algorithms, {label("b", 2): 1e-4}, compile_seconds=10.0)
    store = Store(None)
    choice = choose(tuner(machine, store, mode="full", budget=1.0))
    assert len(choice.timings) == 5
    assert choice.candidate.label == label("b", 2)
    assert store.entries()[0].mode == "full"


def test_full_measures_again_what_was_measured_in_part() -> None:
    machine, store = Machine((Fake("a", [1.0, 99.0]),)), Store(None)
    machine.algorithms = (*machine.algorithms, Fake("b", [1.0]))
    assert choose(tuner(machine, store, mode="auto")).source == "tuned"
    assert choose(tuner(machine, store, mode="full")).source == "tuned"
    assert choose(tuner(machine, store, mode="full")).source == "stored"


def test_the_shortlist_is_short_and_diverse() -> None:
    costs = {"a": [1.0, 1.0, 1.1, 1.2, 1.3], "b": [2.0, 2.1, 5.0], "c": [4.1]}
    candidates = sorted(
        (Candidate(n, {"i": i}, c) for n, cs in costs.items() for i, c in enumerate(cs)),
        key=lambda c: c.cost,
    )
    assert [(c.algorithm, c.cost) for c in shortlist(candidates)] == [
        ("a", 1.0),
        ("b", 2.0),
        ("a", 1.1),
        ("a", 1.2),
        ("a", 1.3),
        ("b", 2.1),
    ]
    unlikely = [*candidates, Candidate("d", {}, 2.3)]
    assert [c.algorithm for c in shortlist(sorted(unlikely, key=lambda c: c.cost))] == list(
        "abaaabd"
    )
    many = [Candidate(str(i), {}, 1 + i / 100) for i in range(50)]
    assert len(shortlist(many)) == MOST_CANDIDATES
    alike = [Candidate("a", {"i": i}, 1 + i / 100) for i in range(50)]
    assert len(shortlist(alike)) == MOST_CONFIGS
    assert shortlist([]) == []


# ---- when nothing is measured ----


@pytest.mark.parametrize(
    ("problem", "options", "facts", "note"),
    [
        (PROBLEM, {"mode": "off"}, Facts(), "tune='off'"),
        (PROBLEM, {"mode": "stored"}, Facts(), "nothing stored"),
        (PROBLEM, {}, Facts(software=True), "software driver"),
        (PROBLEM.with_(n=1, h=4, w=4), {}, Facts(), "too little work"),
        (PROBLEM.with_(n=0), {}, Facts(), "nothing to compute"),
        (PROBLEM.with_(n=0), {"mode": "full"}, Facts(), "nothing to compute"),
    ],
)
def test_the_model_decides_alone(
    problem: ConvProblem, options: dict[str, Any], facts: Facts, note: str
) -> None:
    machine = Machine(fakes(2.0, 1.0), facts=facts)
    choice = choose(tuner(machine, **options), problem)
    assert (choice.candidate.algorithm, choice.source) == ("b", "model")
    assert note in choice.note
    assert machine.sampled == []
    assert machine.compiled == [label("b")]


def test_the_model_goes_on_to_the_next_where_a_kernel_does_not_compile() -> None:
    machine = Machine(fakes(1.0, 2.0), faults={label("a"): ShaderError("driver says no")})
    with pytest.warns(TuningWarning, match="driver says no"):
        choice = choose(tuner(machine, mode="off"))
    assert choice.candidate.algorithm == "b"
    assert choice.failures == ((label("a"), "driver says no"),)


def test_nothing_left_says_why_once_an_algorithm() -> None:
    class Greedy(Fake):
        def lower(self, *args: Any) -> Plan:
            raise AlgorithmRefusedError("needs 9 bytes, may have 8")

    machine = Machine((Greedy("a", [1.0, 2.0]), Fake("b", [1.0], "needs a 1x1 kernel, got 3x3")))
    for mode in ("off", "auto", "full"):
        with pytest.raises(AlgorithmRefusedError) as caught:
            choose(tuner(machine, mode=mode))
        assert str(caught.value).endswith(
            "a: needs 9 bytes, may have 8; b: needs a 1x1 kernel, got 3x3"
        )


@pytest.mark.parametrize(
    ("name", "value"), [("WGPUCONV_TUNE", "fast"), ("WGPUCONV_TUNE_BUDGET", "soon")]
)
def test_a_bad_setting_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPUCONV_TUNE", "auto")
    monkeypatch.setenv(name, value)
    with pytest.raises(TuningError, match=f"{name} must be .*, got '{value}'"):
        Tuner(Machine(()), Store(None))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPUCONV_TUNE", "stored")
    monkeypatch.setenv("WGPUCONV_TUNE_BUDGET", "2.5")
    made = Tuner(Machine(()), Store(None))
    assert (made.mode, made.budget) == ("stored", 2.5)
    assert Tuner(Machine(()), Store(None), mode="full").mode == "full"
    with pytest.raises(TuningError, match="tune must be one of auto, full, stored, off"):
        Tuner(Machine(()), Store(None), mode="most")
    with pytest.raises(TuningError, match="number of seconds"):
        Tuner(Machine(()), Store(None), budget=-1.0)


# ---- choosing from the store ----


def test_what_was_measured_is_used_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    first = Machine(fakes(1.0, 1.1), {label("b"): 5e-4})
    tuned = choose(tuner(first, Store(path)))
    second = Machine(fakes(1.0, 1.1))
    for mode in ("auto", "stored"):
        choice = choose(tuner(second, Store(path), mode=mode))
        assert choice.source == "stored"
        assert choice.candidate == tuned.candidate
        assert (choice.timings, choice.tied) == (tuned.timings, tuned.tied)
    assert second.sampled == []
    assert choose(tuner(second, Store(path), mode="off")).source == "model"


@pytest.mark.parametrize("part", ["backend", "adapter", "driver", "versions"])
def test_another_device_driver_or_version_is_a_miss(part: str) -> None:
    machine, store = Machine(fakes(1.0, 1.1)), Store(None)
    choose(tuner(machine, store))
    machine.identity = replace(Identity(), **{part: "another"})
    assert choose(tuner(machine, store, mode="stored")).source == "model"


def test_a_changed_kernel_or_a_new_algorithm_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None)
    choose(tuner(Machine(fakes(1.0, 1.1)), store))
    assert choose(tuner(Machine(fakes(1.0, 1.1, 1.2)), store, mode="stored")).source == "model"
    assert choose(tuner(Machine(fakes(1.0, 1.1)), store, mode="stored")).source == "stored"
    monkeypatch.setattr("wgpuconv.algorithms.base.source_hash", lambda files: "another")
    assert choose(tuner(Machine(fakes(1.0, 1.1)), store, mode="stored")).source == "model"


def test_forced_and_free_choices_are_kept_apart() -> None:
    machine, store = Machine(fakes(1.0, 1.1)), Store(None)
    choose(tuner(machine, store), scope="auto")
    assert choose(tuner(machine, store, mode="stored"), scope="direct").source == "model"


def unfitting_winners() -> dict[str, Machine]:
    """Machines on which the stored winner, c, no longer fits, by the reason."""
    a, b, c = fakes(1.0, 1.1, 1.2)
    return {
        "needs a 1x1 kernel": Machine((a, b, Fake("c", [1.2], "needs a 1x1 kernel, got 3x3"))),
        "no such algorithm": Machine((a, b)),
        "no longer offered": Machine((a, b, Renamed("c", [1.2]))),
        "did not compile": Machine((a, b, c), faults={label("c"): ShaderError("did not compile")}),
        "may have 8": Machine((a, b, Refusing("c", [1.2]))),
    }


class Renamed(Fake):
    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        return [{"number": 0, "unroll": True}]


class Refusing(Fake):
    def lower(self, *args: Any) -> Plan:
        raise AlgorithmRefusedError("needs 9 bytes, may have 8")


@pytest.mark.parametrize("reason", unfitting_winners())
def test_r20_a_stored_winner_that_no_longer_fits_gives_way(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    seconds = {label("a"): 3e-3, label("b"): 2e-3, label("c"): 1e-3}
    assert (
        choose(tuner(Machine(fakes(1.0, 1.1, 1.2), dict(seconds)), Store(path))).candidate.algorithm
        == "c"
    )

    machine = unfitting_winners()[reason]
    with pytest.warns(TuningWarning, match=reason) as caught:
        choice = choose(tuner(machine, Store(path)))
    assert len(caught) == 1
    assert (choice.candidate.algorithm, choice.source) == ("b", "stored")
    assert machine.sampled == [], "the next best was known"
    assert reason in dict(choice.failures)[label("c")]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the entry is replaced: nobody is warned again
        again = choose(tuner(machine, Store(path)))
    assert (again.candidate.algorithm, again.source) == ("b", "stored")
    assert reason in dict(again.failures)[label("c")]


def test_r20_measured_anew_where_no_stored_candidate_is_left() -> None:
    store = Store(None)
    machine = Machine((Fake("a", [1.0, 1.1, 30.0]),))
    choose(tuner(machine, store))
    machine.faults = {label("a", i): ShaderError("no") for i in (0, 1)}
    with pytest.warns(TuningWarning, match="none is left"):
        choice = choose(tuner(machine, store))
    assert (choice.candidate.label, choice.source) == (label("a", 2), "tuned")


# ---- many sizes ----

SIZED = PROBLEM.with_(n=1)


def test_r21_after_a_few_sizes_a_new_one_is_not_measured() -> None:
    # The best choice depends on the size: b is for the taller half.
    machine = Machine(fakes(1.0, 1.1))
    store = Store(None)
    of = tuner(machine, store)
    sources = []
    for i in range(40):
        problem = SIZED.with_(h=30 + i, w=31)
        machine.seconds = {label("a"): 2e-3 if i % 4 >= 2 else 1e-3, label("b"): 1.5e-3}
        sources.append(choose(of, problem).source)
    assert sources == ["tuned"] * FAMILY + ["similar"] * (40 - FAMILY)
    # Sizes 30 and 31 chose a, 32 and 33 b: a new size does as its nearest neighbour does.
    for h, expected in ((29, "a"), (25, "a"), (38, "b"), (60, "b")):
        choice = choose(of, SIZED.with_(h=h, w=31))
        assert choice.candidate.algorithm == expected
        assert choice.source in ("similar", "stored")


def test_r21_a_program_started_again_measures_no_more(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    for i in range(8):
        choose(tuner(Machine(fakes(1.0, 1.1)), Store(path)), SIZED.with_(h=30 + i))
    machine = Machine(fakes(1.0, 1.1))
    assert choose(tuner(machine, Store(path)), SIZED.with_(h=50)).source == "similar"
    assert machine.sampled == []
    # Other channels are another family, and a size far away is worth a measurement.
    assert choose(tuner(machine, Store(path)), SIZED.with_(k=32)).source == "tuned"
    assert choose(tuner(machine, Store(path)), SIZED.with_(n=9)).source == "tuned"


def test_r21_the_model_where_the_neighbours_winner_fails() -> None:
    store = Store(None)
    for i in range(8):
        choose(tuner(Machine(fakes(1.0, 1.1), {label("b"): 1e-4}), store), SIZED.with_(h=30 + i))
    machine = Machine(fakes(1.0, 1.1), faults={label("b"): ShaderError("not here")})
    choice = choose(tuner(machine, store), SIZED.with_(h=40))
    assert (choice.candidate.algorithm, choice.source) == ("a", "model")
    assert "not here" in dict(choice.failures)[label("b")]
    assert machine.sampled == []


# ---- the timing protocol ----


class Script:
    """Takes samples from lists, and keeps what was asked."""

    def __init__(self, *samples: Sequence[float]) -> None:
        self._samples = [list(s) for s in samples]
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.now = 0.0

    def __call__(self, numbers: Sequence[int], repeats: Sequence[int]) -> list[float]:
        self.asked.append((tuple(numbers), tuple(repeats)))
        taken = [self._samples[i].pop(0) for i in numbers]
        self.now += sum(t * r for t, r in zip(taken, repeats, strict=True))
        return taken

    def clock(self) -> float:
        return self.now


RULES = Rules(spin_up=0.5, sample=2e-3, rounds=7)


def timed(script: Script, estimates: Sequence[float], deadline: float = math.inf) -> list[Timing]:
    return measure(script, estimates, RULES, deadline=deadline, clock=script.clock)


def test_rounds_are_interleaved_and_change_direction() -> None:
    script = Script([1e-3] * 7, [1e-3] * 7, [1e-3] * 7)
    timings = timed(script, [1e-3] * 3)
    assert [len(t.samples) for t in timings] == [7, 7, 7]
    assert [numbers for numbers, _ in script.asked[:3]] == [(0, 1, 2), (2, 1, 0), (0, 1, 2)]


def test_samples_last_about_two_milliseconds() -> None:
    script = Script([1e-5] * 7, [1e-2] * 7)
    timed(script, [2e-5, 1e-2])
    assert script.asked[0][1] == (100, 1)
    assert 200 in script.asked[1][1], "what a sample taught about the speed counts"
    quick = Script([1e-9] * 7)
    timed(quick, [0.0])
    assert quick.asked[0][1] == (1000,)


def test_losers_are_dropped_early() -> None:
    script = Script([1.0] * 7, [1.6] * 7, [1.2] * 7, [1.05] * 7)
    timings = timed(script, [1.0] * 4)
    assert [len(t.samples) for t in timings] == [7, 2, 4, 7]


def test_one_slow_sample_drops_nobody() -> None:
    script = Script([1.0] * 7, [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert [len(t.samples) for t in timed(script, [1.0] * 2)] == [7, 7]


def test_past_the_deadline_no_round_begins() -> None:
    script = Script([1.0] * 7, [1.0] * 7)
    assert [len(t.samples) for t in timed(script, [1.0] * 2, deadline=3.0)] == [2, 2]
    late = Script([1.0] * 7)
    assert len(timed(late, [1.0], deadline=-1.0)[0].samples) == 1


def test_the_device_is_kept_busy_before_the_first_sample() -> None:
    script = Script([1e-3] * 1000)
    spin_up(script, RULES, 1e-3, script.clock)
    assert 0.5 <= script.now < 0.55
    assert {repeats for _, repeats in script.asked} == {(20,)}
    idle = Script([])
    spin_up(idle, SOFTWARE, 1e-3, idle.clock)
    assert idle.asked == []


def test_the_spin_up_goes_on_while_the_clock_rises() -> None:
    rising = [8e-2 * 0.95**i for i in range(20)]
    script = Script(rising + [rising[-1]] * 1000)
    spin_up(script, RULES, 8e-2, script.clock)
    assert len(script.asked) == len(rising) + 1
    endless = Script([8e-2 * 0.97**i for i in range(1000)])
    spin_up(endless, RULES, 8e-2, endless.clock)
    assert 2.0 <= endless.now < 2.1


def test_the_minimum_and_the_median_are_kept() -> None:
    (timing,) = timed(Script([1.0, 1.2, 1.1, 1.3, 1.4, 1.2, 9.0]), [1.0])
    assert (timing.best, timing.median) == (1.0, 1.2)


# ---- verification ----

VERIFIED = [
    "conv2d f32 n2 c8 h11 w9 k6 r3 s2 stride2,1 pad1,2,0,3 dil2,1 groups2 bias act:gelu",
    "conv2d f32 n1 c6 h10 w7 k12 r3 s3 pad1 groups6 nhwc",
    "conv2d f16 n2 c5 h7 w8 k3 r1 s1 bias act:sigmoid nhwc",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:leaky_relu,0.2",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:clip,-0.5,0.5",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:silu",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:tanh",
    "conv2d f32 n1 c3 h8 w8 k4 r3 s3 act:relu",
    "conv2d f32 n2 c3 h8 w7 k4 r3 s3 bias residual act:relu nhwc",
    "conv2d f16 n2 c3 h8 w7 k4 r3 s3 residual",
    "conv_transpose2d f32 n2 c4 h5 w6 k6 r3 s4 stride2,3 pad1,0,2,1 outpad1,2 dil1,2 groups2 bias",
    "conv_transpose2d f16 n1 c8 h4 w4 k4 r2 s2 stride2 nhwc",
]


def exact(check: Check) -> np.ndarray:
    p, data = check.problem, check.data
    dtype = reference.NUMPY[p.dtype]
    arrays = data["input"], data["weight"], data.get("bias"), data.get("residual")
    return reference.convolve(p, *arrays).astype(dtype)


@pytest.mark.parametrize("text", VERIFIED)
def test_the_sampled_reference_agrees_with_the_whole_one(text: str) -> None:
    check = Check(ConvProblem.parse(text))
    assert check.fault(exact(check)) is None


@pytest.mark.parametrize("text", VERIFIED)
def test_an_output_off_by_little_is_found(text: str) -> None:
    check = Check(ConvProblem.parse(text))
    p = check.problem
    right, data = exact(check), check.data
    arrays = data["input"], data["weight"], data.get("bias"), data.get("residual")
    bound = reference.bound(p, *arrays)
    for at in (0, -1):
        wrong = right.copy()
        wrong.reshape(-1)[at] += 8 * bound.reshape(-1)[at] + 2.0**-16
        fault = check.fault(wrong)
        assert fault is not None
        assert fault.startswith("wrong result")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_hole_anywhere_in_an_output_is_found(value: float) -> None:
    check = Check(PROBLEM)
    right = exact(check)
    for at in np.random.default_rng(1).integers(0, right.size, 20):
        wrong = right.copy()
        wrong.reshape(-1)[at] = value
        assert check.fault(wrong) is not None


def test_random_data_has_no_period_that_a_tensor_shares() -> None:
    p = ConvProblem.parse("conv2d f32 n2 c64 h128 w128 k8 r1 s1")
    x = random_data(p)["input"]
    assert x.size > 1_000_003
    assert abs(float(x.mean())) < 0.01
    assert not np.array_equal(x[0], x[1])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_can_be_verified(name: str) -> None:
    activation = Activation.of((name, -0.5, 0.5) if name == "clip" else name)
    check = Check(PROBLEM.with_(activation=activation))
    assert check.fault(exact(check)) is None


def test_scratch_memory_is_given_back_after_a_failure() -> None:
    machine = Machine(fakes(1.0), faults={label("a"): spoil(at=slice(0, 1), by=1.0)})
    plan = Fake("a", [1.0]).lower(PROBLEM, {"number": 0}, machine.facts, 0)
    with Workbench(machine, Check(PROBLEM)) as bench, pytest.raises(WrongResultError):
        bench.verify(machine.compile(plan))
    assert machine.held == 0


# ---- explaining ----


def explained(of: Tuner, **options: Any) -> dict[str, Any]:
    machine = of.machine
    found = survey(PROBLEM, machine.facts, machine.algorithms)
    lowered = lambda c: lower(PROBLEM, c, machine.facts, machine.algorithms)  # noqa: E731
    choice, _ = of.choose(found, lowered, scope="auto")
    return json.loads(
        json.dumps(
            explanation(
                found, choice, lowered, device="fake", basis=basis(of.facts, of.speeds), **options
            ).to_json()
        )
    )


def test_an_explanation_holds_everything_that_was_weighed() -> None:
    algorithms = (
        Fake("a", [1.0, 1.1, 1.2, 1.3, 90.0]),
        Fake("b", [1.05]),
        Fake("c", [1.0], "needs a 1x1 kernel, got 3x3"),
    )
    machine = Machine(algorithms, {label("a", 1): 5e-4}, {label("b"): ShaderError("no")})
    of = tuner(machine)
    found = explained(of)
    assert found["problem"] == str(PROBLEM)
    assert found["choice"] == {
        "label": label("a", 1),
        "algorithm": "a",
        "config": {"number": 1},
        "source": "tuned",
        "seconds": 5e-4,
    }
    assert [(r["label"], r["seconds"], r["failure"]) for r in found["rows"]] == [
        (label("a", 1), 5e-4, None),
        (label("a", 0), 1e-3, None),
        (label("a", 2), 1e-3, None),
        (label("a", 3), 1e-3, None),
        (label("b"), None, "no"),
    ]
    assert {r["scratch"] for r in found["rows"]} == {256}
    assert found["refusals"] == {"c": "needs a 1x1 kernel, got 3x3"}
    assert found["basis"] == {
        "bandwidth": machine.facts.bandwidth,
        "flops": machine.facts.flops,
        "cores": machine.facts.cores,
        "measured": [],
        "date": None,
    }
    assert found["notes"][-1] == "5 of 6 candidates are listed"
    assert len(explained(of, everything=True)["rows"]) == 6


# ---- on the device ----

TINY = "conv2d f32 n1 c3 h9 w11 k8 r3 s3 pad1 bias act:relu"


def call(device: Device, problem: ConvProblem, **options: Any) -> np.ndarray:
    """The public call of a problem with stride 1 and equal padding, checked."""
    x, w, b = reference.arrays(problem)
    y = conv2d(
        x,
        w,
        b,
        padding=problem.padding[0],
        activation="relu" if problem.activation.name == "relu" else None,
        device=device,
        **options,
    )
    reference.check(problem, y, x, w, b)
    return y


def test_full_on_a_real_device(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    problem = ConvProblem.parse(TINY)
    device = Device(tune="full", store=path)
    call(device, problem, algorithm="direct")
    choice = device.choose(problem, algorithm="direct")
    offered = [c for c in device.survey(problem).candidates if c.algorithm == "direct"]
    assert choice.source == "tuned"
    assert choice.failures == ()
    assert {name for name, _ in choice.timings} == {c.label for c in offered}
    assert all(seconds > 0 for _, seconds in choice.timings)

    again = Device(tune="auto", store=path)
    call(again, problem, algorithm="direct")
    stored = again.choose(problem, algorithm="direct")
    assert (stored.source, stored.candidate) == ("stored", choice.candidate)


def test_prewarm_leaves_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tune="full", store=":memory:")
    prewarm([TINY, ConvProblem.parse(TINY)], device, algorithm="direct")

    def fail(*args: Any) -> None:
        raise AssertionError("compiled or measured again")

    monkeypatch.setattr(device.backend, "compile", fail)
    monkeypatch.setattr(device.backend, "time", fail)
    call(device, ConvProblem.parse(TINY), algorithm="direct")


def test_two_threads_that_meet_a_problem_tune_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tune="full", store=":memory:")
    measured = []
    by_measuring = device.tuner._by_measuring

    def counted(*args: Any) -> Any:
        measured.append(args)
        return by_measuring(*args)

    monkeypatch.setattr(device.tuner, "_by_measuring", counted)
    barrier = threading.Barrier(4)
    found = []

    def work() -> None:
        barrier.wait()
        found.append(device.compiled(ConvProblem.parse(TINY), algorithm="direct"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1
    assert len(found) == 4
    assert all(compiled is found[0] for compiled in found)


def test_r20_through_the_public_call(tmp_path: Path) -> None:
    """The store holds a winner that refuses this problem: a 1x1 GEMM for 3x3 kernels."""
    store = Store(tmp_path / "tuning.sqlite3")
    problem = ConvProblem.parse("conv2d f32 n1 c16 h31 w29 k16 r3 s3")
    device = Device(tune="stored", store=store)
    found = device.survey(problem)
    direct = next(c for c in found.candidates if c.algorithm == "direct")
    gemm_1x1 = {"tile_m": 64}
    store.put(
        Entry(
            device.tuner.key(problem, "auto"),
            "gemm_1x1",
            gemm_1x1,
            (Trial("gemm_1x1", gemm_1x1, 1e-5, 1e-5), Trial("direct", direct.config, 2e-5, 2e-5)),
            device.tuner._sources(found),
            "full",
            "2026-01-01T00:00:00+00:00",
        )
    )
    with pytest.warns(TuningWarning, match="needs a 1x1 kernel, got 3x3") as caught:
        call(device, problem)
    assert len(caught) == 1
    again = Device(tune="stored", store=store.path)
    call(again, problem)  # without a warning: those are errors here
    assert again.choose(problem).candidate == direct
    replaced = store.get(device.tuner.key(problem, "auto"))
    assert replaced is not None
    assert replaced.algorithm == "direct"


def seconds_of(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def test_r21_on_a_software_driver(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new size on every call costs about what a call costs, and nothing is measured."""
    if not device.facts.software:
        pytest.skip("a hardware GPU measures; see the next test")
    device = Device(tune="auto", store=":memory:")
    monkeypatch.setattr(device.backend, "time", None)
    x, w, _ = reference.arrays(ConvProblem.parse("conv2d f32 n1 c16 h420 w420 k16 r3 s3 pad1"))
    conv2d(x, w, padding=1, device=device)  # compiles the kernel
    usual = min(seconds_of(lambda: conv2d(x, w, padding=1, device=device)) for _ in range(2))
    new = []
    for size in (400, 407, 413):
        part = np.ascontiguousarray(x[:, :, :size, : size - 3])
        new.append(seconds_of(lambda part=part: conv2d(part, w, padding=1, device=device)))
    # Compiling a kernel or measuring one would cost several calls; another process on the
    # machine may double the time of one, but hardly of all three.
    assert min(new) < 3 * usual


# What a loaded machine measures of itself is not the point here.
@pytest.mark.filterwarnings("ignore:no (copy bandwidth|multiply-add rate) of")
def test_r21_where_measuring_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few sizes are measured (quickly here), further ones are served by their neighbours."""
    device = Device(tune="auto", store=":memory:")
    device.backend.facts = replace(device.facts, software=False)
    monkeypatch.setattr(tuner_module, "HARDWARE", Rules(spin_up=0.01, sample=0.0, rounds=2))
    device.tuner.budget = 0.02
    problems = [ConvProblem.parse(f"conv2d f32 n1 c16 h{h} w40 k16 r3 s3") for h in range(30, 42)]
    sources = []
    for problem in problems:
        call(device, problem, algorithm="direct")
        sources.append(device.choose(problem, algorithm="direct").source)
    assert sources == ["tuned"] * FAMILY + ["similar"] * (12 - FAMILY)
    # Who asks for a size by name gets it measured.
    prewarm(problems[-2:], device, algorithm="direct")
    found = [device.choose(p, algorithm="direct").source for p in problems[-3:]]
    assert found == ["similar", "tuned", "tuned"]
    call(device, problems[-1], algorithm="direct")


def test_explain_agrees_with_the_call() -> None:
    device = Device(tune="off", store=":memory:")
    found = explain(TINY, device)
    chosen = device.choose(ConvProblem.parse(TINY))
    assert (found.choice.label, found.choice.source) == (chosen.candidate.label, "model")
    assert found.refusals["gemm_1x1"] == "needs a 1x1 kernel, got 3x3"
    row = next(row for row in found.rows if row.label == found.choice.label)
    assert (row.scratch, row.dispatches) == (chosen.plan.scratch, chosen.plan.dispatches)
    assert explain(TINY, device, algorithm="direct").choice.algorithm == "direct"
