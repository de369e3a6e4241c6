"""The same backend through Dawn: every shader, every algorithm, times and errors.

The other tests that take a provider (embedding, robustness) run on Dawn as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import arrays, check

from wgpuconv import ConvProblem, Device, Tensor, conv2d, tensor
from wgpuconv.algorithms import ALGORITHMS
from wgpuconv.errors import DeviceError, ShaderError
from wgpuconv.facts import Facts
from wgpuconv.planner import survey
from wgpuconv.shader import load, shader_names

PROBLEMS = [
    "conv2d f32 n2 c8 h9 w7 k12 r3 s3 stride2 pad1 bias act:relu",
    "conv2d f32 n2 c8 h5 w7 k12 r1 s1 stride1 pad0 bias",
    "conv2d f32 n2 c8 h9 w7 k8 r3 s3 stride1 pad1 groups8 bias",
    "conv_transpose2d f32 n2 c8 h5 w4 k6 r3 s3 stride2 pad1 outpad1 bias",
    "conv2d f16 n2 c8 h9 w7 k12 r3 s3 stride2 pad1 bias",
    "conv2d f32 n2 c32 h9 w7 k12 r3 s3 stride1 pad1 bias",  # channels enough for transforms
]
CASES = [
    (text, name)
    for text in PROBLEMS
    for name in dict.fromkeys(
        c.algorithm for c in survey(ConvProblem.parse(text), Facts(f16=True)).candidates
    )
]


@pytest.mark.parametrize("name", shader_names())
def test_each_shader_compiles_as_it_stands(dawn: Device, name: str) -> None:
    dawn.backend.gpu_device.create_shader_module(code=load(name))


def test_every_algorithm_has_a_case() -> None:
    assert {name for _, name in CASES} == {a.name for a in ALGORITHMS}


@pytest.mark.parametrize(("text", "name"), CASES)
def test_each_algorithm(dawn: Device, text: str, name: str) -> None:
    problem = ConvProblem.parse(text)
    if problem.dtype == "f16" and not dawn.facts.f16:
        pytest.skip(f"{dawn.name} has no shader-f16 through Dawn")
    x, w, b = arrays(problem)
    compiled = dawn.compiled(problem, algorithm=name)
    buffers = {role: tensor(v, dawn) for role, v in (("input", x), ("weight", w), ("bias", b))}
    got = np.full(problem.out_shape, np.nan, x.dtype)  # poisoned: what is not written shows
    buffers["out"] = out = tensor(got, dawn)
    dawn.backend.run(compiled, {role: value.buffer for role, value in buffers.items()})
    bilinear = compiled.plan.bilinear
    check(problem, out.numpy(), x, w, b, bilinear=bilinear, label=f"{name} on Dawn")


def test_times_are_fine_grained(dawn: Device) -> None:
    """Dawn quantises time stamps to 65 us unless told otherwise."""
    if "timestamp-query" not in dawn.backend.gpu_device.features:
        pytest.skip(f"{dawn.name} has no timestamp-query")
    problem = ConvProblem.parse("conv2d f32 n1 c4 h12 w12 k4 r3 s3 stride1 pad1")
    compiled = dawn.compiled(problem, algorithm="direct")
    x, w, _ = arrays(problem)
    held = [tensor(x, dawn), tensor(w, dawn), Tensor.empty(problem.out_shape, device=dawn)]
    buffers = dict(zip(("input", "weight", "out"), (t.buffer for t in held), strict=True))
    trial = (compiled, buffers)
    dawn.backend.time([trial], repeats=[1])
    times = dawn.backend.time([trial] * 12, repeats=[1] * 12)
    assert all(0 < t < 10 for t in times)
    assert any(abs(t / 65.536e-6 - round(t / 65.536e-6)) > 1e-3 for t in times), times


def test_a_bad_shader_is_a_shader_error(dawn: Device) -> None:
    text = "@compute @workgroup_size(1) fn main() { let x: f32 = 1u; }"
    for wrong in (text, "this is no shader @workgroup_size(1)"):
        with pytest.raises(ShaderError, match="did not compile on this driver"):
            dawn.backend._build(wrong)


def test_a_refusal_is_a_device_error(dawn: Device) -> None:
    """What Dawn raises comes in our words, at the call that caused it; the device stays usable."""
    gpu = dawn.backend.gpu_device
    buffers = [gpu.create_buffer(size=16, usage="COPY_SRC|COPY_DST") for _ in range(2)]
    encoder = gpu.create_command_encoder()
    encoder.copy_buffer_to_buffer(buffers[0], 0, buffers[1], 0, 64)
    with pytest.raises(DeviceError, match=r"refused the call: .*size"), dawn.backend._guard:
        encoder.finish()
    one = np.ones((1, 1, 1, 1), np.float32)
    assert conv2d(one, one, device=dawn) == 1


def test_both_apis_in_one_process(device: Device, dawn: Device) -> None:
    x, w = np.ones((1, 2, 5, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)
    results: list[Any] = [conv2d(x, w, device=d) for d in (device, dawn, device, dawn)]
    assert all(np.array_equal(r, np.full((1, 3, 3, 3), 18)) for r in results)
    assert device.backend.identity != dawn.backend.identity  # timings are not shared
