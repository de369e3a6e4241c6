"""The WGSL files and the specialiser. Most of it needs no GPU; what does says so."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import struct

import numpy as np
import pytest

from wgpuconv import Device
from wgpuconv.plan import Pass, Shader
from wgpuconv.problem import ACTIVATIONS
from wgpuconv.shader import (
    ORDERS,
    Binding,
    interface,
    load,
    pack_params,
    shader_names,
    source_hash,
    specialise,
)

ENDING = [
    "direct",
    "direct_transpose",
    "depthwise",
    "depthwise_nhwc",
    "gemm",
    "gemm_nhwc",
    "implicit_gemm",
    "implicit_gemm_nhwc",
    "col2im",
    "winograd_output_nhwc",
]
"""Files that end with an activation."""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch):
    """Lets a test bring its own WGSL text, as the file 'made_up'."""

    def use(text: str) -> None:
        monkeypatch.setattr(
            "wgpuconv.shader.load", lambda name: text if name == "made_up" else load(name)
        )

    return use


def unrolled(source, text: str, **constants: int | bool | str) -> list[str]:
    source(text)
    lines = specialise(Shader.of("made_up", **constants)).splitlines()
    return [line.strip() for line in lines if line.strip()]


# ---- the files ----


def test_there_are_shaders() -> None:
    assert {"activations", "direct", "gemm", "implicit_gemm"} <= set(shader_names())


@pytest.mark.parametrize("name", shader_names())
def test_each_file_is_valid_as_it_stands(device: Device, name: str) -> None:
    device.backend.gpu_device.create_shader_module(code=load(name))


@pytest.mark.parametrize("name", shader_names())
def test_each_file_says_what_it_is(name: str) -> None:
    assert load(name).startswith("// ")
    assert load(name).endswith("}\n")


@pytest.mark.parametrize("name", [n for n in shader_names() if n != "activations"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_each_file_specialises(device: Device, name: str, dtype: str) -> None:
    if dtype == "f16" and not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    text = specialise(Shader.of(name, dtype))
    assert ("enable f16;" in text) == (dtype == "f16")
    assert "@unroll" not in text
    device.backend.gpu_device.create_shader_module(code=text)
    found = interface(text)
    assert found.workgroup_size >= 1
    assert [b.index for b in found.bindings] == list(range(1, len(found.bindings) + 1))
    assert any(b.writable for b in found.bindings)


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a not in ("identity", "relu6")])
def test_each_activation_fits_each_ending(device: Device, name: str, activation: str) -> None:
    shader = dataclasses.replace(Shader.of(name), activation=activation)
    text = specialise(shader)
    assert "fn activate(v: f32) -> f32 { return v; }" not in text
    if name == "col2im":  # the bodies are the same in all; one file proves that they compile
        device.backend.gpu_device.create_shader_module(code=text)


@pytest.mark.parametrize("name", [n for n in shader_names() if "fn add_residual" in load(n)])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_residual_is_bound_beside_the_output(device: Device, name: str, dtype: str) -> None:
    if dtype == "f16" and not device.facts.f16:
        pytest.skip(f"{device.name} has no shader-f16")
    shader = Shader.of(name, dtype, **({"Out": dtype} if "alias Out" in load(name) else {}))
    plain, text = (
        specialise(dataclasses.replace(shader, residual=residual)) for residual in (False, True)
    )
    device.backend.gpu_device.create_shader_module(code=text)
    without, found = interface(plain).bindings, interface(text).bindings
    last = len(without) + 1
    assert set(found) == {*without, Binding(last, "residual", writable=False)}
    assert last <= 8  # the storage buffers that WebGPU promises a shader
    assert "residual:" not in plain


def test_activations_compute_what_they_say(device: Device) -> None:
    """Through a 1x1 convolution with weight one, over the whole range of f32."""
    from wgpuconv import conv2d

    x = np.concatenate(
        [np.linspace(-12, 12, 961), [-1e4, -88.8, 88.8, 1e4, 3e38, -3e38, -0.0, 1e-30]]
    )
    x = x.astype(np.float32)[None, None, :, None]
    v = x.astype(np.float64)
    one = np.ones((1, 1, 1, 1), np.float32)
    erf = np.vectorize(math.erf)
    with np.errstate(over="ignore"):
        expected = {
            "relu": np.maximum(v, 0),
            "relu6": np.clip(v, 0, 6),
            ("leaky_relu", 0.2): np.where(v < 0, v * np.float32(0.2), v),
            ("clip", -1.5, 2.5): np.clip(v, -1.5, 2.5),
            "sigmoid": 1 / (1 + np.exp(-v)),
            "tanh": np.tanh(v),
            "silu": v / (1 + np.exp(-v)),
            "gelu": v * 0.5 * (1 + erf(v / np.sqrt(2))),
        }
    eps = np.finfo(np.float32).eps
    for activation, want in expected.items():
        got = conv2d(x, one, activation=activation, device=device, algorithm="direct")
        # WGSL lets exp be off by 3 + 2|v| units in the last place; gelu adds 1.5e-7 times |v|.
        bound = 4 * eps * (np.abs(want) + 1e-6)
        if activation in ("sigmoid", "silu", "gelu", "tanh"):
            bound += (5 + 2 * np.minimum(np.abs(v), 100)) * eps * np.maximum(np.abs(want), 1e-3)
        if activation == "gelu":
            bound += 1.5e-7 * np.minimum(np.abs(v), 10)
        if activation == "tanh":
            bound += 2 * eps  # tanh may be made of exp
        assert (np.abs(got - want) <= bound).all(), (
            activation,
            x[np.abs(got - want) > bound][:5],
            got[np.abs(got - want) > bound][:5],
        )
        nan = conv2d(
            np.full((1, 1, 1, 1), np.nan, np.float32), one, activation=activation, device=device
        )
        assert np.isnan(nan).all(), activation


# ---- constants and aliases ----


def test_constants_are_replaced() -> None:
    text = specialise(Shader.of("gemm", TILE_M=32, THREAD_M=4, LAST_BARRIER=False, In="f16"))
    assert "const TILE_M: u32 = 32u;" in text
    assert "const LAST_BARRIER: bool = false;" in text
    assert "alias In = f16;" in text
    assert "alias Scalar = f32;" in text
    assert text.startswith("enable f16;\n")


@pytest.mark.parametrize(
    ("constants", "says"),
    [
        ({"TILE_Q": 1}, "declares no 'const TILE_Q"),
        ({"Element": "f16"}, "declares no 'alias Element"),
        ({"OTHER_ORDER": "rows"}, "no loop marked '@unroll OTHER_ORDER"),
        ({"FMA_ORDER": "sideways"}, "declares no 'alias FMA_ORDER"),
        ({"FILTER_QUADS": 4}, "declares no 'const FILTER_QUADS"),  # computed, not chosen
    ],
)
def test_unknown_names(constants: dict, says: str) -> None:
    with pytest.raises(KeyError, match=says):
        specialise(Shader.of("gemm", **constants))


def test_other_mismatches() -> None:
    with pytest.raises(ValueError, match="TILE_M is unsigned, got -1"):
        specialise(Shader.of("gemm", TILE_M=-1))
    with pytest.raises(KeyError, match="no function act_mish"):
        specialise(dataclasses.replace(Shader.of("gemm"), activation="mish"))
    with pytest.raises(KeyError, match="no one-line 'fn activate"):
        specialise(dataclasses.replace(Shader.of("im2col"), activation="relu"))
    with pytest.raises(KeyError, match="no one-line 'fn add_residual"):
        specialise(dataclasses.replace(Shader.of("copy_planes"), residual=True))


# ---- loops ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("rows", "columns"), [*itertools.product([1, 2, 3, 4, 8], [1, 2, 4, 5, 8])]
)
def test_each_order_visits_every_pair_once(order: str, rows: int, columns: int) -> None:
    visited = list(ORDERS[order](rows, columns))
    assert sorted(visited) == list(itertools.product(range(rows), range(columns)))


def test_orders_are_what_they_are_for() -> None:
    assert list(ORDERS["rows"](2, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(ORDERS["columns"](2, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for order in ("snake", "zigzag"):  # neighbours share an operand
        steps = list(ORDERS[order](4, 4))
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(steps)), order
    halves = list(ORDERS["halves"](4, 8))
    assert {j // 4 for _, j in halves[:16]} == {0}


def test_plain_unroll(source) -> None:
    text = """const N: u32 = 2u;
const TWICE = N * 2u;
for (var i = 0u; i < TWICE; i++) { // @unroll
  acc[i * 2u + 1u] = i;
}
"""
    lines = unrolled(source, text, N=1)
    assert lines[2:] == ["acc[1u] = 0u;", "acc[3u] = 1u;"]
    lines = unrolled(source, text)
    assert lines[2:] == [f"acc[{2 * i + 1}u] = {i}u;" for i in range(4)]


def test_unmarked_loops_stay(source) -> None:
    text = "for (var i = 0u; i < n; i++) {\n  x += f(i);\n}\n"
    assert unrolled(source, text) == text.replace("  ", "").splitlines()


def test_names_are_whole_words(source) -> None:
    lines = unrolled(
        source, "for (var i = 0u; i < 1u; i++) { // @unroll\n  dim = i + di + i_;\n}\n"
    )
    assert lines == ["dim = 0u + di + i_;"]


def test_bodies_with_declarations_get_a_scope(source) -> None:
    lines = unrolled(source, "for (var i = 0u; i < 2u; i++) { // @unroll\n  let a = i;\n}\n")
    assert lines == ["{", "let a = 0u;", "}", "{", "let a = 1u;", "}"]


def test_nested_loops(source) -> None:
    text = """for (var i = 0u; i < 2u; i++) { // @unroll
  for (var k = 0u; k < n; k++) {
    for (var j = 0u; j < 2u; j++) { // @unroll
      acc[i * 2u + j] += k;
    }
  }
}
"""
    kept = "for (var k = 0u; k < n; k++) {"
    assert unrolled(source, text) == [
        *(kept, "acc[0u] += k;", "acc[1u] += k;", "}"),
        *(kept, "acc[2u] += k;", "acc[3u] += k;", "}"),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_ordered_loops(source, order: str) -> None:
    text = """for (var i = 0u; i < 3u; i++) { // @unroll ORDER=rows
  for (var j = 0u; j < 4u; j++) {
    acc[i * 4u + j] = fma(a[i], b[j], acc[i * 4u + j]);
  }
}
"""
    lines = unrolled(source, text, ORDER=order)
    assert lines == [
        f"acc[{4 * i + j}u] = fma(a[{i}u], b[{j}u], acc[{4 * i + j}u]);"
        for i, j in ORDERS[order](3, 4)
    ]
    if order == "rows":
        assert unrolled(source, text) == lines  # what the file itself names


def test_conditional_unroll(source) -> None:
    text = """const FLAG: bool = true;
for (var k = 0u; k < 2u; k++) { // @unroll if FLAG
  for (var i = 0u; i < 2u; i++) { // @unroll
    acc[i] += k;
  }
}
"""
    assert unrolled(source, text)[1:] == [f"acc[{i}u] += {k}u;" for k in (0, 1) for i in (0, 1)]
    kept = unrolled(source, text, FLAG=False)[1:]
    assert kept[0].startswith("for (var k = 0u;")
    assert kept[1:] == ["acc[0u] += k;", "acc[1u] += k;", "}"]


def test_an_unrolled_loop_must_have_a_constant_end(source) -> None:
    with pytest.raises(ValueError, match="ends at 'n', which is no constant"):
        unrolled(source, "for (var i = 0u; i < n; i++) { // @unroll\n  f(i);\n}\n")
    with pytest.raises(ValueError, match="unbalanced braces"):
        unrolled(source, "for (var i = 0u; i < 1u; i++) { // @unroll\n  f(i);\n")


def test_gemm_keeps_its_accumulators_in_literal_places() -> None:
    text = specialise(Shader.of("gemm", TILE_M=32, THREAD_M=4, TILE_P=32))
    indices = set(re.findall(r"acc\[([^\]]+)\]", text))
    assert indices == {f"{i}u" for i in range(16)}


# ---- reflection ----


def test_interface(source) -> None:
    text = """alias Scalar = f16;
const TILE: u32 = 8u;
const QUADS = TILE / 4u;
struct Params {
  n: u32,  // a comment
  offset: i32,
  act_a: f32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Scalar>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;
var<workgroup> a: array<vec4<f32>, TILE * QUADS>;
var<workgroup> b: array<Scalar, 272>;  // f16
var<workgroup> c: array<vec2<Scalar>, TILE>;
@compute @workgroup_size(TILE, QUADS) fn main() {}
"""
    found = interface(text.replace("TILE, QUADS", "TILE * QUADS"))
    assert found.params == (("n", "u32"), ("offset", "i32"), ("act_a", "f32"))
    assert found.bindings == (Binding(1, "x", False), Binding(2, "y", True))
    assert found.workgroup_size == 16
    assert found.workgroup_bytes == 16 * 16 + 272 * 2 + 8 * 4


@pytest.mark.parametrize(("tile_m", "tile_p", "tile_k"), [(64, 64, 8), (32, 64, 8), (64, 32, 16)])
def test_workgroup_bytes_of_the_tiles(tile_m: int, tile_p: int, tile_k: int) -> None:
    text = specialise(Shader.of("gemm", TILE_M=tile_m, TILE_P=tile_p, TILE_K=tile_k))
    assert interface(text).workgroup_bytes == 4 * tile_k * (tile_m + tile_p)
    assert interface(text).workgroup_size == tile_m // 8 * (tile_p // 4)


def test_pack_params() -> None:
    fields = (("n", "u32"), ("offset", "i32"), ("slope", "f32"))

    def step(**params: float) -> Pass:
        return Pass(Shader.of("gemm"), tuple(params.items()), (), (1, 1, 1))

    packed = pack_params(step(offset=-3, slope=0.5, n=7), fields)  # by name, in any order
    assert len(packed) == 16
    assert struct.unpack("<Iif", packed[:12]) == (7, -3, 0.5)
    assert pack_params(step(), ()) == b""
    with pytest.raises(KeyError, match=r"gemm.wgsl: Params and the plan disagree on \['slope'\]"):
        pack_params(step(n=1, offset=1), fields)
    with pytest.raises(KeyError, match=r"disagree on \['more'\]"):
        pack_params(step(n=1, offset=1, slope=1, more=1), fields)
    with pytest.raises(struct.error):
        pack_params(step(n=-1, offset=1, slope=1), fields)


# ---- the hash that decides whether a stored timing still holds ----


def test_source_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = source_hash.__wrapped__(("gemm", "im2col"))
    assert plain == source_hash(("im2col", "gemm", "gemm"))
    assert plain != source_hash(("gemm",))
    for touched, changes in (("gemm", True), ("activations", True), ("direct", False)):
        with monkeypatch.context() as patch:
            edited = {touched: load(touched) + "\n// edited"}
            patch.setattr("wgpuconv.shader.load", lambda name, e=edited: e.get(name) or load(name))
            assert (source_hash.__wrapped__(("gemm", "im2col")) != plain) is changes
