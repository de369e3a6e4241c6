"""A pool of GPU buffers by size, so that repeated calls allocate nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


def size_class(nbytes: int) -> int:
    """The size to allocate: small sizes in steps of 256 bytes, others within an eighth."""
    nbytes = max(nbytes, 256)
    step = max(256, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class BufferPool:
    """Keeps freed buffers for reuse, at most ``capacity`` bytes; the oldest go first.

    A buffer may be freed while submitted work still uses it: work submitted later runs later.
    Not safe from several threads by itself; the backend holds its lock.
    """

    def __init__(self, create: Callable[[int], Any], capacity: int) -> None:
        self._create = create
        self._capacity = capacity
        self._free: OrderedDict[int, Any] = OrderedDict()  # by id, oldest first
        self._held = 0

    def take(self, nbytes: int, most: int) -> Any:
        """A buffer of at least ``nbytes``; ``most`` is the largest that can be created."""
        size = min(size_class(nbytes), most) if nbytes <= most else nbytes
        for key in reversed(self._free):
            buffer = self._free[key]
            if buffer.size == size:
                del self._free[key]
                self._held -= size
                return buffer
        return self._create(size)

    def give(self, buffer: Any) -> None:
        self._free[id(buffer)] = buffer
        self._held += buffer.size
        while self._held > self._capacity:
            _, oldest = self._free.popitem(last=False)
            self._held -= oldest.size

    def clear(self) -> None:
        self._free.clear()
        self._held = 0
