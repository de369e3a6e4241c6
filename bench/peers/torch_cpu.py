"""PyTorch on the CPU (oneDNN), in f32, timed by the wall clock."""

from __future__ import annotations

from _torch import TorchPeer

from wgpuconv import ConvProblem
from wgpuconv.bench.peer import Variant, serve, wall


class TorchCpu(TorchPeer):
    name = "torch-cpu"
    device = "cpu"
    dtypes = ("f32",)

    def describe(self) -> tuple[dict[str, str], str]:
        import torch

        torch.set_grad_enabled(False)
        return {"torch": torch.__version__}, f"CPU, {torch.get_num_threads()} threads"

    def precisions(self, problem: ConvProblem) -> list[str]:
        return ["f32"]

    def time(self, variant: Variant, repeats: int) -> float:
        return wall(self.find(variant).run, repeats)


if __name__ == "__main__":
    serve(TorchCpu())
