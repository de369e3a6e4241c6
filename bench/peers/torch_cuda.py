"""PyTorch on CUDA (cuDNN in its benchmark mode), timed by events around a graph of calls."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
from _torch import Loaded, TorchPeer

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Array, Refusal, Variant, serve

_GRAPH_SECONDS = 2e-3
_GRAPH_CALLS = 20
"""A graph holds about that many seconds of calls, but at most that many: launching it must not
show, and a sample must not last much longer than it was asked to."""


@dataclass
class Captured(Loaded):
    """A variant as a graph of calls."""

    graph: Any
    calls: int
    result: Any
    """The tensor that the graph's last call writes."""


class TorchCuda(TorchPeer):
    name = "torch-cuda"
    device = "cuda"
    dtypes = ("f32", "f16", "bf16")
    measures = True

    def describe(self) -> tuple[dict[str, str], str]:
        import torch

        if not torch.cuda.is_available():
            build = torch.version.cuda or "no CUDA"
            raise Refusal(f"PyTorch {torch.__version__} (built for {build}) sees no CUDA device")
        torch.set_grad_enabled(False)
        torch.backends.cudnn.benchmark = True
        versions = {
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
        return versions, torch.cuda.get_device_name()

    def precisions(self, problem: ConvProblem) -> list[str]:
        import torch

        if problem.dtype != "f32":
            return [problem.dtype]
        return ["f32", "tf32"] if torch.cuda.get_device_capability() >= (8, 0) else ["f32"]

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize()

    def set_precision(self, precision: str) -> None:
        from torch.backends import cudnn

        # PyTorch 2.9 replaced the one by the other, and refuses a program that mixes them.
        if hasattr(cudnn, "conv"):
            cudnn.conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        else:
            cudnn.allow_tf32 = precision == "tf32"

    def prepare(self, loaded: Loaded) -> Loaded:
        import torch

        # Before a capture PyTorch wants a few calls on a stream that is not the default one. The
        # first lets cuDNN measure its algorithms, which a capture could not.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            for _ in range(3):
                loaded.run()
            start.record()
            loaded.run()
            end.record()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        seconds = max(start.elapsed_time(end) / 1e3, 1e-6)
        calls = min(max(round(_GRAPH_SECONDS / seconds), 1), _GRAPH_CALLS)
        graph = torch.cuda.CUDAGraph()
        result = None
        with torch.cuda.graph(graph):
            for _ in range(calls):
                result = None  # so that each call writes where the one before did
                result = loaded.run()
        return Captured(**vars(loaded), graph=graph, calls=calls, result=result)

    def output(self, variant: Variant) -> Array:
        """Of what is timed: the graph."""
        found = self._captured(variant)
        found.result.fill_(np.nan)
        found.graph.replay()
        return self.numpy(found.problem, found.result)

    def time(self, variant: Variant, repeats: int) -> float:
        import torch

        found = self._captured(variant)
        replays = max(round(repeats / found.calls), 1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            found.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (replays * found.calls)

    def workspace(self, variant: Variant) -> int | None:
        import torch

        run = self.find(variant).run
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before  # the result, in the allocator's units
        del result
        return torch.cuda.max_memory_allocated() - before - kept

    def unload(self) -> None:
        import torch

        super().unload()
        gc.collect()
        torch.cuda.empty_cache()

    def _captured(self, variant: Variant) -> Captured:
        found = self.find(variant)
        assert isinstance(found, Captured)
        return found


if __name__ == "__main__":
    serve(TorchCuda())
