"""Tensor maps: what Hopper's copy engine is told of an array in memory.

The kernels named here take some of their arrays through such maps. They say what the kernel's
``Params`` and constants say, so that a plan need not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...plan import Pass, ceil_div

MAP_BYTES = 128
MAP_ALIGNMENT = 64
ROW_BYTES = 128
"""Of a pixel or filter in one step over k: the most that the engine permutes in shared memory."""
CORNERS = range(-128, 128)
"""Where the box of first taps may begin and end, from the ends of the image;"""
MOST_OFFSET = 255
"""how many pixels beyond it a tap may lie;"""
MOST_STRIDE = 8
"""and how far the pixels of neighbouring outputs may lie apart."""
MOST_BOX = 256
"""Elements of any axis that a copy may span."""


@dataclass(frozen=True)
class TensorMap:
    """An array, its innermost axis first, and what a copy brings of it, or to it."""

    dtype: str
    """``tf32``: floats that are rounded to it on the way, to nearest."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all axes but the first one."""
    box: tuple[int, ...]
    """How many elements a copy spans along each axis; gathered, how many channels of how many
    pixels. Along the first one they take 128, 64 or 32 bytes."""
    steps: tuple[int, ...] = ()
    """How far those that it brings are apart, along each axis; 1 where absent."""
    lower: tuple[int, ...] = ()
    """Of (channels, w, h, n), gathered: where the first taps of an image begin, in w and h,"""
    upper: tuple[int, ...] = ()
    """and where they end, from its end."""

    @property
    def row_bytes(self) -> int:
        """Along the first axis."""
        return self.box[0] * _itemsize(self.dtype)


def _itemsize(dtype: str) -> int:
    return 4 if dtype in ("f32", "tf32") else 2


def tensor_maps(step: Pass) -> dict[str, TensorMap]:
    """Those of a pass, by the names of the bindings that they describe."""
    describe = _DESCRIBED.get(step.shader.file)
    if describe is None:
        return {}
    named = (*step.params, *step.shader.constants, ("RESIDUAL", step.shader.residual))
    return describe(step.shader.dtype, {name: v for name, v in named if isinstance(v, int)})


def _of_implicit_gemm(dtype: str, v: dict[str, int]) -> dict[str, TensorMap]:
    itemsize = _itemsize(dtype)
    row = ROW_BYTES // itemsize
    maps = {}
    if v["BULK_OUT"]:
        maps["y"] = TensorMap(
            dtype,
            (v["m"], v["groups"], v["pixels"]),
            (v["y_g"] * itemsize, v["y_w"] * itemsize),
            (v["STORED_M"], 1, 64),
        )
        if v["RESIDUAL"]:
            maps["residual"] = maps["y"]
    if not v["IM2COL"]:
        return maps
    if dtype == "f32" and not v["WHOLE"]:
        dtype = "tf32"
    taps = {"w": v["tap_columns"], "h": v["tap_rows"]}
    lower = tuple(v[f"tap_{a}"] + min((taps[a] - 1) * v[f"tap_step_{a}"], 0) for a in "wh")
    counts = (v["q_w"], v["q_hw"] // v["q_w"])
    ends = (
        low + (n - 1) * v[f"in_stride_{a}"] for low, n, a in zip(lower, counts, "wh", strict=True)
    )
    images = v["pixels"] // v["q_hw"]
    maps["x"] = TensorMap(
        dtype,
        (v["groups"] * v["channels"], v["in_w"], v["in_h"], images),
        (v["x_w"] * itemsize, v["x_h"] * itemsize, v["x_n"] * itemsize),
        (row, v["TILE_P"]),
        (1, v["in_stride_w"], v["in_stride_h"], 1),
        lower,
        tuple(end - (v[f"in_{a}"] - 1) for end, a in zip(ends, "wh", strict=True)),
    )
    if not v["PACKED"]:
        maps["packed"] = _of_weight(dtype, v, taps["h"] * taps["w"], row)
    return maps


def _of_weight(dtype: str, v: dict[str, int], taps: int, channels: int) -> TensorMap:
    """Of which a copy brings some channels under one tap."""
    bytes_of_tap = v["channels"] * _itemsize(dtype)
    return TensorMap(
        dtype,
        (v["channels"], taps, v["groups"] * v["m"]),
        (bytes_of_tap, taps * bytes_of_tap),
        (channels, 1, v["TILE_M"]),
    )


def _of_halo(dtype: str, v: dict[str, int]) -> dict[str, TensorMap]:
    if v["GATHERED"]:
        return {}
    itemsize = _itemsize(dtype)
    m_tiles = ceil_div(v["m_tiles"], v["TEAMS"] if v["SHARED"] else 1)
    images = v["tiles"] // (v["tiles_h"] * v["tiles_w"] * m_tiles * v["groups"])
    steps = (v["in_stride_w"], v["in_stride_h"])
    counts = (v["pitch"], v["sorted_h"])
    spans = ((count - 1) * step + 1 for count, step in zip(counts, steps, strict=True))
    strides = (v[name] * itemsize for name in ("x_g", "x_w", "x_h", "x_n"))
    dtype = "tf32" if dtype == "f32" else dtype
    maps = {
        "x": TensorMap(
            dtype,
            (v["channels"], v["groups"], v["in_w"], v["in_h"], images),
            tuple(strides),
            (v["TILE_K"], 1, *spans, 1),
            (1, 1, *steps, 1),
        )
    }
    if not v["PACKED"]:
        taps = v["STEPS"] * v["STEP_PRODUCTS"] * 32 // (v["TILE_K"] * itemsize)
        maps["packed"] = _of_weight(dtype, v, taps, v["TILE_K"])
    return maps


_DESCRIBED: dict[str, Callable[[str, dict[str, int]], dict[str, TensorMap]]] = {
    "implicit_gemm_wgmma": _of_implicit_gemm,
    "halo_wgmma": _of_halo,
}
