"""Loads, specialises and reflects the CUDA C++ files of ``kernels/``.

Every ``.cu`` is a complete file that nvcc compiles as it stands. Specialising changes only what
the file itself declares for it:

- ``constexpr int TILE_M = 128;`` gets another value (``bool`` likewise);
- ``using Scalar = Half;`` gets another type;
- ``constexpr Activation ACTIVATION = Activation::identity;`` gets another name;
- ``constexpr bool RESIDUAL = false;`` becomes true where the problem has one.

Headers of our own are written into the text, so that what is compiled, cached and hashed is one
string.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...plan import Constant, Pass, Shader

KERNEL_DIR = Path(__file__).parent / "kernels"
_TYPES = {"f32": "float", "f16": "Half", "bf16": "Bfloat"}


def kernel_names() -> list[str]:
    """The names of all kernel files, without ``.cu``."""
    return sorted(path.stem for path in KERNEL_DIR.glob("*.cu"))


@cache
def load(name: str) -> str:
    """The text of a kernel file with our headers in the place of their ``#include``."""
    return _expand(f"{name}.cu", set())


def _expand(file: str, seen: set[str]) -> str:
    seen.add(file)

    def included(match: re.Match[str]) -> str:
        return "" if match[1] in seen else _expand(match[1], seen)

    text = (KERNEL_DIR / file).read_text(encoding="utf-8")
    text = re.sub(r"^#pragma once\n", "", text, flags=re.M)
    return re.sub(r'^#include "([\w.]+)"\n', included, text, flags=re.M)


@cache
def source_hash(files: tuple[str, ...]) -> str:
    """A digest of what determines the kernels built from these files."""
    digest = hashlib.sha256()
    for name in sorted(set(files)):
        digest.update(load(name).encode())
    digest.update(Path(__file__).read_bytes())  # the specialiser shapes the kernel as well
    return digest.hexdigest()[:16]


def specialise(shader: Shader) -> str:
    """The CUDA C++ text of a shader."""
    text = load(shader.file)
    if "\nusing Scalar = " in text or shader.dtype != "f32":
        text = _replace(text, "using Scalar", _TYPES[shader.dtype], shader.file)
    for name, value in shader.constants:
        if isinstance(value, str):
            text = _replace(text, f"using {name}", _TYPES[value], shader.file)
        else:
            text = _replace(text, f"constexpr (?:int|bool) {name}", _literal(value), shader.file)
    if shader.activation != "identity":
        name = f"Activation::{shader.activation}"
        text = _replace(text, "constexpr Activation ACTIVATION", name, shader.file)
    if shader.residual:
        text = _replace(text, "constexpr bool RESIDUAL", "true", shader.file)
    return text


def _replace(text: str, declaration: str, value: str, file: str) -> str:
    pattern = rf"^({declaration}) = [^;]+;"
    text, count = re.subn(pattern, lambda m: f"{m[1]} = {value};", text, flags=re.M)
    if count != 1:
        raise KeyError(f"{file}.cu declares no '{declaration} = ...;'")
    return text


def _literal(value: Constant) -> str:
    assert not isinstance(value, tuple), "kernels here have no constant arrays"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value))


# ---- reflection ----


@dataclass(frozen=True)
class Interface:
    """What a specialised kernel wants from whoever launches it."""

    name: str
    params: tuple[tuple[str, str], ...]
    """(name, type) of the fields of ``Params``, the first argument, passed by value."""
    bindings: tuple[str, ...]
    """The names of the pointers that follow it."""
    maps: tuple[str, ...]
    """Those of which a tensor map follows these: for ``x`` the argument ``x_map``."""
    threads: int
    """In a block."""
    shared_bytes: int
    """Dynamic shared memory."""


def interface(text: str) -> Interface:
    """Reads the interface off a specialised kernel's text."""
    head = re.search(
        r'^extern "C" __global__ .*?(\w+)\((Params params[^)]*)\) \{', text, re.M | re.S
    )
    block = re.search(r"^struct Params \{(.*?)\n\};", text, flags=re.M | re.S)
    assert head is not None, "a kernel file has one kernel, whose first argument is its Params"
    assert block is not None, "a kernel file declares its Params"
    fields = re.findall(r"^\s*(\w+) (\w+);", block[1], flags=re.M)
    pointers = re.findall(r"\*\s*(?:__restrict__ )?(\w+)", head[2])
    return Interface(
        head[1],
        tuple((name, type_) for type_, name in fields),
        tuple(pointers),
        tuple(re.findall(r"TensorMap (\w+)_map", head[2])),
        _constant(text, "THREADS"),
        _constant(text, "SHARED_BYTES", 0),
    )


def _constant(text: str, name: str, default: int | None = None) -> int:
    found = re.search(rf"^constexpr int {name} = (\d+);", text, flags=re.M)
    if found is None:
        assert default is not None, f"a kernel declares 'constexpr int {name} = ...;'"
        return default
    return int(found[1])


_CODES = {"int": "i", "float": "f"}


def pack_params(step: Pass, fields: tuple[tuple[str, str], ...]) -> bytes:
    """The bytes of ``Params`` of a pass; every field must be given, and no other."""
    given = dict(step.params)
    if set(given) != {name for name, _ in fields}:
        difference = sorted(set(given) ^ {name for name, _ in fields})
        raise KeyError(f"{step.shader.file}.cu: Params and the plan disagree on {difference}")
    return b"".join(struct.pack("<" + _CODES[type_], given[name]) for name, type_ in fields)
