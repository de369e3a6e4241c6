"""The bench on a device: its sides are right, timed and complete, and told when they are not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgpuconv import ConvProblem, Device, tensor
from wgpuconv.bench.calls import call_seconds, caller, end_to_end_seconds, first_call_seconds
from wgpuconv.bench.ours import OurDevice
from wgpuconv.bench.result import ProblemResult, load
from wgpuconv.bench.session import Session
from wgpuconv.errors import BenchError, UnknownAlgorithmError
from wgpuconv.ops import conv2d
from wgpuconv.suites import Entry, parse_entry
from wgpuconv.tuning.verify import Check, random_data

SMALL = parse_entry("small: conv2d f32 n2 c4 h9 w8 k6 r3 s3 stride1 pad1 bias act:relu x2")


def measure(entries: list[Entry], device: Device, **options: Any) -> list[ProblemResult]:
    algorithms = options.pop("algorithms", ())
    with Session([OurDevice(device, algorithms=algorithms)], **options) as session:
        return list(session.measure(entries, lambda label, step: None))


@pytest.fixture(scope="module")
def session(device: Device) -> Iterator[Session]:
    steps: list[tuple[str, str]] = []
    measures = ("kernel", "call", "end-to-end")
    with Session([OurDevice(device)], measures=measures) as made:
        made.measure_rooflines()
        for _ in made.measure([SMALL], lambda *step: steps.append(step)):
            pass
        assert steps[0] == ("small", "choosing on wgpu")
        yield made


@pytest.fixture(scope="module")
def measured(session: Session) -> ProblemResult:
    (found,) = session.results
    return found


def test_every_algorithm_is_measured_or_refuses(measured: ProblemResult, device: Device) -> None:
    timed = {side.what for side in measured.sides}
    refused = {name.removeprefix("wgpu ") for name in measured.refusals}
    assert timed | refused == {algorithm.name for algorithm in device.algorithms}
    assert {"direct", "im2col_gemm", "implicit_gemm"} <= timed
    assert "col2im" in refused


def test_sides_are_right_timed_and_sorted(measured: ProblemResult) -> None:
    assert not measured.failed
    times = [side.seconds for side in measured.sides]
    assert all(seconds is not None and 0 < seconds < 60 for seconds in times)
    assert times == sorted(times, key=lambda seconds: seconds or 0)
    # Of 36 products and a bias, each rounded at most 38 times, relative to the largest output;
    # the sum of sizes is at most 37 * 1.75**2, and outputs of unit variance reach above one.
    # (Winograd's sums are others.)
    errors = {side.what: side.error for side in measured.sides}
    assert all(errors.values())
    ordinary = [name for name in errors if not name.startswith("winograd")]
    assert all((errors[name] or 1) < 38 * 2.0**-24 * 114 for name in ordinary)
    assert {side.on for side in measured.sides} == {"wgpu"}
    assert {side.precision for side in measured.sides} == {"f32"}


def test_the_tuners_choice_is_among_them(measured: ProblemResult) -> None:
    chosen = measured.chosen("wgpu")
    assert chosen is not None
    assert chosen.label == measured.choice["wgpu"]
    assert measured.source == {"wgpu": "model"}
    assert measured.note["wgpu"]
    assert chosen.call is not None
    assert 0 < chosen.call < 60
    assert chosen.end_to_end is not None
    assert 0 < chosen.end_to_end < 60


def test_weights_prepared_beforehand_are_another_side(device: Device) -> None:
    """Of the tuner's choice, where that prepares any."""
    entry = parse_entry("conv2d f32 n1 c32 h16 w16 k64 r3 s3 stride1 pad1")
    choice = device.choose(entry.problem)
    assert choice.plan.prepare
    name = choice.plan.algorithm
    (found,) = measure([entry], device, algorithms=(name,))
    assert not found.failed
    sides = {side.what: side.prepared for side in found.sides}
    assert sides == {name: False, f"{name}, prepared weights": True}
    assert all(side.error and side.samples for side in found.sides)


@pytest.mark.parametrize(("times", "tuned"), [(1.5, False), (1.2, True)])
def test_an_algorithm_far_behind_is_not_tuned_on_its_own(
    device: Device, monkeypatch: pytest.MonkeyPatch, times: float, tuned: bool
) -> None:
    problem, plain, asked = SMALL.problem, device.choose, []
    candidates = device.survey(problem).candidates
    slow = [c.label for c in candidates if c.algorithm == "direct"][-1]
    fast = plain(problem, algorithm="im2col_gemm")
    timings = ((fast.plan.label, 1e-3), (slow, times * 1e-3))

    def choose(problem: ConvProblem, *, algorithm: str = "auto") -> Any:
        asked.append(algorithm)
        return (
            replace(fast, timings=timings)
            if algorithm == "auto"
            else plain(problem, algorithm=algorithm)
        )

    monkeypatch.setattr(device, "choose", choose)
    offer = OurDevice(device).offer(problem, lambda step: None)
    labels = {c.side.what: c.side.label for c in offer.contenders if not c.side.prepared}
    assert labels["im2col_gemm"] == fast.plan.label
    assert ("direct" in asked) == tuned
    if not tuned:
        assert labels["direct"] == slow
    OurDevice(device, algorithms=["direct"]).offer(problem, lambda step: None)
    assert asked[-1] == "direct"  # who names it wants to know


def test_an_algorithm_that_is_guessed_far_behind_is_not_tuned_either(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, plain, asked = SMALL.problem, device.choose, []
    candidates = device.survey(problem).candidates  # cheapest first
    fast = plain(problem)
    measured = replace(fast, timings=((fast.plan.label, 1e-3),))

    def choose(problem: ConvProblem, *, algorithm: str = "auto") -> Any:
        asked.append(algorithm)
        return measured if algorithm == "auto" else plain(problem, algorithm=algorithm)

    monkeypatch.setattr(device, "choose", choose)
    OurDevice(device).offer(problem, lambda step: None)
    cheapest = {c.algorithm: c.cost for c in reversed(candidates)}
    likely = {name for name, cost in cheapest.items() if cost <= 2 * candidates[0].cost}
    assert set(asked) == {"auto"} | likely - {fast.plan.algorithm}
    assert len(likely) < len(cheapest)


def test_algorithms_can_be_named(device: Device) -> None:
    (found,) = measure([SMALL], device, algorithms=("direct", "col2im"))
    assert [side.what for side in found.sides] == ["direct"]
    assert set(found.refusals) == {"wgpu col2im"}
    with pytest.raises(UnknownAlgorithmError, match="known are"):
        measure([SMALL], device, algorithms=("cudnn",))


def test_the_choice_alone(device: Device) -> None:
    (found,) = measure([SMALL], device, algorithms=("auto",))
    sides = [side for side in found.sides if not side.prepared]
    assert [side.label for side in sides] == [found.choice["wgpu"]]
    assert sides[0].samples


def test_two_devices_side_by_side(device: Device, checked: Device) -> None:
    sides = [OurDevice(each, algorithms=["direct"]) for each in (device, checked)]
    with Session(sides, baseline="wgpu-checked", rounds=2) as session:
        (found,) = session.measure([SMALL], lambda label, step: None)
        assert session.run().baseline == "wgpu-checked"
    assert sorted(side.name for side in found.sides) == ["wgpu direct", "wgpu-checked direct"]
    assert [len(side.samples) for side in found.sides] == [2, 2]
    with pytest.raises(BenchError, match="the device 'wgpu' is named twice"):
        Session([OurDevice(device), OurDevice(device)])


def test_a_device_without_f16_refuses(default_limits: Device, monkeypatch: Any) -> None:
    facts = replace(default_limits.facts, f16=False)
    monkeypatch.setattr(default_limits.backend, "facts", facts)
    (found,) = measure([parse_entry("conv2d f16 n1 c1 h4 w4 k1 r1 s1")], default_limits)
    assert "shader-f16" in found.refusals["wgpu"]
    assert found.failure == "nothing here computes this problem"


def test_a_wrong_result_is_a_failure(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    read = device.backend.read

    def wrong(buffer: Any, array: np.ndarray) -> None:
        read(buffer, array)
        array.reshape(-1)[0] += 1  # the first element is always looked at

    monkeypatch.setattr(device.backend, "read", wrong)
    (found,) = measure([SMALL], device, algorithms=("direct",))
    (only,) = found.sides
    assert only.failure is not None
    assert "wrong result" in only.failure
    assert only.seconds is None
    assert found.failed


def test_a_problem_that_cannot_run_does_not_end_the_suite(device: Device) -> None:
    huge = Entry("huge", ConvProblem.parse("conv2d f32 n1 c4096 h4096 w4096 k1 r1 s1 stride1 pad0"))
    first, second = measure([huge, SMALL], device, algorithms=("direct",))
    assert first.failure is not None
    assert first.failed
    assert not second.failed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "torch-gpu"}, "no baseline is named 'torch-gpu'; there are wgpu, "),
        ({"baseline": "torch-cuda"}, "the baseline torch-cuda is missing: .*--peers"),
        ({"peers": ["tensorflow"]}, "no peer is named 'tensorflow'; the peers are "),
        ({"measures": ["kernel", "energy"]}, "unknown measure 'energy'; there are kernel, "),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_timed(
    device: Device, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(BenchError, match=expected):
        Session([OurDevice(device)], **options)


def test_an_absent_peer_is_noted_with_its_reason(device: Device, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch-cuda is there")
    with Session([OurDevice(device)], ["torch-cuda"]) as session:
        (facts,) = session.peers
        assert facts.absent
        assert [each.name for each in session.participants] == ["wgpu"]
    with pytest.raises(BenchError, match=r"the baseline torch-cuda is missing: .*CUDA"):
        Session([OurDevice(device)], ["torch-cuda"], baseline="torch-cuda")


def test_a_peer_takes_part(device: Device) -> None:
    pytest.importorskip("torch")
    devices = [OurDevice(device, algorithms=["direct"])]
    with Session(devices, ["torch-cpu"], baseline="torch-cpu", measures=("call",)) as session:
        (found,) = session.measure([SMALL], lambda label, step: None)
        assert session.run().peers[0].versions["torch"]
    assert not found.failed
    theirs = [side for side in found.sides if side.on == "torch-cpu"]
    assert {side.same_work for side in theirs} == {True, False}
    assert all(side.samples and side.error is not None and side.error < 1e-5 for side in theirs)
    assert sum(side.call is not None for side in theirs) == 1


def test_a_run_is_a_file_with_all_samples(session: Session, device: Device, tmp_path: Path) -> None:
    run = session.run()
    run.save(tmp_path / "b.json")
    assert load(tmp_path / "b.json") == run
    data = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    (only,) = data["results"]
    assert only["problem"] == str(SMALL.problem)
    assert only["count"] == 2
    assert only["flop"] == 2 * 2 * 6 * 4 * 9 * 9 * 8
    assert all(len(side["samples"]) >= 2 for side in only["sides"])
    (facts,) = data["devices"]
    assert facts["driver"] == device.backend.identity.driver
    assert facts["versions"]["wgpu"].split(".")[0].isdigit()
    assert facts["bandwidth"] > 0
    assert {"date", "commit", "method", "wgpuconv"} <= set(data)
    assert {"processor", "processors", "system", "python"} <= set(data["machine"])


# ---- calls ----

CALLS = [
    "conv2d f32 n1 c4 h7 w8 k6 r3 s2 stride2,1 pad1,0,2,1 dil1,2 groups2 nhwc bias act:clip,-1,1",
    "conv_transpose2d f32 n2 c4 h5 w6 k2 r3 s3 stride2 pad1 outpad1,0 act:leaky_relu,0.2",
]


@pytest.mark.parametrize("text", CALLS)
def test_a_call_is_that_of_the_problem(device: Device, text: str) -> None:
    problem = ConvProblem.parse(text)
    check = Check(problem)
    output = caller(problem, "direct", device)(check.data)
    assert check.fault(output) is None


def test_calls_take_time(device: Device) -> None:
    problem, data = SMALL.problem, random_data(SMALL.problem)
    call = call_seconds(device, problem, data, "direct")
    trip = end_to_end_seconds(device, problem, data, "direct")
    assert 1e-6 < call < 1
    assert 1e-6 < trip < 1


def test_a_row_of_calls_is_waited_for(device: Device) -> None:
    """Else the time would be that of handing work over."""
    problem = ConvProblem.parse("conv2d f32 n4 c16 h64 w64 k16 r5 s5 stride1 pad2")
    data = random_data(problem)
    kernel = min(_kernel_seconds(device, problem) for _ in range(3))
    assert call_seconds(device, problem, data, "direct") > 0.5 * kernel
    assert kernel > 1e-3 or not device.facts.software


def _kernel_seconds(device: Device, problem: ConvProblem) -> float:
    data = {role: tensor(array, device) for role, array in random_data(problem).items()}
    result = conv2d(data["input"], data["weight"], padding=2, algorithm="direct")
    result.numpy()
    begin = time.perf_counter()
    conv2d(data["input"], data["weight"], padding=2, algorithm="direct").numpy()
    return time.perf_counter() - begin


def test_the_first_call_has_a_process_of_its_own(device: Device) -> None:
    seconds = first_call_seconds("wgpu", SMALL.problem, "direct", "off")
    again = end_to_end_seconds(device, SMALL.problem, random_data(SMALL.problem), "direct")
    assert seconds > 10 * again  # it opens a device and compiles
    with pytest.raises(BenchError, match=r"first call failed .*'wgpu:99'"):
        first_call_seconds("wgpu:99", SMALL.problem, "direct", "off")
