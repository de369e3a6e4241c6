"""The WebGPU backend: runs plans through wgpu-py, on wgpu-native or on Dawn.

wgpu-native aborts the process on an invalid submit. So nothing is submitted here unchecked:
buffers of our own are never destroyed, a caller's buffer goes through a fresh bind group
(which refuses a destroyed buffer or one of another device), a mapped one is refused, and
``finish`` raises where the device is lost, before anything is submitted. (Dawn raises at the
submit itself.)
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS, Algorithm
from ..errors import (
    DeviceError,
    DeviceLostError,
    DtypeError,
    OutOfDeviceMemoryError,
    ProblemError,
    ShaderError,
    UnsupportedFeatureError,
    WgpuConvError,
    kind_of,
)
from ..facts import Facts, Limits
from ..plan import Pass, Plan, Region, Role, Shader, align
from ..shader import Interface, interface, pack_params, specialise
from .base import Buffers, Identity
from .buffers import BufferPool
from .probe import warn_if_miscompiling
from .provider import Provider

POOL_CAPACITY = 1 << 30
BIND_GROUPS = 1024
"""Sets of bind groups that a device keeps, one for a plan and a set of buffers."""

_WANTED_LIMITS = {
    "max_binding": "max-storage-buffer-binding-size",
    "max_buffer": "max-buffer-size",
    "max_invocations": "max-compute-invocations-per-workgroup",
    "max_workgroup_size": "max-compute-workgroup-size-x",
    "max_workgroup_storage": "max-compute-workgroup-storage-size",
    "max_workgroups": "max-compute-workgroups-per-dimension",
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
    "storage_alignment": "min-storage-buffer-offset-alignment",
    "uniform_alignment": "min-uniform-buffer-offset-alignment",
}
_OF_ANOTHER_DEVICE = ("doesn't match Device with", "is associated with [Device")
"""How wgpu and Dawn refuse a buffer of another device."""
_WANTED_FEATURES = ("shader-f16", "timestamp-query")


@dataclass(frozen=True)
class Pipeline:
    interface: Interface
    layout: Any
    pipeline: Any


@dataclass(frozen=True)
class Step:
    pipeline: Pipeline
    bindings: tuple[tuple[int, Region], ...]
    params: tuple[int, int]
    """Offset and size in the uniform buffer."""
    grid: tuple[int, int, int]


class CompiledPlan:
    """Pipelines, parameters and tables of one plan."""

    def __init__(
        self,
        plan: Plan,
        prepare: list[Step],
        steps: list[Step],
        uniform: Any,
        tables: Any,
    ) -> None:
        self.plan = plan
        self.prepare = prepare
        self.steps = steps
        self.everything = [*prepare, *steps]
        self.uniform = uniform
        self.tables = tables


class WebGpuBackend:
    """One WebGPU device."""

    runs_wgsl = True
    has_probes = True

    def __init__(
        self,
        provider: Provider,
        gpu_device: Any,
        *,
        trusted: bool = True,
        algorithms: tuple[Algorithm, ...] = ALGORITHMS,
    ) -> None:
        self.provider = provider
        self.gpu_device = gpu_device
        self.trusted = trusted
        self.algorithms = algorithms
        self.facts = _facts(gpu_device)
        info = gpu_device.adapter_info
        self.identity = identity_of(provider, info, trusted=trusted)
        usage = provider.api.BufferUsage
        self._storage_usage = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        self._uniform_usage = usage.UNIFORM | usage.COPY_DST
        self._staging_usage = usage.MAP_READ | usage.COPY_DST
        provider.opening()
        self._guard = _Guard(self)
        # The keys hold ids, and each entry the objects of which they are, so that no id is
        # taken anew. A buffer that leaves the pool must not live on here.
        self._groups: OrderedDict[tuple[Any, ...], tuple[Any, list[Any]]] = OrderedDict()
        self._pool = BufferPool(self._create_storage, POOL_CAPACITY, self._groups.clear)
        self._staging = BufferPool(self._create_staging, POOL_CAPACITY // 4, lambda: None)
        self._owned: set[int] = set()
        self._pipelines: dict[Shader, Pipeline] = {}
        self._probe: Pipeline | None = None
        self._scratch: dict[Role, Any] = {}
        self._timer: _Timer | None = None
        self.lost = False
        if self.facts.software:
            warn_if_miscompiling(gpu_device, info["device"], self.identity.driver)

    @property
    def usable(self) -> bool:
        """Whether calls can still succeed: not lost, and not inherited through a fork."""
        return not self.lost and self._guard.pid == os.getpid()

    # ---- buffers ----

    def allocate(self, nbytes: int) -> Any:
        with self._guard:
            most = self._largest_buffer
            if nbytes > most:
                raise UnsupportedFeatureError(
                    f"a tensor of {nbytes} bytes is larger than this device's largest buffer "
                    f"(max-buffer-size {most}); process the batch in parts"
                )
            return self._pool.take(nbytes, most)

    @property
    def _largest_buffer(self) -> int:
        return self.facts.limits.max_buffer // 4 * 4  # copies and bindings count words

    def free(self, buffer: Any) -> None:
        self._pool.give(buffer)

    def write(self, buffer: Any, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        data = array.reshape(-1).view(np.uint8)
        if data.nbytes % 4:
            data = np.concatenate([data, np.zeros(-data.nbytes % 4, np.uint8)])
        with self._guard:
            self.check_usable(buffer, "COPY_DST")
            self.gpu_device.queue.write_buffer(buffer, 0, data)

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        with self._guard:
            encoder = self.gpu_device.create_command_encoder()
            encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
            self.gpu_device.queue.submit([encoder.finish()])

    def read(self, buffer: Any, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        with self._guard:
            self.check_usable(buffer, "COPY_SRC")
            encoder = self.gpu_device.create_command_encoder()
            staging = self._stage(encoder, buffer, array.nbytes)
            self.gpu_device.queue.submit([encoder.finish()])
            self._fetch(staging, array)

    def _stage(self, encoder: Any, buffer: Any, nbytes: int) -> Any:
        """Records a copy to a buffer that the host can map."""
        size = align(nbytes, 4)
        staging = self._staging.take(size, self._largest_buffer)
        encoder.copy_buffer_to_buffer(buffer, 0, staging, 0, size)
        return staging

    def _fetch(self, staging: Any, array: np.ndarray) -> None:
        size = align(array.nbytes, 4)
        staging.map_sync("READ_NOSYNC" if self.provider.name == "wgpu" else "READ", 0, size)
        try:
            view = staging.read_mapped(0, size, copy=False)
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8)[: array.nbytes]
        finally:
            staging.unmap()
        self._staging.give(staging)

    def owns(self, buffer: Any) -> bool:
        """Whether the buffer came from ``allocate``, so that nobody can have destroyed it."""
        return id(buffer) in self._owned

    def check_usable(self, buffer: Any, usage: str = "STORAGE") -> None:
        """Refuses a caller's buffer whose submission would abort the process."""
        if not self.owns(buffer):
            with self._guard:
                self._check_caller_buffer(buffer, usage, "tensor")
                self._try_to_bind(buffer, "tensor")

    def _check_caller_buffer(self, buffer: Any, usage: str, role: str) -> None:
        """What can be read off the buffer itself."""
        api = self.provider.api
        if not isinstance(buffer, api.GPUBuffer):
            raise DtypeError(
                f"{role} must be a GPUBuffer of {api.__name__} or a wgpuconv.Tensor, got "
                f"{kind_of(buffer)}"
            )
        if buffer.map_state != "unmapped":
            raise ProblemError(
                f"the buffer of the {role} is {buffer.map_state} on the host; unmap it first"
            )
        for wanted in dict.fromkeys(("STORAGE", usage)):
            if not buffer.usage & getattr(api.BufferUsage, wanted):
                raise ProblemError(
                    f"the buffer of the {role} was made without the usage {wanted}, which this "
                    "needs"
                )

    def _try_to_bind(self, buffer: Any, role: str) -> None:
        """A bind group refuses what a submit would die of: destroyed, or of another device."""
        if self._probe is None:
            self._probe = self._build(_PROBE)
        entry = {"binding": 1, "resource": {"buffer": buffer, "offset": 0, "size": 4}}
        try:
            self.gpu_device.create_bind_group(layout=self._probe.layout, entries=[entry])
        except self.provider.api.GPUValidationError as error:
            if _is_lost(error):
                raise
            if any(words in str(error) for words in _OF_ANOTHER_DEVICE):
                raise ProblemError(
                    f"the buffer of the {role} belongs to another {self.provider.name} device; "
                    "give one of this device"
                ) from error
            raise ProblemError(
                f"the buffer of the {role} cannot be used on this device: {_first_line(error)}"
            ) from error

    def _create_storage(self, size: int) -> Any:
        buffer = self._create(size, self._storage_usage)
        buffer.destroy = _refuse_to_destroy  # it may be bound again, and a submit would abort
        self._owned.add(id(buffer))
        weakref.finalize(buffer, self._owned.discard, id(buffer))
        return buffer

    def _create_staging(self, size: int) -> Any:
        return self._create(size, self._staging_usage)

    def _create(self, size: int, usage: int) -> Any:
        try:
            return self.gpu_device.create_buffer(size=size, usage=usage)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            self._pool.clear()
            self._staging.clear()
            self.gpu_device.queue.submit([])  # has the driver free what is in use no more
            return self.gpu_device.create_buffer(size=size, usage=usage)

    # ---- compiling ----

    def compile(self, plan: Plan) -> CompiledPlan:
        with self._guard:
            uniform = bytearray()
            prepare = [self._step(p, uniform) for p in plan.prepare]
            steps = [self._step(p, uniform) for p in plan.passes]
            return CompiledPlan(
                plan,
                prepare,
                steps,
                self._constant(bytes(uniform), self._uniform_usage),
                self._constant(plan.tables, self._storage_usage),
            )

    def warm(self, plans: Sequence[Plan]) -> None:
        """Compiles what several plans need side by side, where that saves time.

        A GPU's driver takes up to a second a kernel. What fails here fails again, and says so,
        when its plan is compiled. (Software drivers compile at the first dispatch.)
        """
        if self.facts.software or not self.provider.threadsafe:
            return
        passes = [p for plan in plans for p in (*plan.prepare, *plan.passes)]
        with self._guard:
            shaders = {p.shader for p in passes} - self._pipelines.keys()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for shader in shaders:
                    pool.submit(self._pipeline_of, shader)

    def _step(self, step: Pass, uniform: bytearray) -> Step:
        pipeline = self._pipeline_of(step.shader)
        packed = pack_params(step, pipeline.interface.params)
        offset = align(len(uniform), self.facts.limits.uniform_alignment)
        uniform += bytes(offset - len(uniform)) + packed
        regions = dict(step.bindings)
        names = {b.name: b.index for b in pipeline.interface.bindings}
        if set(names) != set(regions):
            raise KeyError(f"{step.shader.file}.wgsl and the plan disagree on bindings: {names}")
        bindings = tuple((names[name], region) for name, region in step.bindings)
        return Step(pipeline, bindings, (offset, len(packed)), step.grid)

    def _pipeline_of(self, shader: Shader) -> Pipeline:
        found = self._pipelines.get(shader)
        if found is None:
            found = self._pipelines[shader] = self._build(specialise(shader))
        return found

    def _build(self, text: str) -> Pipeline:
        face = interface(text)
        limits = self.facts.limits
        if face.workgroup_size > min(limits.max_invocations, limits.max_workgroup_size):
            raise ShaderError(
                f"a kernel wants {face.workgroup_size} invocations a workgroup, this device has "
                f"{limits.max_invocations}"
            )
        if face.workgroup_bytes > limits.max_workgroup_storage:  # wgpu-native does not check
            raise ShaderError(
                f"a kernel wants {face.workgroup_bytes} bytes of workgroup memory, this device "
                f"has {limits.max_workgroup_storage}"
            )
        device, compute = self.gpu_device, self.provider.api.ShaderStage.COMPUTE
        entries = [
            {
                "binding": b.index,
                "visibility": compute,
                "buffer": {"type": "storage" if b.writable else "read-only-storage"},
            }
            for b in face.bindings
        ]
        if face.params:
            entries.append({"binding": 0, "visibility": compute, "buffer": {"type": "uniform"}})
        try:
            layout = device.create_bind_group_layout(entries=entries)
            pipeline = device.create_compute_pipeline(
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={
                    "module": self.provider.shader_module(device, text, trusted=self.trusted),
                    "entry_point": "main",
                },
            )
        except Exception as error:
            if _is_lost(error) or _is_out_of_memory(error):
                raise
            raise ShaderError(f"a kernel did not compile on this driver: {error}") from error
        return Pipeline(face, layout, pipeline)

    def _constant(self, data: bytes, usage: int) -> Any:
        data = data or bytes(16)
        buffer = self._create(align(len(data), 16), usage)
        self.gpu_device.queue.write_buffer(buffer, 0, data + bytes(-len(data) % 16))
        return buffer

    # ---- running ----

    def run(self, compiled: CompiledPlan, buffers: Buffers, into: np.ndarray | None = None) -> None:
        self._submit(compiled, _steps(compiled, buffers), buffers, into)

    def prepare(self, compiled: CompiledPlan, buffers: Buffers) -> None:
        self._submit(compiled, compiled.prepare, buffers)

    def _submit(
        self,
        compiled: CompiledPlan,
        steps: list[Step],
        buffers: Buffers,
        into: np.ndarray | None = None,
    ) -> None:
        with self._guard:
            groups = self._bind(compiled, steps, buffers)
            encoder = self.gpu_device.create_command_encoder()
            compute = encoder.begin_compute_pass()
            _dispatch(compute, steps, groups)
            compute.end()
            # One submit for both: on a small problem a second one costs as much as the kernel.
            staging = None if into is None else self._stage(encoder, buffers["out"], into.nbytes)
            self.gpu_device.queue.submit([encoder.finish()])
            if into is not None:
                self._fetch(staging, into)

    def record(self, compiled: CompiledPlan, buffers: Buffers, encoder: Any) -> None:
        """Records the plan's dispatches into a command encoder or a compute pass."""
        if hasattr(encoder, "dispatch_workgroups"):
            with self._guard:
                steps = _steps(compiled, buffers)
                _dispatch(encoder, steps, self._bind(compiled, steps, buffers))
        elif hasattr(encoder, "begin_compute_pass"):
            compute = encoder.begin_compute_pass()
            try:
                self.record(compiled, buffers, compute)
            finally:  # an open pass would make the caller's encoder useless
                compute.end()
        else:
            raise DtypeError(
                "encoder must be a GPUCommandEncoder or a GPUComputePassEncoder on "
                f"{self.identity.adapter}, got a {kind_of(encoder)}"
            )

    def _bind(self, compiled: CompiledPlan, steps: list[Step], buffers: Buffers) -> list[Any]:
        """The bind group of each step, kept from an earlier call where it was the same."""
        # The same buffers serve prepare and the rest, which bind different regions of them.
        preparing = steps is compiled.prepare
        key = (id(compiled), preparing, *buffers, *map(id, buffers.values()))
        found = self._groups.get(key)
        if found is not None:
            self._groups.move_to_end(key)
            return found[1]
        callers = {role: b for role, b in buffers.items() if not self.owns(b)}
        for role, buffer in callers.items():
            self._check_caller_buffer(buffer, "STORAGE", role)
        whole: dict[str, Any] = {
            "tables": compiled.tables,
            "workspace": self._scratch_of("workspace", compiled.plan.workspace),
            **{role: self._scratch_of(role, size) for role, size in compiled.plan.staged},
            **buffers,
        }
        if "prepared" not in whole:
            whole["prepared"] = self._scratch_of("prepared", compiled.plan.prepared)
        try:
            groups = [self._bind_group(compiled, step, whole) for step in steps]
        except self.provider.api.GPUValidationError:
            for role, buffer in callers.items():
                self._try_to_bind(buffer, role)  # says which one it was
            raise
        # A caller's own buffer may be destroyed later, and only a new bind group would notice.
        if not callers:
            self._groups[key] = ((compiled, whole), groups)
            if len(self._groups) > BIND_GROUPS:
                self._groups.popitem(last=False)
        return groups

    def _bind_group(self, compiled: CompiledPlan, step: Step, whole: dict[str, Any]) -> Any:
        entries = [
            {
                "binding": 0,
                "resource": {
                    "buffer": compiled.uniform,
                    "offset": step.params[0],
                    "size": step.params[1],
                },
            }
        ]
        for index, region in step.bindings:
            buffer = whole[region.role]
            size = self._span(compiled.plan, region, buffer.size - region.offset)
            resource = {"buffer": buffer, "offset": region.offset, "size": size}
            entries.append({"binding": index, "resource": resource})
        return self.gpu_device.create_bind_group(layout=step.pipeline.layout, entries=entries)

    @staticmethod
    def _span(plan: Plan, region: Region, available: int) -> int:
        """Bytes to bind: the region's own size, or its tensor's (a pooled buffer is larger)."""
        problem = plan.problem
        if region.size is None:
            tensors = {
                "input": problem.input_bytes,
                "weight": problem.weight_bytes,
                "bias": problem.k * problem.itemsize,
                "residual": problem.residual_bytes,
                "out": problem.out_bytes,
            }
            size = tensors[region.role] - region.offset
        else:
            size = region.size
        size = align(size, 4)
        if size > available:
            raise ProblemError(
                f"the buffer for {region.role!r} has {available} bytes from offset "
                f"{region.offset}, the plan needs {size}"
            )
        return size

    def _scratch_of(self, role: Role, nbytes: int) -> Any:
        """Scratch memory, shared by all plans: what is submitted runs one after the other."""
        held = self._scratch.get(role)
        if nbytes and (held is None or held.size < nbytes):
            self._scratch.pop(role, None)
            self._groups.clear()  # they hold the smaller one
            held = self._scratch[role] = self._create_storage(align(nbytes, 4))
        return held

    def trim(self) -> None:
        """Gives pooled and scratch memory back to the driver."""
        with self._guard:
            self._pool.clear()
            self._staging.clear()
            self._scratch.clear()
            self._groups.clear()

    # ---- timing ----

    def time(
        self, trials: Sequence[tuple[CompiledPlan, Buffers]], *, repeats: Sequence[int]
    ) -> list[float]:
        with self._guard:
            if self._timer is None:
                self._timer = _Timer(self)
            return [
                self._timer.time(compiled, buffers, count)
                for (compiled, buffers), count in zip(trials, repeats, strict=True)
            ]


class _Guard:
    """Holds a device for one thread, and says in our own words what went wrong there."""

    def __init__(self, backend: WebGpuBackend) -> None:
        self._backend = backend
        self._lock = threading.RLock() if backend.provider.threadsafe else backend.provider.lock
        self.pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self.pid:
            self._backend.provider.refuse_fork()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        if isinstance(error, Exception) and not isinstance(error, WgpuConvError):
            self._translate(error)

    def _translate(self, error: Exception) -> None:
        adapter = self._backend.identity.adapter
        if _is_lost(error):
            self._backend.lost = True
            raise DeviceLostError(
                f"the device {adapter} is lost ({_first_line(error)}); "
                "make a new Device and call again"
            ) from error
        if _is_out_of_memory(error):
            raise OutOfDeviceMemoryError(
                f"the device {adapter} has no memory left for this call "
                f"({_first_line(error)}); use a smaller batch or workspace_limit"
            ) from error
        if isinstance(error, self._backend.provider.api.GPUError):
            raise DeviceError(f"the device {adapter} refused the call: {error}") from error


_PROBE = """
@group(0) @binding(1) var<storage, read> data: array<u32>;
@compute @workgroup_size(1)
fn main() { _ = data[0]; }
"""


class _Timer:
    """Times runs of a plan by timestamp queries, or by the wall clock where there are none."""

    def __init__(self, backend: WebGpuBackend) -> None:
        self._backend = backend
        device, usage = backend.gpu_device, backend.provider.api.BufferUsage
        self._queries = None
        if "timestamp-query" in device.features:
            self._queries = device.create_query_set(type="timestamp", count=2)
            self._period = backend.provider.timestamp_period(device) * 1e-9
            self._resolve = device.create_buffer(
                size=16, usage=usage.QUERY_RESOLVE | usage.COPY_SRC
            )
        self._ticks = backend._create_staging(16)

    def time(self, compiled: CompiledPlan, buffers: Buffers, repeats: int) -> float:
        backend, device = self._backend, self._backend.gpu_device
        encoder = device.create_command_encoder()
        stamps = {}
        if self._queries is not None:
            stamps["timestamp_writes"] = {
                "query_set": self._queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        compute = encoder.begin_compute_pass(**stamps)
        for _ in range(repeats):
            backend.record(compiled, buffers, compute)
        compute.end()
        if self._queries is not None:
            encoder.resolve_query_set(self._queries, 0, 2, self._resolve, 0)
            encoder.copy_buffer_to_buffer(self._resolve, 0, self._ticks, 0, 16)
        begin = time.perf_counter()
        device.queue.submit([encoder.finish()])
        self._ticks.map_sync("READ")
        wall = time.perf_counter() - begin
        ticks = np.frombuffer(self._ticks.read_mapped(), np.uint64).copy()
        self._ticks.unmap()
        if self._queries is not None and ticks[1] > ticks[0]:
            stamped = float(ticks[1] - ticks[0]) * self._period
            if stamped <= wall * 1.05:  # else the clock is not what it says
                return stamped / repeats
        return wall / repeats


def identity_of(provider: Provider, info: Any, *, trusted: bool = True) -> Identity:
    """The identity of an adapter, by its info."""
    return Identity(
        backend=f"{provider.name}{'' if trusted else '-checked'}",
        adapter=adapter_name(info),
        driver=info["description"] or info["vendor"],
        versions=provider.version,
    )


def adapter_name(info: Any) -> str:
    return f"{info['device']} ({info['backend_type']})"


def _refuse_to_destroy() -> None:
    raise ProblemError("this buffer belongs to wgpuconv; drop its Tensor instead of destroying it")


def _steps(compiled: CompiledPlan, buffers: Buffers) -> list[Step]:
    return compiled.steps if "prepared" in buffers else compiled.everything


def _dispatch(compute: Any, steps: list[Step], groups: list[Any]) -> None:
    for step, group in zip(steps, groups, strict=True):
        compute.set_pipeline(step.pipeline.pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*step.grid)


def open_device(provider: Provider, adapter: Any, limits: Limits | None = None) -> Any:
    """A wgpu device with the features we can use and the adapter's own limits, or ``limits``."""
    features = [f for f in _WANTED_FEATURES if f in adapter.features]
    wanted = {
        name: adapter.limits[name] if limits is None else getattr(limits, field)
        for field, name in _WANTED_LIMITS.items()
        if name in adapter.limits
    }
    return provider.request_device(adapter, features, wanted)


def _facts(device: Any) -> Facts:
    limits = Limits(
        **{
            field: int(device.limits[name])
            for field, name in _WANTED_LIMITS.items()
            if name in device.limits
        }
    )
    # Kernels count elements in 32 bits, some of them with a sign: f16 fits up to here.
    limits = replace(limits, max_binding=min(limits.max_binding, 2**32 - 4))
    kind = device.adapter_info["adapter_type"]
    # A discrete card of the middle. More operations a byte make the model shy of all that writes
    # intermediate values, and it is more often wrong about other cards (see bench/NOTES.md).
    guesses = {
        "DiscreteGPU": {"bandwidth": 1e12, "flops": 25e12, "cores": 48, "launch": 2e-6},
        "IntegratedGPU": {"bandwidth": 80e9, "flops": 3e12, "cores": 16},
        "CPU": {
            "bandwidth": 5e9,
            "flops": 20e9,
            "launch": 50e-6,
            "latency": 5e-9,
            "cores": os.cpu_count() or 1,
        },
    }
    return Facts(
        limits=limits,
        f16="shader-f16" in device.features,
        software=kind == "CPU",
        workspace_limit=max(min(limits.max_buffer // 4, 1 << 30), min(limits.max_binding, 1 << 27)),
        **guesses.get(kind, {}),  # type: ignore[arg-type]
    )


def _is_lost(error: Exception) -> bool:
    # 'Parent device is lost' (wgpu-native), '[Device "name"] is lost' (Dawn)
    return re.search(r"device\b[^\n]* is lost|device lost", str(error), re.I) is not None


def _is_out_of_memory(error: Exception) -> bool:
    return "not enough memory" in str(error).lower() or isinstance(error, MemoryError)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
