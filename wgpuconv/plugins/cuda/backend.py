"""The CUDA backend: runs plans through cupy, on the stream that is current for the caller.

Kernels are compiled by NVRTC for the device's own architecture and kept on disk by cupy. Memory
comes from cupy's pool, which hands a freed block only to work that is queued behind it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from ...algorithms import Algorithm
from ...backends.base import Buffers, Identity
from ...errors import (
    DeviceError,
    DeviceLostError,
    DtypeError,
    ForkedProcessError,
    OutOfDeviceMemoryError,
    ProblemError,
    ShaderError,
    UnsupportedFeatureError,
    WgpuConvError,
    kind_of,
)
from ...facts import Limits
from ...plan import READ, Pass, Plan, Region, Role, Shader, align
from . import entry, launch
from .algorithms import ALGORITHMS
from .arrays import CudaGuests, Stream
from .buffer import ALIGNMENT, CudaBuffer
from .facts import AMPERE, HOPPER, CudaFacts
from .launch import Grid
from .source import Interface, interface, pack_params, specialise
from .tensor_maps import MAP_BYTES, tensor_maps

OPTIONS = ("--std=c++17",)
HOPPER_OPTIONS = ("--gpu-architecture=sm_90a",)
"""Without it NVRTC compiles for sm_90, which has no wgmma."""
GRAPH_RUNS = 20
"""Runs that a timed graph holds: launching from Python takes longer than a small kernel."""


_UNUSED = ctypes.create_string_buffer(MAP_BYTES)
_NO_MAP = ctypes.addressof(_UNUSED)
"""For a kernel that is specialised not to read its map."""


@dataclass(frozen=True)
class Kernel:
    interface: Interface
    function: Any
    """cupy's RawKernel, which keeps the module loaded."""
    handle: int


class Step:
    """One launch of a kernel. The driver reads its arguments before a launch returns, so that one
    set of them, which only pointers are written into, serves all calls."""

    def __init__(
        self,
        kernel: Kernel,
        params: bytes,
        regions: Sequence[Region],
        maps: Sequence[tuple[Region, launch.EncodedMap | None]],
        grid: Grid,
        *,
        early: bool,
    ) -> None:
        self.regions = regions
        """In the order of the kernel's pointers."""
        self.places = [(i, region.role, region.offset) for i, region in enumerate(regions)]
        self.pointers = (ctypes.c_uint64 * len(regions))()
        self.maps = [(m, region.role, region.offset) for region, m in maps if m is not None]
        self._kernel = kernel  # its module stays loaded
        self._params = ctypes.create_string_buffer(params, max(len(params), 1))
        first = ctypes.addressof(self.pointers)
        pointers = (first + 8 * i for i in range(len(regions)))
        encoded = (_NO_MAP if m is None else m.address for _, m in maps)
        values = [ctypes.addressof(self._params), *pointers, *encoded]
        self._values = (ctypes.c_void_p * len(values))(*values)
        face = kernel.interface
        self.config = launch.config(grid, face.threads, face.shared_bytes, early=early)
        self.launch = (
            ctypes.addressof(self.config),
            kernel.handle,
            ctypes.addressof(self._values),
        )
        """What Driver.launch takes."""


class CompiledPlan:
    """Kernels, parameters and tables of one plan."""

    def __init__(self, plan: Plan, prepare: list[Step], steps: list[Step], tables: Any) -> None:
        self.plan = plan
        self.prepare = prepare
        self.steps = steps
        self.everything = [*prepare, *steps]
        self.tables = tables
        problem, ends = plan.problem, dict[str, int]()
        whole = {
            "input": problem.input_bytes,
            "weight": problem.weight_bytes,
            "bias": problem.k * problem.itemsize,
            "residual": problem.residual_bytes,
            "out": problem.out_bytes,
        }
        for region in (region for step in self.everything for region in step.regions):
            size = whole[region.role] if region.size is None else region.size
            ends[region.role] = max(ends.get(region.role, 0), region.offset + size)
        self.needs = ends
        """Bytes of each buffer that are used."""
        scratch: list[tuple[Role, int]] = [
            ("workspace", plan.workspace),
            ("prepared", plan.prepared),
            *plan.staged,
        ]
        self.scratch = [(role, size) for role, size in scratch if size]
        """What the backend provides where the caller does not."""


class CudaBackend:
    """One CUDA device."""

    has_probes = True
    keeps_buffers = False

    def __init__(
        self, api: Any, ordinal: int, *, algorithms: tuple[Algorithm, ...] = ALGORITHMS
    ) -> None:
        self.api = api
        self.ordinal = ordinal
        self.algorithms = algorithms
        self.capability = entry.capability(api, ordinal)
        self.facts = _facts(api, ordinal, self.capability)
        runtime = api.cuda.runtime
        major, minor = self.capability
        self.identity = Identity(
            backend="cuda",
            adapter=entry.name(api, ordinal),
            driver=f"CUDA {entry.version(runtime.driverGetVersion())}",
            versions=(
                f"cupy {api.__version__}, runtime {entry.version(runtime.runtimeGetVersion())}, "
                f"capability {major}.{minor}"
            ),
        )
        self._device = api.cuda.Device(ordinal)
        self._options = OPTIONS + (HOPPER_OPTIONS if self.capability == HOPPER else ())
        self._driver = launch.Driver()
        self._early = launch.starts_early(self.capability, runtime.driverGetVersion())
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._kernels: dict[Shader, Kernel] = {}
        self._scratch: dict[tuple[Role, int], CudaBuffer] = {}
        self._timing_stream: Any = None
        self.lost = False
        self.guard = _Guard(self)
        self.guests = CudaGuests(self)

    @property
    def usable(self) -> bool:
        """Whether calls can still succeed: no kernel has failed, and no fork lies between."""
        return not self.lost and self._pid == os.getpid()

    # ---- buffers ----

    def allocate(self, nbytes: int) -> CudaBuffer:
        with self.guard:
            most = self.facts.limits.max_buffer
            if nbytes > most:
                raise UnsupportedFeatureError(
                    f"a tensor of {nbytes} bytes is larger than the memory of "
                    f"{self.identity.adapter} ({most} bytes); process the batch in parts"
                )
            size = align(max(nbytes, ALIGNMENT), ALIGNMENT)
            memory = self.api.cuda.alloc(size)
            return CudaBuffer(memory, int(memory.ptr), size)

    def free(self, buffer: CudaBuffer) -> None:
        """Nothing to do: cupy's pool takes the memory back when nobody holds the buffer."""

    def write(self, buffer: CudaBuffer, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        with self.guard:
            self._move(buffer, array, self.api.cuda.runtime.memcpyHostToDevice)

    def read(self, buffer: CudaBuffer, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        with self.guard:
            self._move(buffer, array, self.api.cuda.runtime.memcpyDeviceToHost)

    def _move(self, buffer: CudaBuffer, array: np.ndarray, direction: int) -> None:
        self._check_size(buffer, array.nbytes, "array")
        runtime, stream = self.api.cuda.runtime, self._stream
        ends = (buffer.pointer, array.ctypes.data)
        to, from_ = ends if direction == runtime.memcpyHostToDevice else ends[::-1]
        runtime.memcpyAsync(to, from_, array.nbytes, direction, stream)
        runtime.streamSynchronize(stream)  # else pinned memory of the caller's is still in use

    def copy(self, source: CudaBuffer, target: CudaBuffer, nbytes: int) -> None:
        with self.guard:
            self._check_size(source, nbytes, "source")
            self._check_size(target, nbytes, "target")
            runtime = self.api.cuda.runtime
            runtime.memcpyAsync(
                target.pointer,
                source.pointer,
                nbytes,
                runtime.memcpyDeviceToDevice,
                self._stream,
            )

    def check_usable(self, buffer: Any) -> None:
        if not isinstance(buffer, CudaBuffer):
            raise DtypeError(
                f"on a CUDA device a tensor's buffer is a CudaBuffer, got {kind_of(buffer)}"
            )
        if buffer.pointer % ALIGNMENT:
            raise ProblemError(
                f"a buffer must begin at a multiple of {ALIGNMENT} bytes, got {buffer.pointer:#x}"
            )

    @staticmethod
    def _check_size(buffer: CudaBuffer, nbytes: int, what: str) -> None:
        if buffer.size < nbytes:
            raise ProblemError(f"the {what} needs {nbytes} bytes, the buffer has {buffer.size}")

    @property
    def _stream(self) -> int:
        """The stream that is current for the calling thread."""
        return int(self.api.cuda.get_current_stream(self.ordinal).ptr)

    # ---- compiling ----

    def compile(self, plan: Plan) -> CompiledPlan:
        with self.guard:
            prepare = [self._step(p) for p in plan.prepare]
            steps = [self._step(p) for p in plan.passes]
            tables = self.allocate(len(plan.tables))
            self.write(tables, np.frombuffer(plan.tables, np.uint8))
            return CompiledPlan(plan, prepare, steps, tables)

    def warm(self, plans: Sequence[Plan]) -> None:
        """Compiles what several plans need side by side: NVRTC takes up to seconds a kernel."""
        passes = [p for plan in plans for p in (*plan.prepare, *plan.passes)]
        missing = list({p.shader for p in passes} - self._kernels.keys())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = [pool.submit(self._build, shader) for shader in missing]
        for shader, future in zip(missing, built, strict=True):
            if future.exception() is None:  # else it says so when its plan is compiled
                self._kernels.setdefault(shader, future.result())

    def _step(self, step: Pass) -> Step:
        kernel = self._kernel_of(step.shader)
        face, regions = kernel.interface, dict(step.bindings)
        if set(face.bindings) != set(regions):
            raise KeyError(
                f"{step.shader.file}.cu and the plan disagree on bindings: "
                f"{sorted(set(face.bindings) ^ set(regions))}"
            )
        encoded = {
            name: launch.EncodedMap(self._driver, described)
            for name, described in tensor_maps(step).items()
        }
        return Step(
            kernel,
            pack_params(step, face.params),
            [regions[name] for name in face.bindings],
            [(regions[name], encoded.get(name)) for name in face.maps],
            step.grid,
            early=self._early,
        )

    def _kernel_of(self, shader: Shader) -> Kernel:
        found = self._kernels.get(shader)
        if found is None:
            found = self._kernels[shader] = self._build(shader)
        return found

    def _build(self, shader: Shader) -> Kernel:
        text = specialise(shader)
        face = interface(text)
        limits = self.facts.limits
        if face.shared_bytes > limits.max_workgroup_storage:
            raise ShaderError(
                f"a kernel wants {face.shared_bytes} bytes of shared memory, this device has "
                f"{limits.max_workgroup_storage}"
            )
        with self._device:  # a thread of its own has its own current device
            try:
                module = self.api.RawModule(code=text, options=self._options, backend="nvrtc")
                function = module.get_function(face.name)
                if face.shared_bytes > 48 << 10:
                    function.max_dynamic_shared_size_bytes = face.shared_bytes
                handle = int(function.kernel.ptr)
            except self.api.cuda.compiler.CompileException as error:
                if "nvrtc-builtins" in str(error):  # the half of NVRTC that it loads itself
                    raise self._no_compiler(error) from error
                raise ShaderError(f"{shader.file}.cu did not compile: {error}") from error
            except (ImportError, OSError, RuntimeError) as error:
                raise self._compiler_failed(shader, error) from error
        return Kernel(face, function, handle)

    def _compiler_failed(self, shader: Shader, error: Exception) -> WgpuConvError:
        text = str(error)
        if "nvrtc" in text.lower() and "nvrtc_error" not in text.lower():  # it cannot be loaded
            return self._no_compiler(error)
        return ShaderError(f"{shader.file}.cu cannot be loaded on this device: {text}")

    def _no_compiler(self, error: Exception) -> WgpuConvError:
        toolkit = self.api.cuda.runtime.runtimeGetVersion() // 1000
        return DeviceError(
            f"kernels are compiled by NVRTC, which cannot be loaded ({error}); install it "
            f"with: pip install 'cupy-cuda{toolkit}x[ctk]'"
        )

    # ---- running ----

    def run(
        self,
        compiled: CompiledPlan,
        buffers: Buffers,
        into: np.ndarray | None = None,
        *,
        stream: int | None = None,
    ) -> None:
        """On another stream than the current one, where it is given."""
        with self.guard:
            on = self._stream if stream is None else stream
            self._submit(compiled, _steps(compiled, buffers), buffers, on)
            if into is not None:
                self.read(buffers["out"], into)

    def prepare(self, compiled: CompiledPlan, buffers: Buffers) -> None:
        with self.guard:
            stream = self._stream
            self._submit(compiled, compiled.prepare, buffers, stream)
            self.api.cuda.runtime.streamSynchronize(stream)  # runs may be on another stream

    def record(self, compiled: CompiledPlan, buffers: Buffers, encoder: Any) -> None:
        """Queues the plan's launches on a stream of cupy's.

        That may be capturing a graph, if the plan was queued there before: nothing may be allocated
        in a capture."""
        if not hasattr(encoder, "ptr"):
            raise DtypeError(
                "encoder must be a stream of cupy (anything with .ptr) on "
                f"{self.identity.adapter}, got a {kind_of(encoder)}"
            )
        for role, buffer in buffers.items():
            if not isinstance(buffer, CudaBuffer):
                raise DtypeError(
                    f"{role} must be a wgpuconv.Tensor on {self.identity.adapter}, got a "
                    f"{kind_of(buffer)}"
                )
        with self.guard:
            self._submit(compiled, _steps(compiled, buffers), buffers, int(encoder.ptr))

    def _submit(
        self, compiled: CompiledPlan, steps: list[Step], buffers: Buffers, stream: int
    ) -> None:
        first = self._pointers(compiled, steps, buffers, stream)
        for step in steps:
            for i, role, offset in step.places:
                step.pointers[i] = first[role] + offset
            for encoded, role, offset in step.maps:
                encoded.point_to(first[role] + offset)
            step.config.stream = stream
            self._driver.launch(*step.launch)

    def _pointers(
        self, compiled: CompiledPlan, steps: list[Step], buffers: Buffers, stream: int
    ) -> dict[str, int]:
        """Where the buffer of each role begins."""
        found = {"tables": compiled.tables.pointer}
        needs, out = compiled.needs, buffers.get("out")
        for role, buffer in buffers.items():
            if needs.get(role, 0) > buffer.size:
                raise ProblemError(
                    f"the buffer for {role!r} has {buffer.size} bytes, the plan needs {needs[role]}"
                )
            if out is not None and role in READ and out.overlaps(buffer):
                # Views of a caller's array may share memory without being one object.
                raise ProblemError(f"out must not share memory with the {role}; give another array")
            found[role] = buffer.pointer
        for role, size in compiled.scratch:
            if role not in found:
                found[role] = self._scratch_of(role, size, stream).pointer
        return found

    def _scratch_of(self, role: Role, nbytes: int, stream: int) -> CudaBuffer:
        """Scratch memory, shared by all plans of a stream: they run one after the other."""
        held = self._scratch.get((role, stream))
        if held is None or held.size < nbytes:
            self._scratch.pop((role, stream), None)
            # The pool hands memory out again to the stream that it was allocated on.
            external = self.api.cuda.Stream.from_external
            with nullcontext() if stream == self._stream else external(Stream(stream)):
                held = self._scratch[role, stream] = self.allocate(nbytes)
        return held

    def trim(self) -> None:
        """Gives pooled and scratch memory back to the driver."""
        with self.guard:
            self._scratch.clear()
            self.api.get_default_memory_pool().free_all_blocks()

    # ---- timing ----

    def time(
        self, trials: Sequence[tuple[CompiledPlan, Buffers]], *, repeats: Sequence[int]
    ) -> list[float]:
        with self.guard:
            self.api.cuda.get_current_stream(self.ordinal).synchronize()  # what fills the buffers
            if self._timing_stream is None:
                self._timing_stream = self.api.cuda.Stream(non_blocking=True)
            return [
                self._time(compiled, buffers, count)
                for (compiled, buffers), count in zip(trials, repeats, strict=True)
            ]

    def _time(self, compiled: CompiledPlan, buffers: Buffers, repeats: int) -> float:
        cuda, stream = self.api.cuda, self._timing_stream
        steps, runs = _steps(compiled, buffers), min(repeats, GRAPH_RUNS)
        launches = -(-repeats // runs)
        # Nothing may be allocated in a capture.
        self._pointers(compiled, steps, buffers, stream.ptr)
        with stream:
            stream.begin_capture()
            try:
                for _ in range(runs):
                    self._submit(compiled, steps, buffers, stream.ptr)
            finally:
                graph = stream.end_capture()
            begin, end = cuda.Event(), cuda.Event()
            graph.upload()
            begin.record(stream)
            for _ in range(launches):
                graph.launch()
            end.record(stream)
            end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) * 1e-3 / (runs * launches)

    # ---- errors ----

    def enter(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"{self.identity.adapter} was opened before this process was forked, and CUDA does "
                "not survive a fork; open the device in the child, or start it with 'spawn'"
            )
        self._lock.acquire()
        try:
            self._device.__enter__()
        except BaseException:
            self._lock.release()
            raise

    def leave(self) -> None:
        try:
            self._device.__exit__(None, None, None)
        finally:
            self._lock.release()

    def translated(self, error: BaseException) -> WgpuConvError | None:
        """What went wrong on the device, in our own words; None where it was something else."""
        text, adapter = str(error), self.identity.adapter
        ours = (self.api.cuda.runtime.CUDARuntimeError, self._driver.error)
        full = "MemoryAllocation" in text or "OUT_OF_MEMORY" in text
        # cupy's and PyTorch's are called so.
        if type(error).__name__ == "OutOfMemoryError" or (isinstance(error, ours) and full):
            return OutOfDeviceMemoryError(
                f"{adapter} has no memory left for this call ({text}); use a smaller batch or "
                "workspace_limit"
            )
        if not isinstance(error, ours):
            return None
        try:
            self.api.cuda.runtime.deviceSynchronize()
        except self.api.cuda.runtime.CUDARuntimeError:
            # What a failed kernel leaves behind: every later call of this process fails too.
            self.lost = True
            return DeviceLostError(
                f"a kernel failed on {adapter} ({text}); CUDA cannot go on in this process, "
                "start a new one"
            )
        return DeviceError(f"{adapter} refused the call: {text}")


class _Guard:
    """Holds a device for one thread, and says in our own words what went wrong there. (A class,
    since a generator's context manager takes longer than a launch.)"""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        self._backend.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self._backend.leave()
        try:
            ours = None if isinstance(error, WgpuConvError) else self._backend.translated(error)
        finally:
            self._backend.leave()
        if ours is not None:
            raise ours from error


def _steps(compiled: CompiledPlan, buffers: Buffers) -> list[Step]:
    return compiled.steps if "prepared" in buffers else compiled.everything


_LANES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""f32 lanes of a multiprocessor, by compute capability; 128 elsewhere."""
_MATRIX = {(7, 5): 512, (8, 0): 1024, (8, 6): 512, (8, 7): 1024, (8, 9): 512, (9, 0): 1280}
"""f16 multiply-adds that mma.sync does in a cycle of a multiprocessor (guesses for planning)."""


def _facts(api: Any, ordinal: int, capability: tuple[int, int]) -> CudaFacts:
    runtime = api.cuda.runtime

    def attribute(name: str) -> int:
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), ordinal))

    cores, clock = attribute("MultiProcessorCount"), 1e3 * attribute("ClockRate")
    memory_clock, bus = 1e3 * attribute("MemoryClockRate"), attribute("GlobalMemoryBusWidth")
    with api.cuda.Device(ordinal):
        total = int(runtime.memGetInfo()[1])
    limits = Limits(
        max_binding=min(total, 2**32 - 1024),  # f16 elements, and a tile more, count in 31 bits
        max_buffer=total,
        max_invocations=1024,
        max_workgroup_size=1024,
        max_workgroup_storage=attribute("MaxSharedMemoryPerBlockOptin"),
        max_workgroups=2**31 - 1,
        max_storage_buffers=64,
        storage_alignment=256,
        uniform_alignment=256,
    )
    return CudaFacts(
        limits=limits,
        f16=True,
        bf16=True,
        tf32=capability >= AMPERE,
        weight_last=True,
        capability=capability,
        bandwidth=0.9 * 2 * memory_clock * bus / 8,
        flops=2.0 * _LANES.get(capability, 128) * cores * clock,
        matrix_flops=2.0 * _MATRIX.get(capability, 1024) * cores * clock,
        launch=1.5e-6,
        cores=cores,
        latency=400e-9,
        workspace_limit=max(min(total // 8, 4 << 30), 64 << 20),
    )
