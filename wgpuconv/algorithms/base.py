"""What an algorithm is, and the helpers that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from ..errors import AlgorithmRefusedError
from ..facts import Facts
from ..plan import Config, Plan, Region, Tables, ceil_div
from ..problem import ConvProblem
from ..shader import source_hash


class Algorithm(ABC):
    """One way to compute a convolution.

    To add one, write a file beside this with a subclass and name it in ``__init__.py``; the
    contract tests, ``explain``, ``tune`` and ``bench`` find it there.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for tables and help."""
    ops: ClassVar[tuple[str, ...]]
    """The operations it computes: conv2d, conv_transpose2d."""
    shaders: ClassVar[tuple[str, ...]]
    """Every shader file that its plans may use."""
    tf32: ClassVar[bool] = False
    """Whether it multiplies float32 as TF32 where the problem allows that."""
    weight_last: ClassVar[bool] = False
    """Whether it reads a weight whose channels lie side by side."""

    def source(self) -> str:
        """A digest of the kernels' text: a stored timing holds as long as it stays the same."""
        return source_hash(self.shaders)

    def arithmetic(self, problem: ConvProblem) -> str:
        """What it multiplies in: f32, tf32, f16 or bf16."""
        return problem.arithmetic if self.tf32 else problem.dtype

    def refusal(self, problem: ConvProblem, facts: Facts) -> str | None:
        """Why it does not apply, in a sentence with values; None where it does."""
        if problem.op not in self.ops:
            return f"computes {' and '.join(self.ops)}, not {problem.op}"
        if problem.weight_last and not self.weight_last:
            return f"reads weights as {problem.weight_shape}, not as {problem.weight_memory_shape}"
        return self.refuse(problem, facts)

    def refuse(self, problem: ConvProblem, facts: Facts) -> str | None:
        """The algorithm's own reasons to refuse, once the operation fits."""
        return None

    @abstractmethod
    def configs(self, problem: ConvProblem, facts: Facts) -> list[Config]:
        """Its configurations for this problem within the device's limits, at least one."""

    @abstractmethod
    def lower(
        self, problem: ConvProblem, config: Config, facts: Facts, workspace_limit: int
    ) -> Plan:
        """The plan. Raises AlgorithmRefusedError where scratch memory or a grid do not fit."""

    @abstractmethod
    def cost(self, problem: ConvProblem, config: Config, facts: Facts) -> float:
        """A rough guess of the seconds it takes, only good for ordering candidates."""


class Strides(NamedTuple):
    """Elements between neighbours along each axis of the input (x) and the output (y)."""

    x_n: int
    x_c: int
    x_h: int
    x_w: int
    y_n: int
    y_k: int
    y_h: int
    y_w: int


def strides(problem: ConvProblem) -> Strides:
    p = problem
    x, y = p.c * p.h * p.w, p.k * p.out_h * p.out_w
    if p.layout == "NCHW":
        return Strides(x, p.h * p.w, p.w, 1, y, p.out_h * p.out_w, p.out_w, 1)
    return Strides(x, 1, p.w * p.c, p.c, y, 1, p.out_w * p.k, p.k)


class WeightStrides(NamedTuple):
    """Of the weight over groups, filters and channels of a group, and rows and columns of taps."""

    w_g: int
    w_k: int
    w_c: int
    w_r: int
    w_s: int


def weight_strides(problem: ConvProblem) -> WeightStrides:
    p = problem
    taps, second = p.r * p.s, p.weight_shape[1]
    outer = second * taps
    inner, row, column = (1, p.s * second, second) if p.weight_last else (taps, p.s, 1)
    if p.transposed:
        return WeightStrides(p.c_group * outer, inner, outer, row, column)
    return WeightStrides(p.k_group * outer, outer, inner, row, column)


def params(**values: int | float) -> tuple[tuple[str, int | float], ...]:
    return tuple(values.items())


def window_params(problem: ConvProblem) -> dict[str, int]:
    """How the kernel's window moves over the image, as shaders name it."""
    return {
        "stride_h": problem.stride[0],
        "stride_w": problem.stride[1],
        "pad_top": problem.padding[0],
        "pad_left": problem.padding[2],
        "dilation_h": problem.dilation[0],
        "dilation_w": problem.dilation[1],
    }


def in_vectors(problem: ConvProblem, columns: int) -> bool:
    """Whether rows of input and output are whole vectors of so many pixels, and neighbouring
    windows overlap, or nearly so: what lies between them is read as well. One column is no vector.
    """
    p = problem
    if columns == 1:
        return True
    whole = p.layout == "NCHW" and p.w % columns == 0 and p.out_w % columns == 0
    return whole and p.dilation == (1, 1) and p.stride[1] <= p.s + 1


def check_vectors(problem: ConvProblem, columns: int) -> None:
    """Raises AlgorithmRefusedError where a configuration, which may have been chosen for a larger
    part of the problem, wants vectors that are not there."""
    if not in_vectors(problem, columns):
        raise AlgorithmRefusedError(
            f"needs rows of whole vectors of {columns} pixels, got a part with {problem.w} columns "
            f"and {problem.out_w} columns of output"
        )


def rows_share(problem: ConvProblem, rows: int) -> bool:
    """Whether an invocation gains from computing that many output rows: their windows overlap."""
    p = problem
    return rows == 1 or (p.dilation[0] == 1 and p.stride[0] <= p.r)


def loads_per_product(problem: ConvProblem, rows: int, pairs: bool) -> float:
    """Loads of the input a multiply-add of one filter, where so many output rows, and two columns
    with ``pairs``, share what they load."""
    p = problem
    rows_in = (rows - 1) * p.stride[0] + p.r
    columns = ceil_div(p.padding[2] % 2 + p.stride[1] + p.s, 2) / (2 * p.s) if pairs else 1
    return rows_in * columns / (rows * p.r)


def vector_params(problem: ConvProblem, columns: int) -> dict[str, int]:
    """Widths, left padding and strides of tensors that are read and written in such vectors."""
    p, x = problem, strides(problem)
    return {
        "w_vectors": p.w // columns,
        "out_vectors": p.out_w // columns,
        "pad_vectors": ceil_div(p.padding[2], columns),
        "x_n": x.x_n // columns,
        "x_c": x.x_c // columns,
        "x_h": x.x_h // columns,
        "y_n": x.y_n // columns,
        "y_k": x.y_k // columns,
        "y_h": x.y_h // columns,
    }


def activation_params(problem: ConvProblem) -> dict[str, float]:
    return {"act_a": problem.activation.a, "act_b": problem.activation.b}


def bias_region(problem: ConvProblem, tables: Tables) -> Region:
    """The caller's bias, or zeros, so that no kernel needs a variant without one."""
    return Region("bias") if problem.bias else tables.add(bytes(problem.k * problem.itemsize))


def output_bindings(problem: ConvProblem, bias: Region) -> tuple[tuple[str, Region], ...]:
    """What a kernel ending as the problem does reads last, and writes."""
    residual = (("residual", Region("residual")),) if problem.residual else ()
    return (("bias", bias), *residual, ("y", Region("out")))


def roofline(
    problem: ConvProblem,
    facts: Facts,
    *,
    efficiency: float,
    workgroups: int = 0,
    span: float = 0.0,
    extra_bytes: int = 0,
    dispatches: int = 1,
    waste: float = 1.0,
) -> float:
    """Seconds by the longest of arithmetic, memory traffic and span, plus launches.

    ``efficiency`` is the share of the multiply-add rate that the kernel reaches when it fills
    the device; ``workgroups`` that share the arithmetic evenly leave cores idle where they do
    not spread evenly; ``span`` is the time of one workgroup's chain of dependent steps, which
    no parallelism shortens; ``waste`` is work done over work needed (padded tiles); ``extra_bytes``
    is traffic beyond each tensor once.
    """
    if workgroups:
        waste *= ceil_div(workgroups, facts.cores) * facts.cores / workgroups
    arithmetic = 2 * problem.multiply_adds * waste / (facts.flops * efficiency)
    traffic = problem.input_bytes + problem.out_bytes + problem.residual_bytes
    traffic += problem.weight_bytes + extra_bytes
    return max(arithmetic, traffic / facts.bandwidth, span) + dispatches * facts.launch
