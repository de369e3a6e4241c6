"""What a backend is: the only kind of object that touches a device.

Planning hands it plans (pure data) and buffers; it compiles, runs, copies and times. A plugin
brings its own, through the entry point group ``wgpuconv.backends`` (see device.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..algorithms import Algorithm
from ..facts import Facts
from ..plan import Plan

Buffers = Mapping[str, Any]
"""The buffer of each role ('input', 'weight', 'bias', 'residual', 'out', 'prepared') of a plan.

The backend has its own scratch memory; where a caller gives a buffer for one of its roles
('workspace', 'staged_...'), that is used instead. (Verification gives poisoned ones.)
"""


@dataclass(frozen=True)
class Identity:
    """What decides whether a stored timing still holds: part of the tuning store's key."""

    backend: str
    adapter: str
    driver: str
    versions: str

    def __str__(self) -> str:
        return f"{self.backend} / {self.adapter} / {self.driver} / {self.versions}"


class Guest(NamedTuple):
    """An array of another library's, as memory of a device."""

    buffer: Any
    shape: tuple[int, ...]
    """The order of the memory, which is contiguous: (N, H, W, C) with ``channels_last``."""
    dtype: str
    """Its name in problems."""
    channels_last: bool
    """Whether the array itself is (N, C, H, W) or (C, H, W), with the strides of NHWC."""
    copied: bool
    """Whether the memory is that of a copy."""


class Guests(Protocol):
    """The attribute ``guests`` of a backend that takes arrays of other libraries."""

    def takes(self, value: Any) -> bool:
        """Whether a value is such an array, in memory of this kind of device."""

    def receive(self, name: str, value: Any, *, channels_last: bool | None) -> Guest:
        """The array's memory, or where strides or alignment do not fit, a copy. An image in NCHW
        may have the strides of NHWC as well (None) or must have them (True).

        Raises MixedDevicesError where it lives on another device, DtypeError where it holds other
        values than float32, float16 or bfloat16."""

    def copy(self, name: str, value: Any) -> Guest:
        """A copy in C order, complete when this returns."""

    def make(
        self, shape: tuple[int, ...], dtype: str, like: Any, *, channels_last: bool
    ) -> tuple[Any, Any]:
        """A new array for the kind of ``like``, and its memory, which has that shape; see Guest
        for the rest."""

    def give(self, array: Any, like: Any) -> Any:
        """An array of ``make`` as one of that kind, after the work that fills it was submitted:
        see conv2d for what kind a library's arrays get."""

    def run(self, compiled: Any, buffers: Buffers, arrays: Sequence[Any]) -> None:
        """As ``Backend.run``, after the work on these arrays and tensors, the input first, that
        their libraries have submitted, and before what those submit later."""

    def assign(self, out: Any, array: Any) -> None:
        """Copies an array of ``make`` to one of the caller's, whatever its strides."""


class Compiled(Protocol):
    """A plan made ready to run on one device."""

    @property
    def plan(self) -> Plan: ...


class Backend(Protocol):
    """Runs plans on one device. Every method may be called from any thread.

    One that compiles any file of shaders/ says so with an attribute ``runs_wgsl = True``; its
    bandwidth and multiply-add rate are then measured when it is tuned on. The facts of others are
    taken as they are. One that has kernels for the plans of tuning/roofline.py has an attribute
    ``has_probes = True``, and the benchmark measures its roofline. One that takes arrays of other
    libraries has an attribute ``guests``. One whose buffers need no ``free``, since their memory
    goes with them, has an attribute ``keeps_buffers = False``.
    """

    @property
    def facts(self) -> Facts: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def algorithms(self) -> tuple[Algorithm, ...]: ...

    @property
    def usable(self) -> bool:
        """Whether calls can still succeed: not lost, and not inherited through a fork."""

    def check_usable(self, buffer: Any) -> None:
        """Raises where a buffer of the caller's own cannot be used here."""

    def allocate(self, nbytes: int) -> Any:
        """A buffer of at least that many bytes, from a pool; its contents are undefined."""

    def free(self, buffer: Any) -> None:
        """Gives a buffer back to the pool; work already submitted may still use it."""

    def write(self, buffer: Any, array: np.ndarray) -> None:
        """Copies a C-contiguous array to the buffer's beginning."""

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        """Copies the first bytes, a multiple of 4, from one buffer of ``allocate`` to another."""

    def read(self, buffer: Any, array: np.ndarray) -> None:
        """Waits for the work so far and fills a C-contiguous array from the buffer."""

    def compile(self, plan: Plan) -> Compiled:
        """Pipelines, parameters and tables of a plan, made once. No call's data is needed."""

    def warm(self, plans: Sequence[Plan]) -> None:
        """Compiles what several plans need at the same time, where the device gains by that.

        Raises nothing: what fails says so when its plan is compiled."""

    def run(self, compiled: Compiled, buffers: Buffers, into: np.ndarray | None = None) -> None:
        """Submits the plan's work and does not wait. ``prepare`` runs too, into scratch memory,
        unless ``buffers`` has a 'prepared' buffer that holds its result. With ``into``, waits
        and fills that C-contiguous array from the buffer 'out'."""

    def record(self, compiled: Compiled, buffers: Buffers, encoder: Any) -> None:
        """Records the plan's work into what a caller's work is recorded in on such a device, and
        waits for nothing. Raises DtypeError for what is none."""

    def prepare(self, compiled: Compiled, buffers: Buffers) -> None:
        """Submits only the plan's ``prepare`` passes, into ``buffers['prepared']``."""

    def trim(self) -> None:
        """Gives pooled and scratch memory back to the driver."""

    def time(
        self, trials: Sequence[tuple[Compiled, Buffers]], *, repeats: Sequence[int]
    ) -> list[float]:
        """Device seconds of one run of each trial, each repeated that often, back to back."""
