"""Launches kernels through the driver's ``cuLaunchKernelEx``, which cupy has no call for.

Unlike the older one, it can let a kernel start while the one before it still runs (programmatic
dependent launch): see ``wait_for_previous`` in ``kernels/ptx.cuh``.
"""

from __future__ import annotations

import ctypes
import sys

from .facts import HOPPER

Grid = tuple[int, int, int]


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),  # an enumeration, then bytes up to the value's alignment
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class Config(ctypes.Structure):
    """What the driver is told of a launch, beside the kernel and its arguments."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


_EARLY = _Attribute(6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
EARLY_DRIVER = 12030
"""The first version of CUDA whose graphs take such launches."""


def starts_early(capability: tuple[int, int], driver_version: int) -> bool:
    """Whether kernels of that device may start while the one before still runs."""
    return capability >= HOPPER and driver_version >= EARLY_DRIVER


def config(grid: Grid, threads: int, shared_bytes: int, *, early: bool) -> Config:
    """Of a launch, but for the stream."""
    attributes = ctypes.addressof(_EARLY) if early else None
    return Config(grid, (threads, 1, 1), shared_bytes, None, attributes, int(early))


class Driver:
    """The driver's library, which cupy has loaded before."""

    def __init__(self) -> None:
        from cupy_backends.cuda.api import driver

        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self.error: type[Exception] = driver.CUDADriverError
        self._launch = library.cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4

    def launch(self, config: int, function: int, values: int) -> None:
        """All are addresses; ``values`` that of the addresses of the kernel's arguments."""
        status = self._launch(config, function, values, None)
        if status:
            raise self.error(status)
