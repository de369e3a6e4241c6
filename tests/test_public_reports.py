"""Problems on which public GPU convolution libraries went wrong, through the public API.

cases/public_reports.json holds each report's parameters, what was seen there, and what must hold
here. Every entry is covered below, or in the file that COVERED_ELSEWHERE names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from contract import CASES, PLANNED, Runner, lowered, quick_configs, verify

import wgpuconv
from wgpuconv import Device, Tensor
from wgpuconv.algorithms import ALGORITHMS, Algorithm, find
from wgpuconv.errors import (
    OutOfDeviceMemoryError,
    ProblemError,
    UnsupportedFeatureError,
)
from wgpuconv.planner import lower, survey
from wgpuconv.problem import ConvProblem
from wgpuconv.shader import interface, specialise

CASES_BY_ID: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((CASES / "public_reports.json").read_text(encoding="utf-8"))["cases"]
}

COVERED_ELSEWHERE = {"r20": "test_tuner.py", "r21": "test_tuner.py"}
"""Reports about the tuner's store: the file that holds their tests, named test_<id>_..."""

PARAMETERS = ("stride", "padding", "dilation", "output_padding", "groups")

covered: set[str] = set(COVERED_ELSEWHERE)


def reports(*ids: str) -> Callable[[Any], Any]:
    """Marks a test as what covers these entries, and runs it once for each."""
    covered.update(ids)

    def mark(test: Any) -> Any:
        group = pytest.mark.xdist_group("public reports")
        cases = [pytest.param(CASES_BY_ID[i], id=i) for i in ids]
        return group(pytest.mark.parametrize("case", cases)(test))

    return mark


def parameters(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in PARAMETERS if name in case}


def problem_of(case: dict[str, Any]) -> ConvProblem:
    return ConvProblem.from_call(
        case["op"],
        case["x"],
        case["w"],
        dtype={"float32": "f32", "float16": "f16"}[case["dtype"]],
        **parameters(case),
    )


def call(case: dict[str, Any], *arrays: Any, **options: Any) -> Any:
    return getattr(wgpuconv, case["op"])(*arrays, **parameters(case), **options)


def by_every_algorithm(case: dict[str, Any], device: Device) -> None:
    """The public call, and each algorithm that accepts the problem, against the reference."""
    problem = problem_of(case)
    x, w, _ = reference.arrays(problem)
    reference.check(problem, call(case, x, w, device=device), x, w, label="auto")
    for algorithm in fitting(problem, device):
        # One tile: test_contract runs all, and each takes long to compile.
        verify(device, algorithm, problem, quick_configs(algorithm, problem)[0])


def fitting(problem: ConvProblem, device: Device) -> list[Algorithm]:
    return [a for a in ALGORITHMS if a.refusal(problem, device.facts) is None]


def results(case: dict[str, Any], device: Device, x: Any, w: Any) -> Iterator[tuple[str, Any]]:
    """What the public call and each algorithm make of these arrays."""
    problem = problem_of(case)
    yield "auto", call(case, x, w, device=device)
    for algorithm in fitting(problem, device):
        config = quick_configs(algorithm, problem)[0]
        plan = lowered(algorithm, problem, config, device.facts)
        yield plan.label, Runner(device, plan)(x, w, None)


def test_every_report_is_covered() -> None:
    assert covered == set(CASES_BY_ID)
    for report, file in COVERED_ELSEWHERE.items():
        text = (CASES.parent / file).read_text(encoding="utf-8")
        assert f"\ndef test_{report}_" in text, f"{file} has no test of {report}"


@pytest.mark.slow
@reports("r01", "r02")
def test_tuned_kernels_agree_with_the_plain_one(device: Device, case: dict[str, Any]) -> None:
    by_every_algorithm(case, device)


@reports("r07", "r08", "r09", "r15", "r16", "r17")
def test_right_by_every_algorithm(device: Device, case: dict[str, Any]) -> None:
    by_every_algorithm(case, device)


@pytest.mark.slow
@reports("r03")
def test_a_large_image_on_the_least_limits(default_limits: Device, case: dict[str, Any]) -> None:
    problem = problem_of(case)
    x, w, _ = reference.arrays(problem)
    try:
        got = call(case, x, w, device=default_limits)
    except (UnsupportedFeatureError, OutOfDeviceMemoryError) as error:
        if "max-" not in str(error) and "memory" not in str(error):
            raise  # the error must name the limit
    else:
        # A band of rows at each end and around the middle, where a split may run.
        for first in (0, problem.out_h // 2 - 8, problem.out_h - 16):
            band = problem.with_(h=18)
            rows = x[:, :, first : first + 18]
            reference.check(band, got[:, :, first : first + 16], rows, w)
        # The rest must be of the same kind: no gap keeps the poison of an unwritten part.
        assert np.isfinite(got).all()
        assert (np.abs(got).max(axis=(0, 1, 3)) > 0).all()
    small = ConvProblem.parse("conv2d n1 c2 h5 w5 k2 r3 s3")
    x, w, _ = reference.arrays(small)
    reference.check(small, wgpuconv.conv2d(x, w, device=default_limits), x, w)


@reports("r04")
def test_more_images_than_workgroups_in_a_dimension(
    default_limits: Device, case: dict[str, Any]
) -> None:
    problem = problem_of(case)
    x, w, _ = reference.arrays(problem)
    for name in ("auto", "direct"):
        got = call(case, x, w, device=default_limits, algorithm=name)
        reference.check(problem, got, x, w, label=name)


@reports("r05")
def test_f16_counts_past_2048(device: Device, case: dict[str, Any]) -> None:
    if not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    assert case["fill"] == "ones"
    x, w = (np.ones(case[name], np.float16) for name in ("x", "w"))
    for label, y in results(case, device, x, w):
        assert (y == 4608).all(), label


@reports("r06")
def test_f16_does_not_overflow_on_the_way(device: Device, case: dict[str, Any]) -> None:
    if not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    assert case["fill"] == "alternating"
    x, w = np.full(case["x"], 16, np.float16), np.full(case["w"], 2250, np.float16)
    w[:, 1::2] = -2250
    for label, y in results(case, device, x, w):
        # Each product is 36000, and all partial sums are multiples of it that f32 holds.
        assert (y == 0).all(), label


@reports("r10")
def test_an_empty_batch_dispatches_nothing(
    device: Device, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dispatched(*_: Any) -> None:
        raise AssertionError("something was submitted for an empty batch")

    x, w = (np.zeros(case[name], np.float32) for name in ("x", "w"))
    on_device = [wgpuconv.tensor(a, device) for a in (x, w)]
    monkeypatch.setattr(device.backend, "run", dispatched)
    y = call(case, x, w, device=device)
    assert (y.shape, y.dtype) == ((0, 4, 6, 6), np.float32)
    made = call(case, *on_device)
    assert isinstance(made, Tensor)
    assert made.numpy().shape == (0, 4, 6, 6)


@reports("r11")
def test_a_prime_batch_is_split_with_a_remainder(device: Device, case: dict[str, Any]) -> None:
    problem, limit = problem_of(case), case["workspace_limit"]
    im2col = find("im2col_gemm")
    plan = lowered(im2col, problem, im2col.configs(problem, PLANNED)[0], workspace_limit=limit)
    assert plan.workspace <= limit
    images = [dict(step.params)["images"] for step in plan.passes if step.shader.file == "im2col"]
    assert sum(images) == 97
    assert len(set(images)) == 2, "whole chunks of one size, and what remains"
    assert images[0] > 1
    x, w, _ = reference.arrays(problem)
    for name in ("auto", "im2col_gemm"):
        got = call(case, x, w, device=device, algorithm=name, workspace_limit=limit)
        reference.check(problem, got, x, w, label=name)


@reports("r12")
def test_too_large_an_output_padding_is_refused(device: Device, case: dict[str, Any]) -> None:
    x, w = (np.ones(case[name], np.float32) for name in ("x", "w"))
    with pytest.raises(ProblemError, match="output_padding must be smaller than the stride"):
        call(case, x, w, device=device)


@reports("r13")
def test_every_call_writes_the_whole_output(device: Device, case: dict[str, Any]) -> None:
    problem = problem_of(case)
    x, w, _ = reference.arrays(problem)
    on_device = [wgpuconv.tensor(a, device) for a in (x, w)]
    poison = np.full(problem.out_shape, np.nan, np.float32)
    out = wgpuconv.tensor(poison, device)
    for name in ("auto", "direct", "im2col_gemm"):
        for _ in range(case["repeat"]):
            device.backend.write(out.buffer, poison)
            assert call(case, *on_device, out=out, algorithm=name) is out
            reference.check(problem, out.numpy(), x, w, label=name)


@reports("r14")
def test_dispatches_do_not_grow_with_groups(device: Device, case: dict[str, Any]) -> None:
    problem = problem_of(case)
    few = problem.with_(c=2, k=2, groups=2)
    for algorithm in fitting(problem, device):
        config = quick_configs(algorithm, problem)[0]
        plans = [lowered(algorithm, p, config) for p in (few, problem)]
        assert plans[0].dispatches == plans[1].dispatches, algorithm.name
    x, w, _ = reference.arrays(problem)
    for name in ("auto", "direct"):
        got = call(case, x, w, device=device, algorithm=name)
        reference.check(problem, got, x, w, label=name)


@reports("r18")
def test_same_padding_with_a_stride_is_refused(device: Device, case: dict[str, Any]) -> None:
    x, w = (np.ones(case[name], np.float32) for name in ("x", "w"))
    with pytest.raises(ProblemError, match="give the pixels of padding instead"):
        call(case, x, w, device=device)


@reports("r19")
def test_strided_views_are_read_as_they_are(device: Device, case: dict[str, Any]) -> None:
    assert case["view"] == "x[..., ::2]"
    problem = problem_of(case)
    wide, w, _ = reference.arrays(problem.with_(w=2 * problem.w))
    x = wide[..., ::2]
    assert list(x.shape) == case["x"]
    assert not x.flags.c_contiguous
    reference.check(problem, call(case, x, w, device=device), x, w)
    backwards = x[:, ::-1, ::-1]
    reference.check(problem, call(case, backwards, w, device=device), backwards, w)
    turned = np.asfortranarray(w)
    reference.check(problem, call(case, x, turned, device=device), x, turned)
    reference.check(
        problem, call(case, wgpuconv.tensor(x, device), wgpuconv.tensor(w, device)).numpy(), x, w
    )


@reports("r22")
def test_no_kernel_is_offered_that_the_device_cannot_hold(
    default_limits: Device, case: dict[str, Any]
) -> None:
    problem = problem_of(case)
    limits = default_limits.facts.limits
    assert limits.max_workgroup_storage == case["limits"]["max-compute-workgroup-storage-size"]
    assert limits.max_invocations == case["limits"]["max-compute-invocations-per-workgroup"]
    facts = replace(PLANNED, limits=limits)
    found = survey(problem, facts)
    assert {c.algorithm for c in found.candidates} >= {"direct", "im2col_gemm", "implicit_gemm"}
    for shader in {s.shader for c in found.candidates for s in lower(problem, c, facts).passes}:
        face = interface(specialise(shader))
        assert face.workgroup_bytes <= limits.max_workgroup_storage, shader
        assert face.workgroup_size <= limits.max_invocations, shader
    x, w, _ = reference.arrays(problem)
    reference.check(problem, call(case, x, w, device=default_limits), x, w)
    # With half of that memory the large tiles are gone.
    half = replace(PLANNED, limits=replace(limits, max_workgroup_storage=8192))
    fewer = survey(problem, half).candidates
    assert len(fewer) < len(found.candidates)
    for candidate in fewer:
        for step in lower(problem, candidate, half).passes:
            assert interface(specialise(step.shader)).workgroup_bytes <= 8192, candidate
