"""What a benchmark run found, as data, and its form in a file.

A file is JSON: the machine, the devices and peers that took part, and of each problem every
side's samples. ``load`` reads one back and says in a sentence what is wrong with a broken one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..errors import BenchError
from ..problem import ConvProblem

FORMAT = "wgpuconv-bench/2"
"""Names the form of the file; raised when an older reader could misread a newer file."""


@dataclass(frozen=True)
class Side:
    """One algorithm of ours, or one variant of a peer, on one problem."""

    on: str
    """The device or peer: ``wgpu``, ``dawn``, ``cuda``, ``torch-cuda``."""
    what: str
    """The algorithm (``implicit_gemm``), or the peer's variant (``nchw, bias``)."""
    precision: str
    """Of the arithmetic: f32, tf32, f16 or bf16."""
    ours: bool
    samples: tuple[float, ...] = ()
    """Device seconds of one run, a value a round; empty where it failed."""
    prepared: bool = False
    """Whether weights were transformed beforehand, outside of the time."""
    same_work: bool = True
    """Whether it did all that the problem says (a peer without the bias did not)."""
    label: str = ""
    """The configuration, where there is one to name."""
    error: float | None = None
    """Largest error of the sampled outputs, in units of the largest of them."""
    workspace: int | None = None
    """Bytes of memory beside the arguments; None where it is not known."""
    call: float | None = None
    """Seconds from Python of one call on tensors that are on the device, in a row of calls."""
    end_to_end: float | None = None
    """Seconds from a numpy array to a numpy array."""
    first_call: float | None = None
    """Seconds of the first call of its process, with an empty cache: compiling and tuning."""
    failure: str | None = None
    """Why there are no samples."""

    @property
    def name(self) -> str:
        return f"{self.on} {self.what}"

    @property
    def seconds(self) -> float | None:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float | None:
        """Median over minimum, less one."""
        return statistics.median(self.samples) / min(self.samples) - 1 if self.samples else None


@dataclass(frozen=True)
class ProblemResult:
    """All sides on one problem."""

    name: str
    """The layer's name, or an empty string."""
    problem: str
    """The problem's text."""
    count: int
    """How often the network has it."""
    flop: int
    """Operations of a direct method, a multiply-add counting as two."""
    nbytes: int
    """Bytes that any method must move: input, weight, bias, residual and output once."""
    sides: tuple[Side, ...]
    """Fastest first, those that failed last."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Reason by the name of each side that does not apply."""
    choice: dict[str, str] = field(default_factory=dict)
    """By device, what its tuner takes: the label of the plan."""
    source: dict[str, str] = field(default_factory=dict)
    """By device, how the choice was found: see tuner.Choice."""
    note: dict[str, str] = field(default_factory=dict)
    """By device, why it was found this way."""
    failure: str | None = None
    """Why nothing could be measured at all."""

    @property
    def label(self) -> str:
        return self.name or self.problem

    def chosen(self, on: str) -> Side | None:
        """The side that a device's tuner takes, where it took part."""
        label = self.choice.get(on)
        return next((s for s in self.sides if s.on == on and label and s.label == label), None)

    @property
    def failed(self) -> bool:
        """Whether anything of ours that should have been timed was not."""
        return self.failure is not None or any(s.failure for s in self.sides if s.ours)


@dataclass(frozen=True)
class DeviceFacts:
    """A device of ours that took part."""

    name: str
    backend: str
    adapter: str
    driver: str
    versions: dict[str, str]
    software: bool
    bandwidth: float | None = None
    """Measured bytes a second of a copy, read plus written."""
    fma_rate: float | None = None
    """Measured f32 operations a second, a multiply-add counting as two."""


@dataclass(frozen=True)
class PeerFacts:
    """A peer that was asked to take part."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    absent: str | None = None
    """Why it did not take part."""


@dataclass(frozen=True)
class Run:
    """A whole run."""

    date: str
    """ISO 8601, UTC."""
    wgpuconv: str
    commit: str | None
    method: str
    machine: dict[str, Any]
    devices: tuple[DeviceFacts, ...]
    peers: tuple[PeerFacts, ...]
    baseline: str | None
    """The name of the peer or device that ratios refer to."""
    results: tuple[ProblemResult, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Whatever ends the process meanwhile, an earlier file of that name stays whole."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        target = path.resolve()
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            path.write_text(text, encoding="utf-8")  # a pipe, say, which nothing can replace
            return
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def load(path: Path) -> Run:
    """Reads a result file. Raises BenchError with what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BenchError(f"there is no result file {path}") from error
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BenchError(
            f"{path} is not a result of wgpuconv bench, since it is no JSON; --out writes one"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        form = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise BenchError(
            f"{path} is not a result of wgpuconv bench: its format is {form!r}, expected {FORMAT!r}"
        )
    try:
        results = tuple(_result(each) for each in found["results"])
        devices = tuple(_made(DeviceFacts, each) for each in found["devices"])
        peers = tuple(_made(PeerFacts, each) for each in found["peers"])
        return _made(Run, {**found, "results": results, "devices": devices, "peers": peers})
    except KeyError as error:
        raise BenchError(
            f"{path} is a broken result of wgpuconv bench: it lacks {error}"
        ) from error
    except (TypeError, ValueError) as error:
        raise BenchError(f"{path} is a broken result of wgpuconv bench: {error}") from error


T = TypeVar("T")


def _made(kind: type[T], values: dict[str, Any]) -> T:
    """The object from its values by name; names that this version does not know are left out."""
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    found = {name: value for name, value in dict(values).items() if name in known}
    for name, value in found.items():
        if not _fits(value, hints[name]):
            raise TypeError(f"{name} of a {kind.__name__} is {str(value)[:60]!r}")
    return kind(**found)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read from JSON is of a field's type."""
    parts = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in parts)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, parts[0]) for each in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(each, parts[1]) for each in value.values())
    if isinstance(value, bool) and hint in (int, float):
        return False
    return hint is Any or isinstance(value, (int, float) if hint is float else hint)


def _result(values: dict[str, Any]) -> ProblemResult:
    sides = tuple(_side(side) for side in values["sides"])
    result = _made(ProblemResult, {**values, "sides": sides})
    ConvProblem.parse(result.problem)  # says what is wrong with its text
    return result


def _side(values: dict[str, Any]) -> Side:
    side = _made(Side, {**values, "samples": tuple(values["samples"])})
    if not all(0 < sample < math.inf for sample in side.samples):
        raise ValueError(f"a sample of {side.name} is no time: {min(side.samples)}")
    return side


def geometric_mean(values: Iterable[float]) -> float:
    """NaN where there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan
