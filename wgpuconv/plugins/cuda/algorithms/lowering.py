"""What the plans of matrix products over gathered inputs have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....algorithms.base import Strides, activation_params, bias_region, params, strides
from ....errors import AlgorithmRefusedError
from ....facts import Facts, Limits
from ....plan import Config, Pass, Plan, Region, Shader, Tables, align, ceil_div, grid_1d
from ....problem import ConvProblem
from .base import output_bindings


@dataclass(frozen=True)
class Source:
    """The input as the kernels read it."""

    passes: tuple[Pass, ...]
    """What brings it into this order; nothing where it has it."""
    region: Region
    channels: int
    """Of a group, the zeros behind its own included."""
    vector: int
    """Channels that one copy brings, side by side and aligned."""
    strides: Strides
    nbytes: int
    """Of workspace, from its beginning."""

    @property
    def x_g(self) -> int:
        """Elements from one group to the next: groups lie side by side along the channels."""
        return self.channels * self.strides.x_c


def caller_input(problem: ConvProblem, vector: int = 1) -> Source:
    """The input as it is."""
    return Source((), Region("input"), problem.c_group, vector, strides(problem), 0)


class Lowering:
    """A plan in the making: what its passes share, and what has been collected.

    Outputs are written where they belong, or, of sums in several ``slices``, as partial sums to
    workspace, behind the input's copy there; another pass then adds them up.
    """

    def __init__(
        self,
        problem: ConvProblem,
        facts: Facts,
        workspace_limit: int,
        source: Source,
        *,
        slices: int = 1,
    ) -> None:
        p, limits = problem, facts.limits
        self.problem, self.facts, self.limits = p, facts, limits
        self.source, self.slices, self.split = source, slices, slices > 1
        self.tables = Tables(limits)
        self.bias = bias_region(p, self.tables)
        self.elements = p.out_bytes // p.itemsize
        if self.split:
            first, nbytes = align(source.nbytes, limits.storage_alignment), partial_bytes(p, slices)
            self.target, self.workspace = Region("workspace", first, nbytes), first + nbytes
        else:
            self.target, self.workspace = Region("out"), source.nbytes
        if self.workspace > workspace_limit:
            copy = ["the input with its channels last"] if source.passes else []
            sums = [f"partial sums of {slices} slices"] if self.split else []
            raise AlgorithmRefusedError(
                f"needs {self.workspace} bytes for {' and '.join(copy + sums)}, may have "
                f"{workspace_limit}"
            )
        self.prepare: list[Pass] = []
        self.passes = list(source.passes)
        self._prepared = 0

    def prepared(self, nbytes: int) -> Region:
        """Memory for weights that are packed once."""
        region = Region("prepared", self._prepared, nbytes)
        self._prepared = align(self._prepared + nbytes, self.limits.storage_alignment)
        return region

    def ending(self, shader: Shader) -> Shader:
        """What the kernel does with its sums: partial ones are only stored."""
        return shader if self.split else shader.ending_as(self.problem)

    def plan(self, algorithm: str, config: Config) -> Plan:
        passes = list(self.passes)
        if self.split:
            passes.append(
                reduce_pass(self.problem, self.slices, self.target, self.bias, self.limits)
            )
        return Plan(
            self.problem,
            algorithm,
            config,
            tuple(passes),
            prepare=tuple(self.prepare),
            workspace=self.workspace,
            prepared=self._prepared,
            tables=self.tables.blob(),
        )


def partial_bytes(problem: ConvProblem, slices: int) -> int:
    """Of partial sums, which are floats laid out as the output; a sum in one slice has none."""
    return 4 * slices * problem.out_bytes // problem.itemsize if slices > 1 else 0


def reduce_pass(
    problem: ConvProblem, slices: int, partial: Region, bias: Region, limits: Limits
) -> Pass:
    """The pass that adds up the partial sums, slices of the output's own layout."""
    p = problem
    elements = p.out_bytes // p.itemsize
    return Pass(
        Shader.of("reduce_splits", p.dtype).ending_as(p),
        params(
            elements=elements,
            splits=slices,
            k=p.k,
            y_k=strides(p).y_k,
            **activation_params(p),
        ),
        (("partial", partial), *output_bindings(p, bias, Region("out"))),
        grid_1d(ceil_div(elements, 256), limits),
    )


def split_counts(wanted: Iterable[int], most: int) -> list[int]:
    """Into how many parts sums may be split, from 1, which is always among them, to ``most``."""
    return sorted({1} | {max(min(count, most), 1) for count in wanted})
