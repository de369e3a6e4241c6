"""A convolution as gathers: which input pixel lies under which tap, by brute force."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from contract import problems
from hypothesis import given
from hypothesis import strategies as st

from wgpuconv.algorithms import find
from wgpuconv.algorithms.base import strides
from wgpuconv.algorithms.phases import (
    MOST_PHASES,
    NEVER,
    Axis,
    Phase,
    SharedGather,
    Tap,
    count_phases,
    phases,
    shared_gathers,
    tap_table,
)
from wgpuconv.errors import ProblemError
from wgpuconv.facts import Facts
from wgpuconv.problem import ConvProblem

Product = tuple[int, int, int, int, int, int]
"""Output row, output column, input row, input column, r, s."""


def by_definition(p: ConvProblem) -> set[Product]:
    """Every product of an image, read off the definition of the operation."""
    found = set()
    for r in range(p.r):
        for s in range(p.s):
            down, right = r * p.dilation[0] - p.padding[0], s * p.dilation[1] - p.padding[2]
            if p.transposed:
                for ih in range(p.h):
                    for iw in range(p.w):
                        oh, ow = ih * p.stride[0] + down, iw * p.stride[1] + right
                        if 0 <= oh < p.out_h and 0 <= ow < p.out_w:
                            found.add((oh, ow, ih, iw, r, s))
            else:
                for oh in range(p.out_h):
                    for ow in range(p.out_w):
                        ih, iw = oh * p.stride[0] + down, ow * p.stride[1] + right
                        if 0 <= ih < p.h and 0 <= iw < p.w:
                            found.add((oh, ow, ih, iw, r, s))
    return found


def by_phases(p: ConvProblem) -> list[Product]:
    """Every product that the phases compute, those outside of the input left out."""
    return [
        (oh, ow, ih, iw, r, s)
        for phase in phases(p)
        for oh, ih, r in along(phase.h, p.h)
        for ow, iw, s in along(phase.w, p.w)
    ]


def along(axis: Axis, size: int) -> list[tuple[int, int, int]]:
    return [
        (axis.first + q * axis.step, q * axis.in_stride + tap.offset, tap.place)
        for q in range(axis.count)
        for tap in axis.taps
        if 0 <= q * axis.in_stride + tap.offset < size
    ]


def outputs(p: ConvProblem) -> list[tuple[int, int]]:
    return [
        (phase.h.first + i * phase.h.step, phase.w.first + j * phase.w.step)
        for phase in phases(p)
        for i in range(phase.h.count)
        for j in range(phase.w.count)
    ]


def touches_outside(phase: Phase, p: ConvProblem) -> tuple[bool, bool]:
    """For each axis, whether a tap of some output pixel lies outside of the input."""

    def outside(axis: Axis, size: int) -> bool:
        return len(along(axis, size)) < axis.count * len(axis.taps)

    return outside(phase.h, p.h), outside(phase.w, p.w)


def check(p: ConvProblem) -> None:
    written = outputs(p)
    assert len(written) == len(set(written)), "an output pixel is written twice"
    assert set(written) == {(i, j) for i in range(p.out_h) for j in range(p.out_w)}
    computed = by_phases(p)
    assert len(computed) == len(set(computed)), "a product is computed twice"
    assert set(computed) == by_definition(p)
    for phase in phases(p):
        crosses = phase.h.crosses_border(p.h), phase.w.crosses_border(p.w)
        assert crosses == touches_outside(phase, p)
        assert phase.pixels == phase.h.count * phase.w.count > 0
        assert phase.taps == len(phase.h.taps) * len(phase.w.taps)


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_phases_are_the_definition(problem: ConvProblem) -> None:
    check(problem)


PAIR = st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(
    op=st.sampled_from(["conv2d", "conv_transpose2d"]),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    taps=PAIR,
    stride=PAIR,
    dilation=PAIR,
    padding=st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(0, 4)] * 2)),
    output_padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_phases_of_random_problems_are_the_definition(
    op: str,
    size: tuple[int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    output_padding: tuple[int, int],
) -> None:
    try:
        problem = ConvProblem.from_call(
            op,  # type: ignore[arg-type]
            (1, 1, *size),
            (1, 1, *taps),
            stride=stride,
            dilation=dilation,
            padding=padding,
            output_padding=output_padding if op == "conv_transpose2d" else 0,
        )
    except ProblemError:
        return
    check(problem)


def test_no_product_with_an_inserted_zero_is_computed() -> None:
    """A phase has the taps that reach it and no other: stride 2 shares 9 taps among 4 phases."""
    p = ConvProblem.parse("conv_transpose2d n1 c1 h4 w4 k1 r3 s3 stride2 pad1")
    assert sorted(phase.taps for phase in phases(p)) == [1, 2, 2, 4]
    gap = ConvProblem.parse("conv_transpose2d n1 c1 h2 w2 k1 r1 s1 stride3")
    assert sorted(phase.taps for phase in phases(gap)) == [0] * 8 + [1]


def members(gather: SharedGather) -> list[Phase]:
    """The phases that share a gather, as its docstring puts it."""

    def axis_after(axis: Axis, after: int) -> Axis:
        taps = tuple(Tap(tap.place + after, tap.offset) for tap in axis.taps)
        return dataclasses.replace(axis, first=axis.first + after, taps=taps)

    return [
        Phase(axis_after(gather.phase.h, row), axis_after(gather.phase.w, column))
        for row in range(gather.rows)
        for column in range(gather.columns)
    ]


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_shared_gathers_are_all_phases(problem: ConvProblem) -> None:
    check_shared(problem)


def check_shared(problem: ConvProblem) -> list[tuple[int, int]]:
    """Returns the rows and columns of phases of each gather."""
    gathers = shared_gathers(problem)
    shared = [phase for gather in gathers for phase in members(gather)]
    assert sorted(shared, key=str) == sorted(phases(problem), key=str)
    assert sum(gather.phases for gather in gathers) == len(shared)
    return [(gather.rows, gather.columns) for gather in gathers]


@pytest.mark.parametrize(
    ("window", "shared"),
    [
        ("r2 s2 stride2", [(2, 2)]),
        ("r2 s3 stride2,3", [(2, 3)]),
        ("r1 s1 stride1", [(1, 1)]),
        # several taps, which all phases have under the same pixels
        ("r4 s6 stride2,3", [(2, 3)]),
        # ...and other pixels for each phase
        ("r4 s4 stride2 pad1", [(1, 1)] * 4),
        ("r3 s3 stride2 pad1", [(1, 1)] * 4),
        ("r2 s2 stride2 pad1", [(1, 1)] * 4),
        ("r2 s2 stride2 pad2", [(2, 2)]),
        # one row more of the first phase
        ("r3 s3 stride3 outpad1,0", [(1, 3), (2, 3)]),
        ("r3 s3 stride3 outpad0,2", [(3, 2), (3, 1)]),
        # phases without a tap
        ("r1 s1 stride2", [(1, 1)] * 4),
        ("r1 s2 stride3,2", [(1, 2), (2, 2)]),
        # taps under the same pixel, but not those of neighbours
        ("r2 s1 stride3,1 dil2,1", [(1, 1)] * 3),
    ],
)
def test_which_phases_share_a_gather(window: str, shared: list[tuple[int, int]]) -> None:
    problem = ConvProblem.parse(f"conv_transpose2d n1 c2 h5 w4 k3 {window}")
    assert check_shared(problem) == shared


@pytest.mark.parametrize("block", [1, 2, 32])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("problem", [p for p in problems() if p.groups > 1], ids=str)
def test_tap_tables_point_at_the_right_elements(
    problem: ConvProblem, layout: str, block: int
) -> None:
    """Each row's offsets, applied to arrays whose elements are their own coordinates."""
    p = problem.with_(layout=layout)
    x = strides(p)
    spatial = p.h * p.w
    image = np.arange(p.c * spatial).reshape(p.c, p.h, p.w)
    if layout == "NHWC":
        image = np.arange(p.c * spatial).reshape(p.h, p.w, p.c).transpose(2, 0, 1)
    weight = np.arange(np.prod(p.weight_shape)).reshape(p.weight_shape)
    for phase in phases(p):
        count = p.c_group * phase.taps
        table = np.frombuffer(tap_table(p, phase, x, count + 3, block=block), "<i4")
        table = table.reshape(-1, 4)
        rows = [
            (c, h, w)
            for first in range(0, p.c_group, block)
            for h in phase.h.taps
            for w in phase.w.taps
            for c in range(first, min(first + block, p.c_group))
        ]
        never = int(np.int32(NEVER))
        assert table[count:].tolist() == [[0, never, k, 0] for k in range(count, count + 3)]
        assert (np.diff(table[:count, 3]) > 0).all()  # in the order of memory
        packed = {k: offset for _, _, k, offset in table[:count].tolist()}
        for k, (row, (c, h, w)) in enumerate(zip(table[:count].tolist(), rows, strict=True)):
            # The mask has one bit for the tap's row and one for its column, none of them NEVER's.
            down, right = phase.h.taps.index(h), phase.w.taps.index(w)
            assert row[1] == (1 << down) + (1 << (16 + right)) < 2**31
            if 0 <= h.offset < p.h and 0 <= w.offset < p.w:  # under output pixel 0 of group 0
                assert row[0] == image[c, h.offset, w.offset]
            tap = (c, 0) if p.transposed else (0, c)
            assert packed[k] == weight[(*tap, h.place, w.place)]


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_phases_are_counted_without_making_them(problem: ConvProblem) -> None:
    assert count_phases(problem) == len(phases(problem))


def test_a_stride_of_too_many_phases_is_refused() -> None:
    """A dispatch a phase: a stride of 1024 took half a minute to plan, a million to launch."""
    implicit = find("implicit_gemm")
    fits = ConvProblem.parse("conv_transpose2d n1 c1 h4 w4 k1 r3 s3 stride32")
    assert count_phases(fits) == MOST_PHASES
    assert implicit.refusal(fits, Facts()) is None
    large = ConvProblem.parse("conv_transpose2d n1 c1 h4 w4 k1 r3 s3 stride1024")
    reason = implicit.refusal(large, Facts())
    assert reason is not None
    assert "got 1048576 (stride 1024,1024)" in reason
