"""A pool of GPU buffers by size, so that repeated calls allocate nothing."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any


def size_class(nbytes: int) -> int:
    """The size to allocate: small sizes in steps of 256 bytes, others within an eighth."""
    nbytes = max(nbytes, 256)
    step = max(256, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


class BufferPool:
    """Keeps freed buffers for reuse, at most ``capacity`` bytes; ``on_drop`` hears of a drop.

    A buffer may be given back while submitted work still uses it: work submitted later runs
    later. ``give`` may be called from any thread and from a finalizer, in the middle of
    anything; the other methods need the caller's lock.
    """

    def __init__(
        self, create: Callable[[int], Any], capacity: int, on_drop: Callable[[], None]
    ) -> None:
        self._create = create
        self._capacity = capacity
        self._on_drop = on_drop
        self._returned: deque[Any] = deque()  # given back, not yet sorted in
        self._free: OrderedDict[int, list[Any]] = OrderedDict()  # by size, idle longest first
        self._held = 0

    def take(self, nbytes: int, most: int) -> Any:
        """A buffer of at least ``nbytes``; ``most`` is the largest that can be created."""
        self._sort_in()
        size = min(size_class(nbytes), most)
        free = self._free.get(size)
        if free is None:
            return self._create(size)
        if len(free) == 1:
            del self._free[size]
        self._held -= size
        return free.pop()

    def give(self, buffer: Any) -> None:
        self._returned.append(buffer)

    def clear(self) -> None:
        """Drops every free buffer."""
        self._sort_in()
        if self._free:
            self._free.clear()
            self._held = 0
            self._on_drop()

    def _sort_in(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            size = buffer.size
            self._free.setdefault(size, []).append(buffer)
            self._free.move_to_end(size)
            self._held += size
        if self._held <= self._capacity:
            return
        while self._held > self._capacity:
            size, free = next(iter(self._free.items()))
            free.pop(0)
            self._held -= size
            if not free:
                del self._free[size]
        self._on_drop()
