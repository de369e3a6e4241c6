"""Misuse and misfortune: each case in a process of its own, since what is tested could kill it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import wgpuconv
from wgpuconv import Device, Tensor, conv2d, plan_conv2d, tensor
from wgpuconv.errors import (
    DeviceError,
    DeviceLostError,
    ForkedProcessError,
    MixedDevicesError,
    OutOfDeviceMemoryError,
    ProblemError,
    UnsupportedFeatureError,
)

HERE = Path(__file__).parent
TIMEOUT = 120
"""Seconds; a scenario takes about one. Less than pytest's own, so that the output is shown."""

INPUT = np.arange(2 * 3 * 6 * 5, dtype=np.float32).reshape(2, 3, 6, 5) % 7 - 3
WEIGHT = np.arange(4 * 3 * 3 * 3, dtype=np.float32).reshape(4, 3, 3, 3) % 5 - 2


def expected(x: np.ndarray = INPUT, weight: np.ndarray = WEIGHT) -> np.ndarray:
    """Stride 1 without padding; exact in float32, since the inputs are small integers."""
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    return np.einsum("nchwrs,kcrs->nkhw", windows, weight)


def isolated(*providers: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Makes a scenario a test for each provider, run in a fresh interpreter."""

    def decorate(scenario: Callable[[str], None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("provider", providers)
        def test(provider: str) -> None:
            if provider == "dawn":
                pytest.importorskip("wgpudawn")
            call = f"import {__name__} as m; m.{scenario.__name__}.scenario({provider!r})"
            path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", call],
                env={**os.environ, "PYTHONPATH": path, "WGPUCONV_TUNE": "off"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            for word in ("Traceback", "Exception ignored", "panicked"):
                assert word not in done.stderr, done.stderr

        test.scenario = scenario  # type: ignore[attr-defined]
        test.__doc__ = scenario.__doc__
        return test

    return decorate


def works(device: Device) -> None:
    """The device still gives right answers."""
    assert np.array_equal(conv2d(INPUT, WEIGHT, device=device), expected())


def storage(device: Device, nbytes: int, usage: str = "STORAGE|COPY_SRC|COPY_DST", **more):
    return device.backend.gpu_device.create_buffer(size=nbytes, usage=usage, **more)


def caller_buffers(device: Device) -> dict:
    buffers = {
        "input": storage(device, INPUT.nbytes),
        "weight": storage(device, WEIGHT.nbytes),
        "out": storage(device, expected().nbytes),
    }
    queue = device.backend.gpu_device.queue
    queue.write_buffer(buffers["input"], 0, INPUT)
    queue.write_buffer(buffers["weight"], 0, WEIGHT)
    return buffers


# ---- a caller's own buffers ----


@isolated("wgpu", "dawn")
def test_destroyed_buffer(spec: str) -> None:
    """A destroyed buffer is refused wherever it turns up; submitting it would abort."""
    device = Device(spec)
    works(device)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    weight = tensor(WEIGHT, device)
    for role in ("input", "weight", "out"):
        buffers = caller_buffers(device)
        # Used once before, so that whatever could be cached for it is.
        x = Tensor.from_buffer(buffers["input"], INPUT.shape, "f4", device)
        assert np.array_equal(conv2d(x, weight).numpy(), expected())
        buffers[role].destroy()
        gpu_device = device.backend.gpu_device
        encoder = gpu_device.create_command_encoder()
        if spec == "wgpu":  # where a submit would abort
            with pytest.raises(ProblemError, match=f"{role}.*destroyed"):
                plan.encode(encoder, **buffers)
        else:  # the caller's own submit says it
            plan.encode(encoder, **buffers)
            with pytest.raises(Exception, match="destroyed"):
                gpu_device.queue.submit([encoder.finish()])
    buffer = caller_buffers(device)["input"]
    x = Tensor.from_buffer(buffer, INPUT.shape, "f4", device)
    conv2d(x, weight)
    buffer.destroy()
    with pytest.raises((ProblemError, DeviceError), match="destroyed"):
        conv2d(x, weight)
    with pytest.raises((ProblemError, DeviceError), match="destroyed"):
        x.numpy()
    buffer = storage(device, expected().nbytes)
    out = Tensor.from_buffer(buffer, expected().shape, "f4", device)
    buffer.destroy()
    with pytest.raises((ProblemError, DeviceError), match="destroyed"):
        conv2d(tensor(INPUT, device), weight, out=out)
    works(device)


@isolated("wgpu", "dawn")
def test_mapped_buffer(spec: str) -> None:
    device = Device(spec)
    usage = "STORAGE|COPY_SRC|COPY_DST"
    buffer = storage(device, INPUT.nbytes, usage, mapped_at_creation=True)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    encoder = device.backend.gpu_device.create_command_encoder()
    for use in (
        lambda: Tensor.from_buffer(buffer, INPUT.shape, "f4", device),
        lambda: plan.encode(encoder, **{**caller_buffers(device), "input": buffer}),
    ):
        with pytest.raises(ProblemError, match="unmap"):
            use()
    buffer.unmap()
    x = Tensor.from_buffer(buffer, INPUT.shape, "f4", device)
    assert np.array_equal(conv2d(x, WEIGHT).numpy(), np.zeros(expected().shape))
    works(device)


@isolated("wgpu", "dawn")
def test_buffer_of_another_device(spec: str) -> None:
    device, other = Device(spec), Device(spec)
    weight = tensor(WEIGHT, device)
    with pytest.raises(MixedDevicesError, match=r"(weight|input) and the call use two"):
        conv2d(tensor(INPUT, other), weight)
    with pytest.raises(MixedDevicesError, match="input and the call use two"):
        conv2d(tensor(INPUT, other), WEIGHT, device=device)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    encoder = device.backend.gpu_device.create_command_encoder()
    buffers = caller_buffers(device)
    for foreign in (caller_buffers(other)["input"], tensor(INPUT, other).buffer):
        with pytest.raises(ProblemError, match=rf"belongs to another {spec} device"):
            Tensor.from_buffer(foreign, INPUT.shape, "f4", device)
        with pytest.raises(ProblemError, match=rf"belongs to another {spec} device"):
            plan.encode(encoder, **{**buffers, "input": foreign})
    with pytest.raises(MixedDevicesError, match="input and the plan use two"):
        plan.encode(encoder, **{**buffers, "input": tensor(INPUT, other)})
    plan.encode(other.backend.gpu_device.create_command_encoder(), **buffers)  # noticed at the end
    works(device)
    works(other)


@isolated("wgpu", "dawn")
def test_buffer_with_other_usage(spec: str) -> None:
    device = Device(spec)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    for role in ("input", "weight", "out"):
        buffers = caller_buffers(device)
        buffers[role] = storage(device, buffers[role].size, "COPY_SRC|COPY_DST")
        encoder = device.backend.gpu_device.create_command_encoder()
        with pytest.raises((ProblemError, DeviceError), match="STORAGE"):
            plan.encode(encoder, **buffers)
    x = Tensor.from_buffer(storage(device, INPUT.nbytes, "STORAGE"), INPUT.shape, "f4", device)
    conv2d(x, WEIGHT)
    with pytest.raises((ProblemError, DeviceError), match="COPY_SRC"):
        x.numpy()
    works(device)


@isolated("wgpu", "dawn")
def test_buffer_too_small(spec: str) -> None:
    device = Device(spec)
    small = storage(device, INPUT.nbytes - 4)
    with pytest.raises(ProblemError, match=f"{INPUT.nbytes - 4} bytes"):
        Tensor.from_buffer(small, INPUT.shape, "f4", device)
    with pytest.raises(ProblemError, match="needs 8"):  # whole words are bound and copied
        Tensor.from_buffer(storage(device, 6), (3,), "f2", device)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    for role in ("input", "weight", "out"):
        buffers = caller_buffers(device)
        buffers[role] = storage(device, buffers[role].size - 4)
        encoder = device.backend.gpu_device.create_command_encoder()
        with pytest.raises(ProblemError, match="bytes"):
            plan.encode(encoder, **buffers)
    works(device)


@isolated("wgpu", "dawn")
def test_things_that_are_no_buffer(spec: str) -> None:
    device = Device(spec)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    encoder = device.backend.gpu_device.create_command_encoder()
    for thing in (INPUT, None, 3, "input"):
        with pytest.raises(TypeError):
            plan.encode(encoder, **{**caller_buffers(device), "input": thing})
        with pytest.raises(TypeError):
            Tensor.from_buffer(thing, INPUT.shape, "f4", device)
    for thing in (None, 3, device):
        with pytest.raises(TypeError, match="encoder"):
            plan.encode(thing, **caller_buffers(device))
    works(device)


# ---- a device that goes away ----


@isolated("wgpu", "dawn")
def test_destroyed_device(spec: str) -> None:
    """Every way to use a lost device says so; the next default device works."""
    os.environ["WGPUCONV_DEVICE"] = spec
    conv2d(INPUT, WEIGHT)
    device = wgpuconv.device.default_device()
    x, weight = tensor(INPUT, device), tensor(WEIGHT, device)
    module = wgpuconv.Conv2d(WEIGHT, device=device)
    module(x)
    plan = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    buffers = caller_buffers(device)
    encoder = device.backend.gpu_device.create_command_encoder()
    device.backend.gpu_device.destroy()
    for use in (
        lambda: conv2d(INPUT, WEIGHT, device=device),
        lambda: conv2d(x, weight),
        lambda: conv2d(x, weight, stride=2),  # a problem that is not compiled yet
        lambda: module(x),
        lambda: module(INPUT),
        lambda: plan.encode(encoder, **buffers),
        lambda: tensor(INPUT, device),
        lambda: Tensor.empty((1 << 16,), device=device),
        x.numpy,
    ):
        with pytest.raises(DeviceLostError, match="make a new Device"):
            use()
    assert not device.backend.usable
    assert np.array_equal(conv2d(INPUT, WEIGHT), expected())
    assert np.array_equal(conv2d(INPUT, WEIGHT, device=spec), expected())
    works(Device(spec))


# ---- memory ----


@isolated("wgpu", "dawn")
def test_no_memory_left(spec: str) -> None:
    """Simulated, since a driver in main memory would rather have the machine swap."""
    device = Device(spec)
    works(device)
    gpu_device = device.backend.gpu_device
    create, left = gpu_device.create_buffer, [0]
    error = RuntimeError
    for base in type(gpu_device).__mro__:
        module = sys.modules[base.__module__]
        error = getattr(module, "GPUOutOfMemoryError", error)

    def failing(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            return create(*args, **kwargs)
        raise error("Not enough memory left.")

    big = np.zeros((64, 3, 64, 64), np.float32)
    gpu_device.create_buffer = failing
    for granted in range(3):
        left[0] = granted
        device.trim()
        with pytest.raises(OutOfDeviceMemoryError, match="smaller batch") as caught:
            conv2d(big, WEIGHT, device=device)
        assert isinstance(caught.value, MemoryError)
    gpu_device.create_buffer = create
    assert conv2d(big, WEIGHT, device=device).shape == (64, 4, 62, 62)
    works(device)


@isolated("wgpu", "dawn")
def test_freed_memory_is_given_back_before_giving_up(spec: str) -> None:
    """A buffer that the pool holds must not be the reason for 'no memory left'."""
    device = Device(spec)
    gpu_device = device.backend.gpu_device
    create = gpu_device.create_buffer
    del (held := [Tensor.empty((1 << 16,), device=device)])[:]
    gc.collect()
    failed = []

    def failing_once(*args, **kwargs):
        if not failed:
            failed.append(True)
            raise MemoryError("Not enough memory left.")
        return create(*args, **kwargs)

    gpu_device.create_buffer = failing_once
    assert Tensor.empty((1 << 18,), device=device).shape == (1 << 18,)
    assert failed
    assert not held


@isolated("wgpu", "dawn")
def test_larger_than_any_buffer(spec: str) -> None:
    device = Device(spec)
    most = device.facts.limits.max_buffer
    with pytest.raises(UnsupportedFeatureError, match="max-buffer-size"):
        Tensor.empty((most // 4 + 1,), device=device)
    works(device)


@isolated("wgpu", "dawn")
def test_repeated_calls_hold_no_more_memory(spec: str) -> None:
    device = Device(spec)
    created = []
    gpu_device = device.backend.gpu_device
    create = gpu_device.create_buffer
    gpu_device.create_buffer = lambda **kw: created.append(kw) or create(**kw)
    x, weight = tensor(INPUT, device), tensor(WEIGHT, device)
    for _ in range(3):
        conv2d(x, weight).numpy()
        conv2d(INPUT, WEIGHT, device=device)
    warm = len(created)
    for _ in range(50):
        conv2d(x, weight).numpy()
        conv2d(INPUT, WEIGHT, device=device)
    assert len(created) == warm


# ---- processes and threads ----


def _in_child(queue, spec: str) -> None:
    found = []
    for use in (
        lambda: conv2d(INPUT, WEIGHT),
        lambda: Device(spec),
        lambda: wgpuconv.device.default_device(),
        lambda: conv2d(INPUT, WEIGHT, device=spec),
        wgpuconv.devices,
    ):
        try:
            found.append(("no error", str(use())))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    queue.put(found)


@isolated("wgpu", "dawn")
def test_fork(spec: str) -> None:
    """In a forked child the driver would hang; every way in must raise at once instead."""
    os.environ["WGPUCONV_DEVICE"] = spec
    conv2d(INPUT, WEIGHT)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, spec))
    child.start()
    try:
        found = queue.get(timeout=30)
    finally:
        child.join(10)
        alive = child.is_alive()
        child.kill()
    assert not alive
    *errors, (_, listed) = found
    for name, message in errors:
        assert name == ForkedProcessError.__name__, found
        assert "spawn" in message
    assert "spawn" in listed  # devices() never raises; it says why there is nothing
    works(wgpuconv.device.default_device())


def _spawned(spec: str) -> bool:
    return np.array_equal(conv2d(INPUT, WEIGHT, device=spec), expected())


@isolated("wgpu", "dawn")
def test_spawn(spec: str) -> None:
    """What the error above advises works."""
    works(Device(spec))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_spawned, (spec,))


@isolated("wgpu", "dawn")
def test_threads(spec: str) -> None:
    """Eight threads with different problems on one device."""
    device = Device(spec)
    problems = [
        (INPUT[:, :, : 3 + i % 4], WEIGHT[: 1 + i % 4, :, :3, : 1 + i % 3]) for i in range(8)
    ]
    failures, start = [], threading.Barrier(8)

    def hammer(number: int) -> None:
        try:
            start.wait()
            x, weight = problems[number]
            want = expected(x, weight)
            on_device = tensor(x, device), tensor(weight, device)
            module = wgpuconv.Conv2d(weight, device=device)
            for _ in range(15):
                assert np.array_equal(conv2d(x, weight, device=device), want)
                assert np.array_equal(conv2d(*on_device).numpy(), want)
                assert np.array_equal(module(x), want)
        except BaseException as error:
            failures.append((number, repr(error)))

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@isolated("wgpu", "dawn")
def test_threads_share_one_default_device(spec: str) -> None:
    os.environ["WGPUCONV_DEVICE"] = spec
    found: list = []
    threads = [
        threading.Thread(target=lambda: found.append(wgpuconv.tensor(INPUT).device))
        for _ in range(8)
    ]
    threads += [
        threading.Thread(target=lambda: found.append(wgpuconv.tensor(INPUT, spec).device))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len({id(device) for device in found}) <= 2  # the default one, and the one named


# ---- the end ----


@isolated("wgpu", "dawn")
def test_exit_with_everything_alive(spec: str) -> None:
    """At the interpreter's exit objects die in any order, some with work still running."""
    device = Device(spec)
    x = tensor(INPUT, device)
    keep = globals()
    keep["kept_tensor"] = conv2d(x, WEIGHT)
    keep["kept_module"] = wgpuconv.Conv2d(WEIGHT, device=device)
    keep["kept_plan"] = plan_conv2d(INPUT.shape, WEIGHT.shape, device=device)
    keep["kept_cycle"] = cycle = [conv2d(x, WEIGHT)]
    cycle.append(cycle)
    keep["kept_module"](x)


@isolated("wgpu", "dawn")
def test_device_dies_before_its_tensors(spec: str) -> None:
    device = Device(spec)
    result = conv2d(tensor(INPUT, device), WEIGHT)
    del device
    gc.collect()
    assert np.array_equal(result.numpy(), expected())


@isolated("wgpu", "dawn")
def test_devices_are_collected(spec: str) -> None:
    """A device nobody holds goes away, with its pools and caches."""
    import weakref

    device = Device(spec)
    works(device)
    backend = weakref.ref(device.backend)
    del device
    gc.collect()
    assert backend() is None


def test_a_pooled_buffer_cannot_be_destroyed(device: Device) -> None:
    """A cached bind group would bind it again, and the submit would abort the process."""
    t = tensor(np.ones((1, 1, 3, 3), np.float32), device)
    wgpuconv.conv2d(t, t)
    with pytest.raises(ProblemError, match="belongs to wgpuconv; drop its Tensor"):
        t.buffer.destroy()
    assert wgpuconv.conv2d(t, t).numpy() == 9
