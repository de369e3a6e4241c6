"""A known-answer probe for software drivers that miscompile long loops.

lavapipe before Mesa 25 gives each invocation 65,535 loop iterations over all its loops and then
leaves them without a word, so that long reductions come out wrong. The driver's version text
does not tell reliably; one small dispatch does.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

ITERATIONS = 70_000
SEED = 12345
ANSWER = 2783382313
"""What the shader's loop makes of the seed (tests/test_probe.py computes it)."""
_WGSL = """
@group(0) @binding(0) var<storage, read_write> data: array<u32>;

@compute @workgroup_size(1)
fn main() {
    // A generator of random numbers, since no compiler reduces it to a formula.
    var value = data[0];
    for (var i = 0u; i < data[1]; i++) {
        value = value * 1664525u + 1013904223u;
    }
    data[0] = value;
}
"""
_known: dict[tuple[str, str], bool] = {}


def runs_long_loops(gpu_device: Any) -> bool:
    """Whether a loop of 70,000 iterations runs to its end on this device."""
    start = np.array([SEED, ITERATIONS], np.uint32)
    usage = 0x80 | 0x08 | 0x04  # WebGPU's STORAGE, COPY_DST and COPY_SRC
    buffer = gpu_device.create_buffer(size=start.nbytes, usage=usage)
    gpu_device.queue.write_buffer(buffer, 0, start)
    module = gpu_device.create_shader_module(code=_WGSL)
    pipeline = gpu_device.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )
    group = gpu_device.create_bind_group(
        layout=pipeline.get_bind_group_layout(0),
        entries=[{"binding": 0, "resource": {"buffer": buffer, "offset": 0, "size": start.nbytes}}],
    )
    encoder = gpu_device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(1)
    compute.end()
    gpu_device.queue.submit([encoder.finish()])
    found = np.frombuffer(gpu_device.queue.read_buffer(buffer), np.uint32)
    return int(found[0]) == ANSWER


def warn_if_miscompiling(gpu_device: Any, adapter: str, driver: str) -> str | None:
    """Probes a software driver once a process; warns, and returns the warning's text."""
    key = (adapter, driver)
    first = key not in _known
    if first:
        _known[key] = runs_long_loops(gpu_device)
    if _known[key]:
        return None
    text = (
        f"{adapter} ({driver}) leaves loops after 65,535 iterations, so large convolutions come "
        "out wrong; install Mesa 25 or newer (Debian 12: apt install -t bookworm-backports "
        "mesa-vulkan-drivers)"
    )
    if first:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return text
