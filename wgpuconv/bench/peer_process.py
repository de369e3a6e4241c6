"""The runner's side of a peer: starts its process, asks it, and outlives it.

Whatever becomes of the process (it crashes, hangs, answers nonsense), the runner gets a BenchError
in a sentence with the exit status and what the process last wrote to standard error. The next
``load`` starts a fresh one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any

import numpy as np

from ..errors import BenchError
from ..problem import ConvProblem
from .peer import ANSWERS, READY, Array, Refusal, Variant, is_seconds
from .result import PeerFacts

TIMEOUT = 300.0
"""Seconds for one answer: importing a large library, or compiling every kernel of a problem."""
_GRACE = 5.0
"""Seconds for a process to end by itself."""
_TAIL = 5
"""Lines of standard error that an error quotes."""

_PACKAGE = Path(__file__).parent.parent

# The peer's environment may be one of its own (two libraries may exclude each other), so what it
# has wins, and what it lacks, this package too, comes from ours. The order, without the working
# directory ('', which -P would spare newer Pythons), also keeps a script in the peers' folder from
# hiding a library of that name.
_START = (
    "import runpy, sys; script, *more = sys.argv[2:]; "
    "sys.path = [path for path in sys.path if path]; "
    "sys.path += [path for path in sys.argv[1].split('\\n') if path not in sys.path]; "
    "sys.argv = [script, *more]; runpy.run_path(script, run_name='__main__')"
)


def peers_dir() -> Path:
    """The folder of peers: inside an installed package, or beside it in a checkout."""
    inside = _PACKAGE / "bench_peers"
    return inside if inside.is_dir() else _PACKAGE.parent / "bench" / "peers"


def peer_names(folder: Path | None = None) -> list[str]:
    """The peers there are, whether their libraries are installed or not."""
    scripts = (folder or peers_dir()).glob("[!_]*.py")
    return sorted(path.stem.replace("_", "-") for path in scripts)


class PeerProcess:
    """One peer, in a process that starts with the first question and ends with ``close``.

    ``WGPUCONV_PYTHON_`` and the peer's name (``WGPUCONV_PYTHON_ONNXRUNTIME_WEBGPU``) names the
    Python that runs it, where its library is installed in another environment than ours.
    """

    def __init__(self, name: str, *, folder: Path | None = None, timeout: float = TIMEOUT) -> None:
        folder = folder or peers_dir()
        known = peer_names(folder)
        if name not in known:
            raise BenchError(f"no peer is named {name!r}; the peers are {', '.join(known)}")
        self.name = name
        self.timeout = timeout
        self._script = folder / f"{name.replace('-', '_')}.py"
        self._arrays = tempfile.TemporaryDirectory(
            prefix="wgpuconv-peer-", ignore_cleanup_errors=True
        )
        self._child: _Child | None = None
        self._loaded: dict[str, ConvProblem] = {}
        self._shared: dict[str, tuple[Array, Path]] = {}
        self._numbers = itertools.count(1)
        self._end = ""
        """How the last process ended, if it was not asked to."""

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def describe(self) -> PeerFacts:
        """Its versions and device; or why it is absent, a process that died included."""
        try:
            answer = self._answer({"do": "describe"})
            if "done" in answer:
                versions, device = answer["done"]
                return PeerFacts(self.name, dict(versions), str(device))
            reason = next(iter(answer.values()))
        except BenchError as error:
            reason = str(error)
        return PeerFacts(self.name, absent=reason)

    def variants(self, problem: ConvProblem) -> list[Variant]:
        """The ways in which it can compute the problem. Raises Refusal where there is none."""
        found = self._ask({"do": "variants", "problem": str(problem)})
        return [Variant(**each) for each in found]

    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        """Makes a variant ready. Arrays that were handed over before are taken as unchanged."""
        self._loaded.pop(variant.what, None)
        request = {"do": "load", "problem": str(problem), "variant": asdict(variant)}
        self._ask({**request, "data": self._share(data)})
        self._loaded[variant.what] = problem

    def output(self, variant: Variant, points: Sequence[Array]) -> Array:
        """Some elements of the result of one run, in float64; ``points`` are their indices along
        each axis, in the problem's layout. (To hand over the whole result would take longer than
        all the rest.)"""
        problem = str(self._loaded.get(variant.what, ""))
        indices = [axis.tolist() for axis in points]
        answer = self._of("output", variant, problem=problem, points=indices)
        if "shape" in answer:
            raise BenchError(
                f"{self.name} {variant.what} gave a result of shape {tuple(answer['shape'])}, "
                f"expected {self._loaded[variant.what].out_shape}"
            )
        return np.array(answer["values"])

    def time(self, variant: Variant, repeats: int) -> float:
        """Seconds of one run, as the mean of about that many back to back."""
        return self._time(variant, self._of("time", variant, repeats=repeats))

    def call(self, variant: Variant) -> float | None:
        """Seconds of one call from Python on tensors on the device, where that has a meaning."""
        return self._seconds("call", variant)

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        """Seconds from numpy arrays to a numpy array, where that has a meaning."""
        return self._seconds("end_to_end", variant, data=self._share(data))

    def workspace(self, variant: Variant) -> int | None:
        """Bytes of memory beside the arguments and the result, where that is known."""
        found = self._of("workspace", variant)
        return None if found is None else int(found)

    def unload(self) -> None:
        """Frees what was loaded, on both sides."""
        self._loaded.clear()
        self._shared.clear()
        for path in Path(self._arrays.name).glob("*.npy"):
            path.unlink()
        if self._child is not None:
            self._ask({"do": "unload"})

    def close(self) -> None:
        """Ends the process and removes its folder. May be called twice."""
        self._loaded.clear()
        self._shared.clear()
        if self._child is not None:
            self._child.end()
            self._child = None
        self._arrays.cleanup()

    def _seconds(self, do: str, variant: Variant, **more: Any) -> float | None:
        found = self._of(do, variant, **more)
        return None if found is None else self._time(variant, found)

    def _time(self, variant: Variant, found: Any) -> float:
        if not is_seconds(found):
            raise BenchError(f"{self.name} {variant.what} gave the time {found!r}")
        return float(found)

    def _of(self, do: str, variant: Variant, **more: Any) -> Any:
        """The answer to a question about something that is loaded."""
        if variant.what not in self._loaded:
            raise BenchError(f"{self.name} has not loaded {variant.what!r}{self._end}")
        return self._ask({"do": do, "variant": asdict(variant), **more})

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """The result. Raises what the peer answered instead."""
        match self._answer(request):
            case {"done": result}:
                return result
            case {"refused": reason}:
                raise Refusal(reason)
            case {"absent": reason} | {"failed": reason}:
                raise BenchError(f"{self.name}: {reason}")

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One turn. Raises BenchError where the process does not take it."""
        do = request["do"]
        try:
            if self._child is None:
                self._child = _Child(self._command())
            line = self._child.turn(json.dumps(request), self.timeout)
            answer = json.loads(line)
            if not isinstance(answer, dict) or len(answer) != 1 or not ANSWERS & answer.keys():
                raise ValueError
        except _EndedError as error:
            failure = f"{self.name} {error} during {do!r}"
        except ValueError:
            failure = f"{self.name} answered {do!r} with {line[:200]!r}, which is no answer"
        else:
            return answer
        if self._child is not None:
            failure += self._child.kill()
            self._child = None
        self._loaded.clear()
        self._end = f" (before, {failure})"
        raise BenchError(failure)

    def _command(self) -> list[str]:
        ours = [str(_PACKAGE.parent), *filter(None, sys.path), str(self._script.parent)]
        variable = "WGPUCONV_PYTHON_" + re.sub(r"\W", "_", self.name).upper()
        python = os.environ.get(variable) or sys.executable
        return [python, "-c", _START, "\n".join(ours), str(self._script), self._arrays.name]

    def _share(self, data: Mapping[str, Array]) -> dict[str, str]:
        """Paths of the arrays by role; what lies there already is not written again.

        Others get files of new names, so that a name tells the peer whether it has read them.
        """
        for role, array in data.items():
            known = self._shared.get(role)
            if known is not None:
                if known[0] is array:
                    continue
                del self._shared[role]
                known[1].unlink(missing_ok=True)
            path = Path(self._arrays.name, f"{role}-{next(self._numbers)}.npy")
            np.save(path, array, allow_pickle=False)
            self._shared[role] = array, path
        return {role: str(self._shared[role][1]) for role in data}


class _EndedError(Exception):
    """The process is gone or does not answer."""


class _Child:
    """The process, and threads that read what it writes, so that no wait is without an end."""

    def __init__(self, command: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # An interrupt from the keyboard is for the runner, which closes its peers; and
                # what a peer starts itself is in its group, and ends with it.
                start_new_session=True,
            )
        except OSError as error:
            raise _EndedError(f"cannot be started ({error})") from error
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._tail: deque[str | None] = deque(maxlen=_TAIL)
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._pipes = tuple(pipe for pipe in pipes if pipe is not None)
        self._readers = [
            threading.Thread(
                target=self._read, args=(self._pipes[1], self._lines.put), daemon=True
            ),
            threading.Thread(
                target=self._read, args=(self._pipes[2], self._tail.append), daemon=True
            ),
        ]
        for reader in self._readers:
            reader.start()
        self._ready = False

    @staticmethod
    def _read(pipe: IO[str], put: Callable[[str | None], object]) -> None:
        for line in pipe:
            put(line.rstrip("\n"))
        put(None)

    def turn(self, request: str, timeout: float) -> str:
        """The answer's line. Raises _EndedError where none comes in time."""
        # A process that is gone cannot be written to; what is read then says so.
        with contextlib.suppress(OSError):
            self._pipes[0].write(request + "\n")
            self._pipes[0].flush()
        while not self._ready:
            self._ready = self._next(timeout) == json.dumps(READY)
        return self._next(timeout)

    def _next(self, timeout: float) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except Empty:
            raise _EndedError(f"did not answer within {timeout:g} s") from None
        if line is None:
            raise _EndedError(self._status())
        return line

    def _status(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if code >= 0:
            return f"ended with exit status {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def end(self) -> None:
        """Hangs up, which ends the process; kills it where that does not."""
        with contextlib.suppress(OSError):
            self._pipes[0].close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self.kill()

    def kill(self) -> str:
        """Ends it and all that it started; what it last wrote to standard error."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: macOS
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(_GRACE)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        said = " / ".join(filter(None, self._tail))
        return f"; it wrote: {said}" if said else ""
