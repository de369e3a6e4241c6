"""tinygrad's WebGPU backend (Dawn), its JIT without a search (BEAM=0), timed by the wall clock."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Peer, Refusal, Variant, serve, wall, wall_for

_BACKENDS = {"darwin": "Metal", "win32": "D3D12"}


@dataclass
class Loaded:
    problem: ConvProblem
    run: Callable[[], Any]


class TinygradWebGpu(Peer):
    name = "tinygrad-webgpu"
    pip = "tinygrad dawn-python"

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}

    def describe(self) -> tuple[dict[str, str], str]:
        os.environ.update(DEV="WEBGPU", BEAM="0")
        # Left to choose, Dawn takes its null backend where there is no device.
        backend = _BACKENDS.get(sys.platform, "Vulkan")
        os.environ.setdefault("WEBGPU_BACKEND", f"WGPUBackendType_{backend}")
        if "WEBGPU_PATH" not in os.environ:
            os.environ["WEBGPU_PATH"] = str(_dawn())
        from tinygrad import Device

        try:
            self._device = Device["WEBGPU"]
        except Exception as error:  # whatever Dawn and its binding say
            raise Refusal(f"tinygrad's WebGPU backend does not start: {error}") from error
        return {"tinygrad": importlib.metadata.version("tinygrad")}, "WebGPU (Dawn)"

    def variants(self, problem: ConvProblem) -> list[Variant]:
        from tinygrad.runtime.autogen import webgpu

        if problem.dtype == "f16" and webgpu.WGPUFeatureName_ShaderF16 not in self._device.features:
            raise Refusal("tinygrad's WebGPU backend has no f16 on this device")
        return [Variant(problem.layout.lower(), problem.dtype)]

    def load(self, problem: ConvProblem, variant: Variant, data: Mapping[str, Array]) -> None:
        from tinygrad import TinyJit

        self._loaded.pop(variant.what, None)
        tensors = _tensors(data)
        operation = TinyJit(_operation(problem))
        for _ in range(4):  # it runs once, then records, then replays
            operation(**tensors)
        self._device.synchronize()
        self._loaded[variant.what] = Loaded(problem, lambda: operation(**tensors))

    def output(self, variant: Variant) -> Array:
        array: Array = self._loaded[variant.what].run().numpy()
        return array

    def time(self, variant: Variant, repeats: int) -> float:
        return wall(self._loaded[variant.what].run, repeats, self._device.synchronize)

    def call(self, variant: Variant) -> float | None:
        return wall_for(self._loaded[variant.what].run, self._device.synchronize)

    def end_to_end(self, variant: Variant, data: Mapping[str, Array]) -> float | None:
        from tinygrad import TinyJit

        operation = TinyJit(_operation(self._loaded[variant.what].problem))
        for _ in range(3):
            operation(**_tensors(data))
        return wall_for(lambda: operation(**_tensors(data)).numpy())

    def unload(self) -> None:
        self._loaded.clear()


def _dawn() -> Path:
    """The library that dawn-python holds, which tinygrad does not look for on Linux and macOS."""
    found = importlib.util.find_spec("pydawn")
    if found is None or found.origin is None:
        raise ImportError("WEBGPU_PATH names no Dawn library, and dawn-python is not installed")
    ending = "dylib" if sys.platform == "darwin" else "so"
    name = f"libwebgpu_dawn_{platform.machine()}.{ending}"
    path = Path(found.origin).parent / "lib" / name
    if not path.is_file():
        raise ImportError(f"WEBGPU_PATH names no Dawn library, and dawn-python has no {name}")
    return path


def _tensors(data: Mapping[str, Array]) -> dict[str, Any]:
    from tinygrad import Tensor

    return {role: Tensor(array).realize() for role, array in data.items()}


def _operation(problem: ConvProblem) -> Callable[..., Any]:
    """The problem as a function of its tensors, to be run by the JIT."""
    p = problem
    top, bottom, left, right = p.padding
    more: dict[str, Any] = {"output_padding": p.output_padding} if p.transposed else {}
    more |= {
        "groups": p.groups,
        "stride": p.stride,
        "dilation": p.dilation,
        "padding": (left, right, top, bottom),
    }
    a, b = p.activation.a, p.activation.b
    activations: dict[str, Callable[[Any], Any]] = {
        "identity": lambda y: y,
        "relu": lambda y: y.relu(),
        "leaky_relu": lambda y: y.leaky_relu(a),
        "clip": lambda y: y.clip(a, b),
        "sigmoid": lambda y: y.sigmoid(),
        "tanh": lambda y: y.tanh(),
        "gelu": lambda y: 0.5 * y * (1 + (y * 0.5**0.5).erf()),  # its own is an approximation
        "silu": lambda y: y.silu(),
    }
    activation = activations[p.activation.name]

    def operation(input: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
        x = input if p.layout == "NCHW" else input.permute(0, 3, 1, 2)
        call = x.conv_transpose2d if p.transposed else x.conv2d
        y = call(weight, bias, **more)
        if residual is not None:
            y = y + (residual if p.layout == "NCHW" else residual.permute(0, 3, 1, 2))
        y = activation(y)
        return (y if p.layout == "NCHW" else y.permute(0, 2, 3, 1).contiguous()).realize()

    return operation


if __name__ == "__main__":
    serve(TinygradWebGpu())
