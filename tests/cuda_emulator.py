"""A backend that runs the plans of CUDA devices on the CPU, for machines without a GPU.

Each specialised kernel is compiled by g++, with ``cuda_emulator.h`` in the place of the header
that holds the plugin's assembly.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from wgpuconv.backends.base import Identity
from wgpuconv.facts import Limits
from wgpuconv.plan import Pass, Plan, Region
from wgpuconv.plugins.cuda.algorithms import ALGORITHMS
from wgpuconv.plugins.cuda.facts import CudaFacts
from wgpuconv.plugins.cuda.source import KERNEL_DIR, Interface, interface, pack_params, specialise
from wgpuconv.plugins.cuda.tensor_maps import TensorMap, tensor_maps

HEADER = Path(__file__).with_name("cuda_emulator.h")
HOPPER = CudaFacts(
    limits=Limits(
        max_binding=2**32 - 16,
        max_buffer=140 << 30,
        max_invocations=1024,
        max_workgroup_size=1024,
        max_workgroup_storage=227 << 10,
        max_workgroups=2**31 - 1,
        max_storage_buffers=64,
    ),
    f16=True,
    bf16=True,
    tf32=True,
    weight_last=True,
    capability=(9, 0),
    bandwidth=4.3e12,
    flops=67e12,
    matrix_flops=620e12,
    launch=1.5e-6,
    cores=132,
    latency=400e-9,
    workspace_limit=4 << 30,
)
"""Facts of an H200, as the plugin reads them."""

_OPTIONS = [
    "-std=c++17",
    "-O0",
    "-mf16c",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-w",
    "-Wno-psabi",
]

_WRAPPER = """
template <typename... Pointers>
constexpr auto places(void (*)(Params, Pointers...)) {{
  return std::index_sequence_for<Pointers...>();
}}

static const void* given_params;
static void** given_pointers;

extern "C" const char* emulated_launch(unsigned grid, int threads, unsigned shared_bytes,
                                       int cluster, const void* params, void** pointers,
                                       const char** begins, const char** ends, int arrays) {{
  given_params = params;
  given_pointers = pointers;
  emulator::arrays.clear();
  for (int i = 0; i < arrays; i++) {{
    emulator::arrays.push_back({{begins[i], ends[i]}});
  }}
  return emulator::launch(grid, threads, shared_bytes, cluster, [] {{
    emulator::call(&{name}, given_params, given_pointers, places(&{name}));
  }});
}}
"""


def compiler() -> str | None:
    return shutil.which("g++")


class Emulator:
    """A backend as far as tests need it; a buffer is a numpy array of bytes."""

    usable = True
    identity = Identity("cuda", "an emulated card", "CUDA 13.0", "cupy 14.0, capability 9.0")

    def __init__(self, folder: Path | None = None) -> None:
        self.facts: Any = HOPPER
        self.algorithms = ALGORITHMS
        self._folder = folder or Path(tempfile.mkdtemp(prefix="wgpuconv-cuda-"))
        self._libraries: dict[str, Any] = {}

    @property
    def device(self) -> Any:
        """What contract.verify takes for a device."""
        return SimpleNamespace(backend=self, facts=self.facts)

    def allocate(self, nbytes: int) -> np.ndarray:
        return filled(nbytes)

    def free(self, buffer: np.ndarray) -> None:
        pass

    def copy(self, source: np.ndarray, target: np.ndarray, nbytes: int) -> None:
        target[:nbytes] = source[:nbytes]

    def write(self, buffer: np.ndarray, array: np.ndarray) -> None:
        buffer[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def read(self, buffer: np.ndarray, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = buffer[: array.nbytes]

    def compile(self, plan: Plan) -> Any:
        return SimpleNamespace(plan=plan)

    def prepare(self, compiled: Any, buffers: dict[str, np.ndarray]) -> None:
        for step in compiled.plan.prepare:
            self._launch(compiled.plan, step, buffers)

    def run(
        self, compiled: Any, buffers: dict[str, np.ndarray], into: np.ndarray | None = None
    ) -> None:
        plan = compiled.plan
        buffers = {"workspace": filled(plan.workspace), **buffers}
        if "prepared" not in buffers:
            buffers["prepared"] = filled(plan.prepared)
            self.prepare(compiled, buffers)
        for step in plan.passes:
            self._launch(plan, step, buffers)
        if into is not None:
            self.read(buffers["out"], into)

    def time(self, trials: Any, *, repeats: Any) -> list[float]:
        """By the cost model."""
        plans = [compiled.plan for compiled, _ in trials]
        costs = {a.name: a.cost for a in self.algorithms}
        return [costs[p.algorithm](p.problem, p.config, self.facts) for p in plans]

    def _launch(self, plan: Plan, step: Pass, buffers: dict[str, np.ndarray]) -> None:
        tables = filled(len(plan.tables))
        tables[: len(plan.tables)] = np.frombuffer(plan.tables, np.uint8)
        whole = buffers | {"tables": tables}
        text = specialise(step.shader)
        face = interface(text)
        cluster = re.search(r"^constexpr int CLUSTER = (\d+);", text, flags=re.M)
        library = self._library(text, face)
        regions = dict(step.bindings)
        assert set(regions) == set(face.bindings)
        views = [_view(whole[regions[n].role], regions[n]) for n in face.bindings]
        described = tensor_maps(step)
        maps = [
            tensor_map(described[n], whole[regions[n].role], regions[n])
            if n in described
            else filled(128)
            for n in face.maps
        ]
        pointers = (ctypes.c_void_p * (len(views) + len(maps)))(
            *(v.ctypes.data for v in [*views, *maps])
        )
        ends = (ctypes.c_void_p * len(views))(*(v.ctypes.data + v.nbytes for v in views))
        fault = library.emulated_launch(
            step.grid[0],
            face.threads,
            face.shared_bytes,
            1 if cluster is None else int(cluster[1]),
            pack_params(step, face.params),
            pointers,
            pointers,
            ends,
            len(views),
        )
        assert not fault, f"{step.shader.file}: {fault.decode()}"

    def _library(self, text: str, face: Interface) -> Any:
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        if name not in self._libraries:
            source, built = self._folder / f"{name}.cpp", self._folder / f"{name}.so"
            source.write_text(emulated(text) + _WRAPPER.format(name=face.name))
            options = [*_OPTIONS, "-include", str(self._standard_headers())]
            subprocess.run([compiler(), *options, str(source), "-o", str(built)], check=True)
            self._libraries[name] = ctypes.CDLL(str(built))
            self._libraries[name].emulated_launch.restype = ctypes.c_char_p
        return self._libraries[name]

    def _standard_headers(self) -> Path:
        """Compiled once for all kernels, of whose time they take a quarter."""
        headers = self._folder / "standard.h"
        if not headers.exists():
            found = re.findall(r"^#include <.*>$", HEADER.read_text(encoding="utf-8"), flags=re.M)
            headers.write_text("\n".join(found), encoding="utf-8")
            command = [compiler(), *_OPTIONS, "-x", "c++-header", str(headers)]
            subprocess.run([*command, "-o", f"{headers}.gch"], check=True)
        return headers


def filled(nbytes: int) -> np.ndarray:
    """Memory of NaN, aligned as that of a GPU is."""
    raw = np.full(nbytes + 272, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + max(nbytes, 16)]


def emulated(text: str) -> str:
    """The kernel's text with the emulator's functions in the place of ours."""
    own = (KERNEL_DIR / "ptx.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
    ours = HEADER.read_text(encoding="utf-8")
    if text.count(own) == 0:  # it needs nothing that C++ has no words for
        return ours + text
    text = text.replace(own, ours)
    hopper = (KERNEL_DIR / "wgmma.cuh").read_text(encoding="utf-8")
    return text.replace(hopper.split('#include "ptx.cuh"\n')[1], "")


def tensor_map(described: TensorMap, buffer: np.ndarray, region: Region) -> np.ndarray:
    """As struct TensorMap of cuda_emulator.h; what the driver would refuse fails."""
    m, axes = described, len(described.sizes)
    assert region.offset % 16 == 0
    assert all(stride % 16 == 0 and stride < 2**40 for stride in m.strides)
    assert all(0 < size <= 2**32 for size in m.sizes)
    for spanned, most in zip(m.box, (256, 1024) if m.lower else (256,) * axes, strict=True):
        assert 0 < spanned <= most
    assert m.row_bytes in (32, 64, 128)
    assert all(-128 <= corner < 128 for corner in (*m.lower, *m.upper))
    assert all(1 <= step <= 8 for step in m.steps)
    numbers = [m.row_bytes // m.box[0], axes, int(m.dtype == "tf32")]
    for few, length in ((m.sizes, 5), (m.box, 5), (m.steps or (1,) * axes, 5)):
        numbers += [*few, *[0] * (length - len(few))]
    numbers += [*(m.lower or (0, 0)), *(m.upper or (0, 0))]
    strides = [*m.strides, *[0] * (5 - axes)]
    packed = struct.pack("<Q22i4q", buffer.ctypes.data + region.offset, *numbers, *strides)
    made = filled(128)
    made[: len(packed)] = np.frombuffer(packed, np.uint8)
    return made


def _view(buffer: np.ndarray, region: Region) -> np.ndarray:
    end = None if region.size is None else region.offset + region.size
    assert end is None or end <= buffer.nbytes, region
    return buffer[region.offset : end]
