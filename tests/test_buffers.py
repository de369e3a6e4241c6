"""The pool of buffers, with stand-ins for buffers."""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wgpuconv import Device, tensor
from wgpuconv.backends.buffers import BufferPool, size_class


@dataclass(eq=False)
class Buffer:
    size: int


def pool(capacity: int = 1 << 20) -> tuple[BufferPool, list[int], list[None]]:
    created: list[int] = []
    dropped: list[None] = []

    def create(size: int) -> Buffer:
        created.append(size)
        return Buffer(size)

    return BufferPool(create, capacity, lambda: dropped.append(None)), created, dropped


@given(st.integers(0, 1 << 40))
def test_size_class(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 256)
    assert size % 256 == 0
    assert size - nbytes <= max(256, nbytes // 8 + 256)
    assert size_class(size) == size  # a buffer fits its own class


def test_reuse() -> None:
    buffers, created, dropped = pool()
    a, b = buffers.take(1000, 1 << 30), buffers.take(1000, 1 << 30)
    assert a is not b
    buffers.give(a)
    buffers.give(b)
    assert buffers.take(900, 1 << 30) is b  # the last one used: bind groups for it are kept
    assert buffers.take(1000, 1 << 30) is a
    assert created == [1024, 1024]
    assert not dropped


def test_other_sizes_are_not_mixed_up() -> None:
    buffers, created, _ = pool()
    buffers.give(buffers.take(10_000, 1 << 30))
    assert buffers.take(100, 1 << 30).size == 256
    assert buffers.take(20_000, 1 << 30).size >= 20_000
    assert len(created) == 3


def test_largest_buffer() -> None:
    """Rounding up must not ask for more than the device can make."""
    buffers, created, _ = pool(capacity=10_000)
    buffers.give(buffers.take(1001, 1001))
    assert created == [1001]
    assert buffers.take(1001, 1001).size == 1001
    assert created == [1001]


def test_capacity() -> None:
    buffers, _, dropped = pool(capacity=4096)
    old = [buffers.take(1000, 1 << 30) for _ in range(4)]
    large = buffers.take(2048, 1 << 30)
    for buffer in (*old, large):
        buffers.give(buffer)
    assert buffers.take(2048, 1 << 30) is large  # the oldest went, not this one
    assert dropped
    left = {id(buffers.take(1000, 1 << 30)) for _ in range(4)}
    assert len(left & set(map(id, old))) == 2


def test_clear() -> None:
    buffers, created, dropped = pool()
    buffers.clear()
    assert not dropped
    buffers.give(buffers.take(1000, 1 << 30))
    buffers.clear()
    assert len(dropped) == 1
    buffers.take(1000, 1 << 30)
    assert len(created) == 2


def test_finalizers_in_the_middle_of_everything() -> None:
    """A garbage collection inside of the pool's own methods may give buffers back to it."""
    buffers, created, _ = pool(capacity=1 << 30)

    class Owner:
        def __init__(self) -> None:
            self.buffer = buffers.take(1000, 1 << 30)
            self.cycle = self  # so that only the collector finds it

        def __del__(self) -> None:
            buffers.give(self.buffer)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Owner()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    taken = [buffers.take(1000, 1 << 30) for _ in range(len(created))]
    assert len(set(map(id, taken))) == len(taken) == len(created)
    assert len(created) < 300  # they were used again


def test_giving_from_many_threads() -> None:
    buffers, created, _ = pool(capacity=1 << 30)
    given_back = [[buffers.take(1000, 1 << 30) for _ in range(200)] for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda own=own: [buffers.give(b) for b in own])
            for own in given_back
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({id(buffers.take(1000, 1 << 30)) for _ in range(1600)}) == len(created) == 1600


def test_a_tensor_in_a_cycle_of_garbage_gives_back_a_living_buffer(device: Device) -> None:
    """The collector ends all of a cycle at once; what the pool gets must not be part of that."""
    array = np.arange(12, dtype=np.float32)
    for _ in range(5):
        cycle: list[object] = [tensor(array, device)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        again = tensor(array, device)
        assert device.backend.owns(again.buffer)
        assert np.array_equal(again.numpy(), array)
