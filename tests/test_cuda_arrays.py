"""Arrays of cupy and PyTorch in, the same kind out: with stand-ins for both, and on a GPU.

The stand-ins keep their arrays in the host's memory, where the emulator runs the kernels.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
from cuda_emulator import Emulator, compiler, filled

import wgpuconv
from wgpuconv import Device
from wgpuconv import device as device_module
from wgpuconv.backends.provider import Provider
from wgpuconv.dtypes import numpy_dtype
from wgpuconv.errors import (
    DtypeError,
    MissingExtraError,
    MixedDevicesError,
    NoAdapterError,
    ProblemError,
    UnsupportedFeatureError,
)
from wgpuconv.plugins.cuda import entry
from wgpuconv.plugins.cuda.arrays import CudaGuests
from wgpuconv.plugins.cuda.buffer import CudaBuffer
from wgpuconv.problem import ConvProblem

# ---- stand-ins ----


class FakeArray:
    """What cupy.ndarray has of numpy's, and where it lives."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.array = aligned(np.full(shape, np.nan, dtype))

    @classmethod
    def of(cls, array: np.ndarray, gpu: int = 0) -> FakeArray:
        made = cls.__new__(cls)
        made.array, made.gpu = array, gpu
        return made

    gpu = 0
    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    dtype = property(lambda self: self.array.dtype)
    strides = property(lambda self: self.array.strides)
    itemsize = property(lambda self: self.array.itemsize)
    data = property(
        lambda self: SimpleNamespace(ptr=self.array.ctypes.data, device_id=self.gpu),
    )

    def transpose(self, *axes: int) -> FakeArray:
        return FakeArray.of(self.array.transpose(*axes), self.gpu)

    def copy(self) -> FakeArray:
        return FakeArray.of(aligned(self.array), self.gpu)

    def view(self, dtype: Any) -> FakeArray:
        return FakeArray.of(self.array.view(dtype), self.gpu)

    def __setitem__(self, at: Any, value: FakeArray) -> None:
        self.array[at] = value.array


class FakeExchange:
    """An array of a library that has DLPack alone."""

    def __init__(self, array: np.ndarray, gpu: int = 0) -> None:
        self.array, self.gpu = array, gpu

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.gpu)

    def __dlpack__(self, stream: Any = None) -> Any:
        raise AssertionError("the stand-in for from_dlpack reads the array itself")


FakeExchange.__module__ = "exchange"


class FakeTensor(FakeExchange):
    """What a torch.Tensor on a GPU has."""

    def __init__(
        self,
        array: np.ndarray,
        gpu: int = 0,
        requires_grad: bool = False,
        negative: bool = False,
    ) -> None:
        super().__init__(array, gpu)
        self.requires_grad = requires_grad
        self.sign = -1 if negative else 1
        """By which the values in memory are multiplied."""

    def is_neg(self) -> bool:
        return self.sign < 0

    is_cuda = True
    dtype = property(lambda self: f"torch.{self.array.dtype}")
    device = property(lambda self: SimpleNamespace(index=self.gpu))

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def permute(self, axes: tuple[int, ...]) -> FakeTensor:
        return FakeTensor(self.array.transpose(axes), self.gpu, negative=self.is_neg())

    def clone(self, *, memory_format: str) -> FakeTensor:
        assert memory_format == "C"
        return FakeTensor(aligned(self.sign * self.array), self.gpu)

    def copy_(self, other: FakeTensor) -> None:
        self.array[...] = self.sign * other.array


FakeTensor.__module__ = "torch"


class FakeInterface:
    """An array of a library that has __cuda_array_interface__ alone."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__array_interface__


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy in C order that begins on a multiple of 256 bytes, as cupy's do."""
    raw = np.empty(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


class FakeCuda:
    """The parts of cupy that the plugin uses for arrays."""

    current = 33
    """Its current stream."""

    def __init__(self) -> None:
        self.ndarray = FakeArray
        self.order: list[Any] = []
        """Runs, and waits of one stream (first) for another."""
        self.cuda = SimpleNamespace(
            get_current_stream=lambda ordinal: SimpleNamespace(ptr=self.current),
            runtime=SimpleNamespace(
                streamSynchronize=lambda stream: None,
                eventRecord=lambda event, stream: event.append(stream),
                streamWaitEvent=lambda stream, event: self.order.append((stream, *event)),
            ),
            Event=lambda disable_timing: SimpleNamespace(ptr=[]),
        )

    def from_dlpack(self, tensor: Any) -> FakeArray:
        if tensor.array.dtype == np.int8:
            raise BufferError("a dtype that cupy does not have")
        return FakeArray.of(tensor.array, tensor.gpu)

    def asarray(self, value: Any) -> FakeArray:
        interface = value.__cuda_array_interface__
        if interface["typestr"].startswith("|V") or interface["typestr"].startswith("<V"):
            raise TypeError("a dtype that cupy does not have")
        return FakeArray.of(np.asarray(SimpleNamespace(__array_interface__=interface)))


class EmulatedBackend(Emulator):
    """The emulator with buffers by address, as those of the CUDA backend are."""

    ordinal = 0

    def __init__(self, folder: Path, api: FakeCuda) -> None:
        super().__init__(folder)
        self.api = api
        self.guard = nullcontext()
        self.guests = CudaGuests(self)  # type: ignore[arg-type]
        self.inputs: list[int] = []
        """The addresses of the inputs and weights of all runs, and their streams."""
        self.weights: list[int] = []
        self.streams: list[int | None] = []

    def allocate(self, nbytes: int) -> Any:
        memory = filled(nbytes)
        return CudaBuffer(memory, memory.ctypes.data, memory.nbytes)

    def write(self, buffer: Any, array: np.ndarray) -> None:
        super().write(raw(buffer), array)

    def read(self, buffer: Any, array: np.ndarray) -> None:
        super().read(raw(buffer), array)

    def prepare(self, compiled: Any, buffers: Any) -> None:
        super().prepare(compiled, {role: raw(buffer) for role, buffer in buffers.items()})

    def run(
        self,
        compiled: Any,
        buffers: Any,
        into: np.ndarray | None = None,
        *,
        stream: int | None = None,
    ) -> None:
        self.streams.append(stream)
        self.api.order.append("run")
        self.inputs.append(buffers["input"].pointer)
        self.weights.append(buffers["weight"].pointer)
        super().run(compiled, {role: raw(buffer) for role, buffer in buffers.items()}, into)


def raw(buffer: Any) -> np.ndarray:
    if isinstance(buffer, np.ndarray):
        return buffer
    return np.frombuffer((ctypes.c_uint8 * buffer.size).from_address(buffer.pointer), np.uint8)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Device:
    if compiler() is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    device = Device.__new__(Device)
    backend = EmulatedBackend(tmp_path_factory.mktemp("cuda"), FakeCuda())
    device._setup(backend, "off", ":memory:", None)
    return device


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    dtypes = {f"torch.{np.dtype(dtype)}": dtype for dtype in reference.NUMPY.values()}
    module = SimpleNamespace(
        Tensor=FakeTensor,
        **{name.removeprefix("torch."): name for name in dtypes},
        contiguous_format="C",
        device=lambda kind, ordinal: (kind, ordinal),
        empty=lambda shape, dtype, device: FakeTensor(aligned(np.empty(shape, dtypes[dtype]))),
        cuda=SimpleNamespace(current_stream=lambda i: SimpleNamespace(cuda_stream=77)),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


PROBLEM = ConvProblem.parse("conv2d f32 n2 c5 h6 w7 k4 r3 s3 pad1 bias")
X, W, B = (aligned(a) for a in reference.arrays(PROBLEM))
NHWC = aligned(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
"""X with the strides of channels_last."""


def convolve(card: Any, *arrays: Any, **more: Any) -> Any:
    return wgpuconv.conv2d(*arrays, padding=1, algorithm="direct", device=card, **more)


def of(*arrays: np.ndarray) -> list[FakeArray]:
    return [FakeArray.of(a) for a in arrays]


# ---- the kind that comes in ----


def test_cupy_in_cupy_out(card: Device) -> None:
    got = convolve(card, *of(X, W, B))
    assert isinstance(got, FakeArray)
    reference.check(PROBLEM, got.array, X, W, B)
    assert card.backend.inputs[-1] == X.ctypes.data  # no copy
    assert card.backend.streams[-1] == FakeCuda.current


@pytest.mark.usefixtures("torch")
def test_torch_in_torch_out(card: Device) -> None:
    got = convolve(card, *(FakeTensor(a) for a in (X, W, B)))
    assert isinstance(got, FakeTensor)
    reference.check(PROBLEM, got.array, X, W, B)
    assert card.backend.inputs[-1] == X.ctypes.data
    assert card.backend.streams[-1] == 77  # torch's current stream


def test_other_libraries(card: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Get their own kind where they can import it, else cupy's."""
    got = convolve(card, *(FakeInterface(a) for a in (X, W, B)))
    assert isinstance(got, FakeArray)
    reference.check(PROBLEM, got.array, X, W, B)

    def from_dlpack(array: FakeArray) -> FakeExchange:
        assert not np.isnan(array.array).any()  # whoever asks waits for what was submitted so far
        return FakeExchange(array.array)

    exchange = SimpleNamespace(from_dlpack=from_dlpack)
    monkeypatch.setitem(sys.modules, "exchange", exchange)
    for x in (X, NHWC):
        got = convolve(card, *(FakeExchange(a) for a in (x, W, B)))
        assert isinstance(got, FakeExchange)
        reference.check(PROBLEM, got.array, X, W, B)
        out = FakeExchange(np.zeros((*PROBLEM.out_shape[:3], 14), np.float32)[..., ::2])
        assert convolve(card, *(FakeExchange(a) for a in (x, W, B)), out=out) is out
        reference.check(PROBLEM, np.ascontiguousarray(out.array), X, W, B)


def test_tensors_beside_arrays(card: Device) -> None:
    w = wgpuconv.tensor(W, card)
    got = convolve(card, FakeArray.of(X), w, FakeArray.of(B))
    reference.check(PROBLEM, got.array, X, W, B)
    again = convolve(None, wgpuconv.tensor(X, card), w, FakeArray.of(B))
    assert isinstance(again, wgpuconv.Tensor)
    assert np.array_equal(again.numpy(), got.array)


@pytest.mark.usefixtures("torch")
def test_streams_wait_for_each_other(card: Device) -> None:
    """Around the kernel, where arrays are of libraries whose current streams differ."""
    cupy, torch = FakeCuda.current, 77
    x, w, b = X, W, B
    tensors = [wgpuconv.tensor(a, card) for a in (x, w, b)]
    order = card.backend.api.order

    def ordered(*arrays: Any, **more: Any) -> list[Any]:
        order.clear()
        convolve(card, *arrays, **more)
        return list(order)

    theirs = [FakeTensor(a) for a in (x, w, b)]
    for same in (of(x, w, b), theirs, tensors, [tensors[0], *of(w, b)]):
        assert ordered(*same) == ["run"]
    first = [(torch, cupy), "run", (cupy, torch)]  # on torch's stream, as the input is
    assert ordered(theirs[0], *tensors[1:]) == first
    assert ordered(theirs[0], theirs[1], *of(b)) == first
    module = wgpuconv.Conv2d(*theirs[1:], padding=1, algorithm="direct", device=card)
    order.clear()
    module(theirs[0])  # whose weights, prepared ones included, are tensors
    assert order == first
    second = [(cupy, torch), "run", (torch, cupy)]
    assert ordered(tensors[0], *theirs[1:]) == second
    assert ordered(*of(x), theirs[1], tensors[2]) == second
    assert ordered(*of(x, w, b), residual=FakeTensor(RESIDUAL)) == second
    out = aligned(np.zeros(PROBLEM.out_shape, np.float32))
    assert ordered(*of(x, w, b), out=FakeTensor(out)) == second
    wide = np.zeros((*PROBLEM.out_shape[:3], 14), np.float32)[..., ::2]
    assert ordered(*theirs, out=FakeTensor(wide)) == ["run"]
    # The result is copied on cupy's stream.
    assert ordered(*of(x, w, b), out=FakeTensor(wide)) == [*second, second[0], second[2]]
    assert ordered(*theirs, out=FakeArray.of(wide)) == [*first, second[0], second[2]]


BF16 = PROBLEM.with_(dtype="bf16")


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("kind", [FakeArray.of, FakeTensor, FakeInterface, np.asarray])
def test_bfloat16(card: Device, kind: Any) -> None:
    x, w, b = (aligned(a) for a in reference.arrays(BF16))
    got = convolve(card, kind(x), kind(w), kind(b))
    assert isinstance(got, FakeArray if kind is FakeInterface else type(kind(x)))
    reference.check(BF16, getattr(got, "array", got), x, w, b)


def test_bfloat16_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(MissingExtraError, match=r"bfloat16 needs .* pip install ml_dtypes"):
        numpy_dtype.__wrapped__("bf16")


def test_bfloat16_elsewhere() -> None:
    x, w, _ = reference.arrays(BF16)
    for call in (
        lambda: wgpuconv.conv2d(x, w),
        lambda: wgpuconv.conv2d(wgpuconv.tensor(x), wgpuconv.tensor(w)),
        lambda: wgpuconv.Conv2d(w)(x),
        lambda: wgpuconv.plan_conv2d(x.shape, w.shape, dtype="bf16"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=r"bfloat16 needs a CUDA device, got "):
            call()


# ---- strides and alignment ----


@pytest.mark.usefixtures("torch")
def test_strides_of_torch(card: Device) -> None:
    for x in (X, NHWC, X[:, :, ::-1], NHWC[:, :, ::-1]):
        got = convolve(card, *(FakeTensor(a) for a in (x, W, B)))
        assert isinstance(got, FakeTensor)
        last = x is NHWC
        assert got.array.transpose(0, 2, 3, 1).flags.c_contiguous == last
        uncopied = x.flags.c_contiguous or last
        assert (card.backend.inputs[-1] == x.ctypes.data) == uncopied
        reference.check(PROBLEM, got.array, x, W, B)
        for target in (np.zeros(PROBLEM.out_shape, np.float32), np.zeros((2, 6, 7, 4), "f4")):
            out = FakeTensor(target if target.shape[1] == 4 else target.transpose(0, 3, 1, 2))
            assert convolve(card, *(FakeTensor(a) for a in (x, W, B)), out=out) is out
            reference.check(PROBLEM, np.ascontiguousarray(out.array), x, W, B)
        mixed = FakeTensor(np.zeros((*PROBLEM.out_shape[:3], 14), np.float32)[..., ::2])
        assert convolve(card, *of(x, W, B), out=mixed) is mixed
        reference.check(PROBLEM, np.ascontiguousarray(mixed.array), x, W, B)


def test_channels_last_is_used(card: Device) -> None:
    x = FakeArray.of(NHWC)
    got = convolve(card, x, *of(W, B))
    assert card.backend.inputs[-1] == NHWC.ctypes.data
    assert got.shape == PROBLEM.out_shape
    assert got.array.transpose(0, 2, 3, 1).flags.c_contiguous
    reference.check(PROBLEM, got.array, X, W, B)
    # What says itself that it is NHWC, and is not contiguous so, is copied.
    whole = FakeArray.of(NHWC.transpose(0, 2, 3, 1)[:, :, ::-1])
    got = convolve(card, whole, *of(W, B), layout="NHWC")
    flipped = X[:, :, :, ::-1]
    reference.check(PROBLEM, got.array.transpose(0, 3, 1, 2), flipped, W, B)
    assert got.array.flags.c_contiguous


def test_a_weight_in_channels_last_is_read_as_it_lies(card: Device) -> None:
    last = aligned(W.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for x, layout in ((NHWC, "NCHW"), (NHWC.transpose(0, 2, 3, 1), "NHWC"), (X, "NCHW")):
        got = convolve(card, FakeArray.of(x), *of(last, B), layout=layout)
        assert card.backend.weights[-1] == last.ctypes.data
        found = got.array if layout == "NCHW" else got.array.transpose(0, 3, 1, 2)
        reference.check(PROBLEM, found, X, W, B)
    # The same shapes with other strides are another plan.
    got = convolve(card, FakeArray.of(NHWC), *of(W, B))
    assert card.backend.weights[-1] == W.ctypes.data
    reference.check(PROBLEM, got.array, X, W, B)
    module = wgpuconv.Conv2d(FakeArray.of(last), FakeArray.of(B), padding=1, device=card)
    reference.check(PROBLEM, module(FakeArray.of(NHWC)).array, X, W, B)


def test_one_image(card: Device) -> None:
    for x in (X[0], NHWC[0]):
        got = convolve(card, FakeArray.of(x), *of(W, B))
        assert got.shape == PROBLEM.out_shape[1:]
        reference.check(PROBLEM.with_(n=1), got.array[None], X[:1], W, B)


def test_strided_and_unaligned_are_copied(card: Device) -> None:
    for x in (X[:, :, ::-1], np.broadcast_to(X[:1], X.shape)):
        got = convolve(card, FakeArray.of(x), *of(W, B))
        assert card.backend.inputs[-1] != x.ctypes.data
        reference.check(PROBLEM, got.array, x, W, B)
    shifted = aligned(np.zeros(X.size + 1, np.float32))[1:].reshape(X.shape)
    shifted[...] = X
    got = convolve(card, FakeArray.of(shifted), *of(W, B))
    assert card.backend.inputs[-1] % 16 == 0
    reference.check(PROBLEM, got.array, X, W, B)


@pytest.mark.usefixtures("torch")
def test_the_negative_bit_of_torch(card: Device) -> None:
    """A view such as z.conj().imag has the other sign than its memory."""
    for x in (X, NHWC, X[:, :, ::-1]):
        got = convolve(card, FakeTensor(-x, negative=True), *(FakeTensor(a) for a in (W, B)))
        reference.check(PROBLEM, np.ascontiguousarray(got.array), x, W, B)
    w, b = (FakeTensor(aligned(-a), negative=True) for a in (W, B))
    module = wgpuconv.Conv2d(w, b, padding=1, algorithm="direct", device=card)
    reference.check(PROBLEM, module(FakeTensor(X)).array, X, W, B)
    out = FakeTensor(aligned(np.zeros(PROBLEM.out_shape, np.float32)), negative=True)
    assert convolve(card, *(FakeTensor(a) for a in (X, W, B)), out=out) is out
    reference.check(PROBLEM, -out.array, X, W, B)
    with pytest.raises(
        DtypeError, match=r"out has the negative bit .*; pass its \.resolve_neg\(\)"
    ):
        convolve(card, *of(X, W, B), out=out)  # DLPack has no such bit


@pytest.mark.parametrize("order", ["C", "channels last", "strided"])
@pytest.mark.parametrize("x", [X, NHWC], ids=["C", "channels last"])
def test_out(card: Device, x: np.ndarray, order: str) -> None:
    n, k, h, w = PROBLEM.out_shape
    out = {
        "C": aligned(np.zeros((n, k, h, w), np.float32)),
        "channels last": aligned(np.zeros((n, h, w, k), np.float32)).transpose(0, 3, 1, 2),
        "strided": np.zeros((n, k, h, 2 * w), np.float32)[..., ::2],
    }[order]
    given = FakeArray.of(out)
    assert convolve(card, FakeArray.of(x), *of(W, B), out=given) is given
    reference.check(PROBLEM, np.ascontiguousarray(out), X, W, B)


def test_modules(card: Device) -> None:
    w = W.copy()
    module = wgpuconv.Conv2d(
        *of(w, B), padding=1, algorithm="implicit_gemm", precision="tf32", device=card
    )
    w[...] = 0  # which the module does not see
    tf32 = PROBLEM.with_(precision="tf32")
    for x in (X, NHWC):
        got = module(FakeArray.of(x))
        assert isinstance(got, FakeArray)
        assert got.array.transpose(0, 2, 3, 1).flags.c_contiguous == (x is NHWC)
        reference.check(tf32, got.array, X, W, B)
    reference.check(tf32, module(X), X, W, B)


ADDED = PROBLEM.with_(residual=True)
RESIDUAL = aligned(reference.residual(ADDED))


@pytest.mark.parametrize("strides", ["C", "channels last", "strided"])
@pytest.mark.parametrize("x", [X, NHWC], ids=["C", "channels last"])
def test_residuals(card: Device, x: np.ndarray, strides: str) -> None:
    """In any order beside an input in any; the result has the input's."""
    n, k, h, w = PROBLEM.out_shape
    r = {
        "C": RESIDUAL,
        "channels last": aligned(RESIDUAL.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        "strided": np.zeros((n, k, h, 2 * w), np.float32)[..., ::2],
    }[strides]
    r[...] = RESIDUAL
    got = convolve(card, FakeArray.of(x), *of(W, B), residual=FakeArray.of(r))
    assert card.backend.inputs[-1] == x.ctypes.data
    assert got.array.transpose(0, 2, 3, 1).flags.c_contiguous == (x is NHWC)
    reference.check(ADDED, np.ascontiguousarray(got.array), X, W, B, RESIDUAL)
    one = convolve(card, FakeArray.of(x[0]), *of(W, B), residual=FakeArray.of(r[0]))
    np.testing.assert_array_equal(one.array, got.array[0])
    module = wgpuconv.Conv2d(*of(W, B), padding=1, algorithm="direct", device=card)
    again = module(FakeArray.of(x), residual=FakeArray.of(r))
    np.testing.assert_array_equal(again.array, got.array)


@pytest.mark.parametrize("x", [X, NHWC], ids=["C", "channels last"])
def test_a_tensor_as_residual(card: Device, x: np.ndarray) -> None:
    r = wgpuconv.tensor(RESIDUAL, card)
    got = convolve(card, FakeArray.of(x), *of(W, B), residual=r)
    assert got.array.flags.c_contiguous  # as the residual is
    reference.check(ADDED, got.array, X, W, B, RESIDUAL)
    got = convolve(card, wgpuconv.tensor(X, card), *of(W, B), residual=FakeArray.of(RESIDUAL))
    reference.check(ADDED, got.numpy(), X, W, B, RESIDUAL)


# ---- what does not fit ----


@pytest.mark.usefixtures("torch")
def test_refusals(card: Device) -> None:
    x, w, b = of(X, W, B)
    cases: list[tuple[Any, Any, str]] = [
        ((FakeArray.of(X, gpu=1), w, b), MixedDevicesError, "the input .* lives on GPU 1, but the"),
        ((x, FakeTensor(W, gpu=1), b), MixedDevicesError, r"or pass device='cuda:1'"),
        ((x, W, b), MixedDevicesError, r"the weight \(numpy.ndarray\) is not in the memory of"),
        ((X, w, b), MixedDevicesError, r"where the weight \(\w+.FakeArray\) is; move one"),
        (
            (x, W.tolist(), b),
            DtypeError,
            r"weight must be an array, as .*FakeArray\) is, got a list",
        ),
        ((x, w, FakeTensor(B, requires_grad=True)), DtypeError, r"the bias requires a gradient"),
        ((x, w, FakeExchange(B.astype(np.int8))), DtypeError, "cannot be read: a dtype that cupy"),
        ((x, w, FakeTensor(B.astype(np.int8))), DtypeError, "or bfloat16, got torch.int8"),
        (
            (FakeArray.of(X.astype(np.float64)), w, b),
            DtypeError,
            "or bfloat16, got float64",
        ),
        ((FakeArray.of(X.astype(np.float16)), w, b), DtypeError, "must have the input's dtype"),
    ]
    for arrays, error, message in cases:
        with pytest.raises(error, match=message):
            convolve(card, *arrays)
    residuals: list[tuple[Any, Any, str]] = [
        (RESIDUAL, MixedDevicesError, r"the residual \(numpy.ndarray\) is not in the memory of"),
        (FakeArray.of(X), ProblemError, r"the result's shape \(2, 4, 6, 7\), got \(2, 5, 6, 7\)"),
        (FakeArray.of(RESIDUAL.astype("f2")), DtypeError, "residual must have the input's dtype"),
        (0.5, DtypeError, r"residual must be an array, as the input .* is, got a float"),
    ]
    module = wgpuconv.Conv2d(w, b, padding=1, device=card)
    for residual, error, message in residuals:
        for image in (x, FakeArray.of(NHWC)):  # shapes are the caller's, whatever the strides
            with pytest.raises(error, match=message):
                convolve(card, image, w, b, residual=residual)
            with pytest.raises(error, match=message):
                module(image, residual=residual)
    few = FakeArray.of(NHWC[:, :0])
    with pytest.raises(ProblemError, match=r"got an input of shape \(2, 0, 6, 7\)"):
        convolve(card, few, w, b)
    outs: list[tuple[Any, Any, str]] = [
        (np.empty(PROBLEM.out_shape, np.float32), MixedDevicesError, "the out .* is not in the"),
        (wgpuconv.tensor(X, card), DtypeError, "out must be a .*FakeArray as the input is"),
        (FakeArray.of(aligned(X)), ProblemError, r"out must have shape \(2, 4, 6, 7\)"),
        (FakeArray.of(X[:, ::2]), ProblemError, r"out must have shape \(2, 4, 6, 7\)"),
    ]
    for out, error, message in outs:
        with pytest.raises(error, match=message):
            convolve(card, x, w, b, out=out)
    with pytest.raises(DtypeError, match=r"out must be a wgpuconv\.Tensor as the input is"):
        convolve(card, wgpuconv.tensor(X, card), w, b, out=FakeArray.of(aligned(X)))


def test_a_tensor_of_the_host(card: Device) -> None:
    torch = pytest.importorskip("torch")
    x, w, _ = of(X, W, B)
    with pytest.raises(MixedDevicesError, match=r"the weight \(torch.Tensor\) is not in the"):
        convolve(card, x, torch.tensor(W))
    with pytest.raises(DtypeError, match=r"got a torch.Tensor; .* with \.detach\(\)\.numpy\(\)$"):
        convolve(card, torch.tensor(X), torch.tensor(W))
    with pytest.raises(MixedDevicesError, match=r"the input \(torch.Tensor\) is not in the"):
        convolve(card, torch.tensor(X), w)


def test_other_devices_take_no_arrays_of_a_gpu() -> None:
    x, w, _ = of(X, W, B)
    with pytest.raises(DtypeError, match=r"input must be a numpy array or a wgpuconv\.Tensor"):
        wgpuconv.conv2d(x, w)


def test_no_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no Vulkan, but another kind of device is installed."""
    monkeypatch.setattr(device_module, "_shared", {})
    monkeypatch.setattr(Provider, "adapters", lambda self: [])
    monkeypatch.delenv("WGPUCONV_DEVICE", raising=False)
    x, w = of(X, W)
    named = [SimpleNamespace(name="cuda")]
    for found, theirs, ours in (
        (named, r"the input is a \w+\.FakeArray: name a device .* device='cuda', since", "'cuda'$"),
        ([], r"^no Vulkan, .*Mesa 25 or newer\)$", r"Mesa 25 or newer\)$"),
    ):
        entry_points = importlib.metadata.entry_points
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda *, group, name=None, found=found: found if name is None else [],
        )
        with pytest.raises(NoAdapterError, match=theirs):
            wgpuconv.conv2d(x, w)
        with pytest.raises(NoAdapterError, match=ours):
            wgpuconv.conv2d(X, W)
        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_weights_in_channels_last_elsewhere(device: Device) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"\('wlast'\) needs a CUDA device"):
        device.choose(PROBLEM.with_(weight_last=True))
    (direct,) = (a for a in device.algorithms if a.name == "direct")
    reason = direct.refusal(PROBLEM.with_(weight_last=True), device.facts)
    assert reason == "reads weights as (4, 5, 3, 3), not as (4, 3, 3, 5)"


def test_tf32_elsewhere() -> None:
    with pytest.raises(UnsupportedFeatureError, match="precision 'tf32' needs a CUDA device"):
        wgpuconv.conv2d(X, W, precision="tf32")
    with pytest.raises(UnsupportedFeatureError, match="leave it out"):
        wgpuconv.plan_conv2d(X.shape, W.shape, precision="tf32")
    with pytest.raises(ProblemError, match="precision 'tf32' is one of float32, got f16"):
        wgpuconv.conv2d(X.astype("f2"), W.astype("f2"), precision="tf32")
    with pytest.raises(ProblemError, match="precision must be 'default' or 'tf32', got 'bf16'"):
        wgpuconv.Conv2d(W, precision="bf16")


# ---- on a GPU ----


@pytest.fixture(scope="module")
def cuda() -> Device:
    try:
        backend = entry.open("cuda")
    except (MissingExtraError, NoAdapterError) as error:
        pytest.skip(str(error))
    device = Device.__new__(Device)
    device._setup(backend, "off", ":memory:", None)
    return device


@pytest.mark.gpu
def test_cupy_on_a_gpu(cuda: Device) -> None:
    cupy = entry.cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, w, b = (cupy.asarray(a) for a in (X, W, B))
        last = cupy.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        wide = cupy.zeros((*X.shape[:-1], 2 * X.shape[-1]), np.float32)
        wide[..., ::2] = x
        for image, is_last in ((x, False), (last, True), (wide[..., ::2], False)):
            got = wgpuconv.conv2d(image, w, b, padding=1, device=cuda)
            assert isinstance(got, cupy.ndarray)
            assert got.transpose(0, 2, 3, 1).flags.c_contiguous == is_last
            reference.check(PROBLEM, np.ascontiguousarray(got.get()), X, W, B)
        out = cupy.zeros(PROBLEM.out_shape, np.float32)
        assert wgpuconv.conv2d(x, w, b, padding=1, device=cuda, out=out) is out
        reference.check(PROBLEM, out.get(), X, W, B)
        same = ConvProblem.parse("conv2d f32 n1 c4 h6 w7 k4 r3 s3 pad1")
        both = cupy.zeros(same.input_shape, np.float32)
        with pytest.raises(ProblemError, match="out must not share memory with the input"):
            wgpuconv.conv2d(both, w[:, :4], padding=1, device=cuda, out=both)
        r = cupy.asarray(RESIDUAL)
        with pytest.raises(ProblemError, match="out must not share memory with the residual"):
            wgpuconv.conv2d(x, w, b, padding=1, device=cuda, residual=r, out=r)
        for image in (x, last):
            got = wgpuconv.conv2d(image, w, b, padding=1, device=cuda, residual=r)
            reference.check(ADDED, np.ascontiguousarray(got.get()), X, W, B, RESIDUAL)


@pytest.mark.gpu
def test_torch_on_a_gpu(cuda: Device) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x, w, b = (torch.tensor(a, device="cuda") for a in (X, W, B))
            last = x.contiguous(memory_format=torch.channels_last)
            filters = w.contiguous(memory_format=torch.channels_last)
            for image, weight in ((x, w), (last, w), (x, filters), (last, filters)):
                got = wgpuconv.conv2d(image, weight, b, padding=1, device=cuda)
                assert isinstance(got, torch.Tensor)
                assert got.is_cuda
                assert got.is_contiguous(memory_format=torch.channels_last) == (image is last)
                again = (got + 0).cpu().numpy()  # on torch's stream, right behind
                reference.check(PROBLEM, np.ascontiguousarray(again), X, W, B)
            module = wgpuconv.Conv2d(w, b, padding=1, device=cuda)
            reference.check(PROBLEM, module(x).cpu().numpy(), X, W, B)
    with pytest.raises(MixedDevicesError, match=r"the weight \(torch.Tensor\) is not in the"):
        wgpuconv.conv2d(x, w.cpu(), device=cuda)


@pytest.mark.gpu
def test_streams_on_a_gpu(cuda: Device) -> None:
    """Weights that torch's stream fills late, and a result that it reads, beside cupy's stream."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    cupy = entry.cupy()
    source = torch.tensor(W, device="cuda")
    strided = torch.tensor(np.repeat(W, 2, axis=-1), device="cuda")[..., ::2]
    x, b = wgpuconv.tensor(X, cuda), cupy.asarray(B)
    cupy.cuda.runtime.deviceSynchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for late in (torch.zeros_like(source), torch.zeros_like(strided)):
            torch.cuda._sleep(100_000_000)
            late.copy_(source)
            got = wgpuconv.conv2d(x, late, b, padding=1, device=cuda)
            reference.check(PROBLEM, got.numpy(), X, W, B)
        out = torch.zeros(PROBLEM.out_shape, device="cuda")
        torch.cuda._sleep(100_000_000)
        late.zero_()
        late.copy_(source)
        wgpuconv.conv2d(cupy.asarray(X), late, b, padding=1, device=cuda, out=out)
        reference.check(PROBLEM, (out + 0).cpu().numpy(), X, W, B)
        plain = wgpuconv.conv2d(torch.tensor(X, device="cuda"), late, b, padding=1, device=cuda)
        reference.check(PROBLEM, plain.cpu().numpy(), X, W, B)


@pytest.mark.gpu
def test_a_negative_view_on_a_gpu(cuda: Device) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x, w, b = (torch.tensor(a, device="cuda") for a in (X, W, B))
    negative = torch.complex(x, -x).conj().imag
    assert negative.is_neg()
    got = wgpuconv.conv2d(negative, w, b, padding=1, device=cuda)
    reference.check(PROBLEM, np.ascontiguousarray(got.cpu().numpy()), X, W, B)


@pytest.mark.gpu
def test_a_plan_on_a_stream_of_a_gpu(cuda: Device) -> None:
    cupy = entry.cupy()
    problem = PROBLEM.with_(bias=False)
    plan = wgpuconv.plan_conv2d(X.shape, W.shape, padding=1, device=cuda)
    given = {"input": wgpuconv.tensor(X, cuda), "weight": wgpuconv.tensor(W, cuda)}
    out = wgpuconv.Tensor.empty(problem.out_shape, device=cuda)
    stream = cupy.cuda.Stream(non_blocking=True)
    plan.encode(stream, **given, out=out)
    stream.synchronize()
    reference.check(problem, out.numpy(), X, W)
    cuda.backend.write(out.buffer, np.zeros(problem.out_shape, np.float32))
    with stream:
        stream.begin_capture()
        plan.encode(stream, **given, out=out)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    reference.check(problem, out.numpy(), X, W)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu(cuda: Device) -> None:
    cupy = entry.cupy()
    arrays = reference.arrays(BF16)
    got = wgpuconv.conv2d(*arrays, padding=1, device=cuda)
    reference.check(BF16, got, *arrays)
    got = wgpuconv.conv2d(*(cupy.asarray(a) for a in arrays), padding=1, device=cuda)
    assert isinstance(got, cupy.ndarray)
    reference.check(BF16, got.get(), *arrays)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x, w, b = (torch.tensor(a.astype(np.float32), device="cuda").bfloat16() for a in arrays)
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        got = wgpuconv.conv2d(image, w, b, padding=1, device=cuda)
        assert got.dtype == torch.bfloat16
        found = got.float().cpu().numpy().astype(numpy_dtype("bf16"))
        reference.check(BF16, np.ascontiguousarray(found), *arrays)
