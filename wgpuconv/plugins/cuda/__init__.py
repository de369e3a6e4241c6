"""The CUDA plugin: tensor-core kernels on NVIDIA GPUs, through cupy.

Found through the entry point group ``wgpuconv.backends``. Importing it costs nothing: cupy is
imported when devices are listed or opened.
"""

from __future__ import annotations

from .entry import devices, open

__all__ = ["devices", "open"]
