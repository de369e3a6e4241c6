"""Tensors larger than one binding: parts, the plans made of them, and their results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import NUMPY, arrays, check, convolve, residual

from wgpuconv import Device, planner, tiling
from wgpuconv.algorithms import ALGORITHMS, find
from wgpuconv.bilinear import cook_toom
from wgpuconv.errors import AlgorithmRefusedError, ProblemError, UnsupportedFeatureError
from wgpuconv.facts import WEBGPU_DEFAULTS, Facts, Limits
from wgpuconv.plan import Pass, Plan, Region, align
from wgpuconv.problem import ConvProblem
from wgpuconv.shader import interface, specialise


def small(binding: int, buffer: int = 1 << 24) -> Limits:
    return Limits(max_binding=binding, max_buffer=buffer)


# Each with a binding that it exceeds, and by which tensor.
CASES = [
    # split along the batch, images that end where a binding may begin
    ("conv2d f32 n9 c4 h8 w8 k8 r3 s3 pad1 bias act:relu", 8192),
    # ... and images that do not
    ("conv2d f32 n7 c3 h7 w9 k5 r3 s2 stride2,1 pad1,2,0,3 dil1,2 bias", 3072),
    ("conv2d f16 n5 c3 h7 w9 k5 r3 s3 pad1 nhwc", 1024),
    # filters and groups of one image
    ("conv2d f32 n2 c2 h16 w16 k24 r3 s3 pad1 bias", 8192),
    ("conv2d f32 n2 c2 h16 w16 k24 r3 s3 pad1 nhwc bias", 8192),
    ("conv2d f16 n1 c6 h15 w15 k15 r3 s3 groups3 bias", 2048),
    ("conv2d f32 n2 c24 h11 w13 k48 r3 s3 pad1 groups24 bias", 4096),
    ("conv2d f32 n1 c24 h11 w13 k24 r3 s3 stride2 pad1 groups24 nhwc bias", 4096),
    # a weight that is too large by itself, with its bias
    ("conv2d f32 n3 c16 h5 w5 k40 r3 s3 pad1 bias", 8192),
    ("conv2d f32 n3 c16 h5 w5 k40 r3 s3 pad1 nhwc bias", 8192),
    ("conv2d f16 n3 c15 h5 w5 k45 r3 s3 pad1 bias", 4096),
    ("conv_transpose2d f32 n2 c16 h4 w4 k40 r3 s3 stride2 pad1 bias", 8192),
    ("conv_transpose2d f32 n2 c16 h4 w4 k42 r3 s3 stride2 pad1 groups2 nhwc bias", 4096),
    # output rows
    ("conv2d f32 n2 c3 h41 w16 k5 r3 s3 pad1 bias", 4096),
    ("conv2d f32 n2 c3 h41 w16 k5 r5 s3 stride3,2 pad4,1,0,2 dil2,1 nhwc bias", 4096),
    ("conv2d f16 n1 c3 h41 w15 k5 r3 s3 pad1", 1024),
    ("conv2d f32 n1 c3 h9 w16 k2 r3 s3 pad30,1", 1024),
    ("conv_transpose2d f32 n2 c3 h20 w9 k4 r3 s3 stride2 pad1 outpad1 bias", 4096),
    ("conv_transpose2d f32 n1 c4 h20 w9 k4 r2 s2 stride5 pad1 outpad4 groups2 nhwc", 4096),
    ("conv_transpose2d f16 n1 c3 h20 w9 k3 r4 s3 stride1,3 pad2,1,0,2 dil3,1", 1024),
    # ... fewer than the stride, so that each part packs other taps of the same weight
    ("conv_transpose2d f32 n1 c2 h9 w200 k2 r7 s3 stride7,1 pad3,1", 4096),
    # a residual, cut as the output is: images in place, filters, rows and columns staged
    ("conv2d f32 n9 c4 h8 w8 k8 r3 s3 pad1 bias residual", 8192),
    ("conv2d f32 n2 c2 h16 w16 k24 r3 s3 pad1 nhwc bias residual", 8192),
    ("conv2d f32 n2 c3 h41 w15 k5 r3 s3 pad1 residual", 4096),
    ("conv_transpose2d f32 n2 c3 h20 w9 k4 r3 s3 stride2 pad1 outpad1 bias residual", 4096),
    ("conv_transpose2d f32 n1 c2 h3 w500 k3 r3 s3 stride2 pad1 residual", 4096),
    # columns: a signal of one row
    ("conv2d f32 n1 c2 h1 w3000 k3 r1 s5 pad0,2 bias", 4096),
    ("conv2d f32 n1 c2 h3 w900 k3 r3 s3 pad1 nhwc", 4096),
    ("conv_transpose2d f32 n1 c2 h3 w500 k3 r3 s3 stride2 pad1", 4096),
]

SIZES = st.integers(1, 9)


@st.composite
def problems(draw: Any) -> ConvProblem:
    """Any problem whose largest tensors have some ten thousand elements."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c, k = draw(st.integers(1, 6)) * groups, draw(st.integers(1, 8)) * groups
    op = draw(st.sampled_from(["conv2d", "conv_transpose2d"]))
    layout = draw(st.sampled_from(["NCHW", "NHWC"]))
    n, h, w = draw(st.integers(1, 5)), draw(st.integers(1, 24)), draw(st.integers(1, 24))
    r, s = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(st.tuples(st.integers(1, 5), st.integers(1, 3)))
    try:
        return ConvProblem.from_call(
            op,
            (n, c, h, w) if layout == "NCHW" else (n, h, w, c),
            (k, c // groups, r, s) if op == "conv2d" else (c, k // groups, r, s),
            dtype=draw(st.sampled_from(["f32", "f16"])),
            bias_shape=(k,) if draw(st.booleans()) else None,
            residual=draw(st.booleans()),
            stride=stride,
            padding=(
                draw(st.tuples(SIZES, SIZES))
                if op == "conv2d"
                else draw(st.sampled_from([(0, 0), (1, 0), (2, 1)])),
                draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
            ),
            dilation=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            output_padding=(draw(st.integers(0, stride[0] - 1)), 0)
            if op == "conv_transpose2d"
            else 0,
            groups=groups,
            layout=layout,
        )
    except ProblemError:
        assume(False)
        raise


def split(p: ConvProblem, limits: Limits) -> tuple[tiling.Part, ...]:
    try:
        return tiling.parts(p, limits)
    except UnsupportedFeatureError:
        assume(False)
        raise


def check_parts(p: ConvProblem, limits: Limits) -> None:
    """Parts fit, write each output element once, and make of their boxes what the whole is."""
    x, w, b = arrays(p)
    added = residual(p)
    want = convolve(p, x, w, b, added)
    got, written = np.full(p.out_shape, np.nan), np.zeros(p.out_shape, int)
    found = split(p, limits)
    for part in found:
        q = part.problem
        assert tiling.fits(q, limits)
        assert min(*q.padding, *q.output_padding) >= 0
        assert x[part.input].shape == q.input_shape
        assert w[part.weight].shape == q.weight_shape
        assert got[part.out].shape == q.out_shape
        own = None if b is None else b[part.bias]
        assert own is None or own.shape == (q.k,)
        like = None if added is None else added[part.out]
        got[part.out] = convolve(q, x[part.input], w[part.weight], own, like)
        written[part.out] += 1
    assert (written == 1).all()
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=150)
@given(problems(), st.sampled_from([512, 1024, 4096, 16384]))
def test_parts_of_any_problem(p: ConvProblem, binding: int) -> None:
    check_parts(p, small(binding))


@pytest.mark.parametrize(("text", "binding"), CASES)
def test_parts_of_cases(text: str, binding: int) -> None:
    p = ConvProblem.parse(text)
    assert not tiling.fits(p, small(binding))
    assert len(tiling.parts(p, small(binding))) > 1
    check_parts(p, small(binding))


# ---- plans, without a GPU ----


def check_plan(plan: Plan, limits: Limits) -> None:
    """Every binding is within the limits and its buffer, and no pass reads what it writes."""
    p = plan.problem
    tensors = {
        "input": p.input_bytes,
        "weight": p.weight_bytes,
        "bias": p.k * p.itemsize,
        "residual": p.residual_bytes,
        "out": p.out_bytes,
    }
    sizes = {
        "workspace": plan.workspace,
        "prepared": plan.prepared,
        "tables": len(plan.tables),
        **dict(plan.staged),
        **{role: align(size, 4) for role, size in tensors.items()},
    }
    for step in (*plan.prepare, *plan.passes):
        face = interface(specialise(step.shader))
        writable = {b.name for b in face.bindings if b.writable}
        roles: dict[bool, set[str]] = {True: set(), False: set()}
        for name, region in step.bindings:
            assert region.size is not None
            assert region.size > 0
            assert region.offset % limits.storage_alignment == 0, (step, region)
            assert align(region.size, 4) <= limits.max_binding, (step.shader.file, region)
            assert region.offset + align(region.size, 4) <= align(sizes[region.role], 4), region
            roles[name in writable].add(region.role)
        assert not roles[True] & roles[False]
        assert all(0 <= n <= limits.max_workgroups for n in step.grid)
    assert max(sizes.values()) <= limits.max_buffer


def lowered(p: ConvProblem, name: str, facts: Facts, workspace: int = 1 << 20) -> Plan | None:
    """The plan of the algorithm's smallest configuration; None where it refuses."""
    found = planner.survey(p, facts, workspace_limit=workspace)
    fitting = [c for c in found.candidates if c.algorithm == name]
    if not fitting:
        assert found.refusals[name]
        return None
    candidate = min(fitting, key=lambda c: (c.config.get("tile_m", 0), c.label))
    try:
        return planner.lower(p, candidate, facts, workspace_limit=workspace)
    except AlgorithmRefusedError:
        return None


@given(
    problems(),
    st.sampled_from([1024, 4096, 16384]),
    st.sampled_from([a.name for a in ALGORITHMS]),
)
def test_plans_of_any_problem(p: ConvProblem, binding: int, name: str) -> None:
    limits = small(binding)
    split(p, limits)
    plan = lowered(p, name, Facts(limits=limits, software=True, f16=True))
    assume(plan is not None)
    assert plan is not None
    if not tiling.fits(p, limits):
        check_plan(plan, limits)


@pytest.mark.parametrize(
    ("name", "text", "binding"),
    [
        ("depthwise", "conv2d n1 c1 h3 w305 k1 r3 s3", 1024),
        ("direct_tiled", "conv2d n1 c1 h3 w343 k9 r3 s3", 4096),
    ],
)
def test_parts_without_whole_pairs_are_refused(name: str, text: str, binding: int) -> None:
    """Configurations are those of the largest part; a part of odd width has no pairs."""
    p = ConvProblem.parse(text)
    facts = Facts(limits=small(binding), f16=True)
    assert {part.problem.w % 2 for part in split(p, facts.limits)} == {0, 1}
    found = planner.survey(p, facts, workspace_limit=1 << 20)
    pairs = [c for c in found.candidates if c.algorithm == name and c.config["pairs"]]
    assert pairs
    for candidate in pairs:
        with pytest.raises(AlgorithmRefusedError, match=r"whole vectors of \d pixels, got a part"):
            planner.lower(p, candidate, facts, workspace_limit=1 << 20)


def run_copies(plan: Plan, buffers: dict[str, np.ndarray], compute: Any) -> None:
    """What a device does with a plan of which only copies are real."""
    for step in plan.passes:
        regions = dict(step.bindings)
        if step.shader.file != "copy_planes":
            compute(step)
            continue
        v = dict(step.params)
        source, target = (_view(buffers, regions[name]) for name in ("src", "dst"))
        for plane in range(v["planes"]):
            at, to = v["src_base"] + plane * v["src_plane"], v["dst_base"] + plane * v["dst_plane"]
            source_run = source[at : at + v["count"]]
            assert source_run.size == v["count"], "a copy reads past its binding"
            target[to : to + v["count"]] = source_run


def _view(buffers: dict[str, np.ndarray], region: Region) -> np.ndarray:
    whole = buffers[region.role]
    assert region.size is not None
    size = whole.itemsize
    return whole[region.offset // size : (region.offset + region.size) // size]


@given(problems(), st.sampled_from([1024, 2048, 8192]))
def test_copies_bring_and_take_the_boxes(p: ConvProblem, binding: int) -> None:
    """Every part's pass meets its own boxes, wherever they are bound, and its result lands."""
    limits = small(binding)
    found = split(p, limits)
    assume(not tiling.fits(p, limits))
    facts = Facts(limits=limits, software=True)
    plan = lowered(p, "direct", facts)
    assert plan is not None
    x, w, b = arrays(p)
    added = residual(p)
    want = np.random.default_rng(2).standard_normal(p.out_shape).astype(NUMPY[p.dtype])
    buffers = {
        "input": x.ravel(),
        "weight": w.ravel(),
        "bias": np.zeros(0) if b is None else b,
        "residual": np.zeros(0) if added is None else added.ravel(),
        "out": np.full(want.size, np.nan, want.dtype),
        **{role: np.full(size // p.itemsize, np.nan, x.dtype) for role, size in plan.staged},
    }
    remaining = iter(found)

    def compute(step: Pass) -> None:
        part, regions = next(remaining), dict(step.bindings)
        np.testing.assert_array_equal(_view(buffers, regions["x"]), x[part.input].ravel())
        np.testing.assert_array_equal(_view(buffers, regions["weight"]), w[part.weight].ravel())
        if b is not None:
            np.testing.assert_array_equal(_view(buffers, regions["bias"]), b[part.bias].ravel())
        if added is not None:
            like = _view(buffers, regions["residual"])
            np.testing.assert_array_equal(like, added[part.out].ravel())
        _view(buffers, regions["y"])[:] = want[part.out].ravel()

    run_copies(plan, buffers, compute)
    assert next(remaining, None) is None
    np.testing.assert_array_equal(buffers["out"].reshape(p.out_shape), want)


def test_a_fitting_problem_is_one_part_and_a_plain_plan() -> None:
    p = ConvProblem.parse("conv2d f32 n2 c4 h8 w8 k8 r3 s3 pad1 bias")
    (part,) = tiling.parts(p, WEBGPU_DEFAULTS)
    assert part.problem == p
    facts = Facts(software=True)
    candidate = planner.survey(p, facts).candidates[0]
    direct = find(candidate.algorithm).lower(p, candidate.config, facts, facts.workspace_limit)
    assert planner.lower(p, candidate, facts) == direct


def test_batch_parts_are_bound_in_place() -> None:
    p = ConvProblem.parse("conv2d f32 n9 c4 h8 w8 k8 r3 s3 pad1 bias")
    plan = lowered(p, "direct", Facts(limits=small(8192), software=True))
    assert plan is not None
    assert plan.staged == ()
    assert len(plan.passes) == math.ceil(9 / 4)


def test_parts_share_packed_weights_and_workspace() -> None:
    p = ConvProblem.parse("conv2d f32 n9 c4 h8 w8 k8 r3 s3 pad1")
    facts = Facts(limits=small(8192), software=True)
    plan = lowered(p, "im2col_gemm", facts)
    assert plan is not None
    assert len(plan.prepare) == 1
    one = lowered(p.with_(n=4), "im2col_gemm", facts)
    assert one is not None
    assert (plan.prepared, plan.workspace) == (one.prepared, one.workspace)


def test_slabs_stay_within_the_workspace_limit() -> None:
    p = ConvProblem.parse("conv2d f32 n1 c3 h1000 w64 k3 r3 s3 pad1")
    facts = Facts(limits=small(1 << 18, 1 << 20), software=True)
    for limit in (1 << 16, 1 << 17):
        plan = lowered(p, "direct", facts, limit)
        assert plan is not None
        assert 0 < plan.scratch <= limit


@pytest.mark.parametrize(
    ("text", "limits", "match"),
    [
        ("conv2d f32 n1 c300 h3 w3 k2 r3 s3", small(4096), r"10800 bytes of the .*4096"),
        ("conv2d f32 n9 c4 h32 w32 k8 r3 s3", small(4096, 8192), r"input .* 147456 .*8192"),
        ("conv2d f32 n1 c1 h32 w32 k8 r3 s3", small(4096, 8192), r"output .* 28800 .*8192"),
    ],
)
def test_what_cannot_be_split_names_the_limit(text: str, limits: Limits, match: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=match):
        planner.survey(ConvProblem.parse(text), Facts(limits=limits))


def test_an_algorithm_must_take_every_part() -> None:
    # The middle slabs of this 1x1 convolution have no padding, the first one has.
    p = ConvProblem.parse("conv2d f32 n1 c8 h64 w16 k8 r1 s1 pad1,0,0,0")
    limits = small(8192)
    paddings = {part.problem.padding for part in tiling.parts(p, limits)}
    assert len(paddings) == 2
    found = planner.survey(p, Facts(limits=limits, software=True))
    assert "padding" in found.refusals["gemm_1x1"]


TILED = "conv2d f32 n1 c32 h{h} w{w} k16 r3 s3 pad1 bias"
"""A problem for Winograd's F(2, 3): its packed weight fits in 32 KiB, larger tiles' does not."""


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("h", "w", "more", "begins"),
    [
        (39, 16, (40, 16), "row 13, column 0"),  # 13 rows a part, and 14
        (1, 603, (1, 604), "row 0, column 201"),
    ],
)
def test_a_part_begins_with_a_tile(
    h: int, w: int, more: tuple[int, int], begins: str, layout: str
) -> None:
    p = ConvProblem.parse(TILED.format(h=h, w=w)).with_(layout=layout)
    facts = Facts(limits=small(1 << 15), software=True)
    candidates = planner.survey(p, facts).candidates
    candidate = next(c for c in candidates if c.algorithm == "winograd")
    with pytest.raises(AlgorithmRefusedError, match=rf"tile of 2 x 2 outputs, got .* {begins} "):
        planner.lower(p, candidate, facts)
    even = p.with_(h=more[0], w=more[1])
    assert len(tiling.parts(even, facts.limits)) == 3
    check_plan(planner.lower(even, candidate, facts), facts.limits)


def test_parts_share_the_scratch_of_transforms() -> None:
    """Those of different sizes take as much of either buffer as the largest one."""
    p = ConvProblem.parse(TILED.format(h=8, w=8)).with_(n=23)
    limits = small(1 << 15)
    facts = Facts(limits=limits, software=True)
    sizes = {part.problem.n for part in tiling.parts(p, limits)}
    assert len(sizes) == 2
    plan = lowered(p, "winograd", facts)
    assert plan is not None
    check_plan(plan, limits)
    alone = [lowered(p.with_(n=n), "winograd", facts) for n in sizes]
    assert plan.workspace == max(one.workspace for one in alone if one)
    product = max(dict(one.staged)["product"] for one in alone if one)
    assert dict(plan.staged) == {"product": product}
    assert len(plan.prepare) == 1
    assert plan.bilinear == (cook_toom(2, 3), cook_toom(2, 3))


# ---- on a device ----


def run(
    device: Device,
    plan: Plan,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    added: np.ndarray | None = None,
    *,
    keep: bool,
) -> np.ndarray:
    backend, p = device.backend, plan.problem
    out = np.full(p.out_shape, np.nan, NUMPY[p.dtype])
    given = {"input": x, "weight": w, "out": out}
    given |= {} if b is None else {"bias": b}
    given |= {} if added is None else {"residual": added}
    buffers = {role: backend.allocate(array.nbytes) for role, array in given.items()}
    for role, array in given.items():
        backend.write(buffers[role], array)
    compiled = backend.compile(plan)
    if keep and plan.prepared:
        prepared = {"prepared": backend.allocate(plan.prepared)}
        backend.prepare(compiled, {"weight": buffers["weight"], **prepared})
        backend.run(compiled, buffers | prepared)
        buffers |= prepared
    else:
        backend.run(compiled, buffers)
    backend.read(buffers["out"], out)
    for buffer in buffers.values():
        backend.free(buffer)
    return out


@pytest.mark.parametrize("name", ["direct", "implicit_gemm"])
@pytest.mark.parametrize(("text", "binding"), CASES)
def test_results(device: Device, text: str, binding: int, name: str) -> None:
    check_on_device(device, text, binding, name)


@pytest.mark.parametrize(
    ("text", "binding", "name"),
    [
        ("conv2d f32 n7 c3 h7 w9 k5 r3 s2 stride2,1 pad1,2,0,3 dil1,2 bias", 3072, "im2col_gemm"),
        ("conv2d f32 n2 c3 h41 w16 k5 r3 s3 pad1 bias", 4096, "im2col_gemm"),
        ("conv2d f32 n3 c15 h9 w9 k45 r1 s1 bias nhwc", 4096, "gemm_1x1"),
        ("conv2d f32 n2 c24 h11 w13 k48 r3 s3 pad1 groups24 bias", 4096, "depthwise"),
        ("conv_transpose2d f32 n2 c3 h20 w9 k4 r3 s3 stride2 pad1 outpad1 bias", 4096, "col2im"),
        # images bound in place, rows of either layout, columns
        (TILED.format(h=8, w=8).replace("n1", "n23"), 1 << 15, "winograd"),
        (TILED.format(h=40, w=16), 1 << 15, "winograd"),
        (TILED.format(h=40, w=15) + " nhwc", 1 << 15, "winograd"),
        (TILED.format(h=1, w=604), 1 << 15, "winograd"),
        (TILED.format(h=40, w=16), 1 << 15, "winograd_fused"),
        (TILED.format(h=1, w=604), 1 << 15, "winograd_fused"),
    ],
)
def test_results_of_others(device: Device, text: str, binding: int, name: str) -> None:
    check_on_device(device, text, binding, name)


def check_on_device(device: Device, text: str, binding: int, name: str) -> None:
    p = ConvProblem.parse(text)
    if p.dtype == "f16" and not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    limits = dataclasses.replace(device.facts.limits, max_binding=binding, storage_alignment=256)
    facts = dataclasses.replace(device.facts, limits=limits)
    plan = lowered(p, name, facts)
    if plan is None:
        assert name == "implicit_gemm"
        pytest.skip("its smallest tile is larger than so small a binding")
    check_plan(plan, limits)
    given = *arrays(p, exact=True), residual(p, exact=True)
    for keep in (False, True):
        got = run(device, plan, *given, keep=keep)
        check(p, got, *given, exact=True, bilinear=plan.bilinear, label=plan.label)


@pytest.mark.slow
def test_a_large_image_on_default_limits(default_limits: Device) -> None:
    """192 MiB of input where a binding may span 128 MiB."""
    p = ConvProblem.parse("conv2d f32 n1 c3 h4096 w4096 k1 r3 s3")
    plan = default_limits.choose(p, algorithm="direct").plan
    check_plan(plan, WEBGPU_DEFAULTS)
    assert plan.dispatches < 20
    x, w, b = arrays(p, exact=True)
    got = run(default_limits, plan, x, w, b, keep=False)
    np.testing.assert_array_equal(got, convolve(p, x, w, b))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["direct", "implicit_gemm", "im2col_gemm", "depthwise"])
@pytest.mark.parametrize(
    "text",
    [
        # the last element that 2 GiB hold, as one binding where the device has such a one
        "conv2d f16 n1 c1 h32767 w32768 k1 r3 s3 pad1",
        # more than that, in rows and in images
        "conv2d f32 n1 c1 h20001 w32768 k1 r3 s3 pad1",
        "conv2d f16 n3 c1 h20001 w20000 k1 r3 s3 pad1",
    ],
)
def test_tensors_of_two_gigabytes(device: Device, text: str, name: str) -> None:
    """No index overflows: the first and the last rows are right, and all are written."""
    p = ConvProblem.parse(text)
    if max(p.input_bytes, p.out_bytes) > device.facts.limits.max_buffer:
        pytest.skip(f"{device.name} has buffers of {device.facts.limits.max_buffer} bytes")
    plan = lowered(p, name, device.facts, 1 << 28)
    assert plan is not None
    rng = np.random.default_rng(4)
    x = np.tile(rng.integers(-4, 5, (1, 1, 1, p.w)).astype(NUMPY[p.dtype]), (p.n, 1, p.h, 1))
    for image in (0, p.n - 1):
        for rows in (slice(0, 64), slice(p.h - 64, p.h)):
            x[image, 0, rows] = rng.integers(-4, 5, (64, p.w))
    w = rng.integers(-4, 5, p.weight_shape).astype(x.dtype)
    got = run(device, plan, x, w, None, keep=False)
    assert np.isfinite(got[:, :, ::61]).all()
    edge = p.with_(n=1, h=64)
    for image in (0, p.n - 1):
        for rows, inner in ((slice(0, 64), slice(0, 63)), (slice(p.h - 64, p.h), slice(1, 64))):
            want = convolve(edge, x[image : image + 1, :, rows], w)
            np.testing.assert_array_equal(got[image, 0, rows][inner], want[0, 0, inner])
