"""Tiles of the GEMM kernels, and which kernel a layout leads to. No GPU is needed."""

from __future__ import annotations

import pytest
from contract import PLANNED, lowered

from wgpuconv.algorithms import find
from wgpuconv.algorithms.depthwise import BLOCK, _block
from wgpuconv.algorithms.tiles import TILES, Tile
from wgpuconv.problem import ConvProblem


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_divide_as_the_kernels_need(tile: Tile) -> None:
    lanes_p = tile.p // tile.tp
    assert tile.m % tile.tm == tile.p % tile.tp == tile.tm % 4 == tile.tp % 4 == 0
    # Each invocation loads whole vec4s of both staged tiles, of each the same number.
    assert tile.k * tile.m // 4 % tile.workgroup == 0
    assert tile.k * tile.p // 4 % tile.workgroup == 0
    # What the kernels of NHWC say beside their constants: rows are staged with pixels exchanged
    # among eight.
    quads = tile.k // 4
    assert tile.k % 4 == 8 % quads == 0
    assert lanes_p % 8 == tile.workgroup // quads % 8 == 0


@pytest.mark.parametrize(
    ("algorithm", "text", "kernel"),
    [
        ("implicit_gemm", "conv2d n1 c8 h5 w5 k12 r3 s3 nhwc", "implicit_gemm_nhwc"),
        ("implicit_gemm", "conv2d n1 c8 h5 w5 k12 r3 s3", "implicit_gemm"),
        ("implicit_gemm", "conv2d n1 c8 h5 w5 k10 r3 s3 nhwc", "implicit_gemm"),
        ("implicit_gemm", "conv2d n1 c12 h5 w5 k12 r3 s3 groups2 nhwc", "implicit_gemm"),
        ("gemm_1x1", "conv2d n1 c8 h5 w5 k12 r1 s1 nhwc", "gemm_nhwc"),
        ("gemm_1x1", "conv2d n1 c6 h5 w5 k12 r1 s1 nhwc", "gemm"),
        ("gemm_1x1", "conv2d n1 c8 h5 w5 k10 r1 s1 nhwc", "gemm"),
        ("gemm_1x1", "conv2d n1 c8 h5 w5 k12 r1 s1", "gemm"),
        ("gemm_1x1", "conv2d n1 c6 h6 w6 k10 r1 s1", "gemm_vec4"),
        ("winograd", "conv2d n1 c33 h8 w8 k9 r3 s3 nhwc", "gemm_nhwc"),
        ("winograd", "conv2d n1 c33 h8 w8 k9 r3 s3", "gemm_vec4"),
        ("depthwise", "conv2d n1 c8 h5 w5 k8 r3 s3 groups8 nhwc", "depthwise_nhwc"),
        ("depthwise", "conv2d n1 c8 h5 w5 k16 r3 s3 groups8 nhwc", "depthwise"),
        ("depthwise", "conv2d n1 c6 h5 w5 k6 r3 s3 groups6 nhwc", "depthwise"),
        ("depthwise", "conv2d n1 c8 h9 w9 k8 r7 s7 groups8 nhwc", "depthwise"),
    ],
)
def test_layouts_lead_to_the_kernel_made_for_them(algorithm: str, text: str, kernel: str) -> None:
    problem, found = ConvProblem.parse(text), find(algorithm)
    for config in found.configs(problem, PLANNED):
        if config.get("pairs"):
            continue
        plan = lowered(found, problem, config)
        assert kernel in {step.shader.file for step in plan.passes}, plan.label
        assert {step.shader.file for step in (*plan.prepare, *plan.passes)} <= set(found.shaders)


def test_blocks_of_channels_divide_them() -> None:
    blocks = {quads: _block(quads) for quads in range(1, 200)}
    assert all(quads % block == 0 for quads, block in blocks.items())
    assert all(block in (quads, *range(4, BLOCK + 1)) for quads, block in blocks.items())
    assert (blocks[48], blocks[36], blocks[37], blocks[1]) == (16, 12, 37, 1)
