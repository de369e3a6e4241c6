"""ConvProblem: the one description of a convolution, validated once, with a text form.

Everything that is wrong with the shapes or parameters of a call is found here and said in
one sentence. What passes is a frozen value that planning, tuning, the store, the bench
and bug reports share, as an object or as text::

    conv2d f32 n16 c64 h56 w56 k128 r3 s3 stride1 pad1
    conv_transpose2d f16 n1 c8 h5 w5 k4 r3 s3 stride2 pad1 outpad1,0 groups2 nhwc bias act:clip,0,6

The word ``tf32`` behind the sizes allows TF32 (see ``precision``), ``wlast`` tells of a weight
whose channels lie side by side (see ``weight_last``).
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from .errors import DtypeError, ProblemError, counted, described

Op = Literal["conv2d", "conv_transpose2d"]
Pair = tuple[int, int]
Pads = tuple[int, int, int, int]

DTYPES = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element, by the name of its dtype in a problem's text."""
LAYOUTS = ("NCHW", "NHWC")
PRECISIONS = ("default", "tf32")
"""What float32 is multiplied in: itself, or TF32, whose mantissa has 10 bits."""
_BIGGEST = 2**31 - 1
_F32_MAX = (2 - 2**-23) * 2.0**127

_ACTIVATIONS: dict[str, tuple[tuple[str, ...], tuple[float, ...] | None]] = {
    # name: (names of its parameters, their defaults; None where the caller must give them)
    "identity": ((), ()),
    "relu": ((), ()),
    "relu6": ((), ()),
    "leaky_relu": (("negative_slope",), (0.01,)),
    "clip": (("low", "high"), None),
    "sigmoid": ((), ()),
    "tanh": ((), ()),
    "gelu": ((), ()),
    "silu": ((), ()),
}
ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclass(frozen=True)
class Activation:
    """A function applied to each output element in the kernel's last step.

    ``a`` and ``b`` are its parameters: the negative slope of ``leaky_relu``, the bounds of
    ``clip``. ``gelu`` is the exact one (with erf), as PyTorch's default.
    """

    name: str = "identity"
    a: float = 0.0
    b: float = 0.0

    @classmethod
    def of(cls, spec: Activation | str | Sequence[Any] | None) -> Activation:
        """Accepts ``None``, ``"relu"``, ``("leaky_relu", 0.2)``, ``("clip", 0, 6)``."""
        if isinstance(spec, Activation):
            return spec
        if spec is None:
            return IDENTITY
        if not isinstance(spec, (str, tuple, list)) or not spec:
            raise DtypeError(
                f"activation must be None, a name or a tuple (name, parameters...), got {spec!r}"
            )
        name, *args = [spec] if isinstance(spec, str) else spec
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise ProblemError(f"unknown activation {name!r}; known are {', '.join(ACTIVATIONS)}")
        names, defaults = _ACTIVATIONS[name]
        if not args and defaults is not None:
            args = list(defaults)
        try:
            values = [float(v) for v in args]
        except (TypeError, ValueError):
            raise DtypeError(f"the parameters of {name} must be numbers, got {args!r}") from None
        if len(values) != len(names):
            form = f"({name!r}, {', '.join(names)})" if names else repr(name)
            raise ProblemError(f"activation {name} is written {form}, got {spec!r}")
        # Kernels take them as float32, in which larger ones are infinite.
        values = [math.copysign(math.inf, v) if abs(v) > _F32_MAX else v for v in values]
        if any(math.isnan(v) for v in values):
            raise ProblemError(f"the parameters of {name} must not be NaN, got {tuple(args)!r}")
        if name == "clip" and values[0] > values[1]:
            raise ProblemError(f"clip needs low <= high, got {values[0]:g} and {values[1]:g}")
        if name == "relu6":
            return cls("clip", 0.0, 6.0)
        return cls(name, *values)

    @property
    def parameters(self) -> tuple[float, ...]:
        return (self.a, self.b)[: len(_ACTIVATIONS[self.name][0])]

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{v!r}".removesuffix(".0") for v in self.parameters)])


IDENTITY = Activation()


@dataclass(frozen=True)
class ConvProblem:
    """One convolution, without its data.

    ``n c h w`` is the input, ``k`` the number of output channels, ``r s`` the kernel's
    height and width. ``padding`` is (top, bottom, left, right); for ``conv_transpose2d``
    it is cropped from the output, as in PyTorch. The weight is (K, C/groups, R, S) for
    ``conv2d`` and (C, K/groups, R, S) for ``conv_transpose2d``, in either ``layout``;
    ``layout`` ('NCHW' or 'NHWC'; lower case becomes that) orders the input and the output, and
    the ``residual``, an array like the output that is added before the activation.
    ``precision`` "tf32" allows a kernel to round float32 inputs and weights to TF32 (10 bits of
    mantissa) before it multiplies; sums stay in float32. ``weight_last`` says that the weight's
    memory has its second axis last, (K, R, S, C/groups) or (C, R, S, K/groups), as PyTorch's
    ``channels_last`` has it; it is dropped where that is the same.

    Made directly it is validated in nothing but its layout (ProblemError where that is neither);
    :meth:`from_call` and :meth:`parse` validate all of it.
    """

    op: Op
    dtype: str
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Pair = (1, 1)
    padding: Pads = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    output_padding: Pair = (0, 0)
    groups: int = 1
    layout: str = "NCHW"
    bias: bool = False
    residual: bool = False
    activation: Activation = IDENTITY
    precision: str = "default"
    weight_last: bool = False

    def __post_init__(self) -> None:
        if self.weight_last and (self.r * self.s == 1 or self.weight_shape[1] == 1):
            object.__setattr__(self, "weight_last", False)
        if self.layout not in LAYOUTS:  # not in every call: as_layout is slower than this
            object.__setattr__(self, "layout", as_layout(self.layout))

    # ---- derived ----

    @property
    def transposed(self) -> bool:
        return self.op == "conv_transpose2d"

    @cached_property
    def out_h(self) -> int:
        return self._out(0, self.h, self.r)

    @cached_property
    def out_w(self) -> int:
        return self._out(1, self.w, self.s)

    def _out(self, axis: int, size: int, taps: int) -> int:
        pads = self.padding[2 * axis] + self.padding[2 * axis + 1]
        stride, span = self.stride[axis], self.dilation[axis] * (taps - 1) + 1
        if self.transposed:
            return (size - 1) * stride - pads + span + self.output_padding[axis]
        return (size + pads - span) // stride + 1

    @property
    def c_group(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def k_group(self) -> int:
        """Output channels of one group."""
        return self.k // self.groups

    @cached_property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self._ordered(self.c, self.h, self.w)

    @cached_property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self._ordered(self.k, self.out_h, self.out_w)

    def _ordered(self, channels: int, h: int, w: int) -> tuple[int, int, int, int]:
        return (self.n, channels, h, w) if self.layout == "NCHW" else (self.n, h, w, channels)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        if self.transposed:
            return (self.c, self.k_group, self.r, self.s)
        return (self.k, self.c_group, self.r, self.s)

    @property
    def weight_memory_shape(self) -> tuple[int, int, int, int]:
        """The weight's shape in the order of its memory."""
        first, second, r, s = self.weight_shape
        return (first, r, s, second) if self.weight_last else self.weight_shape

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def arithmetic(self) -> str:
        """What its kernels may multiply in: f32, tf32, f16 or bf16."""
        return self.dtype if self.precision == "default" else self.precision

    @property
    def input_bytes(self) -> int:
        return math.prod(self.input_shape) * self.itemsize

    @property
    def out_bytes(self) -> int:
        return math.prod(self.out_shape) * self.itemsize

    @property
    def residual_bytes(self) -> int:
        return self.out_bytes if self.residual else 0

    @property
    def weight_bytes(self) -> int:
        return math.prod(self.weight_shape) * self.itemsize

    @property
    def reduction(self) -> int:
        """Products summed for one output element (at most, at the borders)."""
        return self.c_group * self.r * self.s

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a direct method, the padding's zeros included."""
        pixels = self.h * self.w if self.transposed else self.out_h * self.out_w
        return self.n * pixels * self.c * self.k_group * self.r * self.s

    @property
    def empty(self) -> bool:
        """Whether the output has no element (an empty batch)."""
        return self.n == 0

    # ---- from a call ----

    @classmethod
    def from_call(
        cls,
        op: Op,
        input_shape: Sequence[int],
        weight_shape: Sequence[int],
        *,
        dtype: str = "f32",
        bias_shape: Sequence[int] | None = None,
        residual: bool = False,
        unbatched: bool = False,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        output_padding: Any = 0,
        groups: Any = 1,
        layout: str = "NCHW",
        activation: Any = None,
        precision: str = "default",
    ) -> ConvProblem:
        """The problem of a batched (4-D) call with PyTorch's arguments, or one clear error.

        ``unbatched`` says that the caller's input has 3 dimensions, for the error that may follow.
        """
        layout = as_layout(layout)
        if dtype not in DTYPES:
            raise DtypeError(f"dtype must be 'f32', 'f16' or 'bf16', got {dtype!r}")
        if precision not in PRECISIONS:
            raise ProblemError(f"precision must be 'default' or 'tf32', got {precision!r}")
        if precision == "tf32" and dtype != "f32":
            raise ProblemError(f"precision 'tf32' is one of float32, got {dtype}; leave it out")
        input_shape = _shape("the input's shape", input_shape)
        weight_shape = _shape("the weight's shape", weight_shape)
        if len(input_shape) != 4:
            raise ProblemError(
                f"the input must have 4 dimensions ({', '.join(layout)}) or 3 without the batch, "
                f"got shape {input_shape}"
            )
        transposed = op == "conv_transpose2d"
        names = "(C, K/groups, R, S)" if transposed else "(K, C/groups, R, S)"
        if len(weight_shape) != 4:
            raise ProblemError(
                f"the weight must have 4 dimensions {names}, got shape {weight_shape}"
            )
        order = (0, 1, 2, 3) if layout == "NCHW" else (0, 3, 1, 2)
        n, c, h, w = (input_shape[i] for i in order)
        w0, w1, r, s = weight_shape
        groups = _integer("groups", groups, least=1)
        if min(c, h, w) < 1:
            raise ProblemError(f"only the batch may be empty, got an input of shape {input_shape}")
        if min(w0, w1, r, s) < 1:
            raise ProblemError(f"the weight must not be empty, got shape {weight_shape}")
        if c % groups:
            raise ProblemError(
                f"groups must divide the {counted(c, 'input channel')}, got groups={groups}"
            )
        hint = f" (3 dimensions are read as ({', '.join(layout[1:])}))" if unbatched else ""
        if transposed:
            if w0 != c:
                raise ProblemError(
                    f"the weight {names} must have {counted(c, 'input channel')} as the input has, "
                    f"got shape {weight_shape}{hint}"
                )
            k = w1 * groups
        else:
            k = w0
            if k % groups:
                raise ProblemError(
                    f"groups must divide the {counted(k, 'filter')}, got groups={groups}"
                )
            if w1 != c // groups:
                raise ProblemError(
                    f"an input of {counted(c, 'channel')} in {counted(groups, 'group')} needs a "
                    f"weight {names} with {counted(c // groups, 'channel')} a group, got shape "
                    f"{tuple(weight_shape)}{hint}"
                )
        if bias_shape is not None and tuple(bias_shape) != (k,):
            raise ProblemError(
                f"bias must have shape ({k},), one value an output channel, got {tuple(bias_shape)}"
            )
        stride = _pair("stride", stride, least=1)
        dilation = _pair("dilation", dilation, least=1)
        problem = cls(
            op=op,
            dtype=dtype,
            n=n,
            c=c,
            h=h,
            w=w,
            k=k,
            r=r,
            s=s,
            stride=stride,
            padding=_padding(padding, op, stride, dilation, (r, s)),
            dilation=dilation,
            output_padding=_pair("output_padding", output_padding, least=0),
            groups=groups,
            layout=layout,
            bias=bias_shape is not None,
            residual=residual,
            activation=Activation.of(activation),
            precision=precision,
        )
        return problem._validated()

    def _validated(self) -> ConvProblem:
        for axis, name in enumerate(("height", "width")):
            size, taps = ((self.h, self.r), (self.w, self.s))[axis]
            span = self.dilation[axis] * (taps - 1) + 1
            before, after = self.padding[2 * axis : 2 * axis + 2]
            if self.transposed:
                extra, bound = (
                    self.output_padding[axis],
                    max(self.stride[axis], self.dilation[axis]),
                )
                if extra >= bound:
                    raise ProblemError(
                        "output_padding must be smaller than the stride or the dilation "
                        f"({bound} along the {name}), got {extra}"
                    )
            elif size + before + after < span:
                raise ProblemError(
                    f"the kernel spans {span} pixels along the {name} (size {taps}, dilation "
                    f"{self.dilation[axis]}) but the padded input has only {size + before + after}"
                )
            out = (self.out_h, self.out_w)[axis]
            if out < 1:
                raise ProblemError(
                    f"the output would have {out} pixels along the {name}: padding "
                    f"{before}+{after} crops all of it"
                )
            if max(out, size + before + after) > _BIGGEST:
                raise ProblemError(
                    f"sizes along the {name} must stay below 2^31, got {max(out, size)} pixels "
                    f"with padding {before}+{after}"
                )
        for what, shape in (("input", self.input_shape), ("output", self.out_shape)):
            if math.prod(shape) >= 2**40:
                raise ProblemError(
                    f"the {what} would have {math.prod(shape)} elements (shape {shape}), "
                    "more than any device holds"
                )
        return self

    # ---- text ----

    def __repr__(self) -> str:
        return f"ConvProblem.parse({str(self)!r})"

    def __str__(self) -> str:
        top, bottom, left, right = self.padding
        if (top, left) == (bottom, right):
            pad = _text((top, left))
        else:
            pad = f"{top},{bottom},{left},{right}"
        words = [
            f"{self.op} {self.dtype} n{self.n} c{self.c} h{self.h} w{self.w} k{self.k} "
            f"r{self.r} s{self.s} stride{_text(self.stride)} pad{pad}"
        ]
        if self.dilation != (1, 1):
            words.append(f"dil{_text(self.dilation)}")
        if self.output_padding != (0, 0):
            words.append(f"outpad{_text(self.output_padding)}")
        if self.groups != 1:
            words.append(f"groups{self.groups}")
        if self.layout == "NHWC":
            words.append("nhwc")
        if self.bias:
            words.append("bias")
        if self.residual:
            words.append("residual")
        if self.activation != IDENTITY:
            words.append(f"act:{self.activation}")
        if self.precision != "default":
            words.append(self.precision)
        if self.weight_last:
            words.append("wlast")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> ConvProblem:
        """The problem that a text describes; the order of the words after the op is free.

        Raises ProblemError where the text describes none, DtypeError where it is no text.
        """
        if not isinstance(text, str):
            raise DtypeError(f"a problem's text must be a string, got {described(text)}")
        words = text.split()
        if not words or words[0] not in ("conv2d", "conv_transpose2d"):
            raise ProblemError(
                f"a problem begins with 'conv2d' or 'conv_transpose2d', got {text!r}; "
                f"an example: {_EXAMPLE}"
            )
        op: Op = "conv2d" if words[0] == "conv2d" else "conv_transpose2d"
        dtype, layout, activation, precision = "f32", "NCHW", IDENTITY, "default"
        bias = residual = weight_last = False
        numbers: dict[str, tuple[int, ...]] = {}
        for word in words[1:]:
            match = re.fullmatch(rf"({'|'.join(_NUMBERED)})(\d+(?:,\d+)*)", word)
            if match:
                if match[1] in numbers:
                    raise ProblemError(f"cannot read {word!r}: {match[1]} is repeated in {text!r}")
                numbers[match[1]] = tuple(int(v) for v in match[2].split(","))
            elif word in DTYPES:
                dtype = word
            elif word in ("nchw", "nhwc"):
                layout = word.upper()
            elif word == "bias":
                bias = True
            elif word == "residual":
                residual = True
            elif word in PRECISIONS[1:]:
                precision = word
            elif word == "wlast":
                weight_last = True
            elif word.startswith("act:"):
                activation = parse_activation(word.removeprefix("act:"))
            else:
                raise ProblemError(f"cannot read {word!r} in {text!r}; {_advice(word)}")
        sizes = {}
        for name in "nchwkrs":
            if len(numbers.get(name, ())) != 1:
                raise ProblemError(
                    f"a problem needs one number after {name!r}, got {text!r}; "
                    f"an example: {_EXAMPLE}"
                )
            sizes[name] = numbers[name][0]
        if len(numbers.get("groups", (1,))) != 1:
            raise ProblemError(f"groups takes one number, got {text!r}")
        groups = numbers.get("groups", (1,))[0]
        n, c, h, w, k, r, s = (sizes[name] for name in "nchwkrs")
        if groups < 1 or c % groups or k % groups:
            raise ProblemError(f"groups must divide c{c} and k{k}, got groups{groups} in {text!r}")
        pad = numbers.get("pad", (0,))
        shape = (n, c, h, w) if layout == "NCHW" else (n, h, w, c)
        problem = cls.from_call(
            op,
            shape,
            (k, c // groups, r, s) if op == "conv2d" else (c, k // groups, r, s),
            dtype=dtype,
            bias_shape=(k,) if bias else None,
            residual=residual,
            stride=numbers.get("stride", (1,)),
            padding=((pad[0], pad[1]), (pad[2], pad[3])) if len(pad) == 4 else pad,
            dilation=numbers.get("dil", (1,)),
            output_padding=numbers.get("outpad", (0,)),
            groups=groups,
            layout=layout,
            activation=activation,
            precision=precision,
        )
        return problem.with_(weight_last=True) if weight_last else problem

    def with_(self, **changes: Any) -> ConvProblem:
        """A copy with some fields changed, of which the layout alone is validated again."""
        return replace(self, **changes)


_NUMBERED = ("n", "c", "h", "w", "k", "r", "s", "stride", "pad", "dil", "outpad", "groups")
_WORDS = ("nchw", "nhwc", "bias", "residual", "tf32", "wlast")
_EXAMPLE = "conv2d f32 n1 c3 h32 w32 k8 r3 s3 stride1 pad1"
_OTHER_NAMES = {
    "dilation": "dil", "padding": "pad", "output_padding": "outpad", "outpadding": "outpad",
    "batch": "n",
}  # fmt: skip


def parse_activation(text: str) -> Activation:
    """From ``clip,0,6``: the form in a problem's text and in the shell."""
    name, *args = text.split(",")
    names, defaults = _ACTIVATIONS.get(name, ((), ()))
    if name in _ACTIVATIONS and len(args) != len(names) and (args or defaults is None):
        form = ",".join([name, *names])
        example = {"clip": ", as in clip,0,6", "leaky_relu": ", as in leaky_relu,0.01"}
        raise ProblemError(
            f"activation {name} is written {form}{example.get(name, '')}, got {text!r}"
        )
    return Activation.of((name, *args))


def _advice(word: str) -> str:
    """What to write instead of a word that a problem's text does not have."""
    near = _near(word)
    return (f"write {near}; " if near else "") + (
        f"the words are {', '.join(DTYPES)}, {', '.join(_NUMBERED)} (each with its number, or "
        f"numbers as in stride2,1), {', '.join(_WORDS)}, act:NAME; an example: {_EXAMPLE}"
    )


def _near(word: str) -> str:
    """The likeliest meaning of such a word, or an empty string."""
    lower = word.lower()
    if re.fullmatch(r"b?(f|fp|float|half|double)\d*", lower):
        return " or ".join(DTYPES)
    name, _, parameters = re.sub(r"^act\w*[:=]", "", lower).partition(",")
    if name in _ACTIVATIONS:
        return "act:" + ",".join(filter(None, [name, parameters]))
    numbered = re.fullmatch(r"([a-z_]+)[=:]?(\d+(?:[,x]\d+)*)", lower)
    if numbered:
        name, numbers = numbered[1], numbered[2].replace("x", ",")
        close = difflib.get_close_matches(name, _NUMBERED, 1)
        meant = _OTHER_NAMES.get(name) or (close[0] if close else "")
        return f"{meant}{numbers}" if meant else ""
    return "".join(difflib.get_close_matches(lower, _WORDS, 1))


def as_layout(layout: Any) -> str:
    """'NCHW' or 'NHWC', of that or, as a problem's text has it, its lower case."""
    for known in LAYOUTS:
        if isinstance(layout, str) and layout in (known, known.lower()):
            return known
    raise ProblemError(f"layout must be 'NCHW' or 'NHWC', got {layout!r}")


def _text(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]},{pair[1]}"


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if not _is_sequence(value):
        raise DtypeError(f"{name} must be a sequence of integers, got {value!r}")
    return tuple(_integer(name, v, least=0) for v in value)


def _is_sequence(value: Any) -> bool:
    """A tuple, a list, an array, ...: not a string, a set or a 0-d array."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, (str, bytes, Mapping))
        and getattr(value, "ndim", 1) > 0
    )


def _integer(
    name: str, value: Any, *, least: int, form: str = "an integer", place: str = ""
) -> int:
    """``form`` is what else the value may have been, and ``place`` what it is of, for messages."""
    try:
        if type(value).__name__ in ("bool", "bool_"):  # numpy's too; PyTorch refuses both
            raise TypeError
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise DtypeError(f"{name} must be {form}, got {value!r} ({kind}){place}") from None
    if number < least:
        bound = "positive" if least == 1 else "zero or positive"
        raise ProblemError(f"{name} must be {bound}, got {value!r}{place}")
    if number > _BIGGEST:
        raise ProblemError(f"{name} must be below 2^31, got {value!r}{place}")
    return number


def _pair(name: str, value: Any, *, least: int) -> Pair:
    """An integer, or a sequence of one or two of them, as (vertical, horizontal)."""
    form = "an integer or a pair of them"
    if name == "padding":
        form = "an integer, a pair of them or ((top, bottom), (left, right))"
    if not _is_sequence(value):
        number = _integer(name, value, least=least, form=form)
        return (number, number)
    if len(value) not in (1, 2):
        raise ProblemError(f"{name} must be {form}, got {value!r}")
    first, last = (
        _integer(name, value[i], least=least, form=form, place=f" as the {which} of {value!r}")
        for i, which in ((0, "first"), (-1, "second"))
    )
    return (first, last)


def _padding(value: Any, op: Op, stride: Pair, dilation: Pair, taps: Pair) -> Pads:
    if isinstance(value, str):
        if value not in ("valid", "same") or op == "conv_transpose2d":
            allowed = "" if op == "conv_transpose2d" else "'valid', 'same', "
            raise ProblemError(
                f"padding must be {allowed}an integer, a pair or ((top, bottom), (left, right)), "
                f"got {value!r}"
            )
        if value == "valid":
            return (0, 0, 0, 0)
        if stride != (1, 1):
            raise ProblemError(
                f"padding='same' is defined for stride 1 only, got stride {stride}; "
                "give the pixels of padding instead"
            )
        # PyTorch's rule: an odd total puts the extra pixel behind.
        total = [d * (t - 1) for d, t in zip(dilation, taps, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
    if _is_sequence(value) and len(value) == 2 and all(hasattr(v, "__len__") for v in value):
        if any(not _is_sequence(v) or len(v) != 2 for v in value):
            raise ProblemError(
                f"explicit padding must be ((top, bottom), (left, right)), got {value!r}"
            )
        numbers = [v for side in value for v in side]
        top, bottom, left, right = (
            _integer("padding", v, least=0, place=f" as the {which} of {value!r}")
            for v, which in zip(numbers, ("top", "bottom", "left", "right"), strict=True)
        )
        return (top, bottom, left, right)
    if _is_sequence(value) and len(value) == 4:  # whose order differs between libraries
        raise ProblemError(
            f"padding of four numbers is written ((top, bottom), (left, right)), got {value!r}"
        )
    vertical, horizontal = _pair("padding", value, least=0)
    return (vertical, vertical, horizontal, horizontal)
