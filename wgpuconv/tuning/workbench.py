"""Workbench: candidates of one problem on the device, verified, then timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from ..facts import Facts
from ..plan import Plan
from .verify import POISON, Check

LEAST_POISON = 16 << 20
"""Bytes of each scratch buffer that are poisoned: so many, or as many as the output has. (Of
the output all.)"""


class Machine(Protocol):
    """What tuning needs of a backend (see backends/base.py)."""

    @property
    def facts(self) -> Facts: ...
    @property
    def identity(self) -> Any: ...
    @property
    def algorithms(self) -> Any: ...
    def allocate(self, nbytes: int) -> Any: ...
    def free(self, buffer: Any) -> None: ...
    def write(self, buffer: Any, array: np.ndarray[Any, Any]) -> None: ...
    def copy(self, source: Any, target: Any, nbytes: int) -> None: ...
    def read(self, buffer: Any, array: np.ndarray[Any, Any]) -> None: ...
    def compile(self, plan: Plan) -> Any: ...
    def warm(self, plans: Sequence[Plan]) -> None: ...
    def run(self, compiled: Any, buffers: Mapping[str, Any]) -> None: ...
    def prepare(self, compiled: Any, buffers: Mapping[str, Any]) -> None: ...
    def time(
        self, trials: Sequence[tuple[Any, Mapping[str, Any]]], *, repeats: Sequence[int]
    ) -> list[float]: ...


class WrongResultError(Exception):
    """A candidate computed something else than the reference."""


class Workbench:
    """Random arguments of one problem on the device, and a reference for its result.

    A context manager: its memory goes back to the pool at the end.
    """

    def __init__(self, machine: Machine, check: Check) -> None:
        self._machine = machine
        self._check = check
        self._output = check.empty_output()
        self._buffers: dict[str, Any] = {}
        self._poison: dict[str, Any] = {}
        self._poisoned = max(-(-self._output.nbytes // 4) * 4, LEAST_POISON)

    def __enter__(self) -> Workbench:
        try:
            for role, array in self._check.data.items():
                self._buffers[role] = self._machine.allocate(array.nbytes)
                self._machine.write(self._buffers[role], array)
            self._buffers["out"] = self._machine.allocate(self._output.nbytes)
            # Copied on the device before each run: that is far quicker than uploading it.
            self._poison["all"] = self._machine.allocate(self._poisoned)
            self._machine.write(self._poison["all"], np.full(self._poisoned, POISON, np.uint8))
        except BaseException:
            self._free(self._buffers)
            self._free(self._poison)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free(self._buffers)
        self._free(self._poison)

    def verify(self, compiled: Any) -> None:
        """Runs a candidate twice into poisoned memory. Raises WrongResultError."""
        scratch: dict[str, Any] = {}
        try:
            for role, nbytes in _scratch(compiled.plan):
                scratch[role] = self._machine.allocate(nbytes)
            for attempt in ("first", "second"):
                self._fill(scratch, compiled.plan)
                buffers = self._buffers | scratch
                if compiled.plan.prepare:
                    self._machine.prepare(compiled, buffers)
                self._machine.run(compiled, buffers)
                self._machine.read(self._buffers["out"], self._output)
                fault = self._check.fault(self._output, compiled.plan.bilinear)
                if fault is not None:
                    raise WrongResultError(f"{fault} ({attempt} run)")
        finally:
            self._free(scratch)

    @property
    def buffers(self) -> Mapping[str, Any]:
        """The problem's arguments and its output on the device, by role."""
        return self._buffers

    @property
    def output(self) -> np.ndarray[Any, Any]:
        """What the candidate that was verified last has computed."""
        return self._output

    def time(self, compiled: Sequence[Any], repeats: Sequence[int]) -> list[float]:
        """Seconds of one run of each, the weight's preparation included."""
        return self._machine.time([(each, self._buffers) for each in compiled], repeats=repeats)

    def _fill(self, scratch: Mapping[str, Any], plan: Plan) -> None:
        targets = [(self._buffers["out"], self._output.nbytes)]
        targets += [(scratch[role], nbytes) for role, nbytes in _scratch(plan)]
        for buffer, nbytes in targets:
            words = -(-nbytes // 4)
            self._machine.copy(self._poison["all"], buffer, min(4 * words, self._poisoned))

    def _free(self, buffers: dict[str, Any]) -> None:
        for buffer in buffers.values():
            self._machine.free(buffer)
        buffers.clear()


def _scratch(plan: Plan) -> list[tuple[str, int]]:
    """Role and bytes of each buffer that a plan needs beside its arguments."""
    sizes = [("workspace", plan.workspace), ("prepared", plan.prepared), *plan.staged]
    return [(role, nbytes) for role, nbytes in sizes if nbytes]
