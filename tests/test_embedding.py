"""Plans recorded into an application's own encoders, with its own buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import arrays, convolve, residual

from wgpuconv import ConvProblem, Device, Tensor, plan_conv2d, plan_conv_transpose2d, tensor
from wgpuconv.embed import EncodablePlan
from wgpuconv.errors import (
    AlgorithmRefusedError,
    DtypeError,
    MixedDevicesError,
    ProblemError,
    UnknownAlgorithmError,
)

FIRST = ConvProblem.parse("conv2d f32 n2 c3 h8 w7 k4 r3 s3 stride1 pad1 bias")
SECOND = ConvProblem.parse("conv_transpose2d f32 n2 c4 h8 w7 k2 r2 s2 stride2 pad0")

DOUBLE = """
@group(0) @binding(0) var<storage, read_write> data: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&data)) {
    data[id.x] = 2.0 * data[id.x];
  }
}
"""


def planned(problem: ConvProblem, device: Device, **more: Any) -> EncodablePlan:
    arguments = {"stride": problem.stride, "padding": problem.padding[::2]}
    arguments |= {"bias": problem.bias, "residual": problem.residual}
    make = plan_conv_transpose2d if problem.transposed else plan_conv2d
    return make(problem.input_shape, problem.weight_shape, device=device, **{**arguments, **more})


class Application:
    """Owns a wgpu device and buffers; knows wgpuconv only through its public names."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.gpu = device.backend.gpu_device
        self.usage = device.backend.provider.api.BufferUsage

    def buffer(self, data: Any = None, nbytes: int = 0) -> Any:
        usage = self.usage.STORAGE | self.usage.COPY_DST | self.usage.COPY_SRC
        if data is not None:
            data = np.ascontiguousarray(data)
            nbytes = data.nbytes
        made = self.gpu.create_buffer(size=nbytes, usage=usage)
        if data is not None:
            self.gpu.queue.write_buffer(made, 0, data)
        return made

    def read(self, buffer: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(self.gpu.queue.read_buffer(buffer), np.float32).reshape(shape)

    def double(self, compute: Any, buffer: Any) -> None:
        pipeline = self.gpu.create_compute_pipeline(
            layout="auto",
            compute={
                "module": self.gpu.create_shader_module(code=DOUBLE),
                "entry_point": "main",
            },
        )
        group = self.gpu.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": 0, "resource": {"buffer": buffer, "offset": 0}}],
        )
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(-(-buffer.size // 256))


@pytest.fixture(params=["wgpu", "dawn"])
def app(request: pytest.FixtureRequest) -> Application:
    return Application(request.getfixturevalue("device" if request.param == "wgpu" else "dawn"))


@pytest.fixture
def quiet(app: Application, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every submit, write and wait by the device from here on."""
    noted: list[str] = []
    buffer_type = type(app.buffer(nbytes=4))
    for owner, name in (
        *((type(app.gpu.queue), n) for n in ("submit", "write_buffer", "read_buffer")),
        *((buffer_type, n) for n in ("map_sync", "map_async")),
    ):
        plain = getattr(owner, name)

        def noting(*args: Any, _name: str = name, _plain: Any = plain, **kw: Any) -> Any:
            noted.append(_name)
            return _plain(*args, **kw)

        monkeypatch.setattr(owner, name, noting)
    return noted


@pytest.mark.parametrize("algorithm", ["direct", "im2col_gemm"])
@pytest.mark.parametrize("into", ["encoder", "pass"])
def test_encode(app: Application, quiet: list[str], algorithm: str, into: str) -> None:
    x, w, b = arrays(FIRST, exact=True)
    plan = planned(FIRST, app.device, algorithm=algorithm)
    assert plan.problem == FIRST
    assert plan.plan.algorithm == algorithm
    given = {"input": app.buffer(x), "weight": app.buffer(w), "bias": app.buffer(b)}
    out = app.buffer(nbytes=FIRST.out_bytes)
    quiet.clear()
    encoder = app.gpu.create_command_encoder()
    if into == "encoder":
        plan.encode(encoder, **given, out=out)
    else:
        compute = encoder.begin_compute_pass()
        plan.encode(compute, **given, out=out)
        app.double(compute, out)  # the pass is still the caller's
        compute.end()
    commands = encoder.finish()
    assert quiet == []  # nothing was submitted, nothing waited
    assert not app.read(out, (-1,)).any()
    app.gpu.queue.submit([commands])
    want = convolve(FIRST, x, w, b) * (1 if into == "encoder" else 2)
    assert np.array_equal(app.read(out, FIRST.out_shape), want)


def test_encode_with_a_residual(app: Application) -> None:
    for plain in (FIRST, SECOND):
        problem = plain.with_(residual=True)
        x, w, b = arrays(problem, exact=True)
        r = residual(problem, exact=True)
        plan = planned(problem, app.device, algorithm="direct")
        assert plan.problem == problem
        given = {"input": app.buffer(x), "weight": app.buffer(w), "residual": app.buffer(r)}
        given |= {} if b is None else {"bias": app.buffer(b)}
        out = app.buffer(nbytes=problem.out_bytes)
        encoder = app.gpu.create_command_encoder()
        with pytest.raises(ProblemError, match="out must not be the buffer of the residual"):
            plan.encode(encoder, **given, out=given["residual"])
        plan.encode(encoder, **given, out=out)
        app.gpu.queue.submit([encoder.finish()])
        assert np.array_equal(app.read(out, problem.out_shape), convolve(problem, x, w, b, r))


def test_a_chain_with_the_applications_own_shader(app: Application, quiet: list[str]) -> None:
    """Two plans and a shader of the application's, one encoder, one submit."""
    x, w, b = arrays(FIRST, exact=True)
    _, w2, _ = arrays(SECOND, exact=True)
    first = planned(FIRST, app.device, algorithm="implicit_gemm")
    second = planned(SECOND, app.device, algorithm="direct")
    middle, out = app.buffer(nbytes=FIRST.out_bytes), app.buffer(nbytes=SECOND.out_bytes)
    xs, ws, bs, w2s = (app.buffer(v) for v in (x, w, b, w2))
    quiet.clear()
    encoder = app.gpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    first.encode(compute, input=xs, weight=ws, bias=bs, out=middle)
    app.double(compute, middle)
    second.encode(compute, input=middle, weight=w2s, out=out)
    compute.end()
    commands = encoder.finish()
    assert quiet == []
    app.gpu.queue.submit([commands])
    want = convolve(SECOND, 2 * convolve(FIRST, x, w, b), w2)
    assert np.array_equal(app.read(out, SECOND.out_shape), want)


def test_many_encoders_in_any_order(app: Application) -> None:
    """Scratch memory is shared, and each command buffer fills its own anew."""
    problems = [FIRST, ConvProblem.parse(str(FIRST).replace("k4", "k6").replace("n2", "n3"))]
    recorded = []
    for problem in problems:
        x, w, b = arrays(problem, exact=True)
        plan = planned(problem, app.device, algorithm="im2col_gemm")
        for sign in (1, -1):
            out = app.buffer(nbytes=problem.out_bytes)
            encoder = app.gpu.create_command_encoder()
            plan.encode(
                encoder,
                input=app.buffer(sign * x),
                weight=app.buffer(w),
                bias=app.buffer(b),
                out=out,
            )
            want = convolve(problem, sign * x, w, b)
            recorded.append((encoder.finish(), out, want))
    app.gpu.queue.submit([commands for commands, _, _ in reversed(recorded)])
    for _, out, want in recorded:
        assert np.array_equal(app.read(out, want.shape), want)


def test_tensors_and_buffers_mixed(app: Application) -> None:
    x, w, b = arrays(FIRST, exact=True)
    plan = planned(FIRST, app.device)
    out = Tensor.empty(FIRST.out_shape, device=app.device)
    kept = tensor(x, app.device), tensor(b, app.device)
    for _ in range(2):
        encoder = app.gpu.create_command_encoder()
        plan.encode(encoder, input=kept[0], weight=app.buffer(w), bias=kept[1], out=out)
        app.gpu.queue.submit([encoder.finish()])
    assert np.array_equal(out.numpy(), convolve(FIRST, x, w, b))


def test_a_view_of_the_applications_buffer(app: Application) -> None:
    """Tensor.from_buffer: the other way in, for those who do not record."""
    from wgpuconv import conv2d

    x, w, b = arrays(FIRST, exact=True)
    view = Tensor.from_buffer(app.buffer(x), x.shape, np.float32, app.device)
    out_buffer = app.buffer(nbytes=FIRST.out_bytes)
    out = Tensor.from_buffer(out_buffer, FIRST.out_shape, np.float32, app.device)
    assert view.buffer.size == x.nbytes
    assert np.array_equal(view.numpy(), x)
    conv2d(view, w, b, padding=1, out=out)
    assert np.array_equal(app.read(out_buffer, FIRST.out_shape), convolve(FIRST, x, w, b))


def test_one_buffer_for_two_arguments(app: Application) -> None:
    problem = ConvProblem.parse("conv2d f32 n1 c1 h3 w3 k1 r3 s3 stride1 pad1")
    plan = planned(problem, app.device)
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    both, out = app.buffer(x), app.buffer(nbytes=problem.out_bytes)
    encoder = app.gpu.create_command_encoder()
    plan.encode(encoder, input=both, weight=both, out=out)  # reading twice is fine
    for role, given in (
        ("input", {"input": both, "weight": out, "out": both}),
        ("weight", {"input": out, "weight": both, "out": both}),
    ):
        with pytest.raises(ProblemError, match=f"out must not be the buffer of the {role}"):
            plan.encode(encoder, **given)
    app.gpu.queue.submit([encoder.finish()])
    assert np.array_equal(app.read(out, problem.out_shape), convolve(problem, x, x))


def test_a_refused_encode_leaves_the_encoder_usable(app: Application) -> None:
    x, w, b = arrays(FIRST, exact=True)
    plan = planned(FIRST, app.device)
    given = {"input": app.buffer(x), "weight": app.buffer(w), "bias": app.buffer(b)}
    out = app.buffer(nbytes=FIRST.out_bytes)
    encoder = app.gpu.create_command_encoder()
    with pytest.raises(ProblemError, match="bytes"):
        plan.encode(encoder, **given, out=app.buffer(nbytes=16))
    with pytest.raises(DtypeError, match="out must be a GPUBuffer"):
        plan.encode(encoder, **given, out=np.empty(FIRST.out_shape, np.float32))
    plan.encode(encoder, **given, out=out)
    app.gpu.queue.submit([encoder.finish()])
    assert np.array_equal(app.read(out, FIRST.out_shape), convolve(FIRST, x, w, b))


def test_bad_input(app: Application) -> None:
    plan = planned(FIRST, app.device)
    without = planned(SECOND, app.device)
    some = app.buffer(nbytes=1 << 16)
    more = [app.buffer(nbytes=1 << 16) for _ in range(3)]
    encoder = app.gpu.create_command_encoder()
    with pytest.raises(ProblemError, match="needs a bias"):
        plan.encode(encoder, input=some, weight=more[0], out=more[1])
    with pytest.raises(ProblemError, match="was made without a bias"):
        without.encode(encoder, input=some, weight=more[0], out=more[1], bias=more[2])
    with pytest.raises(ProblemError, match="was made without a residual"):
        without.encode(encoder, input=some, weight=more[0], out=more[1], residual=more[2])
    with pytest.raises(DtypeError, match=r"input must be a GPUBuffer of \w+ or a wgpuconv.Tensor"):
        without.encode(encoder, input=None, weight=more[0], out=more[1])
    with pytest.raises(DtypeError, match="encoder must be a GPUCommandEncoder or a GPUComputePass"):
        without.encode(app.gpu.queue, input=some, weight=more[0], out=more[1])
    weight = Tensor.empty(SECOND.weight_shape, device=Device())
    with pytest.raises(MixedDevicesError, match=r"weight (lives on|and the plan use two)"):
        without.encode(encoder, input=some, weight=weight, out=more[1])
    with pytest.raises(TypeError):
        without.encode(encoder, some, more[0], more[1])  # by name only: too easy to mix up


def test_tensors_that_are_not_the_plans(app: Application) -> None:
    def made(shape: Any, dtype: Any = np.float32) -> Tensor:
        return Tensor.empty(shape, dtype, app.device)

    problem = FIRST.with_(residual=True)
    plan = planned(problem, app.device)
    shapes = {"input": problem.input_shape, "weight": problem.weight_shape, "bias": (problem.k,)}
    shapes |= {"residual": problem.out_shape, "out": problem.out_shape}
    given = {role: made(shape) for role, shape in shapes.items()}
    encoder = app.gpu.create_command_encoder()
    for role, shape in shapes.items():
        for wrong in (made(shape, np.float16), made((*shape, 1)), made(shape[1:])):
            with pytest.raises(
                ProblemError, match=rf"^{role} must have shape .* and dtype float32"
            ):
                plan.encode(encoder, **given | {role: wrong})
    plan.encode(encoder, **given)
    one = planned(problem.with_(n=1), app.device)
    images = ("input", "residual", "out")
    alone = {r: made(s[1:] if r in images else s) for r, s in shapes.items()}
    one.encode(encoder, **alone)
    with pytest.raises(ProblemError, match=r"^weight must have shape"):
        one.encode(encoder, **alone | {"weight": made(problem.weight_shape[1:])})
    app.gpu.queue.submit([encoder.finish()])


def test_planning_bad_input(device: Device) -> None:
    shapes = FIRST.input_shape, FIRST.weight_shape
    for arguments, kind, says in (
        ({"dtype": "float64"}, DtypeError, "must be float32 or float16, got"),
        ({"stride": 0}, ProblemError, "stride must be positive"),
        ({"groups": 2}, ProblemError, "groups must divide"),
        ({"groups": "2"}, DtypeError, "groups must be an integer"),
        ({"algorithm": "fft"}, UnknownAlgorithmError, "known are direct"),
        ({"algorithm": "depthwise"}, AlgorithmRefusedError, "does not apply"),
        ({"workspace_limit": -5}, ProblemError, "zero or more bytes"),
        ({"device": 7}, DtypeError, "device must be a Device"),
        ({"residual": np.ones(4)}, DtypeError, r"residual says whether .*, got a numpy\.ndarray"),
    ):
        for bias in (False, True):
            with pytest.raises(kind, match=says):
                plan_conv2d(*shapes, **{"device": device, "bias": bias, **arguments})
    for shape in ((2, 3, float("nan"), 7), 5, None, "2387", (2, 3)):
        for bias in (False, True):
            with pytest.raises(ProblemError, match="input"):
                plan_conv2d(shape, FIRST.weight_shape, bias=bias, device=device)
            with pytest.raises(ProblemError, match="weight"):
                plan_conv2d(FIRST.input_shape, shape, bias=bias, device=device)
            with pytest.raises(ProblemError, match="weight"):
                plan_conv_transpose2d(FIRST.input_shape, shape, bias=bias, device=device)


def test_whether_there_is_a_bias(device: Device) -> None:
    shapes = FIRST.input_shape, FIRST.weight_shape
    for bias in (np.ones(4, np.float32), [1.0], None, 1):
        with pytest.raises(DtypeError, match=r"bias says whether .* the array goes to encode"):
            plan_conv2d(*shapes, bias=bias, device=device)


def test_empty_batch(app: Application, quiet: list[str]) -> None:
    plan = plan_conv2d((0, 3, 8, 7), FIRST.weight_shape, device=app.device)
    some = [app.buffer(nbytes=1 << 12) for _ in range(3)]
    quiet.clear()
    encoder = app.gpu.create_command_encoder()
    plan.encode(encoder, input=some[0], weight=some[1], out=some[2])
    encoder.finish()
    assert quiet == []


def test_unbatched_plan(app: Application) -> None:
    x, w, b = arrays(FIRST, exact=True)
    plan = plan_conv2d(x.shape[1:], w.shape, padding=1, bias=True, device=app.device)
    out = app.buffer(nbytes=FIRST.out_bytes // 2)
    encoder = app.gpu.create_command_encoder()
    plan.encode(encoder, input=app.buffer(x[0]), weight=app.buffer(w), bias=app.buffer(b), out=out)
    app.gpu.queue.submit([encoder.finish()])
    assert np.array_equal(app.read(out, FIRST.out_shape[1:]), convolve(FIRST, x, w, b)[0])


def test_dtypes_and_shapes_of_a_plan(device: Device) -> None:
    for dtype in ("f32", "float32", np.float32, np.dtype(np.float32)):
        plan = plan_conv2d((1, 2, 5, 5), (3, 2, 3, 3), dtype=dtype, device=device)
        assert plan.problem.dtype == "f32"
    with pytest.raises(DtypeError, match="must be float32 or float16, got 'float64'"):
        plan_conv2d((1, 2, 5, 5), (3, 2, 3, 3), dtype="float64", device=device)
    with pytest.raises(DtypeError, match="input_shape must be a shape, got an array; pass its"):
        plan_conv2d(np.ones((1, 2, 5, 5), np.float32), (3, 2, 3, 3), device=device)
