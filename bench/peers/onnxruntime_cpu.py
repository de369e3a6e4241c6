"""ONNX Runtime on the CPU, in f32, timed by the wall clock."""

from __future__ import annotations

from typing import Any

import numpy as np
from _onnxruntime import OnnxRuntimePeer

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Refusal, Variant, serve


class OnnxRuntimeCpu(OnnxRuntimePeer):
    name = "onnxruntime-cpu"
    pip = "onnxruntime onnx"
    provider = "CPUExecutionProvider"
    dtypes = ("f32",)  # it casts others to it

    def describe(self) -> tuple[dict[str, str], str]:
        import onnx
        import onnxruntime

        versions = {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
        return versions, "CPU"

    def variants(self, problem: ConvProblem) -> list[Variant]:
        if problem.residual:
            raise Refusal("onnxruntime-cpu is compared without residuals")
        layout = problem.layout.lower()
        return [
            Variant(layout, "f32"),
            Variant(f"{layout}, prepared weights", "f32", prepared=True),
        ]

    def upload(self, array: Array) -> Any:
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(array)

    def bind_output(self, binding: Any, name: str, problem: ConvProblem) -> None:
        binding.bind_ortvalue_output(name, self.upload(np.empty(problem.out_shape, np.float32)))


if __name__ == "__main__":
    serve(OnnxRuntimeCpu())
