"""What a call costs on the host beside the bare wgpu-py calls that it must make.

Run with ``--benchmark-only`` to see the times; the assertions alone use ratios of interleaved
runs, with room for the noise of a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wgpuconv import Conv2d, Device, Tensor, conv2d, plan_conv2d, tensor

X = np.ones((1, 4, 8, 8), np.float32)
W = np.ones((4, 4, 3, 3), np.float32)
OUT_SHAPE = (1, 4, 6, 6)


class Bare:
    """The same convolution by wgpu-py alone: its pipeline, its buffers, one bind group a call."""

    def __init__(self, device: Device) -> None:
        self.gpu = device.backend.gpu_device
        self.x, self.weight = tensor(X, device), tensor(W, device)
        self.out = Tensor.empty(OUT_SHAPE, device=device)
        self.plan = plan_conv2d(X.shape, W.shape, device=device, algorithm="direct")
        compiled = self.plan._compiled
        (step,) = compiled.steps
        self.pipeline, self.grid = step.pipeline.pipeline, step.grid
        self.layout = step.pipeline.layout
        offset, size = step.params
        buffers = {"tables": compiled.tables, "input": self.x.buffer, "weight": self.weight.buffer}
        buffers["out"] = self.out.buffer
        self.entries = [
            {"binding": 0, "resource": {"buffer": compiled.uniform, "offset": offset, "size": size}}
        ]
        for index, region in step.bindings:
            buffer = buffers[region.role]
            whole = {"buffer": buffer, "offset": region.offset, "size": buffer.size - region.offset}
            self.entries.append({"binding": index, "resource": whole})
        self.group = self.bind()
        usage = device.backend.provider.api.BufferUsage
        nbytes = self.out.nbytes
        self.staging = self.gpu.create_buffer(size=nbytes, usage=usage.MAP_READ | usage.COPY_DST)

    def bind(self) -> Any:
        return self.gpu.create_bind_group(layout=self.layout, entries=self.entries)

    def record(self, encoder: Any) -> None:
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(self.pipeline)
        compute.set_bind_group(0, self.group)
        compute.dispatch_workgroups(*self.grid)
        compute.end()

    def encode(self) -> None:
        encoder = self.gpu.create_command_encoder()
        self.record(encoder)
        encoder.finish()

    def call(self) -> None:
        encoder = self.gpu.create_command_encoder()
        self.record(encoder)
        self.gpu.queue.submit([encoder.finish()])

    def call_binding(self) -> None:
        """With a bind group of its own, as a call on new tensors needs."""
        self.group = self.bind()
        self.call()

    def round_trip(self) -> np.ndarray:
        """Upload, dispatch and download, one submit, all buffers there already."""
        queue = self.gpu.queue
        queue.write_buffer(self.x.buffer, 0, X)
        queue.write_buffer(self.weight.buffer, 0, W)
        encoder = self.gpu.create_command_encoder()
        self.record(encoder)
        nbytes = self.out.nbytes
        encoder.copy_buffer_to_buffer(self.out.buffer, 0, self.staging, 0, nbytes)
        queue.submit([encoder.finish()])
        self.staging.map_sync("READ")
        result = np.frombuffer(self.staging.read_mapped(copy=False), np.float32).copy()
        self.staging.unmap()
        return result.reshape(OUT_SHAPE)


@pytest.fixture(scope="module")
def bare(device: Device) -> Bare:
    return Bare(device)


def ratio(
    ours: Callable[[], Any], theirs: Callable[[], Any], wait: Callable[[], Any], calls: int = 500
) -> float:
    """Time of ours over theirs: single calls, interleaved, the best of many of each.

    The best is what an undisturbed call takes; each begins with an idle queue.
    """
    best = [float("inf"), float("inf")]
    for _ in range(calls):
        for which, call in enumerate((ours, theirs)):
            wait()
            begin = time.perf_counter()
            call()
            best[which] = min(best[which], time.perf_counter() - begin)
    print(f"{best[0] * 1e6:.0f} us against {best[1] * 1e6:.0f} us")
    return best[0] / best[1]


def test_cached_call(bare: Bare, device: Device) -> None:
    found = ratio(
        lambda: conv2d(bare.x, bare.weight, algorithm="direct"), bare.call_binding, bare.out.numpy
    )
    print(f"cached call on tensors: {found:.2f} of the bare calls (goal 1.3)")
    assert found < 1.8


def test_module_call(bare: Bare, device: Device) -> None:
    module = Conv2d(bare.weight, algorithm="direct")
    found = ratio(lambda: module(bare.x, out=bare.out), bare.call_binding, bare.out.numpy)
    print(f"module on tensors: {found:.2f} of the bare calls (goal 1.3)")
    assert found < 1.8


def test_encode(bare: Bare, device: Device) -> None:
    def ours() -> None:
        encoder = bare.gpu.create_command_encoder()
        bare.plan.encode(encoder, input=bare.x, weight=bare.weight, out=bare.out)
        encoder.finish()

    found = ratio(ours, bare.encode, bare.out.numpy)
    print(f"encode of tensors: {found:.2f} of the bare calls (goal 1.3)")
    assert found < 1.8


def test_encode_of_callers_buffers(bare: Bare) -> None:
    """These are checked and bound anew each time, since their owner may have destroyed them."""
    usage = "STORAGE|COPY_SRC|COPY_DST"
    buffers = {
        role: bare.gpu.create_buffer(size=4096, usage=usage) for role in ("input", "weight", "out")
    }

    def ours() -> None:
        encoder = bare.gpu.create_command_encoder()
        bare.plan.encode(encoder, **buffers)
        encoder.finish()

    def theirs() -> None:
        bare.group = bare.bind()
        bare.encode()

    found = ratio(ours, theirs, bare.out.numpy)
    print(f"encode of the caller's buffers: {found:.2f} of the bare calls (goal 1.3)")
    assert found < 1.8


def test_numpy_round_trip(bare: Bare, device: Device) -> None:
    expected = np.full(OUT_SHAPE, 36, np.float32)
    assert np.array_equal(bare.round_trip(), expected)
    assert np.array_equal(conv2d(X, W, algorithm="direct", device=device), expected)
    found = ratio(
        lambda: conv2d(X, W, algorithm="direct", device=device), bare.round_trip, lambda: None
    )
    print(f"numpy round trip: {found:.2f} of the bare calls (goal 1.15)")
    assert found < 1.6


def test_large_numpy_round_trip(device: Device) -> None:
    """Copies dominate: no copy on the host beside the two that must be."""
    x = np.ones((4, 4, 512, 512), np.float32)  # 16 MiB
    identity = np.ones((4, 1, 1, 1), np.float32)
    on_device = tensor(x, device)
    queue = device.backend.gpu_device.queue
    api = device.backend.provider.api.BufferUsage
    staging = device.backend.gpu_device.create_buffer(
        size=x.nbytes, usage=api.MAP_READ | api.COPY_DST
    )
    plan = plan_conv2d(x.shape, identity.shape, groups=4, device=device)
    weight, out = tensor(identity, device), Tensor.empty(x.shape, device=device)
    result = np.empty_like(x)

    def bare_round_trip() -> None:
        queue.write_buffer(on_device.buffer, 0, x)
        encoder = device.backend.gpu_device.create_command_encoder()
        plan.encode(encoder, input=on_device, weight=weight, out=out)
        encoder.copy_buffer_to_buffer(out.buffer, 0, staging, 0, x.nbytes)
        queue.submit([encoder.finish()])
        staging.map_sync("READ")
        result.reshape(-1)[:] = np.frombuffer(staging.read_mapped(copy=False), np.float32)
        staging.unmap()

    found = ratio(
        lambda: conv2d(x, weight, groups=4, out=result), bare_round_trip, lambda: None, calls=8
    )
    print(f"16 MiB numpy round trip: {found:.2f} of the bare calls (goal 1.15)")
    assert found < 2  # few calls, so more noise


@pytest.mark.parametrize("what", ["cached", "module", "numpy", "bare", "bare_numpy"])
def test_benchmark(benchmark: Any, bare: Bare, device: Device, what: str) -> None:
    """The absolute times, for a table: ``pytest --benchmark-only``."""
    module = Conv2d(bare.weight, algorithm="direct")
    calls: dict[str, Callable[[], Any]] = {
        "cached": lambda: conv2d(bare.x, bare.weight, algorithm="direct"),
        "module": lambda: module(bare.x),
        "numpy": lambda: conv2d(X, W, algorithm="direct", device=device),
        "bare": bare.call,
        "bare_numpy": bare.round_trip,
    }
    benchmark.pedantic(calls[what], rounds=20, iterations=10, warmup_rounds=2)
    bare.out.numpy()
