"""Tensors larger than one binding: a problem falls apart into parts that fit.

A part is an ordinary, smaller :class:`ConvProblem` on a box of each tensor: some images, some
filters (whole groups, or a range inside one), some rows, some columns of the output, and what
they need of the input. Any algorithm lowers it as it lowers every problem. Where a part's box
is contiguous and begins where a binding may begin, it is bound in place, by an offset; where
it is not, ``copy_planes`` brings it into scratch memory of its own (the roles ``staged_*``),
and takes a computed box back. Parts run one after the other and share that memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from .algorithms import Algorithm
from .algorithms.base import params
from .errors import AlgorithmRefusedError, UnsupportedFeatureError
from .facts import Facts, Limits
from .plan import Config, Pass, Plan, Region, Role, Shader, Tables, align, ceil_div, grid_1d
from .problem import ConvProblem

Box = tuple[slice, ...]
"""A range along each axis of a tensor: what indexes its part out of an array."""


@dataclass(frozen=True)
class Part:
    """One convolution that fits, and the boxes of the whole problem's tensors it works on."""

    problem: ConvProblem
    input: Box
    weight: Box
    bias: Box
    out: Box


def fits(problem: ConvProblem, limits: Limits) -> bool:
    """Whether each tensor of the problem can be bound as a whole."""
    return problem.empty or _largest_tensor(problem) <= _most(limits)


def parts(problem: ConvProblem, limits: Limits, scratch: int | None = None) -> tuple[Part, ...]:
    """The parts that together write every output element once; one part if the problem fits.

    ``scratch`` is the memory in bytes that copies of slabs should stay within, where they can.
    Raises UnsupportedFeatureError where a tensor is larger than a buffer, or where even one
    output pixel needs more than a binding.
    """
    p = problem
    _check_buffers(p, limits)
    if fits(p, limits):
        sizes = _Sizes(max(p.n, 1), p.k, p.out_h, p.out_w)
    else:
        sizes = _sizes(p, limits, scratch)
    image = (p.input_bytes // max(p.n, 1), p.out_bytes // max(p.n, 1))
    step = _multiple(limits, *image)
    out_row = p.out_w * p.k * p.itemsize if p.layout == "NHWC" or p.k == 1 else 0
    row_step = math.lcm(_multiple(limits, out_row), p.stride[0] if p.transposed else 1)
    column_step = p.stride[1] if p.transposed else 1
    return tuple(
        _part(p, channels, images, rows, columns)
        for channels in _channels(p, sizes.filters, limits)
        for images in _ranges(p.n, sizes.images, step)
        for rows in _rows(p, 0, sizes.rows, row_step)
        for columns in _rows(p, 1, sizes.columns, column_step)
    )


def lower(
    problem: ConvProblem,
    algorithm: Algorithm,
    config: Config,
    facts: Facts,
    workspace_limit: int,
) -> Plan:
    """The plans of all parts, as one.

    Parts of the same shape share tables, and those with the same packed weight a place in
    ``prepared``, which may be kept between calls; all share the workspace.
    """
    limits = facts.limits
    tables = Tables(limits)
    passes, prepare = _Recorder(problem, limits), _Recorder(problem, limits)
    plans: dict[ConvProblem, Plan] = {}
    table_at: dict[bytes, Region] = {}
    packed: list[tuple[Box, Plan, Region]] = []
    prepared = 0
    for part in parts(problem, limits, workspace_limit):
        plan = plans.get(part.problem)
        if plan is None:
            plan = algorithm.lower(part.problem, config, facts, workspace_limit)
            plans[part.problem] = plan
        _check_tiles(part, plan)
        where: dict[Role, Region] = {"workspace": Region("workspace", 0, plan.workspace)}
        where |= {role: Region(role, 0, size) for role, size in plan.staged}
        if plan.tables not in table_at:
            table_at[plan.tables] = tables.add(plan.tables)
        where["tables"] = table_at[plan.tables]
        if plan.prepare:
            for weight, other, region in packed:
                if weight == part.weight and _prepare_alike(plan, other):
                    where["prepared"] = region
                    break
            else:
                where["prepared"] = Region("prepared", prepared, plan.prepared)
                prepared = align(prepared + plan.prepared, limits.storage_alignment)
                prepare.add(part, plan.prepare, where)
                packed.append((part.weight, plan, where["prepared"]))
        passes.add(part, plan.passes, where)
    staged = _union(passes.staged, prepare.staged)
    for plan in plans.values():
        staged = _union(staged, dict(plan.staged))
    whole = Plan(
        problem,
        algorithm.name,
        config,
        tuple(passes.recorded),
        prepare=tuple(prepare.recorded),
        workspace=max((plan.workspace for plan in plans.values()), default=0),
        prepared=prepared,
        staged=tuple(sorted(staged.items())),
        tables=tables.blob(),
        bilinear=next((plan.bilinear for plan in plans.values()), None),
    )
    for what, size in (("packed weights", prepared), ("tables", len(whole.tables))):
        if size > limits.max_buffer:
            raise AlgorithmRefusedError(
                f"needs {size} bytes of {what} for {len(plans)} shapes of parts, more than the "
                f"device's largest buffer (max-buffer-size {limits.max_buffer})"
            )
    return whole


# ---- how large a part may be ----


class _Sizes(NamedTuple):
    """Most images, filters, output rows and output columns of a part."""

    images: int
    filters: int
    rows: int
    columns: int


def _most(limits: Limits) -> int:
    return min(limits.max_binding, limits.max_buffer) // 4 * 4


def _largest_tensor(p: ConvProblem) -> int:
    return max(p.input_bytes, p.out_bytes, p.weight_bytes)


def _check_buffers(p: ConvProblem, limits: Limits) -> None:
    tensors = {"input": p.input_bytes, "output": p.out_bytes, "weight": p.weight_bytes}
    for name, size in tensors.items():
        if size > limits.max_buffer:
            raise UnsupportedFeatureError(
                f"the {name} of {p} has {size} bytes, more than this device's largest buffer "
                f"(max-buffer-size {limits.max_buffer}); process it in parts"
            )


def _needs(p: ConvProblem, sizes: _Sizes) -> dict[str, int]:
    """Bytes of a part's tensors, at most."""
    groups = ceil_div(sizes.filters, p.k_group)
    pixels = _most_needed(p, 0, sizes.rows) * _most_needed(p, 1, sizes.columns)
    return {
        "input": sizes.images * groups * p.c_group * pixels * p.itemsize,
        "output": sizes.images * sizes.filters * sizes.rows * sizes.columns * p.itemsize,
        "weight": sizes.filters * p.reduction * p.itemsize,
    }


def _sizes(p: ConvProblem, limits: Limits, scratch: int | None) -> _Sizes:
    """The largest parts that fit, splitting what costs least first.

    Images and filters are mostly bound in place; rows and columns overlap and are copied, so
    they come last.
    """
    most = _most(limits)
    slab = most if scratch is None else min(most, scratch // (3 if p.residual else 2))

    def fit(sizes: _Sizes) -> bool:
        return max(_needs(p, sizes).values()) <= most

    def fit_scratch(sizes: _Sizes) -> bool:
        needs = _needs(p, sizes)
        return fit(sizes) and max(needs["input"], needs["output"]) <= slab

    # A weight that is too large by itself leaves no choice.
    filters = _whole_groups(p, min(most // (p.reduction * p.itemsize), p.k))
    if filters:
        image = _Sizes(1, filters, p.out_h, p.out_w)
        found = _grown(image, "images", p.n, fit)
        if found:
            return found
        found = _grown(image, "filters", filters, fit)
        if found:
            return found._replace(filters=_whole_groups(p, found.filters))
        for k, works in ((filters, fit_scratch), (filters, fit), (1, fit)):
            row = image._replace(filters=k, rows=1)
            found = _grown(row, "rows", p.out_h, works)
            if found:
                return found
        for k in (filters, 1):
            pixel = image._replace(filters=k, rows=1, columns=1)
            found = _grown(pixel, "columns", p.out_w, fit)
            if found:
                return found
    name, size = max(_needs(p, _Sizes(1, 1, 1, 1)).items(), key=lambda item: item[1])
    raise UnsupportedFeatureError(
        f"one output pixel of {p} needs {size} bytes of the {name}, more than one binding of "
        f"this device (max-storage-buffer-binding-size {limits.max_binding})"
    )


def _whole_groups(p: ConvProblem, filters: int) -> int:
    return filters if filters < p.k_group else filters // p.k_group * p.k_group


def _grown(sizes: _Sizes, field: str, most: int, works: Callable[[_Sizes], bool]) -> _Sizes | None:
    """The sizes with the largest value of that field that works; None where not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if works(sizes._replace(**{field: middle})):
            low = middle
        else:
            high = middle - 1
    return sizes._replace(**{field: low}) if low else None


def _multiple(limits: Limits, *strides: int) -> int:
    """The least count of steps of so many bytes that ends where a binding may begin."""
    a = limits.storage_alignment
    return math.lcm(*(a // math.gcd(a, stride) for stride in strides))


def _ranges(total: int, size: int, multiple: int = 1) -> list[slice]:
    """Ranges of at most ``size``, nearly equal, and of that multiple where it is not larger."""
    if not total:
        return []
    step = ceil_div(total, ceil_div(total, size))
    if align(step, multiple) <= size:
        step = align(step, multiple)
    elif multiple <= size:
        step = size // multiple * multiple
    return [slice(first, min(first + step, total)) for first in range(0, total, step)]


class _Channels(NamedTuple):
    groups: int
    c: slice
    """Input channels."""
    k: slice
    """Output channels."""


def _channels(p: ConvProblem, filters: int, limits: Limits) -> list[_Channels]:
    """Whole groups, or ranges of filters inside one group at a time."""
    # Bytes from a filter to the next in tensors where filters lie apart.
    strides = [p.itemsize] if p.bias else []
    strides += [] if p.transposed else [p.reduction * p.itemsize]
    strides += [p.out_h * p.out_w * p.itemsize] if p.layout == "NCHW" else []
    if filters < p.k_group:
        multiple = _multiple(limits, *strides)
        return [
            _Channels(1, _group(g, p.c_group), slice(first + k.start, first + k.stop))
            for g in range(p.groups)
            for first in (g * p.k_group,)
            for k in _ranges(p.k_group, filters, multiple)
        ]
    strides = [p.k_group * stride for stride in strides]
    strides += [p.c_group * p.h * p.w * p.itemsize] if p.layout == "NCHW" else []
    return [
        _Channels(
            g.stop - g.start,
            slice(g.start * p.c_group, g.stop * p.c_group),
            slice(g.start * p.k_group, g.stop * p.k_group),
        )
        for g in _ranges(p.groups, filters // p.k_group, _multiple(limits, *strides))
    ]


def _group(g: int, size: int) -> slice:
    return slice(g * size, (g + 1) * size)


# ---- which input a range of output rows (or columns) needs ----


class _Rows(NamedTuple):
    """A range of output rows or columns, and the convolution along that axis that makes it."""

    out: slice
    input: slice
    stride: int
    padding: tuple[int, int]
    output_padding: int


def _most_needed(p: ConvProblem, axis: int, count: int) -> int:
    """Input rows that any ``count`` output rows in sequence need, at most."""
    size, stride, reach = (p.h, p.w)[axis], p.stride[axis], _reach(p, axis)
    if count == (p.out_h, p.out_w)[axis]:
        return size
    if p.transposed:
        return min(size, (count - 1 + reach) // stride + 2)
    return min(size, (count - 1) * stride + reach + 1)


def _reach(p: ConvProblem, axis: int) -> int:
    """Pixels from the first tap to the last."""
    return p.dilation[axis] * ((p.r, p.s)[axis] - 1)


def _rows(p: ConvProblem, axis: int, size: int, multiple: int) -> list[_Rows]:
    total = (p.out_h, p.out_w)[axis]
    if size >= total:
        padding = (p.padding[2 * axis], p.padding[2 * axis + 1])
        whole = slice(0, (p.h, p.w)[axis])
        return [_Rows(slice(0, total), whole, p.stride[axis], padding, p.output_padding[axis])]
    make = _transposed_rows if p.transposed else _conv_rows
    return [make(p, axis, out) for out in _ranges(total, size, multiple)]


def _conv_rows(p: ConvProblem, axis: int, out: slice) -> _Rows:
    size, stride, span = (p.h, p.w)[axis], p.stride[axis], _reach(p, axis) + 1
    low = out.start * stride - p.padding[2 * axis]
    high = (out.stop - 1) * stride - p.padding[2 * axis] + span
    if low >= size or high <= 0:
        # Only padding lies under these rows. With this stride and padding the one input row
        # falls between the first two kernels, so that none of them touches it.
        count = out.stop - out.start
        padding = (span, max((count - 1) * (span + 1) - 1, 0))
        return _Rows(out, slice(0, 1), span + 1, padding, 0)
    inside = slice(max(low, 0), min(high, size))
    return _Rows(out, inside, stride, (inside.start - low, high - inside.stop), 0)


def _transposed_rows(p: ConvProblem, axis: int, out: slice) -> _Rows:
    """Input row i reaches output row ``i * stride + tap - before``."""
    size, stride, reach = (p.h, p.w)[axis], p.stride[axis], _reach(p, axis)
    before = p.padding[2 * axis]
    low = max(ceil_div(out.start + before - reach, stride), 0)
    # An earlier row than needed, where the padding of the part would be negative otherwise.
    low = min(low, (out.start + before) // stride, size - 1)
    high = max(min((out.stop - 1 + before) // stride + 1, size), low + 1)
    padding = out.start + before - low * stride
    made = (high - low - 1) * stride + reach + 1 - padding
    wanted = out.stop - out.start
    after, extra = max(made - wanted, 0), max(wanted - made, 0)
    return _Rows(out, slice(low, high), stride, (padding, after), extra)


def _part(p: ConvProblem, channels: _Channels, images: slice, rows: _Rows, columns: _Rows) -> Part:
    c, k = channels.c, channels.k
    size_k = k.stop - k.start
    if p.transposed:
        first = k.start - c.start // p.c_group * p.k_group
        outer, inner = c, slice(first, first + size_k // channels.groups)
    else:
        outer, inner = k, slice(0, p.c_group)
    taps = slice(0, p.r), slice(0, p.s)

    def ordered(channel: slice, h: slice, w: slice) -> Box:
        return (images, channel, h, w) if p.layout == "NCHW" else (images, h, w, channel)

    return Part(
        p.with_(
            n=images.stop - images.start,
            c=c.stop - c.start,
            h=rows.input.stop - rows.input.start,
            w=columns.input.stop - columns.input.start,
            k=size_k,
            stride=(rows.stride, columns.stride),
            padding=(*rows.padding, *columns.padding),
            output_padding=(rows.output_padding, columns.output_padding),
            groups=channels.groups,
        ),
        input=ordered(c, rows.input, columns.input),
        weight=(outer, *taps, inner) if p.weight_last else (outer, inner, *taps),
        bias=(k,),
        out=ordered(k, rows.out, columns.out),
    )


# ---- one plan of many ----


def _check_tiles(part: Part, plan: Plan) -> None:
    """A part's tiles must be those of the whole problem: errors differ inside a tile, and a result
    is verified as one."""
    if plan.bilinear is None:
        return
    down, across = plan.bilinear
    first = 2 if part.problem.layout == "NCHW" else 1
    row, column = (axis.start for axis in part.out[first : first + 2])
    if row % down.out or column % across.out:
        raise AlgorithmRefusedError(
            f"needs parts that begin at multiples of its tile of {down.out} x {across.out} "
            f"outputs, got one that begins at row {row}, column {column} of the output"
        )


def _prepare_alike(a: Plan, b: Plan) -> bool:
    """Whether both plans make the same of the same weight."""
    return (a.prepare, a.tables, a.prepared) == (b.prepare, b.tables, b.prepared)


def _union(a: dict[Role, int], b: dict[Role, int]) -> dict[Role, int]:
    return {role: max(a.get(role, 0), b.get(role, 0)) for role in a | b}


_STAGED: dict[Role, Role] = {
    "input": "staged_input",
    "weight": "staged_weight",
    "bias": "staged_bias",
    "residual": "staged_residual",
    "out": "staged_out",
}


class _Recorder:
    """Collects passes of parts, with the copies that they need before and after."""

    def __init__(self, problem: ConvProblem, limits: Limits) -> None:
        self.recorded: list[Pass] = []
        self.staged: dict[Role, int] = {}
        self._problem = problem
        self._limits = limits
        self._held: dict[Role, Box] = {}
        self._shapes: dict[Role, tuple[int, ...]] = {
            "input": problem.input_shape,
            "weight": problem.weight_memory_shape,
            "bias": (problem.k,),
            "residual": problem.out_shape,
            "out": problem.out_shape,
        }

    def add(self, part: Part, passes: tuple[Pass, ...], where: dict[Role, Region]) -> None:
        """Appends a part's passes; ``where`` has the regions of its tables and scratch."""
        boxes: dict[Role, Box] = {
            "input": part.input,
            "weight": part.weight,
            "bias": part.bias,
            "residual": part.out,
            "out": part.out,
        }
        used = {region.role for step in passes for _, region in step.bindings}
        where = dict(where)
        for role, box in boxes.items():
            if role not in used:
                continue
            where[role] = self._in_place(role, box) or self._stage(role, box)
            staged = where[role].role
            if role != "out" and staged != role:
                if self._held.get(staged) != box:
                    self.recorded += self._copies(role, box, where[role])
                self._held[staged] = box
        self.recorded += [_moved(step, where) for step in passes]
        if "out" in used and where["out"].role == "staged_out":
            self.recorded += self._copies("out", part.out, where["out"])

    def _in_place(self, role: Role, box: Box) -> Region | None:
        """The box's own bytes, where they are contiguous from an offset that can be bound."""
        first, runs = _runs(self._shapes[role], box)
        offset = first * self._problem.itemsize
        if len(runs) > 1 or offset % self._limits.storage_alignment:
            return None
        return Region(role, offset, runs[0].length * self._problem.itemsize)

    def _stage(self, role: Role, box: Box) -> Region:
        size = math.prod(axis.stop - axis.start for axis in box) * self._problem.itemsize
        staged = _STAGED[role]
        self.staged[staged] = max(self.staged.get(staged, 0), align(size, 4))
        return Region(staged, 0, size)

    def _copies(self, role: Role, box: Box, staged: Region) -> Iterator[Pass]:
        """Passes that copy a box into its dense form, or for the output, back from it."""
        size, limits = self._problem.itemsize, self._limits
        start, runs = _runs(self._shapes[role], box)
        count = runs[0].length
        (planes, stride), *outer = runs[1:] or [_Run(1, 0)]
        # A window begins where a binding may begin, up to so many elements before its data.
        most = _most(limits) // size - (limits.storage_alignment // size - 1)
        for n, index in enumerate(product(*(range(run.length) for run in reversed(outer)))):
            at = start + sum(i * run.stride for i, run in zip(index, reversed(outer), strict=True))
            for plane, first, many, length in _windows(planes, stride, count, most):
                begin = at + plane * stride + first
                offset = begin * size // limits.storage_alignment * limits.storage_alignment
                base = begin - offset // size
                step = stride if many > 1 else 0
                window = Region(role, offset, (base + (many - 1) * step + length) * size)
                dense = (n * planes + plane) * count + first
                ends = ((window, base, step), (staged, dense, count))
                source, target = reversed(ends) if role == "out" else ends
                yield Pass(
                    Shader.of("copy_planes", self._problem.dtype),
                    params(
                        planes=many,
                        count=length,
                        src_base=source[1],
                        src_plane=source[2],
                        dst_base=target[1],
                        dst_plane=target[2],
                    ),
                    (("src", source[0]), ("dst", target[0])),
                    grid_1d(ceil_div(many * length, 256), limits),
                )


class _Run(NamedTuple):
    length: int
    stride: int


def _runs(shape: tuple[int, ...], box: Box) -> tuple[int, list[_Run]]:
    """Where a box begins in C order, and its runs: contiguous elements, then repetitions."""
    first, stride, runs = 0, 1, [_Run(1, 1)]
    for extent, axis in zip(reversed(shape), reversed(box), strict=True):
        count = axis.stop - axis.start
        first += axis.start * stride
        if runs[-1].length * runs[-1].stride == stride:
            runs[-1] = _Run(runs[-1].length * count, runs[-1].stride)
        elif count > 1:
            runs.append(_Run(count, stride))
        stride *= extent
    return first, runs


def _windows(
    planes: int, stride: int, count: int, most: int
) -> Iterator[tuple[int, int, int, int]]:
    """(first plane, first element, planes, elements) of copies that span ``most`` elements."""
    if count <= most:
        many = min(planes, 1 + (most - count) // stride) if planes > 1 else 1
        for plane in range(0, planes, many):
            yield plane, 0, min(many, planes - plane), count
        return
    for plane in range(planes):
        for first in range(0, count, most):
            yield plane, first, 1, min(most, count - first)


def _moved(step: Pass, where: dict[Role, Region]) -> Pass:
    """The pass of a part with its regions inside those of the whole plan."""

    def move(region: Region) -> Region:
        base = where[region.role]
        assert base.size is not None, "every region of a whole plan has its size"
        size = base.size - region.offset if region.size is None else region.size
        return Region(base.role, base.offset + region.offset, size)

    bindings = tuple((name, move(region)) for name, region in step.bindings)
    return Pass(step.shader, step.params, bindings, step.grid)
