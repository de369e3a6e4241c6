"""ONNX Runtime's WebGPU provider (Dawn), timed by the wall clock over models of several nodes.

One run of a model costs the host some hundred microseconds, so what is timed holds several
convolutions side by side, as a network does: the time is per convolution, with its share of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from _onnxruntime import OnnxRuntimePeer

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Refusal, Variant, serve

_COPIES = 10
_OUTPUT_BYTES = 1 << 30
"""Of all copies together, since each keeps its own."""


class OnnxRuntimeWebGpu(OnnxRuntimePeer):
    name = "onnxruntime-webgpu"
    pip = "onnxruntime-webgpu onnx"
    provider = "WebGpuExecutionProvider"

    def describe(self) -> tuple[dict[str, str], str]:
        import onnx
        import onnxruntime

        version = onnxruntime.__version__
        if self.provider not in onnxruntime.get_available_providers():
            raise Refusal(
                f"the onnxruntime {version} here has no WebGPU; install onnxruntime-webgpu in an "
                "environment of its own (the two exclude each other), and name its Python in "
                "WGPUCONV_PYTHON_ONNXRUNTIME_WEBGPU"
            )
        try:
            self._copiers = {
                np.dtype(name): self.session(_model("Identity", name), {})
                for name in ("float32", "float16")
            }
            self.wait()
        except Exception as error:  # its own classes, which differ from version to version
            reason = str(error).rpartition(" was false. ")[2]
            raise Refusal(f"onnxruntime-webgpu finds no device: {reason}") from error
        return {"onnxruntime-webgpu": version, "onnx": onnx.__version__}, "WebGPU (Dawn)"

    def variants(self, problem: ConvProblem) -> list[Variant]:
        if problem.residual:
            raise Refusal("onnxruntime-webgpu is compared without residuals")
        if problem.dtype == "f16":
            try:
                self.session(_model("Neg", "float16"), {}).run(
                    None, {"from": np.zeros(1, np.float16)}
                )
            except Exception as error:
                raise Refusal(f"the device cannot compute in f16: {error}") from error
        found = []
        for layout in ("nchw", "nhwc"):
            # Users have their weights in the model, and few know of the capture; the first is
            # for a comparison of the same work, so it has the capture's help.
            for prepared, capture in ((False, True), (True, True), (True, False)):
                what = f"{layout} inside"
                what += ", prepared weights" * prepared + ", graph capture" * capture
                options = {"layout": layout.upper(), "capture": capture}
                found.append(Variant(what, problem.dtype, prepared, options=options))
        return found

    def options(self, variant: Variant) -> dict[str, str]:
        of_provider = "ep.webgpuexecutionprovider."
        return {
            "session.disable_cpu_ep_fallback": "1",
            of_provider + "preferredLayout": variant.options["layout"],
            of_provider + "enableGraphCapture": str(int(variant.options["capture"])),
        }

    def copies(self, problem: ConvProblem) -> int:
        return min(max(_OUTPUT_BYTES // problem.out_bytes, 1), _COPIES)

    def upload(self, array: Array) -> Any:
        copier = self._copiers[array.dtype]
        binding = copier.io_binding()
        binding.bind_cpu_input("from", array)
        binding.bind_output("to", "webgpu", 0)
        copier.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def bind_output(self, binding: Any, name: str, problem: ConvProblem) -> None:
        binding.bind_output(name, "webgpu", 0)

    def wait(self) -> None:
        """Sessions share one queue, so a value that came back means that all before is done."""
        self._copiers[np.dtype(np.float32)].run(None, {"from": np.zeros(1, np.float32)})


def _model(operator: str, dtype: str) -> bytes:
    """Of one operator, from a tensor of any shape to one of the same."""
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(end, kind, None) for end in ("from", "to")]
    node = helper.make_node(operator, ["from"], ["to"])
    graph = helper.make_graph([node], "model", ends[:1], ends[1:])
    opset = helper.make_opsetid("", 20)
    serialized: bytes = helper.make_model(
        graph, opset_imports=[opset], ir_version=9
    ).SerializeToString()
    return serialized


if __name__ == "__main__":
    serve(OnnxRuntimeWebGpu())
