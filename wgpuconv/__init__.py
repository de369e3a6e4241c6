"""GPU convolution from Python, on any vendor's card: WGSL kernels through wgpu-py, tuned."""

from __future__ import annotations

from . import errors
from .device import Device, DeviceInfo, devices
from .embed import EncodablePlan, plan_conv2d, plan_conv_transpose2d
from .modules import Conv2d, ConvTranspose2d
from .ops import conv2d, conv_transpose2d
from .problem import ConvProblem
from .tensor import Tensor, tensor
from .tune import explain, export_bundle, import_bundle, prewarm

__version__ = "0.1.0"

__all__ = [
    "Conv2d",
    "ConvProblem",
    "ConvTranspose2d",
    "Device",
    "DeviceInfo",
    "EncodablePlan",
    "Tensor",
    "conv2d",
    "conv_transpose2d",
    "devices",
    "errors",
    "explain",
    "export_bundle",
    "import_bundle",
    "plan_conv2d",
    "plan_conv_transpose2d",
    "prewarm",
    "tensor",
]
