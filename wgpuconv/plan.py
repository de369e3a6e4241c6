"""Plan: how one convolution is computed, as pure data.

A plan is a list of passes. Each pass names a shader, how it is specialised, its parameters,
the buffer regions bound to it, and its grid. Algorithms write plans, backends run them, and
``explain`` prints them; nothing here touches a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .bilinear import Bilinear
from .errors import AlgorithmRefusedError, counted
from .facts import Limits
from .problem import ConvProblem

Value = int | float | bool | str
Config = dict[str, Value]
"""The choices of one algorithm (tiles, splits, ...), by name, as JSON would hold them."""
Constant = Value | tuple[float, ...]
"""What a shader's constant may be: a number, or those of a matrix, row by row."""

Role = Literal[
    "input",
    "weight",
    "bias",
    "residual",
    "out",
    "workspace",
    "product",
    "prepared",
    "tables",
    "staged_input",
    "staged_weight",
    "staged_bias",
    "staged_residual",
    "staged_out",
]
"""Which buffer a region lies in: an argument of the call, scratch memory (two of them), weights
transformed once, tables that the plan itself brings along, or parts of a tensor that is too
large for one binding. (Buffers apart, since one dispatch may not both read and write one.)"""
READ = ("input", "weight", "bias", "residual")
"""The roles of a call's arguments that a plan only reads."""


@dataclass(frozen=True)
class Region:
    """A byte range of the buffer with that role; ``size=None`` reaches to its end."""

    role: Role
    offset: int = 0
    size: int | None = None


@dataclass(frozen=True)
class Shader:
    """A file of ``shaders/`` and how it is specialised (see shader.py)."""

    file: str
    constants: tuple[tuple[str, Constant], ...] = ()
    dtype: str = "f32"
    activation: str = "identity"
    residual: bool = False

    @classmethod
    def of(
        cls,
        file: str,
        dtype: str = "f32",
        /,
        **constants: Constant,
    ) -> Shader:
        return cls(file, tuple(sorted(constants.items())), dtype)

    def ending_as(self, problem: ConvProblem) -> Shader:
        """The same kernel with the problem's residual and activation in its last step."""
        return replace(self, activation=problem.activation.name, residual=problem.residual)


@dataclass(frozen=True)
class Pass:
    """One dispatch. ``params`` fill the shader's ``Params`` by name; ``bindings`` are by name."""

    shader: Shader
    params: tuple[tuple[str, int | float], ...]
    bindings: tuple[tuple[str, Region], ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """Passes that compute ``problem``.

    ``prepare`` depends on the weight alone and fills the buffer ``prepared`` (bytes); who
    keeps that buffer runs it once. ``workspace`` is the scratch memory in bytes, ``staged``
    that of other roles: a second workspace, and parts of too large tensors. ``tables`` are
    constants that the backend uploads once. ``bilinear`` is how outputs are computed, down and
    across, where not as sums of products of inputs and weights: results then err more.
    """

    problem: ConvProblem
    algorithm: str
    config: Config
    passes: tuple[Pass, ...]
    prepare: tuple[Pass, ...] = ()
    workspace: int = 0
    prepared: int = 0
    staged: tuple[tuple[Role, int], ...] = ()
    tables: bytes = b""
    bilinear: tuple[Bilinear, Bilinear] | None = None

    def __repr__(self) -> str:
        """In a line; the passes of a large tensor's parts would fill a screen."""
        return (
            f"Plan({str(self.problem)!r}, {self.label}, {counted(len(self.prepare), 'pass')} to "
            f"prepare the weight, {counted(len(self.passes), 'pass')} a run, "
            f"{counted(self.scratch, 'byte')} of scratch memory)"
        )

    @property
    def label(self) -> str:
        return candidate_label(self.algorithm, self.config)

    @property
    def scratch(self) -> int:
        """Bytes of memory that one call takes beside its arguments."""
        return self.workspace + self.prepared + sum(size for _, size in self.staged)

    @property
    def dispatches(self) -> int:
        return len(self.prepare) + len(self.passes)


def candidate_label(algorithm: str, config: Config) -> str:
    """``implicit_gemm(tile_m=64,tile_n=128)``"""
    return f"{algorithm}({','.join(f'{k}={v}' for k, v in config.items())})"


class Tables:
    """Collects host-made tables into one blob, each at an offset that can be bound."""

    def __init__(self, limits: Limits) -> None:
        self._alignment = limits.storage_alignment
        self._blob = bytearray()

    def add(self, data: bytes) -> Region:
        offset = align(len(self._blob), self._alignment)
        self._blob += bytes(offset - len(self._blob)) + data + bytes(-len(data) % 4)
        return Region("tables", offset, len(self._blob) - offset)

    def blob(self) -> bytes:
        return bytes(self._blob)


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_1d(workgroups: int, limits: Limits) -> tuple[int, int, int]:
    """A grid of at least that many workgroups, folded into x and y to stay within the limit.

    The shader counts ``workgroup_id.x + workgroup_id.y * num_workgroups.x`` and returns where
    the count is past its end.
    """
    most = limits.max_workgroups
    if workgroups <= most:
        return (workgroups, 1, 1)
    rows = ceil_div(workgroups, most)
    if rows > most:
        raise AlgorithmRefusedError(
            f"needs {workgroups} workgroups, more than one dispatch may have ({most} x {most})"
        )
    return (ceil_div(workgroups, rows), rows, 1)
