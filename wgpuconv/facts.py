"""What planning may know about a device: limits and rough speeds, as plain data.

Nothing here touches a GPU. A backend fills in a :class:`Facts`; tests write their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """The limits that kernels and buffers must respect; the defaults are WebGPU's own."""

    max_binding: int = 128 << 20
    """Bytes that one storage binding may span."""
    max_buffer: int = 256 << 20
    """Bytes of the largest buffer."""
    max_invocations: int = 256
    """Invocations per workgroup."""
    max_workgroup_size: int = 256
    """Largest x size of a workgroup."""
    max_workgroup_storage: int = 16384
    """Bytes of ``var<workgroup>`` memory."""
    max_workgroups: int = 65535
    """Workgroups per dimension of one dispatch."""
    max_storage_buffers: int = 8
    """Storage buffers per shader stage."""
    storage_alignment: int = 256
    """Bytes to which a storage binding's offset is aligned."""
    uniform_alignment: int = 256
    """Bytes to which a uniform binding's offset is aligned."""


WEBGPU_DEFAULTS = Limits()


@dataclass(frozen=True)
class Facts:
    """Everything that planning may know about one device."""

    limits: Limits = field(default_factory=Limits)
    f16: bool = False
    """Whether shaders may store and load 16-bit floats."""
    bf16: bool = False
    """Whether kernels may load and store bfloat16."""
    tf32: bool = False
    """Whether some kernel multiplies float32 as TF32."""
    weight_last: bool = False
    """Whether kernels read a weight whose channels lie side by side."""
    software: bool = False
    """A CPU driver: correct, slow, and not worth measuring."""
    bandwidth: float = 200e9
    """Bytes a second that a copy kernel reads plus writes (a guess unless measured)."""
    flops: float = 10e12
    """f32 operations a second, a multiply-add counting as two (a guess unless measured)."""
    launch: float = 3e-6
    """Seconds that one more dispatch costs."""
    cores: int = 32
    """Compute units that run workgroups side by side (streaming multiprocessors, a guess)."""
    latency: float = 100e-9
    """Seconds from one load to the next that waits for it."""
    workspace_limit: int = 64 << 20
    """Default bytes of scratch memory that one call may take."""

    @property
    def cycle(self) -> float:
        """Seconds of one multiply-add of an invocation, if a core has 128 lanes."""
        return 256 * self.cores / self.flops
