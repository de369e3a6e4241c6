"""ncnn's Vulkan backend, timed by the wall clock over nets of several convolutions.

From Python ncnn takes and gives tensors on the host only, and copying them would be most of the
time. So the net that is timed makes its input on the device, by enlarging a small one, convolves
it several times over, and gives back one pixel of each result. What is checked, and timed end to
end, is the same layer in a net of its own, from the problem's data to the whole result; with it the
pixels are compared.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Peer, Refusal, Variant, serve, wall, wall_for

_COPIES = 10
_SHRINK = 8
"""How much smaller the timed net's input is along each side."""
_ACTIVATIONS = {
    # name: (layer, its parameters)
    "relu": "ReLU {} 1 1 {} {}",
    "leaky_relu": "ReLU {} 1 1 {} {} 0={a!r}",
    "clip": "Clip {} 1 1 {} {} 0={a!r} 1={b!r}",
    "sigmoid": "Sigmoid {} 1 1 {} {}",
    "tanh": "TanH {} 1 1 {} {}",
    "silu": "Swish {} 1 1 {} {}",
}


@dataclass
class Loaded:
    problem: ConvProblem
    one: Any
    many: Any
    input: Array
    """In f32, as ncnn takes it."""
    small: Array
    """The input of ``many``."""


class NcnnVulkan(Peer):
    name = "ncnn-vulkan"
    pip = "ncnn"

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}

    def describe(self) -> tuple[dict[str, str], str]:
        import ncnn

        if ncnn.get_gpu_count() == 0:
            raise Refusal("ncnn finds no Vulkan device")
        device = ncnn.get_gpu_info(ncnn.get_default_gpu_index())
        return {"ncnn": ncnn.__version__}, device.device_name()

    def variants(self, problem: ConvProblem) -> list[Variant]:
        if problem.layout != "NCHW":
            raise Refusal(f"ncnn has NCHW tensors only, got {problem.layout}")
        if problem.residual:
            raise Refusal("ncnn is compared without residuals")
        if problem.activation.name == "gelu":
            raise Refusal("ncnn's gelu on Vulkan is the approximation by tanh")
        return [Variant("nchw, prepared weights", problem.dtype, prepared=True)]

    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        self._loaded.pop(variant.what, None)
        n, c, h, w = problem.input_shape
        weights = _weights(problem, data)
        loaded = Loaded(
            problem,
            _net(problem, ["Input in 0 1 x", *_convolution(problem, "", "x", "y")], weights),
            _net(problem, _many(problem), weights * _COPIES),
            data["input"].astype(np.float32),
            np.random.default_rng(0)
            .standard_normal((n, c, -(-h // _SHRINK), -(-w // _SHRINK)))
            .astype(np.float32),
        )
        _check_pixels(loaded)
        self._loaded[variant.what] = loaded

    def output(self, variant: Variant) -> Array:
        loaded = self._loaded[variant.what]
        return _result(loaded.problem, loaded.one, loaded.input)

    def time(self, variant: Variant, repeats: int) -> float:
        loaded = self._loaded[variant.what]
        runs = max(round(repeats / _COPIES), 1)
        return wall(lambda: _run(loaded.many, loaded.small), runs) / _COPIES

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        loaded = self._loaded[variant.what]
        return wall_for(
            lambda: _result(loaded.problem, loaded.one, data["input"].astype(np.float32))
        )

    def unload(self) -> None:
        self._loaded.clear()


def _convolution(p: ConvProblem, suffix: str, given: str, made: str) -> list[str]:
    """The lines of a net that compute the problem."""
    kind = ("Deconvolution" if p.transposed else "Convolution") + "DepthWise" * (p.groups > 1)
    top, bottom, left, right = p.padding
    parameters = {
        0: p.k, 1: p.s, 11: p.r, 2: p.dilation[1], 12: p.dilation[0], 3: p.stride[1],
        13: p.stride[0], 4: left, 15: right, 14: top, 16: bottom, 5: int(p.bias),
        6: p.c * p.k_group * p.r * p.s, 7: p.groups,
    }  # fmt: skip
    if p.transposed:
        parameters |= {18: p.output_padding[1], 19: p.output_padding[0]}
    text = " ".join(f"{key}={value}" for key, value in parameters.items())
    if p.activation.name == "identity":
        return [f"{kind} conv{suffix} 1 1 {given} {made} {text}"]
    between = f"{made}_linear"
    activation = _ACTIVATIONS[p.activation.name].format(
        f"act{suffix}", between, made, a=p.activation.a, b=p.activation.b
    )
    return [f"{kind} conv{suffix} 1 1 {given} {between} {text}", activation]


def _many(p: ConvProblem) -> list[str]:
    """The lines of the net that is timed."""
    copies = [str(i) for i in range(_COPIES)]
    lines = [
        "Input in 0 1 x",
        f"Interp enlarge 1 1 x large 0=1 3={p.h} 4={p.w}",
        f"Split split 1 {_COPIES} large " + " ".join(f"x{i}" for i in copies),
    ]
    for i in copies:
        lines += _convolution(p, i, f"x{i}", f"y{i}")
        at = f"0={p.out_w // 2} 1={p.out_h // 2} 2=0 3=1 4=1 5={p.k}"
        lines.append(f"Crop pixel{i} 1 1 y{i} pixel{i} {at}")
    lines.append(f"Concat all {_COPIES} 1 " + " ".join(f"pixel{i}" for i in copies) + " y 0=0")
    return lines


def _check_pixels(loaded: Loaded) -> None:
    """Raises where the net that is timed gives other pixels than the net that is checked."""
    p, small = loaded.problem, loaded.small
    rows = np.arange(p.h) * small.shape[2] // p.h
    columns = np.arange(p.w) * small.shape[3] // p.w
    large = np.ascontiguousarray(small[:, :, rows][..., columns])
    expected = _result(p, loaded.one, large)[:, None, :, p.out_h // 2, p.out_w // 2]
    for _ in range(3):
        pixels = _run(loaded.many, small).numpy(batch_index=0).reshape(p.n, _COPIES, p.k)
        off, most = float(abs(pixels - expected).max()), float(abs(expected).max())
        if not off <= 2e-3 * most:  # sums in f16 may differ by as much from run to run
            raise RuntimeError(
                f"ncnn's net of {_COPIES} is off by {off:g}, with values to {most:g}"
            )


def _weights(p: ConvProblem, data: Mapping[str, Array]) -> bytes:
    """Of one layer, as a model file holds them: a tag for f32, filters first."""
    weight = data["weight"].astype("<f4")
    if p.transposed:
        weight = weight.reshape(p.groups, p.c_group, p.k_group, p.r, p.s).swapaxes(1, 2)
    bias = data["bias"].astype("<f4").tobytes() if p.bias else b""
    return struct.pack("<I", 0) + weight.tobytes() + bias


def _net(p: ConvProblem, lines: list[str], weights: bytes) -> Any:
    import ncnn

    net = ncnn.Net()
    net.opt.use_vulkan_compute = True
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic"):
        setattr(net.opt, option, p.dtype == "f16")
    for option in ("use_bf16_packed", "use_bf16_storage"):
        setattr(net.opt, option, False)
    # Each line is: type, name, number of inputs and of outputs, their names, parameters.
    blobs = {name for line in lines for name in line.split()[4:] if "=" not in name}
    text = "\n".join(["7767517", f"{len(lines)} {len(blobs)}", *lines, ""])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.bin")
        model.write_bytes(weights)
        if net.load_param_mem(text) or net.load_model(str(model)):
            raise RuntimeError(f"ncnn does not take this net: {lines}")
    return net


def _run(net: Any, array: Array) -> Any:
    import ncnn

    extractor = net.create_extractor()
    extractor.input("x", ncnn.Mat(array, 0))  # 0: the axis of the batch
    status, made = extractor.extract("y")
    if status:
        raise RuntimeError(f"ncnn's extract returned {status}")
    return made


def _result(p: ConvProblem, net: Any, array: Array) -> Array:
    found: Array = _run(net, array).numpy(batch_index=0)
    # ncnn drops the batch's axis where it has one element only.
    return found.reshape(p.out_shape).astype(np.float16 if p.dtype == "f16" else np.float32)


if __name__ == "__main__":
    serve(NcnnVulkan())
