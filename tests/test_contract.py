"""What every registered algorithm must keep, whatever it is; nothing here names one without need.

An algorithm that is added to the registry is tested with no edit. Kernels are compiled on a
software driver in seconds each, so every configuration runs once, on problems of many shapes
only the quick ones do; on hardware (``-m gpu``) all configurations meet all modes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from contract import (
    FINITE,
    PLANNED,
    QUICK_TEXT,
    Runner,
    longest_kernel,
    lowered,
    problems,
    quick_configs,
    verify,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st

import wgpuconv
from wgpuconv import Device
from wgpuconv.algorithms import ALGORITHMS, Algorithm, find
from wgpuconv.algorithms.tiles import FMA_ORDERS
from wgpuconv.errors import AlgorithmRefusedError, ProblemError
from wgpuconv.facts import Facts
from wgpuconv.plan import Config, Shader
from wgpuconv.problem import ACTIVATIONS, Activation, ConvProblem
from wgpuconv.shader import load, shader_names, specialise

MODES = ("device", "checked", "default_limits")

PLAIN = ((None, None), (FMA_ORDERS[0], True))
"""Order of multiply-adds and last barrier of configurations that stand for others like them."""

WIDE = [
    # Several tiles of every size in both directions and several steps, none of them full.
    ConvProblem.parse(text)
    for text in (
        "conv2d n2 c37 h13 w17 k133 r3 s3 pad1 bias",
        "conv2d n2 c37 h13 w17 k133 r1 s1 bias",
        "conv2d n2 c5 h13 w17 k10 r3 s3 pad1 groups5 bias",
        "conv_transpose2d n2 c37 h13 w17 k133 r3 s3 stride2 pad1 bias",
        "conv2d n2 c40 h13 w17 k136 r3 s3 pad1 bias nhwc",  # by kernels of its own
    )
]

EDGED = [
    # As wide, for algorithms whose tiles depend on the kernel, the stride or the groups.
    ConvProblem.parse(text)
    for text in (
        "conv2d n2 c35 h13 w17 k133 r5 s5 pad2 bias",
        "conv2d n2 c37 h27 w33 k70 r7 s7 stride2 pad3 bias",
        "conv2d n2 c134 h13 w17 k130 r3 s3 pad1 groups2 bias",
        "conv2d n2 c37 h13 w17 k133 r3 s5 pad0,2 bias",
        "conv2d n2 c5 h13 w20 k10 r3 s3 pad1 groups5 bias",  # rows of whole vectors
        "conv2d n2 c9 h13 w18 k37 r3 s3 pad1 bias",  # and of pairs, by many filters
    )
]


def accepting(problem: ConvProblem) -> list[Algorithm]:
    return [a for a in ALGORITHMS if a.refusal(problem, PLANNED) is None]


def shares(text: str) -> pytest.MarkDecorator:
    """Tests with the same text run in one process, so that what they compile is shared."""
    return pytest.mark.xdist_group(f"{zlib.crc32(text.encode()):08x}")


@pytest.mark.xdist_group("of one")
def test_groups_reach_the_workers(request: pytest.FixtureRequest) -> None:
    """Else every worker compiles every kernel. The id is how pytest-xdist hands a group on."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@of one")


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Device:
    """The device of the mode that a test is parametrised with."""
    found: Device = request.getfixturevalue(request.param)
    return found


# ---- every configuration, once ----


def wide_cases() -> Iterator[Any]:
    """On the first problem that leads to them, each algorithm's kernels and bilinear transforms."""
    first: dict[tuple[Any, ...], ConvProblem] = {}
    for problem in (*WIDE, *EDGED):
        for algorithm in accepting(problem):
            for config in algorithm.configs(problem, PLANNED):
                plan = lowered(algorithm, problem, config)
                files = {step.shader.file for step in plan.passes}
                pairs = config.get("pairs")
                kind = (algorithm.name, problem.op, plan.bilinear, pairs, *sorted(files))
                if first.setdefault(kind, problem) == problem:
                    yield pytest.param(
                        algorithm,
                        problem,
                        config,
                        marks=shares(longest_kernel(plan)),
                        id=f"{problem.op}-{problem.layout}-{problem.r}x{problem.s}-{plan.label}",
                    )


@pytest.mark.parametrize(("algorithm", "problem", "config"), list(wide_cases()))
def test_every_configuration(
    device: Device, algorithm: Algorithm, problem: ConvProblem, config: Config
) -> None:
    verify(device, algorithm, problem, config)


def _rows(config: Config) -> int:
    return int(config["rows"])


@pytest.mark.xdist_group("largest depthwise kernel")
def test_the_largest_depthwise_kernel(device: Device) -> None:
    problem = ConvProblem.parse("conv2d n1 c2 h13 w12 k2 r11 s11 pad5,4 groups2 bias")
    depthwise = find("depthwise")
    verify(device, depthwise, problem, max(quick_configs(depthwise, problem), key=_rows))
    assert depthwise.refusal(problem.with_(r=12), PLANNED) == (
        "needs a kernel of at most 121 taps, got 132 (12 x 11)"
    )


def test_every_algorithm_has_a_wide_problem_for_every_operation() -> None:
    covered = {(a.name, p.op) for p in WIDE for a in accepting(p)}
    assert covered == {(a.name, op) for a in ALGORITHMS for op in a.ops}


def kernels(algorithm: Algorithm, problem: ConvProblem, facts: Facts) -> set[Shader]:
    plans = [
        lowered(algorithm, problem, config, facts) for config in algorithm.configs(problem, facts)
    ]
    return {step.shader for plan in plans for step in (*plan.prepare, *plan.passes)}


def test_every_kernel_offered_here_is_among_those_tested(device: Device) -> None:
    """Plans are listed before a device is open; this driver must not add a kernel to the list.

    (It may offer other numbers of splits, since those follow from its cores.)
    """
    if not device.facts.software:
        pytest.skip("hardware offers more orders: test_every_configuration_on_hardware")

    for problem in (*WIDE, *EDGED):
        for algorithm in accepting(problem):
            listed = kernels(algorithm, problem, PLANNED)
            assert kernels(algorithm, problem, device.facts) <= listed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("on", "dtype"),
    [("device", "f32"), ("device", "f16"), ("checked", "f32"), ("default_limits", "f32")],
    indirect=["on"],
)
@pytest.mark.parametrize("problem", [*WIDE, *EDGED], ids=str)
def test_every_configuration_on_hardware(
    on: Device, problem: ConvProblem, dtype: str, request: pytest.FixtureRequest
) -> None:
    """On the edged problems, those with a kernel that the wide ones do not have.

    The same steps in another order meet the device as it is, in f32: the checks, the limits and
    the dtype have no part in them, and a driver needs minutes for all combinations.
    """
    every = request.node.callspec.params["on"] == "device" and dtype == "f32"
    if dtype == "f16" and not on.facts.f16:
        pytest.skip(f"{on.name} has no shader-f16")
    met: set[Shader] = set()
    if problem in EDGED:
        for wide in (each.with_(dtype=dtype) for each in WIDE):
            met = met.union(*(kernels(a, wide, on.facts) for a in accepting(wide)))
    problem = problem.with_(dtype=dtype)
    found = [
        (algorithm, config, plan)
        for algorithm in accepting(problem)
        for config in algorithm.configs(problem, on.facts)
        if every or (config.get("order"), config.get("last_barrier")) in PLAIN
        for plan in (lowered(algorithm, problem, config, on.facts),)
        if any(step.shader not in met for step in (*plan.prepare, *plan.passes))
    ]
    assert found
    # A driver takes up to a second a kernel, and there are hundreds.
    on.backend.warm([plan for _, _, plan in found])
    for algorithm, config, _ in found:
        verify(on, algorithm, problem, config)


# ---- many problems ----


def fixed_cases(mode: str, dtype: str, *layouts: str) -> Iterator[Any]:
    """The fixed list, in each of the layouts or, with none given, in both by turns."""
    for number, plain in enumerate(problems()):
        for layout in layouts or (("NCHW", "NHWC")[number % 2],):
            problem = plain.with_(dtype=dtype, layout=layout)
            for algorithm in accepting(problem):
                yield pytest.param(
                    mode,
                    algorithm,
                    problem,
                    marks=shares(f"{mode} {dtype} {algorithm.name}"),
                    id=f"{mode}-{algorithm.name}-{problem}",
                )


@pytest.mark.parametrize(
    ("on", "algorithm", "problem"),
    [
        *fixed_cases("device", "f32", "NCHW", "NHWC"),
        *fixed_cases("device", "f16"),
        *fixed_cases("checked", "f32"),
        *fixed_cases("checked", "f16"),
        *fixed_cases("default_limits", "f32"),
    ],
    indirect=["on"],
)
def test_the_fixed_list(on: Device, algorithm: Algorithm, problem: ConvProblem) -> None:
    if problem.dtype == "f16" and not on.facts.f16:
        pytest.skip(f"{on.name} has no shader-f16")
    for config in quick_configs(algorithm, problem):
        verify(on, algorithm, problem, config)


@pytest.mark.parametrize(
    ("on", "algorithm", "problem"),
    list(fixed_cases("dawn", "f32")),
    indirect=["on"],
)
def test_the_fixed_list_on_dawn(on: Device, algorithm: Algorithm, problem: ConvProblem) -> None:
    # One configuration: what Dawn does otherwise is compile, and test_shader compiles all.
    verify(on, algorithm, problem, quick_configs(algorithm, problem)[0])


SIDE = st.integers(1, 3)
SPANS = st.tuples(SIDE, SIDE)
CALLS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "size": st.tuples(st.integers(1, 14), st.integers(1, 14)),
        "c_group": st.integers(1, 11),
        "k_group": st.integers(1, 15),  # few enough for one tile: one pipeline serves them all
        # Few kernels, since some are made for their taps.
        "taps": st.sampled_from([(1, 1), (3, 3), (2, 3), (1, 4), (4, 2)]),
        "stride": SPANS,
        "dilation": SPANS,
        "padding": st.tuples(
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
        ),
        "output_padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
        "groups": st.integers(1, 3),
        "layout": st.sampled_from(["NCHW", "NHWC"]),
        "bias": st.booleans(),
    }
)


def check_call(op: str, device: Device, call: dict[str, Any], *, only_many: bool = False) -> None:
    """One random call through the public API, by every algorithm that accepts it; with
    ``only_many``, by those that refuse it with one channel a group."""
    c, k = (call[name] * call["groups"] for name in ("c_group", "k_group"))
    shape = (call["n"], c, *call["size"])
    if call["layout"] == "NHWC":
        shape = (call["n"], *call["size"], c)
    first = (c, call["k_group"]) if op == "conv_transpose2d" else (k, call["c_group"])
    parameters = {
        name: call[name] for name in ("stride", "padding", "dilation", "groups", "layout")
    }
    if op == "conv_transpose2d":
        parameters["output_padding"] = call["output_padding"]
    try:
        problem = ConvProblem.from_call(
            op,  # type: ignore[arg-type]
            shape,
            (*first, *call["taps"]),
            bias_shape=(k,) if call["bias"] else None,
            **parameters,
        )
    except ProblemError:
        assume(False)
    function = getattr(wgpuconv, op)
    x, w, b = reference.arrays(problem)
    algorithms = accepting(problem)
    if only_many:
        few = accepting(problem.with_(c=problem.groups))
        algorithms = [algorithm for algorithm in algorithms if algorithm not in few]
        assert algorithms
    for algorithm in algorithms:
        got = function(x, w, b, **parameters, algorithm=algorithm.name, device=device)
        bilinear = device.choose(problem, algorithm=algorithm.name).plan.bilinear
        reference.check(problem, got, x, w, b, bilinear=bilinear, label=algorithm.name)


@pytest.mark.xdist_group("random conv2d")
@given(CALLS)
@example(
    {
        "n": 1,
        "size": (1, 1),
        "c_group": 1,
        "k_group": 1,
        "taps": (1, 1),
        "stride": (3, 3),
        "dilation": (1, 1),
        "padding": ((0, 0), (0, 0)),
        "output_padding": (0, 0),
        "groups": 1,
        "layout": "NCHW",
        "bias": False,
    }
)
def test_random_calls_of_conv2d(device: Device, call: dict[str, Any]) -> None:
    check_call("conv2d", device, call)


@pytest.mark.xdist_group("random conv2d of many channels")
@given(
    CALLS,
    st.integers(32, 66),
    st.sampled_from([((3, 3), 1), ((5, 5), 1), ((4, 5), 1), ((5, 6), 2)]),  # few pipelines
)
def test_random_calls_of_conv2d_with_many_channels(
    device: Device, call: dict[str, Any], c_group: int, taps: tuple[tuple[int, int], int]
) -> None:
    """By the algorithms that a few channels do not pay for."""
    more = {"c_group": c_group, "taps": taps[0], "stride": taps[1], "dilation": 1}
    check_call("conv2d", device, call | more, only_many=True)


@pytest.mark.xdist_group("random conv_transpose2d")
@given(CALLS)
def test_random_calls_of_conv_transpose2d(device: Device, call: dict[str, Any]) -> None:
    check_call("conv_transpose2d", device, call)


# ---- activations ----

ACTIVATION_SPECS: dict[str, Any] = {
    "leaky_relu": ("leaky_relu", 0.2),
    "clip": ("clip", -0.5, 0.75),
}
ENDINGS = [
    ConvProblem.parse(text)
    for text in (
        "conv2d n2 c9 h7 w5 k10 r3 s3 pad1 bias",
        "conv2d n2 c9 h7 w5 k10 r1 s1 bias",
        "conv2d n2 c9 h7 w5 k18 r3 s3 pad1 groups9 bias",
        "conv_transpose2d n2 c9 h7 w5 k10 r3 s3 stride2 bias",
        "conv2d n1 c40 h4 w5 k10 r3 s3 pad1 bias",  # long enough to be split
        # By kernels of NHWC.
        "conv2d n2 c8 h7 w5 k12 r3 s3 pad1 bias nhwc",
        "conv2d n2 c8 h7 w5 k12 r1 s1 bias nhwc",
        "conv2d n2 c8 h7 w5 k8 r3 s3 pad1 groups8 bias nhwc",
        "conv2d n1 c40 h4 w5 k12 r3 s3 pad1 bias nhwc",
    )
]


def ending(algorithm: Algorithm, problem: ConvProblem, config: Config) -> str:
    """The text of the kernel that applies the activation."""
    return specialise(lowered(algorithm, problem, config).passes[-1].shader)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # One dtype shows that the activation is computed in f32 before the output is rounded.
        pytest.param(name, dtype, marks=shares(f"activation {name} {dtype}"))
        for name in ACTIVATIONS
        for dtype in (("f32", "f16") if name == "relu" else ("f32",))
    ],
)
def test_activations(device: Device, name: str, dtype: str) -> None:
    if dtype == "f16" and not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    activation = Activation.of(ACTIVATION_SPECS.get(name, name))
    for plain in ENDINGS:
        problem = plain.with_(dtype=dtype, activation=activation)
        for algorithm in accepting(problem):
            configs = quick_configs(algorithm, problem)
            config = next((c for c in configs if c.get("splits", 1) != 1), configs[0])
            # Every kernel gets its activation in the same way; those that take seconds to compile
            # show it with one of them. A split sum ends in a kernel of its own, which is quick.
            if name == "gelu" or len(ending(algorithm, problem, config)) < QUICK_TEXT:
                verify(device, algorithm, problem, config)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.xdist_group("activations of extremes")
def test_activations_of_extremes(device: Device, name: str) -> None:
    """Far from zero an activation must not overflow; NaN stays NaN."""
    activation = Activation.of(ACTIVATION_SPECS.get(name, name))
    values = np.float32([0, 1e-3, 5, 20, 50, 80, 87, 100, 1e4, 1e30])
    values = np.concatenate([-values, values])
    problem = ConvProblem.parse(f"conv2d n1 c1 h1 w{values.size + 1} k1 r1 s1")
    problem = problem.with_(activation=activation)
    x = np.append(values, np.float32(np.nan)).reshape(problem.input_shape)
    w = np.ones(problem.weight_shape, np.float32)
    direct = find("direct")
    y = Runner(device, lowered(direct, problem, quick_configs(direct, problem)[0]))(x, w, None)
    assert np.isnan(y[..., -1]).all()
    finite = problem.with_(w=values.size)
    reference.check(finite, y[..., :-1], x[..., :-1], w, exact=True, label=name)


# ---- residuals ----

RESIDUALS = [
    ConvProblem.parse(f"{text} act:relu residual")
    for text in (
        "conv2d n2 c33 h7 w5 k10 r3 s3 pad1 bias",
        "conv2d n2 c9 h8 w6 k10 r3 s3 pad1",  # rows of pairs, images of fours
        "conv2d n2 c9 h7 w5 k10 r1 s1 bias",
        "conv2d n2 c9 h8 w6 k10 r1 s1",
        "conv2d n2 c9 h7 w5 k18 r3 s3 pad1 groups9 bias",
        "conv2d n2 c9 h8 w6 k18 r3 s3 pad1 groups9",
        "conv_transpose2d n2 c9 h7 w5 k10 r3 s3 stride2 bias",
        "conv2d n1 c40 h4 w5 k20 r3 s3 pad1 bias",  # long enough to be split
        "conv2d n1 c40 h4 w5 k12 r3 s3 pad1 bias nhwc",
        "conv2d n2 c8 h7 w5 k12 r1 s1 bias nhwc",
        "conv2d n2 c8 h7 w5 k8 r3 s3 pad1 groups8 bias nhwc",
        "conv_transpose2d n2 c8 h7 w5 k12 r3 s3 stride2 bias nhwc",
    )
]


def residual_cases() -> Iterator[Any]:
    """Of each algorithm, every kernel that writes its output; in f16 those that compile fast (that
    the others compile too, test_shader shows)."""
    seen: set[tuple[str, str, str]] = set()
    for problem in RESIDUALS:
        for algorithm in accepting(problem):
            for config in quick_configs(algorithm, problem):
                shader = lowered(algorithm, problem, config).passes[-1].shader
                kind = (algorithm.name, problem.op, shader.file)
                if kind in seen:
                    continue
                seen.add(kind)
                quick = len(specialise(shader)) < QUICK_TEXT
                for dtype in ("f32", "f16") if quick else ("f32",):
                    yield pytest.param(
                        algorithm,
                        problem.with_(dtype=dtype),
                        config,
                        marks=shares(shader.file),
                        id="-".join((dtype, *kind)),
                    )


@pytest.mark.parametrize(("algorithm", "problem", "config"), list(residual_cases()))
def test_residuals(
    device: Device, algorithm: Algorithm, problem: ConvProblem, config: Config
) -> None:
    if problem.dtype == "f16" and not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    verify(device, algorithm, problem, config)


def test_every_kernel_that_writes_outputs_is_tested_with_a_residual() -> None:
    tested = {case.id.rsplit("-", 1)[-1] for case in residual_cases()}
    assert tested == {name for name in shader_names() if "fn add_residual" in load(name)}
    endings = {
        lowered(algorithm, problem, config).passes[-1].shader.file
        for problem in (*WIDE, *EDGED, *problems())
        for algorithm in accepting(problem)
        for config in quick_configs(algorithm, problem)
    }
    assert endings <= tested


# ---- orders of arithmetic, barriers, unrolling ----


def kernel_variants() -> Iterator[Any]:
    """Every value of the choices that a software driver is not offered, on the smallest tile."""
    for mode in ("device", "checked"):
        for name in ("im2col_gemm", "implicit_gemm"):
            for order in FMA_ORDERS:
                for barrier in (True, False):
                    # Written out, a kernel takes seconds to compile: once an algorithm and mode.
                    unroll = (order, barrier) == {
                        ("device", "im2col_gemm"): ("zigzag", False),
                        ("device", "implicit_gemm"): ("halves", False),
                        ("checked", "im2col_gemm"): ("halves", True),
                        ("checked", "implicit_gemm"): ("zigzag", False),
                    }[mode, name]
                    choices = {"order": order, "last_barrier": barrier, "unroll": unroll}
                    label = f"{mode}-{name}-{order}-barrier={barrier}-unroll={unroll}"
                    yield pytest.param(mode, name, choices, id=label)


@pytest.mark.parametrize(("on", "name", "choices"), list(kernel_variants()), indirect=["on"])
def test_orders_barriers_and_unrolling(on: Device, name: str, choices: Config) -> None:
    algorithm = find(name)
    for text in (
        "conv2d n2 c11 h6 w7 k35 r3 s3 pad1 bias",
        "conv2d n2 c12 h6 w7 k36 r3 s3 pad1 bias nhwc",  # by a kernel of its own
    ):
        problem = ConvProblem.parse(text)
        config = quick_configs(algorithm, problem)[0]
        assert config["tile_m"] == config["tile_p"] == 32
        verify(on, algorithm, problem, config | choices)


# ---- limits of memory and of the grid ----

CHUNKED = [
    ConvProblem.parse("conv2d n5 c3 h9 w8 k7 r3 s3 pad1 bias"),
    ConvProblem.parse("conv2d n3 c4 h9 w8 k6 r3 s2 stride2,1 pad1,2,0,3 groups2 bias nhwc"),
    ConvProblem.parse("conv_transpose2d n5 c3 h6 w7 k4 r3 s3 stride2 pad1 outpad1 bias"),
    ConvProblem.parse("conv_transpose2d n2 c4 h9 w5 k4 r3 s2 stride1,3 dil3,1 groups2 bias nhwc"),
    ConvProblem.parse("conv_transpose2d n1 c2 h7 w3 k3 r2 s2 stride5,2"),  # rows without a tap
]


@pytest.mark.parametrize("problem", CHUNKED, ids=str)
@pytest.mark.xdist_group("chunks")
def test_scratch_memory_stays_within_its_limit(device: Device, problem: ConvProblem) -> None:
    """Whole images with a remainder, then parts of an image, then a refusal."""
    chunked = 0
    for algorithm in accepting(problem):
        config = quick_configs(algorithm, problem)[0]
        whole = lowered(algorithm, problem, config)
        if not whole.workspace:
            continue
        chunked += 1
        image = whole.workspace // problem.n
        for limit in (whole.workspace, 2 * image + 8, image, image - 4, image // 3, image // 7):
            try:
                plan = lowered(algorithm, problem, config, workspace_limit=limit)
            except AlgorithmRefusedError:
                if limit > image // 2:
                    raise
                continue  # not even one row of an image fits
            assert plan.workspace <= limit
            chunks = len(plan.passes) / len(whole.passes)
            per_chunk = limit // image
            if per_chunk:
                assert chunks == -(-problem.n // per_chunk)
            else:
                assert chunks >= 2 * problem.n
            verify(device, algorithm, problem, config, workspace_limit=limit)
        with pytest.raises(AlgorithmRefusedError, match="bytes of workspace for one output"):
            lowered(algorithm, problem, config, workspace_limit=8)
    assert chunked, "no algorithm of this operation takes scratch memory"


@pytest.mark.parametrize("problem", WIDE, ids=str)
@pytest.mark.xdist_group("folded grids")
def test_grids_fold_into_two_dimensions(device: Device, problem: ConvProblem) -> None:
    """More workgroups than one dimension may have, where that limit is a small number."""
    problem = problem.with_(n=1, layout="NHWC")
    for algorithm in accepting(problem):
        config = quick_configs(algorithm, problem)[0]
        plan = lowered(algorithm, problem, config, device.facts)
        most = math.isqrt(max(step.grid[0] for step in (*plan.prepare, *plan.passes))) + 2
        facts = replace(device.facts, limits=replace(device.facts.limits, max_workgroups=most))
        plan = verify(device, algorithm, problem, config, facts=facts)
        grids = [step.grid for step in (*plan.prepare, *plan.passes)]
        assert max(max(grid) for grid in grids) <= most
        assert any(grid[1] > 1 for grid in grids), plan.label


# ---- special values ----

SPECIAL = [
    ConvProblem.parse(text)
    for text in (
        "conv2d n2 c3 h9 w8 k5 r3 s3 pad1",
        "conv2d n2 c5 h6 w7 k9 r1 s1",
        "conv2d n2 c4 h8 w9 k8 r3 s3 stride2 pad2,1 groups4",
        "conv2d n2 c33 h9 w8 k5 r3 s3 pad1",
        "conv2d n2 c64 h15 w17 k6 r5 s6 stride1,2 pad2 groups2 nhwc",
        "conv2d n2 c6 h9 w8 k4 r2 s3 stride2,1 pad1,0 dil1,2 groups2 nhwc",
        "conv2d n2 c12 h9 w8 k8 r3 s3 pad1 nhwc",
        "conv2d n2 c12 h6 w7 k8 r1 s1 nhwc",
        "conv2d n2 c8 h8 w9 k8 r3 s3 stride2 pad2,1 groups8 nhwc",
        "conv_transpose2d n2 c12 h5 w6 k8 r3 s3 stride2 pad1 nhwc",
        "conv_transpose2d n2 c3 h5 w6 k5 r3 s3 stride2 pad1",
        "conv_transpose2d n2 c6 h5 w4 k4 r2 s3 stride3,2 dil1,2 groups2 nhwc",
    )
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("problem", SPECIAL, ids=str)
@pytest.mark.xdist_group("special values")
def test_a_special_pixel_spoils_only_what_it_reaches(
    device: Device, problem: ConvProblem, value: float
) -> None:
    """The first element, which kernels read for what lies outside, and the last one.

    A bilinear algorithm may spoil the whole tiles that it reads the element for, and no more; inf
    becomes NaN where its terms differ in sign.
    """
    x, w, _ = reference.arrays(problem)
    w[w == 0] = 1  # so that each tap passes the special value on
    for at in (0, x.size - 1):
        clean, special, reach = x.copy(), x.copy(), np.zeros_like(x)
        clean.flat[at], special.flat[at], reach.flat[at] = 0, value, 1
        reached = reference.linear(problem, reach, np.ones_like(w)) > 0
        assert reached.any()
        assert not reached.all()
        for algorithm in accepting(problem):
            for config in quick_configs(algorithm, problem):
                plan = lowered(algorithm, problem, config, device.facts)
                run = Runner(device, plan)
                want, got = run(clean, w, None, poison=FINITE), run(special, w, None)
                if plan.bilinear:
                    spoilt = reference.tiles_with(problem, plan.bilinear, reach)
                    assert not spoilt.all()
                    wrong = reached & np.isfinite(got)
                else:
                    spoilt = reached
                    wrong = (np.isnan(got) if np.isnan(value) else np.isinf(got)) != reached
                assert not wrong.any(), f"{plan.label}: {wrong.sum()} elements"
                np.testing.assert_array_equal(got[~spoilt], want[~spoilt], plan.label)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("problem", SPECIAL, ids=str)
@pytest.mark.xdist_group("special values")
def test_a_special_weight_spoils_only_its_filter(
    device: Device, problem: ConvProblem, value: float
) -> None:
    x, w, _ = reference.arrays(problem)
    clean, special = w.copy(), w.copy()
    clean[-1, -1, -1, -1], special[-1, -1, -1, -1] = 0, value  # the last filter's last weight
    other = [slice(None)] * 4
    other[1 if problem.layout == "NCHW" else 3] = slice(0, -1)
    for algorithm in accepting(problem):
        for config in quick_configs(algorithm, problem):
            plan = lowered(algorithm, problem, config, device.facts)
            run = Runner(device, plan)
            want, got = run(x, clean, None, poison=FINITE), run(x, special, None)
            assert not np.isfinite(got).all(), plan.label
            np.testing.assert_array_equal(got[tuple(other)], want[tuple(other)], plan.label)
