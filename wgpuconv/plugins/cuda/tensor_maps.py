"""Tensor maps: what Hopper's copy engine is told of an array in memory.

A kernel whose constant ``IM2COL`` is set takes ``x``, and a weight that is not packed, through such
maps. They say what its ``Params`` say, so that a plan need not: see ``implicit_gemm_wgmma.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...plan import Pass

MAP_BYTES = 128
MAP_ALIGNMENT = 64
ROW_BYTES = 128
"""Of a pixel or filter in one step over k: what the swizzle of shared memory permutes."""
CORNERS = range(-128, 128)
"""Where the box of first taps may begin and end, from the ends of the image;"""
MOST_OFFSET = 255
"""how many pixels beyond it a tap may lie;"""
MOST_STRIDE = 8
"""and how far the pixels of neighbouring outputs may lie apart."""


@dataclass(frozen=True)
class TensorMap:
    """An array, its innermost axis first, and what a copy brings of it."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all axes but the first one."""
    rows: int
    """How many a copy brings, each of 128 bytes: pixels, or along the last axis."""
    lower: tuple[int, ...] = ()
    """Of (channels, w, h, n), gathered: where the first taps of an image begin, in w and h,"""
    upper: tuple[int, ...] = ()
    """where they end, from its end,"""
    steps: tuple[int, ...] = ()
    """and how far neighbouring ones are apart, in all four."""

    @property
    def row_elements(self) -> int:
        return ROW_BYTES // (4 if self.dtype == "f32" else 2)


def tensor_maps(step: Pass) -> dict[str, TensorMap]:
    """Those of a pass, by the names of the bindings that they describe."""
    dtype, constants = step.shader.dtype, dict(step.shader.constants)
    if not constants.get("IM2COL"):
        return {}
    v = {name: int(value) for name, value in step.params}
    tiles = {name: value for name, value in constants.items() if isinstance(value, int)}
    itemsize = 4 if dtype == "f32" else 2
    taps = {"w": v["tap_columns"], "h": v["tap_rows"]}
    lower = tuple(v[f"tap_{a}"] + min((taps[a] - 1) * v[f"tap_step_{a}"], 0) for a in "wh")
    counts = (v["q_w"], v["q_hw"] // v["q_w"])
    ends = (
        low + (n - 1) * v[f"in_stride_{a}"] for low, n, a in zip(lower, counts, "wh", strict=True)
    )
    images = v["pixels"] // v["q_hw"]
    maps = {
        "x": TensorMap(
            dtype,
            (v["groups"] * v["channels"], v["in_w"], v["in_h"], images),
            (v["x_w"] * itemsize, v["x_h"] * itemsize, v["x_n"] * itemsize),
            tiles["TILE_P"],
            lower,
            tuple(end - (v[f"in_{a}"] - 1) for end, a in zip(ends, "wh", strict=True)),
            (1, v["in_stride_w"], v["in_stride_h"], 1),
        )
    }
    if not constants["PACKED"]:
        count = taps["h"] * taps["w"]
        maps["packed"] = TensorMap(
            dtype,
            (v["channels"], count, v["groups"] * v["m"]),
            (v["channels"] * itemsize, count * v["channels"] * itemsize),
            tiles["TILE_M"],
        )
    return maps
