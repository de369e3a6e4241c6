"""Plans: pure data, and the small arithmetic that all algorithms share."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wgpuconv.errors import AlgorithmRefusedError
from wgpuconv.facts import Limits
from wgpuconv.plan import Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from wgpuconv.problem import Activation, ConvProblem

PROBLEM = ConvProblem.parse("conv2d f32 n1 c3 h4 w4 k2 r3 s3 stride1 pad1")


def test_shader_of() -> None:
    shader = Shader.of("gemm", "f16", TILE_M=64, In="f16")
    assert shader == Shader("gemm", (("In", "f16"), ("TILE_M", 64)), "f16")
    assert shader == Shader.of("gemm", "f16", In="f16", TILE_M=64)
    assert hash(shader) == hash(Shader.of("gemm", "f16", In="f16", TILE_M=64))
    assert (shader.activation, shader.residual) == ("identity", False)
    ending = shader.ending_as(PROBLEM.with_(activation=Activation("tanh"), residual=True))
    assert (ending.activation, ending.residual) == ("tanh", True)
    assert ending.ending_as(PROBLEM) == shader


def test_plan_sums() -> None:
    one = Pass(Shader.of("direct"), (), (("x", Region("input")),), (1, 1, 1))
    plan = Plan(PROBLEM, "direct", {"a": 1, "b": "x"}, (one, one), (one,), 100, 20)
    assert plan.label == "direct(a=1,b=x)"
    assert plan.dispatches == 3
    assert plan.scratch == 120
    staged = dataclasses.replace(plan, staged=(("staged_out", 7), ("staged_input", 3)))
    assert staged.scratch == 130
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.workspace = 1  # type: ignore[misc]


def test_tables() -> None:
    tables = Tables(Limits(storage_alignment=32))
    first, second = tables.add(b"abc"), tables.add(bytes(33))
    assert (first.role, first.offset, first.size) == ("tables", 0, 4)  # whole words
    assert (second.offset, second.size) == (32, 36)
    assert tables.blob() == b"abc" + bytes(29) + bytes(36)
    assert Tables(Limits()).blob() == b""


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_rounding(value: int, to: int) -> None:
    assert align(value, to) % to == 0
    assert 0 <= align(value, to) - value < to
    assert ceil_div(value, to) * to == align(value, to)


@given(st.integers(1, 65535 * 65535))
def test_grid(workgroups: int) -> None:
    x, y, z = grid_1d(workgroups, Limits())
    assert z == 1
    assert max(x, y) <= 65535
    assert workgroups <= x * y < workgroups + max(x, y)  # hardly any idle workgroup


def test_grid_too_large() -> None:
    with pytest.raises(AlgorithmRefusedError, match=r"needs 17 workgroups, .*\(4 x 4\)"):
        grid_1d(17, Limits(max_workgroups=4))
    assert grid_1d(16, Limits(max_workgroups=4)) == (4, 4, 1)
