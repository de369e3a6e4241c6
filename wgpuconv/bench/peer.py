"""Peers: other libraries, each timed in a process of its own.

A peer is a script in ``bench/peers`` with a subclass of :class:`Peer` and a call of :func:`serve`.
The runner starts it and takes turns with it: one JSON object a line, over the process's standard
input and output; arrays lie as .npy files in a folder that both know. So a peer that crashes,
or whose library is not installed, costs one line in a table.

A request is ``{"do": "time", "variant": {...}, ...}``; what else it holds are the arguments of the
method of that name. The answer has one key: ``done`` with the result, ``refused`` or ``absent``
with a reason, or ``failed`` with what an exception said.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TextIO

import numpy as np

from ..dtypes import numpy_dtype
from ..problem import ConvProblem

Array = np.ndarray[Any, Any]

READY = {"done": "ready"}
"""The first answer, before any request. What a script prints before it is noise."""
ANSWERS = {"done", "refused", "absent", "failed"}


class Refusal(Exception):
    """The peer cannot compute this problem; the text says why, with values."""


@dataclass(frozen=True)
class Variant:
    """One way in which a peer can compute a problem."""

    what: str
    """``nchw``, ``channels_last, tf32, no bias``: tells it from the peer's other variants."""
    precision: str
    """f32, tf32, f16 or bf16"""
    prepared: bool = False
    """Whether weights are transformed outside of the time."""
    same_work: bool = True
    """Whether it does all that the problem says: False for one that leaves the bias out."""
    measures: bool = False
    """Whether ``load`` chooses by measuring, so that nothing else may run meanwhile."""
    options: dict[str, Any] = field(default_factory=dict)
    """The peer's own, as JSON holds them."""


class Peer(ABC):
    """One other library on one device."""

    name: ClassVar[str]
    pip: ClassVar[str]
    """What pip installs it from."""
    dtypes: ClassVar[tuple[str, ...]] = ("f32", "f16")
    """Of the problems that ``variants`` is asked about; those in others are refused."""

    @abstractmethod
    def describe(self) -> tuple[dict[str, str], str]:
        """Versions by name, and the device. Imports the library. Raises ImportError where it is
        absent, and Refusal, with what to do, where it has no device.

        Called before anything else, in each process."""

    @abstractmethod
    def variants(self, problem: ConvProblem) -> list[Variant]:
        """The ways to compute the problem. Raises Refusal where there is none."""

    @abstractmethod
    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        """Makes ready to run: data by role (input, weight, bias, residual) in the problem's
        layout and dtype. What the library does once (choosing, compiling, uploading) is done here.
        Drops what was loaded before under the same variant."""

    @abstractmethod
    def output(self, variant: Variant) -> Array:
        """Runs once; the result in the problem's layout (float32 for bf16). Where
        ``same_work`` is False, without what is left out."""

    @abstractmethod
    def time(self, variant: Variant, repeats: int) -> float:
        """Seconds of one run, as the mean of about that many back to back."""

    @abstractmethod
    def unload(self) -> None:
        """Frees everything that was loaded."""

    def call(self, variant: Variant) -> float | None:
        """Seconds of one call from Python on tensors on the device; None where that has no
        meaning for this peer."""
        return None

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        """Seconds from numpy arrays to a numpy array; None where that has no meaning."""
        return None

    def workspace(self, variant: Variant) -> int | None:
        """Bytes of memory beside the arguments and the result; None where it is not known."""
        return None


def wall(
    run: Callable[[], object], repeats: int, wait: Callable[[], object] | None = None
) -> float:
    """Seconds of one run by the wall clock, of that many in a row with one wait at the end."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if wait is not None:
        wait()
    return (time.perf_counter() - start) / repeats


def wall_for(
    run: Callable[[], object], wait: Callable[[], object] | None = None, seconds: float = 0.2
) -> float:
    """The same, of as many runs as take about that many seconds, but at most 100."""
    wall(run, 1, wait)
    first = wall(run, 1, wait)
    return wall(run, min(max(int(seconds / first), 1), 100), wait)


def serve(peer: Peer) -> None:
    """Answers the runner's requests until it hangs up. The last line of a peer's script.

    The first argument of the script is the folder for arrays.
    """
    requests, answers = _take_streams()
    folder, arrays = Path(sys.argv[1]), _Arrays()
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, lines, folder), daemon=True).start()
    _send(answers, READY)
    for line in iter(lines.get, ""):
        _send(answers, _answer(peer, json.loads(line), arrays))


def _take_streams() -> tuple[TextIO, TextIO]:
    """Standard input and output for the protocol alone: what a library prints, from C too, goes
    to standard error, and what reads standard input finds it empty."""
    sys.stdout.flush()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests, answers


def _listen(requests: TextIO, lines: SimpleQueue[str], folder: Path) -> None:
    """Reads in a thread, so that a peer that is busy or stuck ends with its runner too, however
    that one ended; and with the peer what it started."""
    for line in requests:
        lines.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _send(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(peer: Peer, request: dict[str, Any], arrays: _Arrays) -> dict[str, Any]:
    try:
        return {"done": _done(peer, request, arrays)}
    except Refusal as error:
        return {"absent" if request["do"] == "describe" else "refused": str(error)}
    except ImportError as error:
        return {"absent": f"{error}; pip install {peer.pip}"}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def _done(peer: Peer, request: dict[str, Any], arrays: _Arrays) -> Any:
    do = request["do"]
    if do == "describe":
        return peer.describe()
    if do == "unload":
        arrays.clear()
        return peer.unload()
    if do == "variants":
        problem = _problem(request)
        if problem.dtype not in peer.dtypes:
            raise Refusal(
                f"{peer.name} is compared in {', '.join(peer.dtypes)}, got {problem.dtype}"
            )
        return [asdict(variant) for variant in peer.variants(problem)]
    variant = Variant(**request["variant"])
    match do:
        case "load":
            return peer.load(_problem(request), variant, arrays.of(request))
        case "output":
            output = peer.output(variant)
            if output.shape != _problem(request).out_shape:
                return {"shape": output.shape}
            points = tuple(np.array(axis) for axis in request["points"])
            return {"values": output[points].astype(float).tolist()}
        case "time":
            return float(peer.time(variant, request["repeats"]))
        case "call":
            return peer.call(variant)
        case "end_to_end":
            return peer.end_to_end(variant, arrays.of(request))
        case "workspace":
            return peer.workspace(variant)
    raise ValueError(f"unknown request {do!r}")


def _problem(request: Mapping[str, Any]) -> ConvProblem:
    return ConvProblem.parse(request["problem"])


class _Arrays:
    """What the runner has handed over, the newest of each role. All variants of a problem get the
    same arrays, and a large one takes long to read; no file is ever written twice."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[str, Array]] = {}

    def of(self, request: Mapping[str, Any]) -> dict[str, Array]:
        return {role: self._load(role, path) for role, path in request["data"].items()}

    def clear(self) -> None:
        self._read.clear()

    def _load(self, role: str, path: str) -> Array:
        if self._read.get(role, (None,))[0] != path:
            array = np.load(path, allow_pickle=False)
            # A file has bfloat16 as two bytes of no type.
            array = array.view(numpy_dtype("bf16")) if array.dtype.kind == "V" else array
            self._read[role] = path, array
        return self._read[role][1]


def is_seconds(value: Any) -> bool:
    """Whether an answer can be a time."""
    return isinstance(value, float) and math.isfinite(value) and value > 0
