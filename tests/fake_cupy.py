"""cupy in the host's memory, as far as the backend uses it: nothing computes, anything can fail."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from wgpuconv.plugins.cuda.launch import Config

ATTRIBUTES = {
    "MultiProcessorCount": 132,
    "ClockRate": 1_980_000,
    "MemoryClockRate": 3_201_000,
    "GlobalMemoryBusWidth": 6144,
    "MaxSharedMemoryPerBlockOptin": 227 << 10,
}
FREE, TOTAL = 100 << 30, 140 << 30


class RuntimeFailure(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError"""


class DriverFailure(RuntimeError):
    """cupy_backends.cuda.api.driver.CUDADriverError"""


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError"""


class NotCompiled(Exception):
    """cupy.cuda.compiler.CompileException"""


class Memory:
    def __init__(self, nbytes: int, stream: int) -> None:
        self.stream = stream
        self.array = np.empty(nbytes, np.uint8)
        self.ptr = (self.array.ctypes.data + 255) // 256 * 256  # of an address, no more


class Device:
    compute_capability = "90"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Stream:
    def __init__(self, pointer: int, current: list[Stream]) -> None:
        self.ptr = pointer
        self._current = current

    def __enter__(self) -> None:
        self._current.append(self)

    def __exit__(self, *_: object) -> None:
        self._current.pop()


class FakeCupy:
    """The module, one device, and its driver.

    What a test puts into ``fails``, by the name of what the backend calls, is raised there.
    """

    __version__ = "14.0"

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.launched: list[Config] = []
        device = Device()
        self.streams: list[Stream] = []
        self.streams.append(Stream(0, self.streams))

        def external(other: Any) -> Stream:
            return Stream(other.__cuda_stream__()[1], self.streams)

        def alloc(nbytes: int) -> Memory:
            return Memory(nbytes, self.streams[-1].ptr)

        runtime = types.SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            deviceGetAttribute=lambda name, ordinal: ATTRIBUTES[name],
            **{f"cudaDevAttr{name}": name for name in ATTRIBUTES},
            getDeviceCount=lambda: 1,
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
            getDeviceProperties=lambda ordinal: {"name": b"a card"},
            memGetInfo=lambda: (FREE, TOTAL),
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyAsync=self._may_fail("memcpyAsync"),
            streamSynchronize=self._may_fail("streamSynchronize"),
            deviceSynchronize=self._may_fail("deviceSynchronize"),
        )
        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            Device=lambda ordinal: device,
            Stream=types.SimpleNamespace(from_external=external),
            alloc=self._may_fail("alloc", alloc),
            get_current_stream=lambda ordinal: self.streams[-1],
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=types.SimpleNamespace(CompileException=NotCompiled),
        )
        kernel = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=1))
        module = types.SimpleNamespace(get_function=lambda name: kernel)
        self.RawModule = self._may_fail("RawModule", lambda **_: module)
        self.ndarray = type("ndarray", (), {})
        self.driver = types.SimpleNamespace(
            error=DriverFailure, launch=self._may_fail("launch", self._launched)
        )

    def _launched(self, config: int, function: int, values: int) -> None:
        self.launched.append(Config.from_buffer_copy(Config.from_address(config)))

    def _may_fail(self, name: str, call: Callable[..., Any] = lambda *_: None) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if name in self.fails:
                raise self.fails[name]
            return call(*arguments, **named)

        return called
