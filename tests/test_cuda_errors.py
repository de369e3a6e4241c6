"""What goes wrong on a CUDA device is one exception of ours, and the next call works if any can."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from fake_cupy import (
    DriverFailure,
    FakeCupy,
    NotCompiled,
    OutOfMemoryError,
    RuntimeFailure,
    Stream,
)

import wgpuconv
from wgpuconv import Device
from wgpuconv.errors import (
    DeviceError,
    DeviceLostError,
    DtypeError,
    ForkedProcessError,
    OutOfDeviceMemoryError,
    ProblemError,
    ShaderError,
    UnsupportedFeatureError,
    WgpuConvError,
)
from wgpuconv.plugins.cuda import launch
from wgpuconv.plugins.cuda.backend import CudaBackend
from wgpuconv.plugins.cuda.buffer import CudaBuffer
from wgpuconv.problem import ConvProblem

TEXT = "conv2d f32 n1 c4 h6 w6 k8 r3 s3"
X, W = np.ones((1, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setattr(launch, "Driver", lambda: made.driver)
    return made


@pytest.fixture
def card(api: FakeCupy) -> Device:
    device = Device.__new__(Device)
    device._setup(CudaBackend(api, 0), "off", ":memory:", None)
    return device


def convolve(card: Device) -> Any:
    return wgpuconv.conv2d(X, W, device=card)


ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
FAILURES: list[tuple[str, Exception, type[WgpuConvError], str]] = [
    (
        "alloc",
        OutOfMemoryError("Out of memory"),
        OutOfDeviceMemoryError,
        "a card has no memory left",
    ),
    (
        "memcpyAsync",
        RuntimeFailure("cudaErrorMemoryAllocation: out of memory"),
        OutOfDeviceMemoryError,
        "use a smaller batch or workspace_limit",
    ),
    (
        "launch",
        DriverFailure("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        OutOfDeviceMemoryError,
        "has no memory left for this call",
    ),
    (
        "launch",
        DriverFailure("CUDA_ERROR_INVALID_VALUE: invalid argument"),
        DeviceError,
        "a card refused the call: CUDA_ERROR_INVALID_VALUE",
    ),
    *(
        (
            "RawModule",
            error,
            DeviceError,
            r"NVRTC, which cannot be loaded .*pip install 'cupy-cuda13x\[ctk\]'",
        )
        for error in (
            RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: cannot open shared object"),
            ImportError('Failure finding "libnvrtc.so": No such file'),
            NotCompiled("nvrtc: error: failed to open libnvrtc-builtins.so.13.0."),
        )
    ),
]


@pytest.mark.parametrize(("where", "raised", "error", "message"), FAILURES)
def test_a_failure_is_one_error_and_the_next_call_works(
    card: Device,
    api: FakeCupy,
    where: str,
    raised: Exception,
    error: type[WgpuConvError],
    message: str,
) -> None:
    api.fails[where] = raised
    with pytest.raises(error, match=message) as found:
        convolve(card)
    assert type(found.value) is error
    assert found.value.__cause__ is raised
    api.fails.clear()
    assert card.backend.usable
    assert convolve(card).shape == (1, 8, 4, 4)
    assert api.launched


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (NotCompiled("error: expected a ';'"), r"direct\.cu did not compile: error: expected"),
        (RuntimeError("NO_BINARY_FOR_GPU"), r"direct\.cu cannot be loaded on this device: NO_BIN"),
    ],
)
def test_a_kernel_that_is_none(
    card: Device, api: FakeCupy, raised: Exception, message: str
) -> None:
    """Choosing a plan goes on to the next candidate; to ask for this one is an error."""
    plan = card.choose(ConvProblem.parse(TEXT), algorithm="direct").plan
    backend = CudaBackend(api, 0)
    api.fails["RawModule"] = raised
    with pytest.raises(ShaderError, match=message):
        backend.compile(plan)
    api.fails.clear()
    assert backend.compile(plan).plan is plan


def test_the_pip_command_is_that_of_the_toolkit(card: Device, api: FakeCupy) -> None:
    api.cuda.runtime.runtimeGetVersion = lambda: 12090
    api.fails["RawModule"] = RuntimeError("cannot find libnvrtc.so.12")
    with pytest.raises(DeviceError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        convolve(card)


def test_a_kernel_that_fails_ends_the_device(card: Device, api: FakeCupy) -> None:
    """The driver refuses all that comes after, and whoever asks is told so at once."""
    for where in ("streamSynchronize", "deviceSynchronize", "alloc"):
        api.fails[where] = RuntimeFailure(ILLEGAL)
    with pytest.raises(DeviceLostError, match=r"a kernel failed on a card .*start a new one"):
        convolve(card)
    assert not card.backend.usable
    with pytest.raises(DeviceLostError, match="start a new one"):
        convolve(card)


def test_a_forked_child(card: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ForkedProcessError, match="open the device in the child"):
        convolve(card)


def test_scratch_belongs_to_the_stream_that_uses_it(card: Device, api: FakeCupy) -> None:
    """cupy's pool would hand it to another one while this one still reads it."""
    compiled = card.compiled(ConvProblem.parse(TEXT), algorithm="implicit_gemm")
    assert compiled.plan.prepared
    buffers = {role: card.backend.allocate(1 << 16) for role in ("input", "weight", "out")}
    for stream in (5, 0):
        card.backend.run(compiled, buffers, stream=stream)
        scratch = card.backend._scratch["prepared", stream]
        assert scratch.memory.stream == stream
        assert (api.launched[-1].stream or 0) == stream
    assert api.streams[-1].ptr == 0


def test_kernels_start_while_the_one_before_still_runs(card: Device, api: FakeCupy) -> None:
    """On GPUs that can, with drivers whose graphs can; the sizes are those of cuda.h."""
    assert (ctypes.sizeof(launch.Config), ctypes.sizeof(launch._Attribute)) == (56, 72)
    convolve(card)
    config = api.launched[-1]
    assert (config.count, config.block[0] % 32) == (1, 0)
    assert ctypes.c_int.from_address(config.attributes).value == 6
    assert ctypes.c_int.from_address(config.attributes + 8).value == 1
    api.cuda.runtime.driverGetVersion = lambda: 12020
    older = Device.__new__(Device)
    older._setup(CudaBackend(api, 0), "off", ":memory:", None)
    convolve(older)
    assert (api.launched[-1].count, api.launched[-1].attributes) == (0, None)
    assert not launch.starts_early((8, 9), 13000)


def test_a_plan_is_queued_on_the_callers_stream(card: Device, api: FakeCupy) -> None:
    plan = wgpuconv.plan_conv2d(X.shape, W.shape, algorithm="direct", device=card)
    given = {"input": wgpuconv.tensor(X, card), "weight": wgpuconv.tensor(W, card)}
    out = wgpuconv.Tensor.empty(plan.problem.out_shape, device=card)
    api.launched.clear()
    plan.encode(Stream(5, []), **given, out=out)
    assert [config.stream for config in api.launched] == [5] * plan.plan.dispatches
    with pytest.raises(
        DtypeError, match=r"encoder must be a stream of cupy .* on a card, got a obj"
    ):
        plan.encode(object(), **given, out=out)
    with pytest.raises(DtypeError, match=r"out must be a wgpuconv.Tensor on a card, got a numpy"):
        plan.encode(Stream(5, []), **given, out=np.empty(plan.problem.out_shape, np.float32))


@pytest.mark.parametrize("role", ["input", "weight", "bias", "residual"])
def test_out_that_shares_memory(card: Device, role: str) -> None:
    """Views of one array are other objects than each other."""
    shapes = {"input": (1, 4, 6, 6), "weight": (4, 4, 3, 3), "bias": (4,), "residual": (1, 4, 6, 6)}
    given = {name: wgpuconv.Tensor.empty(shape, device=card) for name, shape in shapes.items()}
    shared = given[role].buffer
    size, nbytes = 4 * 4 * 6 * 6, given[role].nbytes
    for begin, overlaps in ((nbytes - 4, True), (nbytes, False), (4 - size, True), (-size, False)):
        memory = CudaBuffer(shared.memory, shared.pointer + begin, size)
        out = wgpuconv.Tensor(card, memory, (1, 4, 6, 6), np.dtype(np.float32))
        shared.size = nbytes
        if not overlaps:
            wgpuconv.conv2d(**given, padding=1, out=out)
            continue
        with pytest.raises(ProblemError, match=f"out must not share memory with the {role}"):
            wgpuconv.conv2d(**given, padding=1, out=out)


def test_sizes(card: Device) -> None:
    backend = card.backend
    with pytest.raises(UnsupportedFeatureError, match="larger than the memory of a card"):
        backend.allocate(1 << 50)
    small = backend.allocate(16)
    with pytest.raises(ProblemError, match="the array needs 64 bytes, the buffer has 16"):
        backend.write(small, np.zeros(16, np.float32))
