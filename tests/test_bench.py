"""The simple bench: what it measures, what it reports, and that it tells a wrong result."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from wgpuconv import ConvProblem, Device
from wgpuconv.bench import Measurement, Result, geometric_mean, machine, report, run
from wgpuconv.errors import UnknownAlgorithmError
from wgpuconv.suites import Entry, parse_entry

SMALL = parse_entry("small: conv2d f32 n2 c4 h9 w8 k6 r3 s3 stride1 pad1 bias act:relu x2")


def measurement(label: str, *samples: float, failure: str | None = None) -> Measurement:
    return Measurement(label, {}, f"{label}()", samples, None, 0, 1, failure)


def result(*measurements: Measurement, choice: str = "a()") -> Result:
    return Result(SMALL, measurements, {}, choice, "model", "")


@pytest.fixture(scope="module")
def measured(device: Device) -> Result:
    steps: list[tuple[str, str]] = []
    (found,) = run([SMALL], device, tell=lambda *step: steps.append(step))
    assert steps[0] == ("small", "choosing")
    assert steps[-1] == ("small", "timing")
    return found


def test_every_algorithm_is_measured_or_refuses(measured: Result, device: Device) -> None:
    names = {m.algorithm for m in measured.measurements} | set(measured.refusals)
    assert names == {algorithm.name for algorithm in device.algorithms}
    assert {"direct", "im2col_gemm", "implicit_gemm"} <= {
        m.algorithm for m in measured.measurements
    }
    assert "col2im" in measured.refusals


def test_measurements_are_right_timed_and_sorted(measured: Result) -> None:
    assert not measured.failed
    times = [m.seconds for m in measured.measurements]
    assert all(seconds is not None and 0 < seconds < 60 for seconds in times)
    assert times == sorted(times)
    # Of 36 products and a bias, each rounded at most 38 times, relative to the largest output;
    # the sum of sizes is at most 37 * 1.75**2, and outputs of unit variance reach above one.
    assert all(m.error is not None and m.error < 38 * 2.0**-24 * 114 for m in measured.measurements)
    assert any(m.error for m in measured.measurements)


def test_the_tuners_choice_is_among_them(measured: Result) -> None:
    assert measured.choice in {m.label for m in measured.measurements}
    assert measured.source == "model"
    assert measured.ratio is not None
    assert measured.ratio >= 1


def test_algorithms_can_be_named(device: Device) -> None:
    (found,) = run([SMALL], device, algorithms=("direct", "col2im"))
    assert [m.algorithm for m in found.measurements] == ["direct"]
    assert set(found.refusals) == {"col2im"}
    with pytest.raises(UnknownAlgorithmError, match="known are"):
        next(run([SMALL], device, algorithms=("cudnn",)))


def test_a_wrong_result_is_a_failure(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    read = device.backend.read

    def wrong(buffer: Any, array: np.ndarray) -> None:
        read(buffer, array)
        array.reshape(-1)[0] += 1  # the first element is always looked at

    monkeypatch.setattr(device.backend, "read", wrong)
    (found,) = run([SMALL], device, algorithms=("direct",))
    (only,) = found.measurements
    assert only.failure is not None
    assert "wrong result" in only.failure
    assert only.seconds is None
    assert found.failed


def test_a_problem_that_cannot_run_does_not_end_the_suite(device: Device) -> None:
    huge = Entry("huge", ConvProblem.parse("conv2d f32 n1 c4096 h4096 w4096 k1 r1 s1 stride1 pad0"))
    first, second = run([huge, SMALL], device, algorithms=("direct",))
    assert first.failure is not None
    assert first.failed
    assert not second.failed


def test_the_fastest_and_the_ratio() -> None:
    found = result(measurement("b", 1.0, 3.0, 2.0), measurement("a", 4.0))
    assert found.fastest is not None
    assert found.fastest.seconds == 2.0  # the median
    assert found.ratio == 2.0
    assert result(measurement("a", failure="wrong")).fastest is None
    assert result(measurement("a", failure="wrong")).ratio is None
    assert result(measurement("b", 1.0)).ratio is None


def test_the_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_a_report_is_json_with_all_samples(measured: Result, device: Device) -> None:
    data = json.loads(json.dumps(report([measured], device)))
    (only,) = data["results"]
    assert only["problem"] == str(SMALL.problem)
    assert only["count"] == 2
    assert only["flop"] == 2 * 2 * 6 * 4 * 9 * 9 * 8
    assert all(len(m["samples"]) >= 2 for m in only["measurements"])
    here = json.loads(json.dumps(machine(device)))
    assert data["machine"].keys() == here.keys()
    assert data["machine"]["driver"] == here["driver"]
    assert data["machine"]["driver"]
    assert {"date", "commit", "method", "wgpuconv"} <= set(data)
