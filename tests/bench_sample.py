"""A result of the benchmark as one H200 could give it, for the tests of what reads results."""

from __future__ import annotations

import random
from collections.abc import Iterator

from wgpuconv import suites
from wgpuconv.bench.result import DeviceFacts, PeerFacts, ProblemResult, Run, Side

# Microseconds: wgpu implicit_gemm, wgpu direct; cuDNN f32 + bias, f32 without, TF32, f16 + bias,
# f16 without; ONNX Runtime f32, f16.
TIMES = {
    "c0": (716, 2060, 1667, 1468, 546, 572, 394, 5219, 3015),
    "c1": (118, 263, 160, 147, 97.9, 113, 102, 859, 853),
    "c2": (121, 270, 154, 141, 102, 114, 104, 920, 888),
    "c3": (139, 244, 223, 185, 107, 71.5, 45, 922, 924),
    "c4": (1632, 9100, 3494, 3458, 583, 265, 245, 6643, 4704),
    "c5": (176, 1310, 162, 156, 28.7, 27, 22, 1299, 1184),
    "c6": (90, 610, 171, 167, 20.1, 15, 11.4, 1081, 959),
    "c7": (131, 81, 321, 168, 115, 235, 100, 1752, 909),
    "c8": (574, 4200, 783, 707, 101, 122, 58, 2628, 2200),
    "c9": (78.8, 530, 130, 122, 24.2, 23.9, 15.7, 874, 859),
    "c10": (76, 520, 130, 125, 18.1, 16.9, 12.1, 863, 877),
    "c11": (65.7, 480, 146, 142, 20.5, 14.2, 11.1, 900, 884),
    "c12": (55, 390, 115, 114, 19.3, 14.5, 11.9, 988, 1006),
    "c13": (221, 700, 466, 312, 128, 210, 70.1, 3836, 977),
}
ERRORS = {"f32": 6e-7, "tf32": 4e-4, "f16": 2.4e-4}


def sample_run(
    *, scale: float = 1.0, seed: int = 0, dtypes: tuple[str, ...] = ("f32", "f16")
) -> Run:
    """``scale`` multiplies the times of our own sides."""
    rng = random.Random(seed)
    results = [
        _result(entry, rng, scale)
        for dtype in dtypes
        for entry in (suites.varied(e, dtype=dtype) for e in suites.load_suite("burn"))
    ]
    versions = {"wgpu": "0.32.0"}
    h200 = ("NVIDIA H200 (Vulkan)", "580.159.04")
    return Run(
        date="2026-12-02T09:30:00+00:00",
        wgpuconv="0.1.0",
        commit="cff47b33dac2d299a6492820c5bfaaa6c919d0a2",
        method="device time, sides interleaved after a spin-up; medians of 7 rounds; inputs "
        "repeat (warm L2); outputs checked against float64 on samples",
        machine={
            "system": "Linux-6.18.44-x86_64-with-glibc2.39",
            "processor": "x86_64",
            "processors": 16,
            "python": "3.12.3",
            "nvidia_smi": "NVIDIA H200, 580.159.04, 1965 MHz, 1980 MHz, 3201 MHz, 459.04 W",
        },
        devices=(
            DeviceFacts("wgpu", "wgpu", *h200, versions, False, 3.98e12, 58.4e12),
            DeviceFacts("dawn", "dawn", *h200, {"wgpudawn": "0.32.0.4"}, False, 3.95e12, 57.9e12),
        ),
        peers=(
            PeerFacts("torch-cuda", {"torch": "2.11.0", "cudnn": "9.19"}, "NVIDIA H200"),
            PeerFacts("onnxruntime-webgpu", {"onnxruntime": "1.27.0"}, "NVIDIA H200"),
            PeerFacts("ncnn", absent="ncnn is not installed: pip install ncnn"),
        ),
        baseline="torch-cuda",
        results=tuple(results),
    )


def _result(entry: suites.Entry, rng: random.Random, scale: float) -> ProblemResult:
    problem = entry.problem
    size = {"f32": 4, "f16": 2}[problem.dtype]
    arrays = (
        problem.n * problem.c * problem.h * problem.w,
        problem.k * problem.c * problem.r * problem.s,
        problem.n * problem.k * problem.out_h * problem.out_w,
        problem.k,
    )
    sides = sorted(
        _sides(entry.name, problem.dtype, rng, scale), key=lambda side: side.seconds or 1e9
    )
    return ProblemResult(
        name=entry.name,
        problem=str(problem),
        count=entry.count,
        flop=2 * problem.multiply_adds,
        nbytes=size * sum(arrays),
        sides=tuple(sides),
        refusals={
            "wgpu depthwise": "needs one input channel a group (groups=1), got several",
            "wgpu col2im": "computes conv_transpose2d, not conv2d",
        },
        choice={"wgpu": "implicit_gemm(tile_m=64,tile_p=128)", "dawn": "implicit_gemm(tile_m=64)"},
        source={"wgpu": "tuned", "dawn": "tuned"},
        note={"wgpu": "measured 2026-12-02, 24 candidates"},
    )


def _sides(name: str, dtype: str, rng: random.Random, scale: float) -> Iterator[Side]:
    gemm, direct, bias, bare, tf32, half_bias, half, ort, ort_half = TIMES[name]

    def side(
        on: str, what: str, us: float, precision: str = dtype, *, ours: bool = False, **more: object
    ) -> Side:
        base = us * 1e-6 * (scale if ours else 1)
        samples = tuple(base * (1 + abs(rng.gauss(0, 0.004))) for _ in range(7))
        error = ERRORS[precision] * rng.uniform(0.6, 1.4)
        return Side(on, what, precision, ours, samples, error=error, **more)  # type: ignore[arg-type]

    ours = 0.8 if dtype == "f16" else 1.0
    yield side(
        "wgpu", "implicit_gemm", gemm * ours, ours=True, workspace=9216, call=gemm * 1e-6 + 9e-6,
        end_to_end=gemm * 9e-6, first_call=1.3, label="implicit_gemm(tile_m=64,tile_p=128)",
    )  # fmt: skip
    yield side(
        "wgpu", "implicit_gemm, prepared weights", gemm * ours * 0.97, ours=True, prepared=True
    )
    yield side("wgpu", "direct", direct * ours, ours=True, workspace=0, label="direct(filters=16)")
    yield side(
        "dawn", "implicit_gemm", gemm * ours * 1.04, ours=True, label="implicit_gemm(tile_m=64)"
    )
    yield Side(
        "dawn",
        "im2col_gemm",
        dtype,
        True,
        failure="needs a buffer of 1.0 GiB, the device has 256 MiB",
    )
    if dtype == "f32":
        yield side("torch-cuda", "nchw", bias)
        yield side("torch-cuda", "channels_last", bias * 1.3)
        yield side("torch-cuda", "nchw, no bias", bare, same_work=False)
        yield side("torch-cuda", "channels_last", tf32, "tf32")
    else:
        yield side("torch-cuda", "channels_last", half_bias)
        yield side("torch-cuda", "channels_last, no bias", half, same_work=False)
    yield side("onnxruntime-webgpu", "nhwc", ort if dtype == "f32" else ort_half)
