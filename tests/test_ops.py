"""conv2d and conv_transpose2d as functions: kinds of arrays in and out, where results go, modules.

Small integers make sums exact in float32 in any order, so results are compared with ``==``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from reference import arrays, convolve, residual

import wgpuconv
from wgpuconv import Conv2d, ConvProblem, ConvTranspose2d, Device, Tensor, tensor
from wgpuconv.errors import (
    AlgorithmRefusedError,
    DtypeError,
    MixedDevicesError,
    ProblemError,
    UnknownAlgorithmError,
)

PROBLEMS = [
    "conv2d f32 n2 c3 h6 w5 k4 r3 s3 stride1 pad1 bias",
    "conv2d f32 n1 c4 h7 w8 k6 r2 s3 stride2,1 pad1,0,2,1 dil1,2 groups2 nhwc act:relu",
    "conv_transpose2d f32 n2 c4 h4 w3 k6 r3 s2 stride2 pad1,0 outpad1,0 groups2 bias",
]


def parameters_of(problem: ConvProblem) -> dict[str, Any]:
    top, bottom, left, right = problem.padding
    arguments: dict[str, Any] = {
        "stride": problem.stride,
        "padding": ((top, bottom), (left, right)),
        "dilation": problem.dilation,
        "groups": problem.groups,
        "layout": problem.layout,
        "activation": problem.activation,
    }
    if problem.transposed:
        arguments["output_padding"] = problem.output_padding
    return arguments


def called(problem: ConvProblem, x: Any, w: Any, b: Any = None, **more: Any) -> Any:
    """The public function, with the problem's parameters."""
    arguments = parameters_of(problem)
    return getattr(wgpuconv, problem.op)(x, w, b, **{**arguments, **more})


@pytest.fixture(params=PROBLEMS, ids=["conv2d", "conv2d_nhwc", "conv_transpose2d"])
def problem(request: pytest.FixtureRequest) -> ConvProblem:
    return ConvProblem.parse(request.param)


@pytest.fixture
def data(problem: ConvProblem) -> tuple[Any, Any, Any, Any]:
    x, w, b = arrays(problem, exact=True)
    return x, w, b, convolve(problem, x, w, b)


# ---- kinds of arrays ----


def test_numpy_in_numpy_out(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    got = called(problem, x, w, b, device=device)
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    assert got.flags.c_contiguous
    assert got.flags.owndata
    assert np.array_equal(got, want)


def test_tensors_in_tensor_out(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    given = [None if v is None else tensor(v, device) for v in (x, w, b)]
    got = called(problem, *given)
    assert isinstance(got, Tensor)
    assert got.device is device
    assert got.shape == problem.out_shape
    assert np.array_equal(got.numpy(), want)


def test_the_input_decides_the_kind(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    got = called(problem, tensor(x, device), w, b)
    assert isinstance(got, Tensor)
    assert np.array_equal(got.numpy(), want)
    got = called(problem, x, tensor(w, device), b)
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, want)


def test_float16(device: Device) -> None:
    if not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    problem = ConvProblem.parse(PROBLEMS[0].replace("f32", "f16"))
    x, w, b = arrays(problem, exact=True)
    got = called(problem, x, w, b, device=device)
    assert got.dtype == np.float16
    assert np.array_equal(got, convolve(problem, x, w, b))
    odd = np.ones((1, 1, 1, 3), np.float16)  # six bytes: not a whole number of words
    assert np.array_equal(wgpuconv.conv2d(odd, odd[..., :1], device=device), odd)
    assert np.array_equal(tensor(odd, device).numpy(), odd)


def strided(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same values, laid out in every way that numpy knows."""
    doubled = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
    every_second = doubled[tuple(slice(1, None, 2) for _ in array.shape)]
    every_second[...] = array
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    read_only = array.copy()
    read_only.flags.writeable = False
    reverse = np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    return {
        "Fortran order": np.asfortranarray(array),
        "transposed axes": np.ascontiguousarray(array.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0),
        "every second": every_second,
        "negative strides": reverse,
        "unaligned": unaligned,
        "read-only": read_only,
        "subclass": array.view(type("Sub", (np.ndarray,), {})),
    }


def test_any_strides(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    for (kind, odd_x), odd_w in zip(strided(x).items(), strided(w).values(), strict=True):
        assert np.array_equal(odd_x, x), kind
        assert np.array_equal(called(problem, odd_x, odd_w, b, device=device), want), kind
        assert np.array_equal(tensor(odd_x, device).numpy(), x), kind


def test_broadcast_input(device: Device) -> None:
    """Strides of zero."""
    x = np.broadcast_to(np.float32(2), (2, 3, 5, 5))
    w = np.broadcast_to(np.float32(1), (1, 3, 5, 5))
    assert np.array_equal(
        wgpuconv.conv2d(x, w, device=device), np.full((2, 1, 1, 1), 150, np.float32)
    )


@pytest.mark.parametrize(
    "dtype", [">f4", ">f2", "f8", "i4", "u1", "?", "c8", "O", "S4", "g"], ids=str
)
def test_other_dtypes_are_refused(device: Device, dtype: str) -> None:
    x, w = np.ones((1, 1, 3, 3)), np.ones((1, 1, 2, 2), np.float32)
    with pytest.raises(DtypeError, match=r"^input must have dtype .*astype\(numpy.float32\)"):
        wgpuconv.conv2d(x.astype(dtype), w, device=device)
    with pytest.raises(TypeError, match="convert it with"):
        tensor(x.astype(dtype), device)
    if dtype.startswith(">"):
        with pytest.raises(TypeError, match="foreign byte order"):
            tensor(x.astype(dtype), device)


def test_mixed_dtypes_are_refused(device: Device) -> None:
    x, w = np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 2, 2), np.float16)
    with pytest.raises(DtypeError, match="weight must have the input's dtype float32, got float16"):
        wgpuconv.conv2d(x, w, device=device)
    with pytest.raises(DtypeError, match="bias must have the input's dtype float16, got float32"):
        wgpuconv.conv2d(w, w, np.ones(1, np.float32), device=device)


class Stranger:
    """Has what a tensor of another library has."""

    shape, dtype, ndim = (1, 1, 3, 3), np.dtype(np.float32), 4

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones(self.shape, np.float32)


@pytest.mark.parametrize(
    "thing",
    [Stranger(), [[[[1.0]]]], 1.0, "x", None, memoryview(b"1234")],
    ids=lambda v: type(v).__name__,
)
def test_other_kinds_are_refused(device: Device, thing: Any) -> None:
    w = np.ones((1, 1, 2, 2), np.float32)
    with pytest.raises(DtypeError, match="input must be a numpy array or a"):
        wgpuconv.conv2d(thing, w, device=device)
    with pytest.raises(DtypeError, match="weight must be a numpy array"):
        wgpuconv.conv2d(w, thing, device=device)
    if thing is not None:
        with pytest.raises(DtypeError, match="bias must be a numpy array"):
            wgpuconv.conv2d(w, w, thing, device=device)
        with pytest.raises(DtypeError, match="out must be a numpy array or a Tensor"):
            wgpuconv.conv2d(w, w, out=thing, device=device)


def test_nothing_imports_other_libraries() -> None:
    code = """
import sys, numpy as np, wgpuconv
class Fake: pass
for thing in (Fake(), [1.0]):
    try:
        wgpuconv.conv2d(thing, thing)
    except TypeError:
        pass
    else:
        raise AssertionError(thing)
wgpuconv.conv2d(np.ones((1, 1, 2, 2), "f4"), np.ones((1, 1, 1, 1), "f4"))
print([name for name in ("torch", "cupy", "onnx", "typer", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_arrays_of_torch_by_numpy(device: Device) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 1, 3, 3)
    with pytest.raises(DtypeError, match=r"got a torch\.Tensor; .* with \.detach\(\)\.numpy\(\)$"):
        wgpuconv.conv2d(x, x, device=device)
    assert tensor(x, device).shape == (1, 1, 3, 3)
    assert wgpuconv.conv2d(x.numpy(), x.numpy(), device=device) == 9


# ---- shapes ----


def test_unbatched(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    got = called(problem, x[0], w, b, device=device)
    assert np.array_equal(got, want[0])
    got = called(problem, tensor(x[0], device), w, b)
    assert got.shape == problem.out_shape[1:]
    assert np.array_equal(got.numpy(), want[0])


def test_empty_batch(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, _ = data
    shape = (0, *problem.out_shape[1:])
    got = called(problem, x[:0], w, b, device=device)
    assert got.shape == shape
    assert got.dtype == np.float32
    got = called(problem, tensor(x[:0], device), tensor(w, device), b)
    assert got.shape == shape
    assert got.numpy().shape == shape
    out = np.empty(shape, np.float32)
    assert called(problem, x[:0], w, b, device=device, out=out) is out


def test_torch_positions(device: Device) -> None:
    """Arguments by position mean what they mean in torch.nn.functional."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (2, 4, 7, 6)).astype(np.float32)
    w = rng.integers(-4, 5, (4, 2, 3, 3)).astype(np.float32)
    b = rng.integers(-4, 5, 4).astype(np.float32)
    both = [torch.from_numpy(v) for v in (x, w, b)]
    want = torch.nn.functional.conv2d(*both, 2, (2, 1), 1, 2).numpy()
    assert np.array_equal(wgpuconv.conv2d(x, w, b, 2, (2, 1), 1, 2, device=device), want)
    want = torch.nn.functional.conv_transpose2d(*both, (2, 3), 1, (1, 2), 2, 1).numpy()
    got = wgpuconv.conv_transpose2d(x, w, b, (2, 3), 1, (1, 2), 2, 1, device=device)
    assert np.array_equal(got, want)


# ---- residuals ----


def test_residuals(device: Device, problem: ConvProblem) -> None:
    added = problem.with_(residual=True)
    x, w, b = arrays(added, exact=True)
    r = residual(added, exact=True)
    want = convolve(added, x, w, b, r)
    for like in (r, np.asfortranarray(r), tensor(r, device)):
        got = called(problem, x, w, b, residual=like, device=device)
        assert isinstance(got, np.ndarray)
        assert np.array_equal(got, want)
        got = called(problem, tensor(x, device), w, b, residual=like)
        assert isinstance(got, Tensor)
        assert np.array_equal(got.numpy(), want)
    assert np.array_equal(called(problem, x[0], w, b, residual=r[0], device=device), want[0])
    none = called(problem, x[:0], w, b, residual=r[:0], device=device)
    assert none.shape == (0, *want.shape[1:])
    plain = called(problem, x, w, b, device=device)  # a call of its own, not the cached one
    assert np.array_equal(plain, convolve(problem, x, w, b))
    assert called(problem, x, w, b, residual=r, out=r, device=device) is r  # copied before
    assert np.array_equal(r, want)


def test_the_input_as_residual(device: Device) -> None:
    problem = ConvProblem.parse("conv2d f32 n2 c4 h6 w5 k4 r3 s3 pad1 residual act:relu")
    x, w, _ = arrays(problem, exact=True)
    for given in (x, tensor(x, device)):
        got = called(problem, given, w, residual=given, device=device)
        assert np.array_equal(np.asarray(got), convolve(problem, x, w, None, x))


# ---- out ----


def test_out_arrays(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    for kind, out in strided(np.zeros(problem.out_shape, np.float32)).items():
        if not out.flags.writeable:
            with pytest.raises(ProblemError, match="read-only"):
                called(problem, x, w, b, device=device, out=out)
            continue
        assert called(problem, x, w, b, device=device, out=out) is out, kind
        assert np.array_equal(out, want), kind


def test_out_may_overlap_numpy_input(device: Device) -> None:
    """The input is copied to the device before anything is written."""
    memory = np.arange(40, dtype=np.float32)
    x = memory[:36].reshape(1, 1, 6, 6)
    want = x.copy() * 2
    out = memory[4:].reshape(1, 1, 6, 6)
    wgpuconv.conv2d(x, np.full((1, 1, 1, 1), 2, np.float32), out=out, device=device)
    assert np.array_equal(out, want)


def test_out_tensors(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    out = Tensor.empty(problem.out_shape, device=device)
    assert called(problem, x, w, b, out=out) is out
    assert np.array_equal(out.numpy(), want)
    assert called(problem, tensor(x, device), w, b, out=out) is out
    assert np.array_equal(out.numpy(), want)


def test_out_must_fit(device: Device) -> None:
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 2, 2), np.float32)
    for out in (np.empty((1, 1, 3, 4), np.float32), Tensor.empty((1, 1, 4, 3), device=device)):
        with pytest.raises(ProblemError, match=r"out must have shape \(1, 1, 3, 3\)"):
            wgpuconv.conv2d(x, w, out=out, device=device)
    with pytest.raises(ProblemError, match=r"dtype float32, got .* float64"):
        wgpuconv.conv2d(x, w, out=np.empty((1, 1, 3, 3)), device=device)
    with pytest.raises(ProblemError, match="and dtype float32"):
        wgpuconv.conv2d(x, w, out=np.empty((1, 1, 3, 3), ">f4"), device=device)
    with pytest.raises(DtypeError, match="out must be a Tensor as the input is"):
        wgpuconv.conv2d(tensor(x, device), w, out=np.empty((1, 1, 3, 3), np.float32))


def test_out_must_not_be_an_input_tensor(device: Device) -> None:
    x = tensor(np.ones((1, 1, 3, 3), np.float32), device)
    one = tensor(np.ones((1, 1, 1, 1), np.float32), device)
    with pytest.raises(ProblemError, match="out must not be the buffer of the input"):
        wgpuconv.conv2d(x, one, out=x)
    with pytest.raises(ProblemError, match="out must not be the buffer of the weight"):
        wgpuconv.conv2d(one, x, padding=2, out=x)


# ---- where it runs ----


def test_tensor_calls_do_not_wait(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensor(np.ones((1, 1, 3, 3), np.float32), device), np.ones((1, 1, 1, 1), np.float32)
    wgpuconv.conv2d(x, w)
    buffer_type = device.backend.provider.api.GPUBuffer

    def refuse(*_: Any) -> None:
        raise AssertionError("waited")

    with monkeypatch.context() as patch:
        patch.setattr(buffer_type, "map_sync", refuse)
        y = wgpuconv.conv2d(x, w)
        for _ in range(3):
            y = wgpuconv.conv2d(y, w, activation="relu")
        Conv2d(w, device=device)(y)
        with pytest.raises(AssertionError, match="waited"):
            y.numpy()
    assert np.array_equal(y.numpy(), np.ones((1, 1, 3, 3)))


def test_mixed_devices(device: Device) -> None:
    other = Device()
    x, w = np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 1, 1), np.float32)
    with pytest.raises(MixedDevicesError, match="weight and the call use two Device objects of"):
        wgpuconv.conv2d(tensor(x, device), tensor(w, other))
    with pytest.raises(MixedDevicesError, match="out and the call use two Device objects"):
        wgpuconv.conv2d(tensor(x, device), w, out=Tensor.empty((1, 1, 3, 3), device=other))
    with pytest.raises(MixedDevicesError, match="input and the call use two Device objects"):
        wgpuconv.conv2d(tensor(x, device), w, device=other)
    with pytest.raises(MixedDevicesError, match="weight and the call use two Device objects"):
        Conv2d(tensor(w, other), device=device)
    with pytest.raises(MixedDevicesError, match="input and the call use two Device objects"):
        Conv2d(w, device=device)(tensor(x, other))
    assert issubclass(MixedDevicesError, ValueError)


def test_tensor_properties(device: Device) -> None:
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    t = tensor(x, device)
    assert (t.shape, t.ndim, t.nbytes, t.dtype) == ((1, 2, 3, 4), 4, 96, np.float32)
    assert repr(t).startswith("Tensor(shape=(1, 2, 3, 4), dtype=float32, device=")
    first, second = t.numpy(), t.numpy()
    first[...] = 0
    assert np.array_equal(second, x)
    assert tensor(np.float32(3), device).shape == ()
    assert tensor(np.float32(3), device).numpy() == 3
    for shape in ((2.0,), 3, "ab", (None,)):
        with pytest.raises(DtypeError, match="a shape must be a sequence of integers"):
            Tensor.empty(shape, device=device)
    with pytest.raises(ProblemError, match="no negative sizes"):
        Tensor.empty((2, -1), device=device)


# ---- algorithms and memory ----


def test_algorithms_by_name(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    for name in ("direct", "implicit_gemm"):
        assert np.array_equal(called(problem, x, w, b, algorithm=name, device=device), want)
    with pytest.raises(UnknownAlgorithmError, match=r"'fft'; known are direct, .*'auto'"):
        called(problem, x, w, b, algorithm="fft", device=device)
    with pytest.raises(AlgorithmRefusedError, match=r"'depthwise' does not apply .*those that app"):
        called(problem, x, w, b, algorithm="depthwise", device=device)
    for wrong in (None, 3, ["direct"]):
        with pytest.raises(DtypeError, match="algorithm must be a name or 'auto'"):
            called(problem, x, w, b, algorithm=wrong, device=device)


def test_workspace_limit(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    for limit in (0, 1, np.int64(1 << 20), 1 << 40):
        assert np.array_equal(called(problem, x, w, b, workspace_limit=limit, device=device), want)
    for wrong in ("1MB", 1e6, True):
        with pytest.raises(DtypeError, match="workspace_limit must be a number of bytes or None"):
            called(problem, x, w, b, workspace_limit=wrong, device=device)
    with pytest.raises(ProblemError, match="zero or more bytes, got -1"):
        called(problem, x, w, b, workspace_limit=-1, device=device)


def test_an_equal_value_of_another_type_is_no_cached_call(device: Device) -> None:
    x = np.ones((1, 1, 3, 3), np.float32)
    for _ in range(2):
        wgpuconv.conv2d(x, x, stride=1, device=device)
        for wrong in (True, 1.0):
            with pytest.raises(DtypeError, match="stride must be an integer"):
                wgpuconv.conv2d(x, x, stride=wrong, device=device)


def test_lists_as_parameters(device: Device, problem: ConvProblem, data: Any) -> None:
    x, w, b, want = data
    for _ in range(2):
        got = called(problem, x, w, b, stride=list(problem.stride), device=device)
        assert np.array_equal(got, want)


# ---- modules ----


def made_module(problem: ConvProblem, w: Any, b: Any, device: Device, **more: Any) -> Any:
    arguments = parameters_of(problem)
    kind = ConvTranspose2d if problem.transposed else Conv2d
    return kind(w, b, device=device, **{**arguments, **more})


@pytest.mark.parametrize("algorithm", ["direct", "implicit_gemm"])
def test_modules(device: Device, problem: ConvProblem, data: Any, algorithm: str) -> None:
    x, w, b, want = data
    module = made_module(problem, w, b, device, algorithm=algorithm)
    for _ in range(2):
        assert np.array_equal(module(x), want)
        got = module(tensor(x, device))
        assert isinstance(got, Tensor)
        assert np.array_equal(got.numpy(), want)
    assert np.array_equal(module(x[:1]), want[:1])  # other shapes
    assert np.array_equal(module(x[0]), want[0])
    assert module(x[:0]).shape == (0, *want.shape[1:])
    out = np.empty_like(want, dtype=np.float32)
    assert module(x, out=out) is out
    assert np.array_equal(out, want)
    added = problem.with_(residual=True)
    r = residual(added, exact=True)
    want = convolve(added, x, w, b, r)
    assert np.array_equal(module(x, residual=r), want)
    assert np.array_equal(module(x[0], residual=r[0]), want[0])
    assert np.array_equal(module(tensor(x, device), residual=tensor(r, device)).numpy(), want)
    with pytest.raises(ProblemError, match="residual must have the result's shape"):
        module(x, residual=r[..., :1])


def test_module_weights_are_its_own(device: Device) -> None:
    problem = ConvProblem.parse(PROBLEMS[0])
    x, w, b = arrays(problem, exact=True)
    want = convolve(problem, x, w, b)
    module = made_module(problem, w, b, device, algorithm="implicit_gemm")
    w[...], b[...] = 7, 7
    assert np.array_equal(module(x), want)
    w[...], b[...] = 9, 9
    assert np.array_equal(module(x), want)


def test_module_prepares_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packing passes run at the first call with a shape, never again."""
    problem = ConvProblem.parse(PROBLEMS[0])
    x, w, b = arrays(problem, exact=True)
    want = convolve(problem, x, w, b)
    module = made_module(problem, w, b, device, algorithm="implicit_gemm")
    on_device = tensor(x, device)
    assert np.array_equal(module(on_device).numpy(), want)
    counted: list[tuple[int, ...]] = []
    passes = type(device.backend.gpu_device.create_command_encoder().begin_compute_pass())
    dispatch = passes.dispatch_workgroups
    monkeypatch.setattr(
        passes, "dispatch_workgroups", lambda self, *g: counted.append(g) or dispatch(self, *g)
    )
    plan = device.choose(problem, algorithm="implicit_gemm").plan
    assert len(plan.prepare) == 1
    for _ in range(3):
        module(on_device)
    assert len(counted) == 3 * len(plan.passes)
    counted.clear()
    called(problem, on_device, w, b, algorithm="implicit_gemm")  # a function packs in each call
    assert len(counted) == plan.dispatches


def test_module_forgets_old_shapes(device: Device) -> None:
    from wgpuconv.modules import PREPARED

    w = np.ones((1, 1, 1, 1), np.float32)
    module = Conv2d(w, device=device, algorithm="implicit_gemm")
    for _ in range(2):
        for size in range(1, PREPARED + 4):
            x = np.ones((1, 1, 1, size), np.float32)
            assert np.array_equal(module(x), x)
    assert len(module._ready) == PREPARED


def test_modules_of_many_channels(device: Device) -> None:
    for shape in ((8, 4096, 1, 1), (1 << 16, 8, 1, 1), (8, 1 << 16, 3, 3)):
        weight = tensor(np.zeros(shape, np.float32), device)
        assert Conv2d(weight).weight is weight
        assert ConvTranspose2d(weight).weight is weight


def test_module_bad_input(device: Device) -> None:
    w = np.ones((2, 3, 3, 3), np.float32)
    with pytest.raises(DtypeError, match=r"must have dtype float32 or float16, got float64"):
        Conv2d(w.astype(np.float64), device=device)
    with pytest.raises(DtypeError, match="bias must have the weight's dtype"):
        Conv2d(w, np.ones(2, np.float16), device=device)
    for wrong, said in (
        ({"stride": 0}, "stride must be positive"),
        ({"groups": 4}, "groups must divide the 2 filters"),
        ({"groups": "2"}, "groups must be an integer"),
        ({"padding": "same", "stride": 2}, "'same' is defined for stride 1 only"),
        ({"layout": "NCWH"}, "layout must be"),
        ({"activation": "rel"}, "unknown activation 'rel'"),
    ):
        with pytest.raises(ProblemError, match=said):  # when it is made, not when it is called
            Conv2d(w, device=device, **wrong)
    with pytest.raises(ProblemError, match="weight must have 4 dimensions"):
        Conv2d(w[0], device=device)
    with pytest.raises(ProblemError, match="output_padding must be smaller"):
        ConvTranspose2d(w, output_padding=1, device=device)
    for layout in ("NCHW", "NHWC"):
        Conv2d(np.ones((4, 3, 1, 1), np.float32), groups=2, layout=layout, device=device)
    module = Conv2d(w, device=device)
    with pytest.raises(ProblemError, match="4 channels a group"):
        module(np.ones((1, 4, 5, 5), np.float32))
    with pytest.raises(DtypeError, match="input must have the weight's dtype float32"):
        module(np.ones((1, 3, 5, 5), np.float16))
    assert module(np.ones((1, 3, 5, 5), np.float32)).shape == (1, 2, 3, 3)


def test_bfloat16_by_name() -> None:
    """numpy has the name only once ml_dtypes was imported: so in a process of its own."""
    code = """
import sys
from wgpuconv.dtypes import dtype_name
from wgpuconv.embed import _dtype_name
from wgpuconv.tensor import checked_dtype
assert "ml_dtypes" not in sys.modules
assert dtype_name(checked_dtype("bfloat16")) == "bf16" == _dtype_name("bfloat16", None)
assert [checked_dtype(n).itemsize for n in ("f32", "f16", "float16")] == [4, 2, 2]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_how_to_convert_is_said_as_it_is_written() -> None:
    import ml_dtypes

    x = np.ones((1, 1, 1, 1), np.float32)
    for dtype, name in ((np.float16, "numpy.float16"), (ml_dtypes.bfloat16, "ml_dtypes.bfloat16")):
        with pytest.raises(DtypeError, match=rf"\.astype\({name}\)"):
            wgpuconv.conv2d(x.astype(dtype), x)


def test_numpy_reads_a_tensor(device: Device) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = tensor(array, device)
    assert np.array_equal(np.asarray(made), array)
    assert np.asarray(made, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        made.__array__(copy=False)


def test_names_that_are_no_algorithm(device: Device) -> None:
    x = np.ones((1, 2, 5, 5), np.float32)
    with pytest.raises(
        UnknownAlgorithmError, match=r"known are direct, .*; .*\bdirect, .* apply to conv2d"
    ):
        wgpuconv.conv2d(x, x[:, :, :3, :3], algorithm="fft", device=device)
