"""Loads, specialises and reflects the WGSL files of ``shaders/``.

Every file is a complete WGSL module that any tool reads as it stands. Specialising changes
only what the file itself declares for it:

- ``const TILE_M: u32 = 64u;`` gets another value, and so does a matrix,
  ``const G = array<f32, 4>(1.0, 0.0, 0.5, 0.5);``, of whatever length;
- ``alias Scalar = f32;`` gets another type (``f16`` brings ``enable f16;`` along);
- ``fn activate(...)`` gets the body of that name from ``activations.wgsl``;
- ``fn add_residual(...)``, which returns what it got, adds what the buffer ``residual`` holds at
  the same place as ``y``; only then is there a binding for it;
- ``for (var i = 0u; i < TILE_M; i++) { // @unroll`` is written out, so that arrays have
  literal indices and live in registers. ``// @unroll FMA_ORDER=rows`` on a loop that holds
  just one other loop writes out both, in an order that can be chosen (see ORDERS): on some
  GPUs the order of multiply-adds decides about conflicts between register banks.
  ``// @unroll if UNROLL_K`` leaves the loop as it is where that constant is false.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .plan import Pass, Shader, Value

_HERE = Path(__file__).parent
ACTIVATIONS_FILE = "activations"


@cache
def shader_dir() -> Path:
    """``shaders/`` inside an installed package, or beside it in a checkout."""
    inside = _HERE / "shaders"
    return inside if inside.is_dir() else _HERE.parent / "shaders"


def shader_names() -> list[str]:
    """The names of all shader files, without ``.wgsl``."""
    return sorted(path.stem for path in shader_dir().glob("*.wgsl"))


@cache
def load(name: str) -> str:
    """The text of a shader file as it stands."""
    return (shader_dir() / f"{name}.wgsl").read_text(encoding="utf-8")


@cache
def source_hash(files: tuple[str, ...]) -> str:
    """A digest of what determines the kernels built from these files."""
    digest = hashlib.sha256()
    for part in (*sorted(set(files)), ACTIVATIONS_FILE):
        digest.update(load(part).encode())
    digest.update(Path(__file__).read_bytes())  # the specialiser shapes the kernel as well
    return digest.hexdigest()[:16]


# ---- orders of a nest of two loops ----


def _rows(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(rows) for j in range(columns))


def _columns(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for j in range(columns) for i in range(rows))


def _snake(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((i, j if i % 2 == 0 else columns - 1 - j) for i in range(rows) for j in range(columns))


def _zigzag(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Down and up through pairs of columns: of two neighbours, one operand stays the same."""
    for pair in range(0, columns, 2):
        width = min(2, columns - pair)
        down = (pair // 2) % 2 == 0
        for i in range(rows) if down else reversed(range(rows)):
            for j in range(width) if i % 2 == 0 else reversed(range(width)):
                yield (i, pair + j)


def _halves(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """A snake inside blocks of four columns: one vec4 of the second operand at a time."""
    for block in range(0, columns, 4):
        width = min(4, columns - block)
        down = (block // 4) % 2 == 0
        for i in range(rows) if down else reversed(range(rows)):
            for j in range(width) if i % 2 == 0 else reversed(range(width)):
                yield (i, block + j)


ORDERS: dict[str, Callable[[int, int], Iterator[tuple[int, int]]]] = {
    "rows": _rows,
    "columns": _columns,
    "snake": _snake,
    "zigzag": _zigzag,
    "halves": _halves,
}


# ---- specialising ----


def specialise(shader: Shader) -> str:
    """The WGSL text of a shader."""
    text = load(shader.file)
    orders: dict[str, str] = {}
    if shader.dtype == "f16":
        text = _replace_alias(text, "Scalar", "f16", shader.file)
    for name, value in shader.constants:
        if isinstance(value, str) and value in ORDERS:
            if f"// @unroll {name}=" not in text:
                raise KeyError(f"{shader.file}.wgsl has no loop marked '@unroll {name}=...'")
            orders[name] = value
        elif isinstance(value, tuple):
            text = _replace_matrix(text, name, value, shader.file)
        elif isinstance(value, str):
            text = _replace_alias(text, name, value, shader.file)
        else:
            text = _replace_constant(text, name, value, shader.file)
    if re.search(r"^alias \w+ = f16;", text, flags=re.MULTILINE):
        text = "enable f16;\n" + text
    if shader.activation != "identity":
        text = _replace_activation(text, shader.activation)
    if shader.residual:
        text = _bind_residual(text, shader.file)
    return _unroll(text, _constants(text), orders)


def _replace_alias(text: str, name: str, value: str, file: str) -> str:
    text, count = re.subn(rf"^alias {name} = \w+;", f"alias {name} = {value};", text, flags=re.M)
    if count != 1:
        raise KeyError(f"{file}.wgsl declares no 'alias {name} = ...;'")
    return text


def _replace_constant(text: str, name: str, value: Value, file: str) -> str:
    def declaration(match: re.Match[str]) -> str:
        return f"const {name}: {match[1]} = {_literal(value, match[1], name)};"

    text, count = re.subn(rf"^const {name}: (u32|bool) = [^;]+;", declaration, text, flags=re.M)
    if count != 1:
        raise KeyError(f"{file}.wgsl declares no 'const {name}: type = ...;'")
    return text


def _replace_matrix(text: str, name: str, values: tuple[float, ...], file: str) -> str:
    numbers = ", ".join(repr(float(value)) for value in values)
    text, count = re.subn(
        rf"^const {name} = array<f32, \d+>\([^)]*\);",
        f"const {name} = array<f32, {len(values)}>({numbers});",
        text,
        flags=re.M,
    )
    if count != 1:
        raise KeyError(f"{file}.wgsl declares no 'const {name} = array<f32, ...>(...);'")
    return text


def _literal(value: Value, type_: str, name: str) -> str:
    if type_ == "bool":
        return "true" if value else "false"
    if int(value) < 0:
        raise ValueError(f"{name} is unsigned, got {value}")
    return f"{int(value)}u"


def _replace_activation(text: str, name: str) -> str:
    library = load(ACTIVATIONS_FILE)
    match = re.search(rf"^fn act_{name}\(v: f32\) -> f32 (\{{.*?^\}})", library, flags=re.M | re.S)
    if match is None:
        raise KeyError(f"activations.wgsl has no function act_{name}")
    body = match[1]
    text, count = re.subn(
        r"^fn activate\(v: f32\) -> f32 \{.*?\}$",
        lambda _: f"fn activate(v: f32) -> f32 {body}",
        text,
        flags=re.M,
    )
    if count != 1:
        raise KeyError("the shader has no one-line 'fn activate(v: f32) -> f32 { ... }'")
    return text


def _bind_residual(text: str, file: str) -> str:
    output = re.search(r"var<storage, read_write> y: (array<.+>);$", text, flags=re.M)
    plain = re.search(
        r"^fn add_residual\(v: (\S+), at: u32\) -> \1 \{ return v; \}$", text, flags=re.M
    )
    if output is None or plain is None:
        raise KeyError(f"{file}.wgsl has no one-line 'fn add_residual(...)' beside an output 'y'")
    index, type_ = len(re.findall(r"@binding\(", text)), plain[1]
    return text.replace(
        plain[0],
        f"@group(0) @binding({index}) var<storage, read> residual: {output[1]};\n"
        f"fn add_residual(v: {type_}, at: u32) -> {type_} {{ return v + {type_}(residual[at]); }}",
    )


def _constants(text: str) -> dict[str, int]:
    """The module's integer constants, those computed from others included."""
    values: dict[str, int] = {}
    for name, expression in re.findall(r"^const (\w+)(?:: [ui]32)? = ([^;]+);", text, flags=re.M):
        value = _evaluate(expression, values)
        if value is not None:
            values[name] = value
    return values


def _evaluate(expression: str, names: Mapping[str, int]) -> int | None:
    """An integer expression of literals and known constants, or None."""
    words = re.sub(r"\b(\d+)[ui]\b", r"\1", expression)
    words = re.sub(r"[A-Za-z_]\w*", lambda m: str(names.get(m[0], m[0])), words)
    if not re.fullmatch(r"[\d\s+\-*/%()]+", words):
        return None
    return int(eval(words.replace("/", "//"), {"__builtins__": {}}))


_LOOP = re.compile(
    r"for \(var (?P<var>\w+) = 0u; (?P=var) < (?P<end>[^;]+); (?P=var)\+\+\) \{"
    r"[ \t]*(?P<mark>// @unroll(?: if (?P<flag>\w+)| (?P<order>\w+)=(?P<default>\w+))?)?[^\n]*\n"
)


def _unroll(text: str, constants: Mapping[str, int], orders: Mapping[str, str]) -> str:
    """Writes out the marked loops, innermost text first found from the top."""
    at = 0
    while match := _LOOP.search(text, at):
        kept = match["flag"] and f"const {match['flag']}: bool = false;" in text
        if not match["mark"] or kept:
            at = match.end()
            continue
        close = _closing(text, match.end())
        body = text[match.end() : close]
        count = _trips(match, constants)
        if match["order"]:
            inner = _LOOP.search(body)
            assert inner is not None, "an ordered loop holds just one other loop"
            inner_body = body[inner.end() : _closing(body, inner.end())]
            order = ORDERS[orders.get(match["order"], match["default"])]
            copies = [
                _put(_put(inner_body, match["var"], i), inner["var"], j)
                for i, j in order(count, _trips(inner, constants))
            ]
        else:
            copies = [_put(body, match["var"], i) for i in range(count)]
        scoped = re.search(r"^\s*(let|var) ", body, flags=re.M) is not None
        written = "".join(f"{{\n{copy}}}\n" if scoped else copy for copy in copies)
        text = text[: match.start()] + written.lstrip() + text[close + 1 :]
        at = match.start()
    folded = cache(lambda index: _fold(index, constants))  # the same few, thousands of times
    return re.sub(r"\[([^\[\]]+)\]", lambda m: folded(m[1]), text)


def _trips(loop: re.Match[str], constants: Mapping[str, int]) -> int:
    count = _evaluate(loop["end"], constants)
    if count is None:
        raise ValueError(f"an unrolled loop ends at {loop['end']!r}, which is no constant")
    return count


def _put(text: str, name: str, value: int) -> str:
    return re.sub(rf"\b{name}\b", f"{value}u", text)


def _fold(index: str, constants: Mapping[str, int]) -> str:
    value = _evaluate(index, constants)
    return f"[{index}]" if value is None else f"[{value}u]"


def _closing(text: str, start: int) -> int:
    """The index of the brace that closes the block whose inside begins at ``start``."""
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError("unbalanced braces in a shader")


# ---- reflection ----

_TYPE_SIZES = {"f32": 4, "u32": 4, "i32": 4, "f16": 2}


@dataclass(frozen=True)
class Binding:
    index: int
    name: str
    writable: bool


@dataclass(frozen=True)
class Interface:
    """What a specialised shader wants from whoever runs it."""

    params: tuple[tuple[str, str], ...]
    """(name, type) of the fields of ``Params``, which is bound at 0."""
    bindings: tuple[Binding, ...]
    workgroup_size: int
    workgroup_bytes: int


def interface(text: str) -> Interface:
    """Reads the interface off a specialised shader's text."""
    constants = _constants(text)
    bindings = tuple(
        Binding(int(index), name, mode == "read_write")
        for index, mode, name in re.findall(
            r"@group\(0\) @binding\((\d+)\) var<storage, (read|read_write)> (\w+)", text
        )
    )
    size = re.search(r"@workgroup_size\(([^)]+)\)", text)
    assert size is not None, "a compute shader has a workgroup size"
    invocations = _evaluate(size[1], constants)
    assert invocations is not None, f"workgroup_size({size[1]}) must be constant"
    return Interface(_param_fields(text), bindings, invocations, _workgroup_bytes(text, constants))


def _param_fields(text: str) -> tuple[tuple[str, str], ...]:
    block = re.search(r"^struct Params \{(.*?)\}", text, flags=re.M | re.S)
    return tuple(re.findall(r"(\w+): (u32|i32|f32)", block[1])) if block else ()


def _workgroup_bytes(text: str, constants: Mapping[str, int]) -> int:
    aliases = dict(re.findall(r"^alias (\w+) = (\w+);", text, flags=re.M))
    total = 0
    for element, count in re.findall(r"var<workgroup> \w+: array<(.+), ([^>;]+)>;", text):
        match = re.fullmatch(r"(?:(vec[24])<)?(\w+)>?", element)
        assert match is not None, f"cannot size workgroup array of {element}"
        vector, scalar = match[1], match[2]
        number = _evaluate(count, constants)
        assert number is not None, f"workgroup array length {count} must be constant"
        width = int(vector[3]) if vector else 1
        total += _TYPE_SIZES[str(aliases.get(scalar, scalar))] * width * number
    return total


def pack_params(step: Pass, fields: tuple[tuple[str, str], ...]) -> bytes:
    """The bytes of the uniform ``Params`` of a pass; every field must be given, and no other."""
    given = dict(step.params)
    if set(given) != {name for name, _ in fields}:
        difference = sorted(set(given) ^ {name for name, _ in fields})
        raise KeyError(f"{step.shader.file}.wgsl: Params and the plan disagree on {difference}")
    codes = {"u32": "I", "i32": "i", "f32": "f"}
    packed = b"".join(struct.pack("<" + codes[type_], given[name]) for name, type_ in fields)
    return packed + bytes(-len(packed) % 16)
