"""Whether a peer's output counts as right: its own precision's errors pass, mistakes do not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from reference import activate, linear

from wgpuconv.bench.accuracy import UNITS, Judge
from wgpuconv.problem import ConvProblem
from wgpuconv.tuning.verify import Check

PROBLEMS = {
    "short": "conv2d f32 n2 c3 h9 w8 k8 r3 s3 stride1 pad1 bias",
    "long": "conv2d f32 n1 c256 h6 w7 k8 r3 s3 stride1 pad1 bias act:relu",
    "nhwc": "conv2d f32 n1 c16 h6 w7 k8 r3 s3 stride2 pad1 nhwc bias act:gelu",
}


def judged(problem: str) -> Judge:
    return Judge(Check(ConvProblem.parse(problem)))


def computed(judge: Judge, *, bias: bool = True, rounding: Any = None) -> np.ndarray:
    """In float64, of factors that were rounded."""
    p = judge.problem
    x, w = (judge.check.data[role].astype(np.float64) for role in ("input", "weight"))
    if rounding is not None:
        x, w = rounding(x), rounding(w)
    y = linear(p, x, w)
    if bias:
        b = judge.check.data["bias"].astype(np.float64)
        y = y + (b if p.layout == "NHWC" else b[:, None, None])
    return activate(p.activation, y).astype(np.float32)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """As hardware may: the last 13 bits of a float32 are cut off."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = (x.astype(np.float32).view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", PROBLEMS)
def test_rounded_factors_pass_in_their_own_precision_alone(name: str) -> None:
    judge = judged(PROBLEMS[name])
    for precision, rounding in {"tf32": to_tf32, "bf16": to_bf16}.items():
        output = computed(judge, rounding=rounding)
        error = judge.error(output[judge.points], precision)
        assert UNITS[precision] / 16 < error < 8 * UNITS[precision]
        with pytest.raises(ValueError, match="wrong result"):
            judge.error(output[judge.points], "f32")


@pytest.mark.parametrize("name", [n for n in PROBLEMS if n != "nhwc"])
def test_sums_in_float16_pass_as_f16(name: str) -> None:
    judge = judged(PROBLEMS[name].replace("f32", "f16"))
    p, data = judge.problem, judge.check.data
    x = np.pad(data["input"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    sums = np.zeros(p.out_shape, np.float16)
    for c in range(p.c):
        for r in range(p.r):
            for s in range(p.s):
                tap = data["weight"][:, c, r, s][None, :, None, None]
                sums += x[:, c, None, r : r + p.out_h, s : s + p.out_w] * tap
    sums += data["bias"][:, None, None]
    output = activate(p.activation, sums.astype(np.float64)).astype(np.float16)
    assert judge.error(output[judge.points], "f16") > 2.0**-13


@pytest.mark.parametrize("precision", ["f32", "tf32", "f16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_mistakes_are_wrong_in_every_precision(name: str, precision: str) -> None:
    judge = judged(PROBLEMS[name])
    right = computed(judge)
    judge.error(right[judge.points], precision)
    p = judge.problem
    mistakes = {
        "no bias": computed(judge, bias=False),
        "a channel off": np.roll(right, 1, axis=3 if p.layout == "NHWC" else 1),
        "a pixel off": np.roll(right, 1, axis=2),
        "zeros": np.zeros_like(right),
        "not a number": np.full_like(right, np.nan),
    }
    said = {what: verdict(judge, output, precision) for what, output in mistakes.items()}
    for what, text in said.items():
        assert re.match(r"wrong result: \d+ of \d+ sampled elements; .* \+- ", text), what


def verdict(judge: Judge, output: np.ndarray, precision: str) -> str:
    try:
        judge.error(output[judge.points], precision)
    except ValueError as error:
        return str(error)
    return "right"


def test_what_leaves_the_bias_out_is_judged_without_it() -> None:
    judge = judged(PROBLEMS["long"])
    output = computed(judge, bias=False)
    assert judge.error(output[judge.points], "f32", bias=False) < 1e-6
