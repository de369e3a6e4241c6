"""The CUDA plugin: what can be held without a GPU, and the contract on one."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contract
import numpy as np
import pytest
import reference
from cuda_emulator import HOPPER, Emulator, compiler, filled

import wgpuconv
from wgpuconv import Device, devices, tiling
from wgpuconv.algorithms import Algorithm
from wgpuconv.errors import MissingExtraError, NoAdapterError
from wgpuconv.plan import Config, Pass, Plan, Region, Shader
from wgpuconv.planner import lower, survey
from wgpuconv.plugins.cuda import entry
from wgpuconv.plugins.cuda.algorithms import (
    ALGORITHMS,
    halo_mma,
    implicit_gemm_mma,
)
from wgpuconv.plugins.cuda.algorithms.gather import count_tiles
from wgpuconv.plugins.cuda.algorithms.mma import (
    PACKED_ALONG_FILTERS,
    SHARED_OF_CORE,
    tile_config,
)
from wgpuconv.plugins.cuda.buffer import CudaBuffer
from wgpuconv.plugins.cuda.launch import EncodedMap
from wgpuconv.plugins.cuda.source import (
    KERNEL_DIR,
    Interface,
    interface,
    kernel_names,
    load,
    pack_params,
    source_hash,
    specialise,
)
from wgpuconv.plugins.cuda.tensor_maps import TensorMap, tensor_maps
from wgpuconv.problem import ACTIVATIONS, Activation, ConvProblem
from wgpuconv.tuning.verify import Check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120")
WHOLE_FLOATS = "f32 n3 c20 h14 w9 k70 r3 s3 pad1 nhwc bias residual"
WGMMA = next(a for a in ALGORITHMS if a.name == "implicit_gemm_wgmma")
PROBLEMS = [
    problem.with_(dtype=dtype, layout=layout)
    for problem in contract.problems()
    for dtype in ("f32", "f16", "bf16")
    for layout in ("NCHW", "NHWC")
]
PROBLEMS += [
    ConvProblem.parse(f"{text} bias residual act:relu {layout}")
    for layout in ("nchw", "nhwc")
    for text in (
        "conv2d f32 n2 c40 h13 w11 k35 r3 s3 pad1",
        "conv2d f16 n2 c40 h13 w11 k35 r3 s3 pad1",
        "conv2d f16 n2 c72 h14 w12 k64 r3 s3 stride2 pad1",
        "conv2d f16 n2 c64 h14 w12 k48 r1 s1",
        "conv2d f16 n2 c12 h9 w10 k12 r3 s3 pad1 groups12",
        "conv_transpose2d f16 n2 c24 h7 w5 k40 r3 s3 stride2 pad1",
        "conv2d bf16 n2 c40 h13 w11 k35 r3 s3 pad1",
        "conv_transpose2d f32 n2 c24 h7 w5 k40 r3 s3 stride2 pad1",
        # pointwise, with images of whole copies
        "conv2d f32 n3 c40 h8 w6 k35 r1 s1",
        "conv2d f16 n5 c144 h6 w4 k70 r1 s1 groups2",
        "conv_transpose2d bf16 n3 c72 h8 w7 k35 r1 s1",
        # few channels, few filters
        "conv2d f16 n2 c3 h19 w46 k40 r7 s7 stride2 pad3",
        "conv2d f32 n2 c16 h11 w70 k20 r3 s3 pad1",
        # weights in channels_last
        "conv2d f16 n2 c128 h9 w11 k70 r3 s3 pad1 wlast",
        "conv2d bf16 n3 c3 h19 w41 k20 r3 s3 wlast",
        "conv2d f32 n2 c40 h9 w11 k35 r3 s3 wlast",
        "conv_transpose2d f16 n1 c64 h5 w6 k20 r4 s4 stride2 wlast",
    )
]
TF32_PROBLEMS = [p.with_(precision="tf32") for p in PROBLEMS if p.dtype == "f32"]


def plans(problem: ConvProblem) -> list[Plan]:
    found = survey(problem, HOPPER, ALGORITHMS)
    return [lower(problem, candidate, HOPPER, ALGORITHMS) for candidate in found.candidates]


def passes(plan: Plan) -> tuple[Pass, ...]:
    return (*plan.prepare, *plan.passes)


@cache
def face_of(shader: Shader) -> Interface:
    return interface(specialise(shader))


# ---- kernels as text ----


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_compiles_everywhere(name: str, tmp_path: Path) -> None:
    """As the file stands, for each generation of GPUs, with no warning and no spilled register."""
    spilled = compiled(KERNEL_DIR / f"{name}.cu", (*volta(), *ARCHITECTURES), tmp_path)
    # Turing and Volta have no asynchronous copies, and so hold what they copy in registers.
    assert spilled <= {"70", "75"}


def volta() -> tuple[str, ...]:
    """Where the compiler still knows it: that of CUDA 13 does not."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ()
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return ("70",) if "compute_70" in known.stdout.split() else ()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("cores", [True, False])
def test_packing_by_filters_compiles(dtype: str, cores: bool, tmp_path: Path) -> None:
    whole = cores and dtype == "f32"
    block, window = PACKED_ALONG_FILTERS
    sizes = {"COLUMNS": block, "WINDOW": window}
    shader = Shader.of("pack_filters", dtype, FILTERS_FIRST=True, CORES=cores, WHOLE=whole, **sizes)
    file = tmp_path / "pack_filters.cu"
    file.write_text(specialise(shader), encoding="utf-8")
    assert compiled(file, ("75", "90a", "120"), tmp_path) == set()


BF16_KERNELS = sorted({n for a in ALGORITHMS if a.name != "implicit_gemm" for n in a.shaders})


@pytest.mark.parametrize("name", BF16_KERNELS)
def test_every_kernel_compiles_in_bf16(name: str, tmp_path: Path) -> None:
    """On the oldest and the newest kind of its code: on Turing too, but for the tensor cores,
    which lack it there. (In f16 the kernels meet the others.)"""
    file = tmp_path / f"{name}.cu"
    shader = Shader.of(name, "bf16", **({"Out": "bf16"} if "\nusing Out" in load(name) else {}))
    file.write_text(specialise(shader), encoding="utf-8")
    oldest = "80" if name.endswith("mma") else "75"
    assert compiled(file, (oldest, "90a"), tmp_path) == set()


def test_the_tf32_kernel_compiles(tmp_path: Path) -> None:
    """In the largest tile, where TF32 exists."""
    problem = ConvProblem.parse("conv2d f32 n8 c64 h56 w56 k256 r3 s3 pad1 bias nhwc tf32")
    config = tile_config(implicit_gemm_mma.tiles(problem)[2]) | {"splits": 1}
    compiled_plan("implicit_gemm_mma", problem, config, ("80", "90a", "120"), tmp_path)


def halo_config(
    tile_p: int, group_p: int, rows_of_eight: bool, tile_m: int, tile_k: int, teams: int
) -> Config:
    return {
        "tile_p": tile_p,
        "group_p": group_p,
        "rows_of_eight": rows_of_eight,
        "tile_m": tile_m,
        "tile_k": tile_k,
        "teams": teams,
    }


@pytest.mark.parametrize(
    ("text", "config"),
    [
        # the most sums of a thread, in two teams and in one
        ("c64 k128 r3 s3 f16", halo_config(256, 256, True, 64, 64, 2)),
        ("c128 k128 r3 s3 f16", halo_config(256, 256, False, 128, 64, 2)),
        ("c64 k64 r7 s7 f32 tf32", halo_config(448, 224, False, 64, 8, 1)),
        # weights that are not packed
        ("c128 k128 r3 s3 f16 wlast", halo_config(256, 256, True, 128, 64, 2)),
        ("c64 k128 r2 s2 f32 tf32 wlast", halo_config(224, 224, False, 128, 32, 1)),
        # inputs that are gathered
        ("c3 k64 r3 s3 f16", halo_config(256, 256, False, 64, 8, 2)),
        ("c3 k64 r3 s3 f32 tf32", halo_config(256, 256, True, 64, 4, 2)),
    ],
)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_hopper_kernels_compile(text: str, config: Config, layout: str, tmp_path: Path) -> None:
    problem = ConvProblem.parse(f"conv2d n4 h112 w112 bias act:relu {text} {layout}")
    compiled_plan("halo_wgmma", problem, config, ("90a",), tmp_path)


def compiled_plan(
    name: str, problem: ConvProblem, config: Config, architectures: tuple[str, ...], folder: Path
) -> None:
    """Compiles all kernels of a plan; no registers may spill."""
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    for step in passes(algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)):
        file = folder / f"{step.shader.file}.cu"
        file.write_text(specialise(step.shader), encoding="utf-8")
        assert compiled(file, architectures, folder) == set()


@pytest.mark.parametrize(
    "text",
    [
        # whole floats in the largest tile
        "conv2d f32 n8 c64 h56 w56 k256 r3 s3 pad1 bias nhwc",
        "conv2d f32 n8 c512 h28 w28 k256 r1 s1 bias residual act:relu",
        # a weight that is read as it lies, by producers with two sets of addresses
        "conv2d f16 n8 c512 h28 w28 k256 r1 s1 bias nhwc",
        # by the copy engine, which rounds it
        "conv2d f32 n8 c64 h28 w28 k256 r3 s3 bias nhwc wlast tf32",
        # that stays
        "conv2d f16 n64 c64 h56 w56 k256 r1 s1 bias nhwc",
    ],
)
def test_the_wgmma_kernel_compiles_with_other_filters(text: str, tmp_path: Path) -> None:
    problem = ConvProblem.parse(text)
    for config in WGMMA.configs(problem, HOPPER):
        if config["tile_m"] == 128 and (config["splits"] == 1 or config["cluster"] > 1):
            compiled_plan("implicit_gemm_wgmma", problem, config, ("90a",), tmp_path)


GREEDY = [(128, 256, 1, 1), (256, 128, 2, 1), (256, 128, 8, 8), (256, 64, 1, 1), (128, 64, 1, 1)]


@pytest.mark.parametrize("precision", ["f16", "f32 tf32"])
@pytest.mark.parametrize(
    ("channels", "tile_p", "tile_m", "splits", "cluster"),
    [
        *((40, *tile) for tile in GREEDY),
        *((64, *tile) for tile in (*GREEDY[:3], (192, 128, 1, 1), (128, 160, 1, 1))),
    ],
)
def test_the_wgmma_kernel_compiles(
    tmp_path: Path,
    precision: str,
    channels: int,
    tile_p: int,
    tile_m: int,
    splits: int,
    cluster: int,
) -> None:
    """The tiles that need most registers, of consumers and of producers: threads that gather, or
    one that asks the copy engine."""
    dtype, *tf32 = precision.split()
    text = f"conv2d {dtype} n8 c{channels} h56 w56 k256 r3 s3 pad1 bias nhwc {' '.join(tf32)}"
    config = wgmma_config(tile_p, tile_m, 3, splits, cluster)
    problem = ConvProblem.parse(text.strip())
    compiled_plan("implicit_gemm_wgmma", problem, config, ("90a",), tmp_path)


@pytest.mark.parametrize("precision", ["f16", "bf16", "f32 tf32"])
@pytest.mark.parametrize(
    ("tile_p", "tile_m", "splits", "cluster"), [(128, 256, 1, 1), (256, 128, 4, 4), (128, 64, 1, 1)]
)
def test_the_wgmma_kernel_of_planes_compiles(
    tmp_path: Path, precision: str, tile_p: int, tile_m: int, splits: int, cluster: int
) -> None:
    dtype, *tf32 = precision.split()
    text = f"conv2d {dtype} n8 c512 h28 w28 k256 r1 s1 bias {' '.join(tf32)}"
    config = wgmma_config(tile_p, tile_m, 3, splits, cluster)
    problem = ConvProblem.parse(text.strip())
    compiled_plan("implicit_gemm_wgmma", problem, config, ("90a",), tmp_path)


def wgmma_config(tile_p: int, tile_m: int, stages: int, splits: int, cluster: int) -> Config:
    return {
        "tile_p": tile_p,
        "tile_m": tile_m,
        "stages": stages,
        "blocks": 2 if (tile_p, tile_m, stages) == (128, 64, 3) else 1,
        "splits": splits,
        "cluster": cluster,
    }


def compiled(file: Path, architectures: tuple[str, ...], folder: Path) -> set[str]:
    """Compiles a file with no warning; returns the architectures on which registers spill."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc, which is not on the path")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    options = ["-std=c++17", "-fatbin", "--threads", "2", *targets]
    options += ["-Werror", "all-warnings", "-Xptxas", "-v"]
    files = [str(file), "-o", str(folder / "kernel.fatbin")]
    done = subprocess.run([nvcc, *options, *files], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Potential Performance Loss" not in done.stderr  # products that wait for each other
    report = re.findall(
        r"function '\w+' for 'sm_(\w+)'.*?(\d+) bytes spill stores", done.stderr, flags=re.DOTALL
    )
    assert sorted(a for a, _ in report) == sorted(architectures), done.stderr
    return {a for a, spilled in report if spilled != "0"}


@pytest.mark.parametrize("name", kernel_names())
def test_interface(name: str) -> None:
    face = interface(load(name))
    assert face.name == name
    assert face.params
    assert face.bindings
    assert face.threads % 32 == 0
    assert {type_ for _, type_ in face.params} <= {"int", "float"}


@pytest.mark.parametrize("name", kernel_names())
def test_a_kernel_waits_before_it_touches_memory(name: str) -> None:
    """It may have been started while the kernel before it still writes there."""
    text = load(name)
    _, _, kernel = text.partition('\nextern "C" ')
    _, _, body = kernel.partition(") {\n")
    before, waits, after = body.partition("  wait_for_previous();\n")
    pointers = set(interface(text).bindings)
    assert waits
    assert not pointers & set(re.findall(r"(?<![.\w])\w+", before))
    assert pointers & set(re.findall(r"\w+", after))
    assert "return" not in before
    # Behind a product, blocks that start early would crowd where they find room.
    prepares = name in ("pack_filters", "pack_columns", "to_channels_last")
    assert ("let_next_start();" in body) == prepares


def test_interface_of_one() -> None:
    face = interface(specialise(Shader.of("reduce_splits", "f32")))
    assert face.params == (
        ("elements", "int"),
        ("splits", "int"),
        ("k", "int"),
        ("y_k", "int"),
        ("act_a", "float"),
        ("act_b", "float"),
    )
    assert face.bindings == ("partial", "bias", "residual", "y")
    assert (face.threads, face.shared_bytes) == (256, 0)


def test_specialise() -> None:
    shader = Shader.of("direct", "f16", FILTERS=8, TRANSPOSED=True)
    text = specialise(dataclasses.replace(shader, activation="silu"))
    assert "\nusing Scalar = Half;\n" in text
    assert "\nconstexpr int FILTERS = 8;\n" in text
    assert "\nconstexpr bool TRANSPOSED = true;\n" in text
    assert "ACTIVATION = Activation::silu;" in text
    assert "RESIDUAL = false;" in text
    assert "RESIDUAL = true;" in specialise(dataclasses.replace(shader, residual=True))
    assert "#include" not in text
    for wrong in (Shader.of("direct", NOTHING=1), Shader.of("direct", Other="f16")):
        with pytest.raises(KeyError, match=r"direct\.cu declares no"):
            specialise(wrong)


def test_every_activation_is_known() -> None:
    head = load("direct").split("enum class Activation {")[1].split("}")[0]
    assert {name.strip() for name in head.split(",")} == set(ACTIVATIONS) - {"relu6"}


def test_source_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_hash(("direct", "halo_mma")) == source_hash(("halo_mma", "direct", "direct"))
    assert len({a.source() for a in ALGORITHMS}) == len(ALGORITHMS)
    plain = source_hash.__wrapped__(("halo_mma",))
    text = load("halo_mma")
    monkeypatch.setattr("wgpuconv.plugins.cuda.source.load", lambda name: text + " ")
    assert source_hash.__wrapped__(("halo_mma",)) != plain


# ---- plans ----


@pytest.mark.parametrize("problem", PROBLEMS + TF32_PROBLEMS, ids=str)
def test_plans_fit_their_kernels(problem: ConvProblem) -> None:
    for plan in plans(problem):
        assert plan.passes
        sizes = {"workspace": plan.workspace, "prepared": plan.prepared, "tables": len(plan.tables)}
        for step in passes(plan):
            face = face_of(step.shader)
            assert set(face.bindings) == {name for name, _ in step.bindings}
            assert len(pack_params(step, face.params)) == 4 * len(face.params)
            assert face.shared_bytes <= HOPPER.limits.max_workgroup_storage
            assert step.grid[0] > 0
            assert step.grid[1:] == (1, 1)
            for _, region in step.bindings:
                if region.role in sizes:
                    assert region.size
                    assert region.offset % 256 == 0
                    assert region.offset + region.size <= sizes[region.role]
        algorithm = next(a for a in ALGORITHMS if a.name == plan.algorithm)
        assert {step.shader.file for step in passes(plan)} <= set(algorithm.shaders)


def test_something_computes_every_problem() -> None:
    for problem in PROBLEMS:
        assert any(c.algorithm == "direct" for c in survey(problem, HOPPER, ALGORITHMS).candidates)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (
            "conv2d f32 n1 c8 h9 w9 k8 r3 s3",
            "implicit_gemm_mma",
            "the precision 'tf32' is allowed, got f32",
        ),
        (
            "conv2d f32 n1 c8 h9 w9 k8 r3 s3",
            "halo_wgmma",
            "the precision 'tf32' is allowed, got f32",
        ),
        (
            "conv_transpose2d f32 n1 c63 h9 w9 k8 r2 s2 stride2",
            "implicit_gemm_wgmma",
            "at least 64 products of f32 .*, got 63",
        ),
        ("conv2d f32 n1 c8 h9 w9 k8 r3 s3", "halo_mma", "f16 and bf16 on tensor cores, got f32"),
        ("conv2d f32 n1 c8 h9 w9 k8 r3 s3 tf32", "halo_mma", "bf16 on tensor cores, got f32"),
        ("conv2d bf16 n1 c8 h9 w9 k8 r3 s3", "implicit_gemm", "computes in f32, got bf16"),
        ("conv2d f16 n1 c8 h9 w9 k8 r3 s3", "implicit_gemm", "computes in f32, got f16"),
        ("conv2d f16 n1 c8 h9 w9 k8 r1 s1", "halo_mma", r"one tap \(1 x 1\)"),
        ("conv2d f16 n1 c8 h40 w40 k8 r17 s3", "implicit_gemm_mma", "got 17 x 3"),
        ("conv2d f16 n1 c8 h900 w900 k8 r3 s3 dil400", "halo_mma", "bytes of shared memory"),
        (
            "conv2d f16 n1 c8 h900 w900 k8 r3 s3 dil400",
            "halo_wgmma",
            r"the 232448 bytes of shared memory that a block may have for .* dilation 400,400\)",
        ),
        (
            "conv2d f16 n1 c16 h900 w900 k8 r3 s3 dil400",
            "halo_wgmma",
            "that a block may have, or 256 pixels in a row or column, for the input of a tile",
        ),
        ("conv2d f16 n1 c64 h99 w99 k8 r3 s3 stride9", "halo_wgmma", "at most 8, got 9,9"),
        ("conv2d f16 n1 c8 h9 w9 k8 r3 s3", "depthwise", "got 8 channels a group"),
        (
            "conv2d f32 n1 c8 h900 w9 k8 r3 s3 dil128,1 groups8",
            "depthwise",
            r"at most 256 rows .* got 257 \(kernel 3 x 3, dilation 128,1\)",
        ),
        ("conv_transpose2d f16 n1 c8 h9 w9 k8 r3 s3 stride40", "halo_mma", "1024 phases"),
        (
            "conv2d f16 n1 c256 h9 w9 k8 r3 s3",
            "direct_mma",
            r"too many products a filter .* \(256 channels, kernel 3 x 3, dilation 1,1\)",
        ),
        ("conv2d f16 n1 c8 h900 w900 k8 r3 s3 dil400", "direct_mma", "or too long rows .* 400,400"),
        ("conv2d f32 n1 c8 h9 w9 k8 r3 s3", "direct_mma", "precision 'tf32' is allowed"),
        (
            "conv_transpose2d f16 n1 c8 h9 w9 k8 r2 s1 stride3,1",
            "direct_mma",
            r"some without \(kernel 2 x 1, stride 3,1, dilation 1,1\)",
        ),
    ],
)
def test_refusals(text: str, name: str, reason: str) -> None:
    problem = ConvProblem.parse(text)
    found = survey(problem, HOPPER, ALGORITHMS)
    assert name not in {c.algorithm for c in found.candidates}
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.refusals[name])


@pytest.mark.parametrize(
    ("window", "rows"),
    [
        ("stride3,1", {1, 4, 8}),
        ("stride36,1", {1, 4, 8}),  # 255 rows
        ("stride37,1", {1, 4}),  # 262
        ("stride84,1", {1, 4}),  # 255
        ("stride85,1", {1}),  # 258
        ("dil126,1", {1, 4}),  # 256 of four, 260 of eight
        ("dil127,1", {1}),  # 258 of four
    ],
)
def test_depthwise_unrolls_few_rows(window: str, rows: set[int]) -> None:
    problem = ConvProblem.parse(f"conv2d f32 n1 c8 h900 w9 k8 r3 s3 {window} groups8")
    depthwise = next(a for a in ALGORITHMS if a.name == "depthwise")
    assert depthwise.refusal(problem, HOPPER) is None
    assert {config["rows"] for config in depthwise.configs(problem, HOPPER)} == rows


def test_what_a_device_lacks() -> None:
    problem = ConvProblem.parse("conv2d f16 n1 c64 h28 w28 k64 r3 s3")
    for capability in ((7, 5), (8, 9), (12, 0)):
        other = dataclasses.replace(HOPPER, capability=capability)
        found = survey(problem, other, ALGORITHMS)
        for name in ("halo_wgmma", "implicit_gemm_wgmma"):
            assert f"9.0, got {capability[0]}.{capability[1]}" in found.refusals[name]
        assert "halo_mma" in {c.algorithm for c in found.candidates}
    turing = dataclasses.replace(HOPPER, capability=(7, 5))
    for change in ({"dtype": "bf16"}, {"dtype": "f32", "precision": "tf32"}):
        changed = problem.with_(**change)
        found = survey(changed, turing, ALGORITHMS)
        reason = f"multiplies {changed.arithmetic} from compute capability 8.0 on, got 7.5"
        assert found.refusals["implicit_gemm_mma"] == reason
        assert "direct" in {c.algorithm for c in found.candidates}
    assert (
        "8.0 on, got 7.5"
        in survey(problem.with_(dtype="bf16"), turing, ALGORITHMS).refusals["halo_mma"]
    )
    volta = dataclasses.replace(HOPPER, capability=(7, 0))
    found = survey(problem, volta, ALGORITHMS)
    for name in ("direct_mma", "halo_mma", "implicit_gemm_mma"):
        assert found.refusals[name].endswith("of compute capability 7.5 or more, got 7.0")
    assert {c.algorithm for c in found.candidates} == {"direct"}
    whole = survey(problem.with_(dtype="f32"), volta, ALGORITHMS)
    assert {c.algorithm for c in whole.candidates} == {"direct", "implicit_gemm"}
    limits = dataclasses.replace(HOPPER.limits, max_workgroup_storage=64 << 10)  # Turing
    small = dataclasses.replace(HOPPER, limits=limits)
    for candidate in survey(problem, small, ALGORITHMS).candidates:
        for step in lower(problem, candidate, small, ALGORITHMS).passes:
            assert interface(specialise(step.shader)).shared_bytes <= 64 << 10


def test_workspace_is_limited() -> None:
    problem = ConvProblem.parse("conv2d f16 n4 c64 h56 w56 k64 r3 s3")
    for algorithm in ALGORITHMS:
        if "to_channels_last" in algorithm.shaders:
            (config, *_) = algorithm.configs(problem, HOPPER)
            with pytest.raises(wgpuconv.errors.AlgorithmRefusedError, match="may have 1000"):
                algorithm.lower(problem, config, HOPPER, 1000)


@pytest.mark.parametrize(
    ("text", "packs", "products"),
    [
        ("r2 s2 stride2 nhwc", 1, 1),
        ("r2 s3 stride2,3 groups2", 1, 1),
        ("r4 s4 stride2", 1, 1),
        ("r4 s4 stride2 pad1", 4, 4),
        ("r2 s2 stride2 pad1", 4, 4),
        ("r3 s3 stride3 outpad1,0", 2, 2),
        ("r1 s1 stride3", 1, 4),  # three without a tap, of 2, 2 and 4 phases
    ],
)
def test_phases_that_share_their_gather_are_one_product(
    text: str, packs: int, products: int
) -> None:
    problem = ConvProblem.parse(f"conv_transpose2d f16 n2 c64 h9 w7 k140 {text}")
    no_launches = dataclasses.replace(HOPPER, launch=0)
    for config in WGMMA.configs(problem, HOPPER):
        plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
        assert len(plan.prepare) == packs
        kernels = [step for step in plan.passes if step.shader.file == WGMMA.name]
        assert len(kernels) == products
        tiles = [dict(step.params)["tiles"] for step in kernels]
        tile = SimpleNamespace(p=config["tile_p"], m=config["tile_m"])
        assert sum(tiles) == int(config["splits"]) * count_tiles(problem, tile)
        # The cost counts a packing for each product.
        launches = len(plan.passes) + products
        of_launches = WGMMA.cost(problem, config, HOPPER) - WGMMA.cost(problem, config, no_launches)
        assert of_launches == pytest.approx(launches * HOPPER.launch)


@pytest.mark.parametrize(
    ("text", "in_planes"),
    [
        ("conv2d f16 n2 c40 h6 w4 k35 r1 s1", True),
        ("conv2d f32 n2 c40 h6 w2 k35 r1 s1 tf32", True),
        ("conv_transpose2d bf16 n2 c40 h6 w4 k30 r1 s1 groups2", True),
        ("conv2d f16 n2 c40 h6 w2 k35 r1 s1", False),
        ("conv2d f32 n2 c40 h5 w5 k35 r1 s1 tf32", False),
        ("conv2d f16 n2 c40 h8 w8 k35 r1 s1 stride2", False),
        ("conv2d f16 n2 c40 h8 w8 k35 r1 s1 pad0,0,4,4", False),
        ("conv2d f16 n2 c40 h8 w8 k35 r1 s2", False),
        ("conv_transpose2d f16 n2 c40 h8 w8 k35 r1 s1 stride2", False),
        ("conv_transpose2d f16 n2 c40 h8 w8 k35 r1 s1 dil3 outpad0,2", False),
    ],
)
def test_pointwise_products_read_the_input_as_it_lies(text: str, in_planes: bool) -> None:
    problem = ConvProblem.parse(text)
    for config in WGMMA.configs(problem, HOPPER):
        plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
        copied = [step for step in plan.passes if step.shader.file == "to_channels_last"]
        step = next(step for step in plan.passes if step.shader.file == WGMMA.name)
        assert dict(step.shader.constants)["PLANES"] is in_planes
        assert bool(copied) is not in_planes
        assert (dict(step.bindings)["x"].role == "input") is in_planes


@pytest.mark.parametrize(
    ("text", "packed"),
    [
        ("conv2d f16 n2 c40 h6 w5 k35 r1 s1 stride2", False),
        ("conv2d bf16 n2 c80 h6 w5 k30 r1 s1 groups2 nhwc", False),
        ("conv2d f16 n2 c36 h6 w5 k35 r1 s1", True),
        ("conv2d f16 n2 c40 h6 w5 k35 r1 s2", True),
        ("conv2d f32 n2 c96 h6 w5 k35 r1 s1", True),
        ("conv2d f32 n2 c96 h6 w5 k35 r1 s1 tf32", False),
        ("conv2d f32 n2 c40 h6 w5 k35 r1 s1 tf32", True),  # nobody rounds it on its way
        ("conv_transpose2d f16 n2 c40 h6 w5 k35 r1 s1", True),
    ],
)
def test_pointwise_products_read_the_weight_as_it_lies(text: str, packed: bool) -> None:
    problem = ConvProblem.parse(text)
    for config in WGMMA.configs(problem, HOPPER):
        plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
        assert bool(plan.prepare) == bool(plan.prepared) == packed


@pytest.mark.parametrize(
    ("text", "im2col"),
    [
        ("conv2d f16 n2 c64 h9 w9 k35 r3 s3 pad1 dil2 nhwc", True),
        ("conv2d f32 n2 c32 h9 w9 k35 r3 s3 stride8 nhwc tf32", True),
        ("conv2d f32 n2 c96 h9 w9 k35 r1 s1 nhwc", True),
        ("conv2d bf16 n2 c128 h9 w9 k70 r3 s3 groups2", True),
        ("conv_transpose2d f16 n2 c128 h9 w9 k35 r3 s3 stride2 pad1 outpad1 nhwc", True),
        # half of a step may be in vain, but not of a group
        ("conv2d f16 n2 c96 h9 w9 k35 r3 s3 nhwc", True),
        ("conv2d f16 n2 c72 h9 w9 k35 r3 s3 nhwc", False),
        ("conv2d f16 n2 c192 h9 w9 k70 r3 s3 groups2 nhwc", False),
        # read as it lies
        ("conv2d f16 n2 c64 h8 w8 k35 r1 s1", False),
        # what a tensor map cannot hold
        ("conv2d f16 n2 c64 h9 w9 k35 r3 s3 stride9 nhwc", False),
        ("conv2d f16 n2 c64 h9 w9 k35 r3 s3 pad128 nhwc", True),
        ("conv2d f16 n2 c64 h9 w9 k35 r3 s3 pad129 nhwc", False),
        ("conv2d f16 n2 c64 h9 w260 k35 r1 s3 dil1,64 nhwc", True),
        ("conv2d f16 n2 c64 h9 w260 k35 r1 s3 dil1,65 nhwc", False),
        ("conv2d f16 n2 c64 h9 w260 k35 r1 s3 dil1,127 pad0,0,127,127 nhwc", True),
        ("conv2d f16 n2 c64 h9 w260 k35 r1 s3 dil1,128 pad0,0,128,128 nhwc", False),
    ],
)
def test_what_the_copy_engine_gathers(text: str, im2col: bool) -> None:
    problem = ConvProblem.parse(text)
    for config in WGMMA.configs(problem, HOPPER):
        plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
        steps = [step for step in plan.passes if step.shader.file == WGMMA.name]
        for step in steps:
            assert dict(step.shader.constants)["IM2COL"] is im2col
            assert bool(tensor_maps(step)) is im2col


def test_tensor_maps() -> None:
    """What the driver is told of an input, and of a weight that lies as it is."""
    problem = ConvProblem.parse(
        "conv2d f16 n2 c128 h9 w12 k35 r3 s3 stride2,3 pad1,0,2,1 dil1,2 nhwc"
    )
    (config, *_) = WGMMA.configs(problem, HOPPER)
    plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    assert tensor_maps(plan.prepare[0]) == {}
    (x,) = tensor_maps(plan.passes[0]).values()
    assert x == TensorMap(
        dtype="f16",
        sizes=(128, 12, 9, 2),
        strides=(256, 256 * 12, 256 * 12 * 9),
        box=(64, int(config["tile_p"])),
        lower=(-2, -1),
        # of four columns, the last one's first tap lies at 7, of four rows at 5
        upper=(-2 + 3 * 3 - 11, -1 + 2 * 3 - 8),
        steps=(1, 3, 2, 1),
    )
    problem = ConvProblem.parse("conv2d f16 n2 c128 h9 w12 k70 r1 s1 groups2 nhwc")
    (config, *_) = WGMMA.configs(problem, HOPPER)
    (step,) = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit).passes
    assert tensor_maps(step)["packed"] == TensorMap(
        dtype="f16", sizes=(64, 1, 70), strides=(128, 128), box=(64, 1, int(config["tile_m"]))
    )
    problem = ConvProblem.parse("conv2d f16 n2 c104 h9 w12 k70 r3 s2 nhwc wlast")
    (config, *_) = WGMMA.configs(problem, HOPPER)
    (step,) = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit).passes
    assert tensor_maps(step)["packed"] == TensorMap(
        dtype="f16", sizes=(104, 6, 70), strides=(208, 1248), box=(64, 1, int(config["tile_m"]))
    )


def test_tensor_maps_of_a_halo() -> None:
    """A box for each pair of remainders; TF32 is rounded on its way, of the weight as well."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse(
        "conv2d f32 n2 c40 h19 w24 k70 r3 s3 stride2,1 pad1 groups2 nhwc wlast tf32"
    )
    problem = problem.with_(c=80)
    config = halo_config(64, 64, True, 64, 32, 1)
    (step,) = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit).passes
    # tiles of eight by eight: nine rows of the same remainder, ten columns
    assert tensor_maps(step) == {
        "x": TensorMap(
            dtype="tf32",
            sizes=(40, 2, 24, 19, 2),
            strides=(160, 320, 320 * 24, 320 * 24 * 19),
            box=(32, 1, 10, 17, 1),
            steps=(1, 1, 1, 2, 1),
        ),
        "packed": TensorMap(dtype="tf32", sizes=(40, 9, 70), strides=(160, 1440), box=(32, 1, 64)),
    }
    plan = algorithm.lower(problem.with_(weight_last=False), config, HOPPER, HOPPER.workspace_limit)
    assert tensor_maps(plan.passes[0]).keys() == {"x"}


@pytest.mark.parametrize("text", ["c64 r3 s3 nhwc", "c3 r3 s3 nhwc", "c64 r1 s1"])
def test_tensor_maps_beside_an_infinite_bound(text: str) -> None:
    """An activation's numbers are no sizes."""
    problem = ConvProblem.parse(f"conv2d f16 n1 h28 w28 k64 act:clip,0,inf {text}")
    for algorithm in ALGORITHMS:
        if algorithm.name.endswith("wgmma") and algorithm.refusal(problem, HOPPER) is None:
            (config, *_) = algorithm.configs(problem, HOPPER)
            plan = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)
            assert all(isinstance(tensor_maps(step), dict) for step in passes(plan))


def test_a_tensor_map_is_encoded_where_its_array_lies() -> None:
    """Once for each place, with the arguments that the driver's functions take; again after one
    that failed."""
    calls: list[tuple[str, list[Any]]] = []
    answers = [0, 0, 1, 0]

    def encode(kind: str) -> Any:
        def call(address: int, *rest: Any) -> int:
            assert address % 64 == 0
            calls.append((kind, [list(a) if hasattr(a, "__len__") else a for a in rest]))
            return answers.pop(0)

        return call

    driver: Any = SimpleNamespace(
        encode_im2col=encode("im2col"), encode_tiled=encode("tiled"), error=RuntimeError
    )
    options = [
        0,
        3,
        3,
        0,
    ]  # not interleaved, permuted in 128 bytes, 256 to the cache, zeros outside
    gathered = TensorMap(
        "bf16",
        (64, 9, 8, 2),
        (128, 1152, 9216),
        (64, 192),
        steps=(1, 2, 3, 1),
        lower=(-1, -2),
        upper=(0, 1),
    )
    mapped = EncodedMap(driver, gathered)
    for pointer in (4096, 4096, 8192):
        mapped.point_to(pointer)
    described = [[64, 9, 8, 2], [128, 1152, 9216], [-1, -2], [0, 1], 64, 192, [1, 2, 3, 1]]
    assert calls == [("im2col", [9, 4, at, *described, *options]) for at in (4096, 8192)]
    calls.clear()
    rows = EncodedMap(driver, TensorMap("f32", (40, 6, 70), (160, 960), (32, 1, 96)))
    with pytest.raises(RuntimeError):
        rows.point_to(16)
    rows.point_to(16)
    described = [[40, 6, 70], [160, 960], [32, 1, 96], [1, 1, 1]]
    assert calls == 2 * [("tiled", [7, 3, 16, *described, *options])]
    calls.clear()
    answers.append(0)
    boxes = TensorMap("tf32", (16, 9, 8), (64, 576), (16, 5, 3), steps=(1, 2, 1))
    EncodedMap(driver, boxes).point_to(32)
    options[1] = 2  # rows of 64 bytes
    described = [[16, 9, 8], [64, 576], [16, 5, 3], [1, 2, 1]]
    assert calls == [("tiled", [11, 3, 32, *described, *options])]


def test_what_reading_in_planes_spares() -> None:
    """Scratch memory, and the time of the copy: it costs what it does with its channels last."""
    planes, odd = (ConvProblem.parse(f"conv2d f16 n2 c64 h8 w{w} k64 r1 s1") for w in (8, 7))
    odd = odd.with_(h=odd.h - 1)
    last = planes.with_(layout="NHWC")
    (config, *_) = WGMMA.configs(planes, HOPPER)
    assert WGMMA.lower(planes, config, HOPPER, 0).workspace == 0
    with pytest.raises(wgpuconv.errors.AlgorithmRefusedError, match="with its channels last"):
        WGMMA.lower(odd, config, HOPPER, 0)
    gathered = WGMMA.cost(last, config, HOPPER)  # by the copy engine, which is faster
    assert gathered < WGMMA.cost(planes, config, HOPPER) < 1.2 * gathered
    assert WGMMA.cost(planes, config, HOPPER) < WGMMA.cost(odd, config, HOPPER)


# ---- kernels on the CPU ----


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if compiler() is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    if "f16c" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("needs a CPU that converts halves")
    return Emulator(tmp_path_factory.mktemp("cuda"))


FEW_CORES = dataclasses.replace(HOPPER, cores=2)
"""On which a block computes several tiles."""
SMALL_SHARED = dataclasses.replace(
    FEW_CORES, limits=dataclasses.replace(HOPPER.limits, max_workgroup_storage=100 << 10)
)
"""Where the weight comes anew for each tile."""
EMULATED: list[tuple[str, str, Config]] = (
    [
        (name, text, {**tile_config(module.TILES[tile]), **more})
        for name, module, tile, more, text in [
            # a sum that is split, a run of pixels over two images, filters past the end
            (
                "halo_mma",
                halo_mma,
                9,
                {"tile_w": 0, "splits": 2},
                "conv2d f16 n2 c40 h6 w5 k70 r3 s3 pad1 nhwc bias residual",
            ),
            # everything at once, in rectangles, from an input with its channels first
            (
                "halo_mma",
                halo_mma,
                11,
                {"tile_w": 8, "splits": 1},
                "conv2d f16 n1 c72 h12 w9 k20 r3 s2 stride2,1 pad1,0,2,1 dil2,1 groups2 "
                "residual act:relu",
            ),
            # phases of one to four taps: fewer stages than a tile asks for
            (
                "halo_mma",
                halo_mma,
                14,
                {"tile_w": 16, "splits": 1},
                "conv_transpose2d f16 n1 c24 h4 w5 k10 r3 s3 stride2 pad1 nhwc residual act:silu",
            ),
            # rows of four pixels, images of eight: no store may run over the end of a row
            (
                "halo_mma",
                halo_mma,
                14,
                {"tile_w": 8, "splits": 1},
                "conv2d f16 n2 c16 h4 w6 k9 r3 s3 bias",
            ),
            # the whole weight at once
            (
                "halo_mma",
                halo_mma,
                15,
                {"tile_w": 32, "splits": 1},
                "conv2d f16 n1 c16 h5 w40 k16 r3 s3 pad1 bias",
            ),
            (
                "implicit_gemm_mma",
                implicit_gemm_mma,
                9,
                {"splits": 2},
                "conv2d f16 n2 c40 h6 w5 k70 r3 s3 pad1 nhwc bias",
            ),
            # four channels of a pixel at a time
            (
                "implicit_gemm_mma",
                implicit_gemm_mma,
                12,
                {"splits": 1},
                "conv2d f16 n2 c6 h13 w11 k20 r5 s3 stride2 pad1 dil1,2 groups2 "
                "residual act:clip,0,1",
            ),
            (
                "implicit_gemm_mma",
                implicit_gemm_mma,
                14,
                {"splits": 1},
                "conv_transpose2d f16 n1 c24 h4 w5 k10 r3 s3 stride2 pad1 bias",
            ),
        ]
    ]
    + [
        # TF32: a split sum, filters past the end; then groups, an odd width and everything else;
        # then two channels of a pixel at a time
        (
            "implicit_gemm_mma",
            text,
            {**tile_config(implicit_gemm_mma.TILES[tile]._replace(k=16)), "splits": splits},
        )
        for tile, splits, text in [
            (9, 2, "conv2d f32 n2 c20 h6 w5 k70 r3 s3 pad1 nhwc bias tf32"),
            (
                12,
                1,
                "conv2d f32 n1 c14 h13 w9 k20 r3 s2 stride2,1 dil1,2 groups2 "
                "residual act:relu tf32",
            ),
            (14, 1, "conv_transpose2d f32 n1 c2 h4 w5 k10 r3 s3 stride2 pad1 bias tf32"),
        ]
    ]
    + [
        (
            "halo_wgmma",
            text,
            halo_config(p, group_p, rows_of_eight, m, k, teams),
        )
        for p, group_p, rows_of_eight, m, k, teams, text in [
            # Rows of eight positions and rows of others that follow each other.
            # two teams of a resident weight, chunks of channels, filters past the end
            (96, 96, True, 64, 64, 2, "conv2d f16 n5 c72 h11 w7 k60 r3 s3 pad1 nhwc bias residual"),
            (64, 64, False, 64, 32, 2, "conv2d f16 n7 c40 h8 w7 k20 r3 s3 pad1 bias act:relu"),
            # two teams that take turns at the filters of one tile, some of which are none; the
            # weight comes anew, or stays
            (
                64,
                64,
                True,
                128,
                64,
                2,
                "conv2d f16 n2 c200 h9 w9 k130 r3 s3 pad1 nhwc bias residual act:relu",
            ),
            (64, 64, True, 128, 32, 2, "conv2d f32 n3 c72 h9 w17 k80 r3 s3 bias tf32"),
            (96, 96, False, 128, 32, 2, "conv2d bf16 n5 c32 h11 w7 k70 r3 s3 pad1 nhwc bias"),
            (64, 64, True, 128, 8, 2, "conv2d f16 n2 c3 h19 w13 k130 r3 s3 pad1 nhwc bias"),
            # warpgroups side by side over filters, and over pixels
            (96, 96, False, 128, 32, 1, "conv2d f16 n3 c40 h11 w7 k70 r3 s3 pad1 nhwc bias"),
            (192, 96, True, 64, 8, 1, "conv2d f32 n3 c20 h11 w15 k30 r3 s3 pad1 nhwc bias tf32"),
            # pairs of pixels on their way out
            (96, 96, False, 128, 32, 1, "conv2d f16 n3 c40 h9 w10 k70 r3 s3 pad1 bias residual"),
            (192, 96, False, 64, 8, 1, "conv2d f32 n3 c20 h11 w14 k30 r3 s3 pad1 residual tf32"),
            # strides by which rows and columns are sorted, and everything else
            (
                64,
                64,
                False,
                64,
                64,
                1,
                "conv2d f16 n2 c80 h9 w15 k12 r3 s5 stride2,3 dil1,2 groups2 residual act:relu",
            ),
            # phases of one to four taps, gathered: an odd tap meets zeros
            (
                64,
                64,
                True,
                64,
                4,
                1,
                "conv_transpose2d f32 n2 c3 h4 w5 k10 r3 s3 stride2 nhwc bias residual tf32",
            ),
            (96, 96, False, 64, 8, 2, "conv2d bf16 n3 c3 h23 w19 k20 r5 s3 stride2 pad1 nhwc bias"),
            # a halo so large that the next chunk comes only when this one's place is free
            (96, 96, False, 64, 32, 2, "conv2d f16 n2 c40 h38 w30 k20 r3 s3 dil12 nhwc bias"),
            # rounded: channels of several planes and their remainder
            (64, 64, True, 64, 32, 2, "conv2d f32 n5 c40 h7 w7 k9 r2 s2 bias tf32"),
            # an output longer than its input reaches
            (
                64,
                64,
                False,
                64,
                32,
                1,
                "conv_transpose2d f16 n2 c40 h5 w4 k9 r3 s3 stride2 pad1 outpad1,0 bias",
            ),
        ]
    ]
    + [
        # every block computes several tiles, of pixels and of filters past the end; a split sum;
        # phases of one to four taps; blocks of channels
        (
            "implicit_gemm_wgmma",
            text,
            wgmma_config(tile_p, tile_m, stages, splits, cluster),
        )
        for tile_p, tile_m, stages, splits, cluster, text in [
            (128, 64, 3, 1, 1, "conv2d f16 n3 c40 h14 w9 k70 r3 s3 pad1 nhwc bias residual"),
            (
                128,
                128,
                2,
                1,
                1,
                "conv2d f16 n1 c72 h19 w17 k20 r3 s2 stride2,1 dil1,2 groups2 residual act:relu",
            ),
            (256, 64, 2, 2, 1, "conv2d bf16 n2 c128 h14 w14 k72 r2 s2 nhwc bias residual"),
            (
                128,
                256,
                2,
                1,
                1,
                "conv_transpose2d f16 n1 c24 h9 w8 k264 r3 s3 stride2 pad1 nhwc bias",
            ),
            (128, 64, 3, 1, 1, "conv2d f32 n3 c20 h14 w9 k70 r3 s3 pad1 nhwc bias tf32"),
            (256, 64, 2, 2, 1, "conv2d f32 n3 c64 h12 w9 k12 r3 s2 pad1,2 bias tf32"),
            (
                128,
                128,
                2,
                1,
                1,
                "conv_transpose2d f32 n1 c6 h9 w8 k10 r3 s3 stride2 pad1 bias tf32",
            ),
            (256, 128, 2, 1, 1, "conv2d f32 n1 c40 h23 w23 k132 r1 s1 nhwc act:silu tf32"),
            # whole floats
            (128, 64, 2, 1, 1, f"conv2d {WHOLE_FLOATS}"),
            (128, 128, 2, 1, 1, "conv_transpose2d f32 n1 c64 h9 w8 k10 r3 s3 stride2 pad1 bias"),
            (128, 64, 2, 2, 1, "conv2d f32 n3 c64 h9 w9 k72 r2 s2 act:relu"),
            (128, 64, 2, 2, 2, "conv2d f32 n3 c64 h9 w9 k35 r2 s2 nhwc residual"),
            # one tap, whose weight is read as it lies
            (128, 64, 2, 1, 1, "conv2d f16 n2 c72 h13 w11 k140 r1 s1 stride2 pad1 nhwc bias"),
            (256, 128, 2, 2, 1, "conv2d bf16 n2 c144 h13 w11 k70 r1 s1 groups2 nhwc residual"),
            # the copy engine gathers: blocks of channels, the last one not whole; taps from far to
            # near; a weight as it lies, of several groups; three warpgroups that multiply
            (
                128,
                64,
                2,
                3,
                1,
                "conv2d f16 n2 c112 h9 w11 k70 r3 s2 stride2,1 pad1,0,2,1 dil2,1 nhwc",
            ),
            (192, 128, 2, 1, 1, "conv2d f16 n3 c128 h9 w11 k170 r3 s3 pad1 groups2 bias residual"),
            (128, 96, 3, 1, 1, "conv_transpose2d bf16 n2 c56 h7 w5 k196 r3 s3 stride2 pad1 nhwc"),
            (128, 160, 2, 1, 1, "conv2d bf16 n3 c88 h13 w11 k170 r1 s1 stride2 nhwc bias"),
            (192, 64, 2, 2, 2, "conv2d f16 n3 c256 h7 w9 k70 r1 s1 groups2 nhwc bias residual"),
            (192, 96, 2, 1, 1, "conv2d f32 n3 c30 h9 w11 k100 r3 s3 pad1 bias tf32"),
            (128, 64, 2, 1, 1, "conv2d f32 n2 c32 h9 w11 k70 r3 s3 stride2 pad2 nhwc act:relu"),
            # the copy engine brings the output to memory: slices past the last pixel and filter, of
            # groups, of half a line, one to four of a tile; what is added to them
            (256, 128, 2, 1, 1, "conv2d f16 n4 c64 h19 w11 k136 r1 s1 nhwc residual act:relu"),
            (128, 128, 2, 1, 1, "conv2d f16 n4 c64 h19 w11 k136 r1 s1 nhwc bias"),
            (128, 64, 2, 1, 1, "conv2d f16 n3 c72 h19 w13 k144 r1 s1 groups2 nhwc bias residual"),
            (128, 64, 2, 1, 1, "conv2d f32 n2 c64 h11 w13 k72 r3 s3 pad1 nhwc bias residual"),
            (192, 64, 2, 1, 1, "conv2d f32 n3 c40 h19 w11 k68 r1 s1 nhwc residual tf32"),
            (128, 96, 3, 1, 1, "conv2d bf16 n3 c40 h13 w11 k200 r1 s1 nhwc bias act:silu"),
            (128, 64, 3, 1, 1, "conv_transpose2d bf16 n3 c64 h9 w11 k72 r3 s3 nhwc bias residual"),
            # rows of pixels that follow each other, but two apart
            (
                128,
                64,
                3,
                1,
                1,
                "conv_transpose2d f16 n1 c64 h9 w8 k72 r3 s3 stride1,2 outpad0,1 nhwc bias",
            ),
            # and some of them without a tap
            (
                128,
                64,
                3,
                1,
                1,
                "conv_transpose2d f16 n1 c64 h5 w6 k72 r3 s1 stride1,2 outpad0,1 nhwc residual",
            ),
            # splits in a cluster, which adds them up
            (128, 64, 3, 3, 3, "conv2d bf16 n3 c64 h9 w9 k72 r2 s2 nhwc bias residual act:relu"),
            (128, 64, 3, 2, 2, "conv_transpose2d f32 n3 c32 h8 w6 k9 r3 s3 stride2 residual tf32"),
        ]
    ]
    + [
        (
            "implicit_gemm",
            f"{problem} {layout}".strip(),
            {"tile_m": 64, "tile_p": 64, "tile_k": 16, "stages": 4, "splits": splits},
        )
        for layout, splits in (("", 1), ("nhwc", 2))
        for problem in (
            "conv2d f32 n2 c6 h9 w7 k20 r3 s2 stride2,1 pad1,2,0,3 dil2,1 groups2 "
            "residual act:relu",
            "conv_transpose2d f32 n1 c9 h4 w5 k8 r3 s3 stride2 pad1 bias",
        )
    ]
)


ROWS: list[tuple[str, str, Config]] = [
    ("direct_mma", text, {"tile_h": h, "tile_w": w, "tile_m": m, "ring": ring})
    for h, w, m, ring, text in [
        # copied: filters past the end, two strips a warp, the last of a row not whole
        (4, 32, 16, 16, "conv2d f16 n21 c16 h6 w70 k13 r3 s3 pad1 nhwc bias residual act:relu"),
        (2, 64, 16, 8, "conv2d f32 n5 c2 h21 w50 k3 r2 s2 nhwc bias tf32"),
        # pixels that lie apart, of which a product takes a part; a stride beyond the taps
        (
            1,
            32,
            32,
            8,
            "conv2d bf16 n1 c32 h23 w39 k40 r3 s3 stride2 pad1 dil2 nhwc bias act:silu",
        ),
        (2, 32, 16, 16, "conv2d f16 n1 c8 h19 w49 k2 r2 s2 stride3 nhwc"),
        # products of several taps with a part of one, apart from each other
        (1, 32, 16, 8, "conv2d f16 n1 c20 h13 w39 k10 r3 s3 dil1,2 pad2 nhwc bias"),
        # loaded: zeros behind the channels, some of two products a pixel
        (1, 32, 32, 16, "conv2d f16 n2 c3 h21 w45 k64 r7 s7 stride2 pad3 nhwc bias"),
        (
            1,
            32,
            16,
            8,
            "conv2d bf16 n1 c12 h13 w39 k10 r3 s2 stride2,1 pad1,0,2,1 dil2,1 groups2 nhwc "
            "residual",
        ),
        # channels first, in pairs of pixels and one by one
        (2, 64, 32, 8, "conv2d f16 n1 c3 h20 w46 k20 r3 s3 pad1 bias residual act:silu"),
        (1, 32, 16, 4, "conv2d f32 n2 c3 h10 w41 k33 r3 s3 pad1 residual tf32"),
        (2, 32, 16, 8, "conv2d f32 n1 c5 h9 w68 k17 r3 s2 stride1,2 pad1,0,3,0 bias tf32"),
        (1, 32, 16, 2, "conv2d f16 n3 c5 h2 w3 k1 r1 s1 bias"),
        # phases of one to four taps, and of four
        (
            1,
            32,
            16,
            4,
            "conv_transpose2d f16 n1 c24 h7 w35 k10 r3 s3 stride2 pad1 nhwc residual act:silu",
        ),
        (2, 32, 16, 8, "conv_transpose2d f32 n2 c3 h6 w33 k10 r4 s4 stride2 pad1 bias tf32"),
    ]
]
"""Rows that stream past filters in registers."""
EMULATED += ROWS
# Two blocks of a multiprocessor, with little room each.
EMULATED.append(
    (
        "implicit_gemm_wgmma",
        "conv2d f16 n3 c96 h19 w13 k72 r1 s1 nhwc bias residual",
        wgmma_config(128, 64, 2, 1, 1) | {"blocks": 2},
    )
)
PLANES: list[tuple[str, str, Config]] = [
    ("implicit_gemm_wgmma", text, wgmma_config(*tile))
    for tile, text in [
        # several steps, tiles of several images, channels and pixels past the end
        ((128, 64, 3, 1, 1), "conv2d f16 n5 c72 h8 w7 k35 r1 s1 bias"),
        ((128, 64, 3, 1, 1), "conv2d f32 n5 c40 h7 w8 k35 r1 s1 bias tf32"),
        ((128, 64, 2, 1, 1), "conv2d f32 n5 c100 h7 w8 k35 r1 s1 bias"),
        # groups, a split sum, two blocks of 64 pixels a consumer
        ((256, 64, 2, 2, 1), "conv2d bf16 n5 c136 h6 w12 k20 r1 s1 groups2 residual act:relu"),
        ((256, 64, 2, 1, 1), "conv2d f32 n3 c78 h10 w12 k18 r1 s1 groups2 residual act:silu tf32"),
        # splits in a cluster
        ((128, 128, 3, 3, 3), "conv_transpose2d bf16 n2 c200 h8 w9 k66 r1 s1 bias"),
        ((128, 64, 3, 2, 2), "conv_transpose2d f32 n2 c36 h6 w6 k9 r1 s1 residual tf32"),
    ]
]
"""Inputs that are read as they lie."""
EMULATED += PLANES
SHARED: list[tuple[str, str, Config]] = [
    ("implicit_gemm_wgmma", f"conv_transpose2d {text}", wgmma_config(*tile))
    for tile, text in [
        # tiles of pixels and of filters past the end
        (
            (128, 64, 3, 1, 1),
            "f16 n3 c72 h9 w7 k70 r2 s3 stride2,3 nhwc bias residual act:relu",
        ),
        ((128, 64, 3, 1, 1), "bf16 n1 c80 h5 w4 k140 r3 s3 stride3 groups2 bias residual"),
        ((128, 128, 2, 1, 1), "f32 n1 c64 h9 w8 k10 r2 s2 stride2 bias act:silu"),
        # several taps, blocks of channels; sums split in both ways
        ((128, 64, 3, 2, 2), "f16 n1 c128 h5 w6 k70 r4 s4 stride2 nhwc bias residual"),
        ((128, 64, 2, 2, 1), "f32 n2 c36 h6 w7 k40 r2 s3 stride2,3 groups2 nhwc residual tf32"),
        # some phases share a gather and others do not
        ((128, 64, 3, 1, 1), "bf16 n1 c24 h5 w9 k20 r3 s3 stride3 outpad1,2 nhwc bias act:relu"),
        # phases without a tap
        ((128, 64, 3, 1, 1), "f16 n2 c24 h5 w6 k20 r1 s1 stride3,2 bias residual"),
        ((128, 64, 3, 1, 1), "f16 n1 c64 h5 w6 k20 r1 s1 stride3,2 bias nhwc"),
        # none do
        ((128, 64, 3, 1, 1), "f16 n1 c24 h5 w6 k20 r4 s4 stride2 pad1 nhwc bias"),
    ]
]
"""Phases of transposed convolutions that gather the same pixels."""
EMULATED += SHARED
WEIGHT_LAST = [
    *(
        ("implicit_gemm_wgmma", text, wgmma_config(*tile))
        for tile, text in [
            # the copy engine brings them: blocks of channels, the last one not whole, of each tap
            (
                (128, 64, 2, 3, 1),
                "conv2d f16 n2 c112 h9 w11 k70 r3 s2 stride2,1 pad1,0,2,1 dil2,1 nhwc",
            ),
            ((192, 128, 2, 1, 1), "conv2d f16 n3 c128 h9 w11 k170 r3 s3 pad1 groups2 nhwc bias"),
            ((128, 64, 3, 3, 3), "conv2d bf16 n3 c64 h9 w9 k72 r2 s2 bias residual act:relu"),
            # once: they stay
            ((128, 64, 2, 1, 1), "conv2d f16 n3 c96 h13 w13 k60 r1 s1 nhwc bias"),
            # packed
            ((128, 64, 3, 1, 1), "conv2d f16 n3 c40 h14 w9 k70 r3 s3 pad1 nhwc bias residual"),
            (
                (128, 64, 3, 1, 1),
                "conv_transpose2d f16 n3 c72 h9 w7 k70 r2 s3 stride2,3 nhwc bias act:relu",
            ),
        ]
    ),
    # a tile's filters in turns
    (
        "halo_wgmma",
        "conv2d f16 n1 c200 h8 w16 k130 r3 s3 pad1 nhwc bias",
        halo_config(64, 64, True, 128, 64, 2),
    ),
    *(
        next(e for e in EMULATED if e[0] == name and part in e[1])
        for name, part in [
            ("halo_mma", "c72 h12"),
            ("halo_wgmma", "c80 h9"),
            ("halo_wgmma", "c40 h7"),  # two taps a step
            ("halo_wgmma", "c72 h9"),
            ("implicit_gemm_mma", "c24 h4"),
            ("implicit_gemm", "conv2d"),
            ("implicit_gemm", "transpose2d"),
            ("direct_mma", "c3 h21"),
            ("direct_mma", "c20 h13"),
            ("direct_mma", "transpose2d f32"),
        ]
    ),
]
"""Weights whose channels lie side by side."""
EMULATED += [(name, f"{text} wlast", config) for name, text, config in WEIGHT_LAST]
EMULATED += [
    (name, text.replace(" f16 ", " bf16 "), config)
    for name, text, config in EMULATED
    if " f16 " in text and config.get("splits", 1) > 1
]


@pytest.mark.parametrize(("name", "text", "config"), EMULATED)
def test_kernels_on_the_cpu(emulator: Emulator, name: str, text: str, config: Config) -> None:
    """Each kind of path through the kernels, with copies as late and memory as bad as can be."""
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    contract.verify(emulator.device, algorithm, ConvProblem.parse(text), config, facts=FEW_CORES)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("conv2d f16 n16 c16 h512 w512 k16 r3 s3 nhwc", True),
        ("conv2d f16 n16 c3 h224 w224 k64 r3 s3", True),
        ("conv2d f32 n1 c16 h384 w384 k2 r1 s1 nhwc tf32", True),
        ("conv2d f16 n16 c64 h112 w112 k128 r3 s3 nhwc", False),
        ("conv2d f16 n16 c32 h112 w112 k32 r3 s3 pad1 groups32 nhwc", False),
    ],
)
def test_where_channels_or_filters_are_few(text: str, first: bool) -> None:
    """The likeliest candidate is the one that was fastest on an H200 (bench/NOTES.md)."""
    likeliest, *_ = survey(ConvProblem.parse(text), HOPPER, ALGORITHMS).candidates
    assert (likeliest.algorithm == "direct_mma") is first


def test_a_part_for_which_a_ring_is_too_short() -> None:
    """In its padding a part of a problem has a larger stride than the whole."""
    problem = ConvProblem.parse("conv2d f16 n1 c8 h40 w64 k8 r3 s3 pad1,20,1,1 nhwc")
    direct_mma = next(a for a in ALGORITHMS if a.name == "direct_mma")
    limits = dataclasses.replace(HOPPER.limits, max_binding=16384)
    facts = dataclasses.replace(HOPPER, limits=limits)
    short, *_ = direct_mma.configs(problem, facts)
    with pytest.raises(wgpuconv.errors.AlgorithmRefusedError, match="a ring of 8 rows for 1 of"):
        tiling.lower(problem, direct_mma, short, facts, 1 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d f16 n1 c24 h12 w11 k40 r3 s3 pad1 nhwc bias wlast",
        "conv_transpose2d f16 n1 c24 h9 w8 k40 r2 s2 stride2 nhwc bias wlast",
    ],
)
def test_parts_of_a_weight_whose_channels_lie_side_by_side(emulator: Emulator, text: str) -> None:
    problem, algorithm = ConvProblem.parse(text), next(a for a in ALGORITHMS if a.name == "direct")
    limits = dataclasses.replace(HOPPER.limits, max_binding=6000, storage_alignment=16)
    facts = dataclasses.replace(HOPPER, limits=limits)
    (config, *_) = algorithm.configs(problem, facts)
    plan = tiling.lower(problem, algorithm, config, facts, 1 << 20)
    x, w, b = reference.arrays(problem, exact=True)
    got = contract.Runner(emulator.device, plan)(x, w, b)
    reference.check(problem, got, x, w, b, exact=True)
    boxes = {str(part.weight) for part in tiling.parts(problem, limits, 1 << 20)}
    assert len(boxes) > 1


def test_a_weight_that_comes_anew(emulator: Emulator) -> None:
    """Where it is too large to stay, each tile's steps go through the same few stages."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse("conv2d f16 n3 c72 h11 w7 k70 r3 s3 pad1 nhwc bias")
    config = halo_config(96, 96, True, 128, 32, 1)
    plan = contract.verify(emulator.device, algorithm, problem, config, facts=SMALL_SHARED)
    constants = dict(plan.passes[-1].shader.constants)
    assert not constants["RESIDENT"]
    assert dict(plan.passes[-1].params)["tiles"] > plan.passes[-1].grid[0]


@pytest.mark.parametrize("name", ["direct", "depthwise"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_plain_kernels_on_the_cpu(emulator: Emulator, name: str, layout: str) -> None:
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    for i, base in enumerate(contract.problems()[:14]):
        dtype = ("f16", "bf16")[i % 2]
        changes = {"residual": layout == "NHWC", "weight_last": i % 4 > 1}
        problem = base.with_(dtype=dtype, layout=layout, **changes)
        if algorithm.refusal(problem, HOPPER) is None:
            config = algorithm.configs(problem, HOPPER)[-1]
            contract.verify(emulator.device, algorithm, problem, config)


def test_activations_of_many_values_on_the_cpu(emulator: Emulator) -> None:
    check_activations(emulator.device)


def check_activations(device: Device) -> None:
    """Within the accuracies that WGSL gives exp and divisions, relative to each result."""
    v = [*np.linspace(-12, 12, 961), -1e4, -80, 80, 1e4, 3e38, -3e38, -0.0, 1e-30, np.nan]
    x = np.array(v, np.float32).reshape(1, 1, -1, 1)
    problem = ConvProblem.parse(f"conv2d f32 n1 c1 h{x.size} w1 k1 r1 s1")
    direct = next(a for a in ALGORITHMS if a.name == "direct")
    (config, *_) = direct.configs(problem, device.facts)
    for name in ("gelu", "silu", "sigmoid", "tanh"):
        active = problem.with_(activation=Activation.of(name))
        plan = direct.lower(active, config, device.facts, 0)
        got = contract.Runner(device, plan)(x, np.ones((1, 1, 1, 1), np.float32), None)
        want = reference.activate(active.activation, x.astype(np.float64))
        of_exp = x.astype(np.float64) ** 2 / 2 if name == "gelu" else np.abs(x)
        bound = (9 + 4 * np.minimum(of_exp, 100)) * reference.ULP * np.abs(want) + 2.0**-126
        assert (np.abs(got - want) <= bound)[~np.isnan(x)].all(), name
        assert np.isnan(got[np.isnan(x)]).all(), name


@pytest.mark.parametrize(
    ("name", "right", "broken"),
    [
        ("implicit_gemm_mma", "wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();"),
        ("direct_mma", "wait_copies<AHEAD - 1>();", "wait_copies<AHEAD>();"),
        ("implicit_gemm_wgmma", "wait_barrier(full_barrier(shared, slot.at), slot.parity);", ""),
        ("implicit_gemm_wgmma", "wait_products<1>();\n    release();", "release();"),
        ("implicit_gemm_wgmma", "sync_some<GROUP>(PRODUCER_BARRIER);", ""),
        (
            "implicit_gemm_wgmma",
            "wait_barrier(empty_barrier(shared, slot.at), slot.parity ^ 1);",
            "",
        ),
        ("halo_wgmma", "wait_barrier(block.halo_full(buffer), halo.round);", ""),
        ("halo_wgmma", "wait_barrier(block.stage_full(stage.buffer)", "((void)(stage.buffer)"),
        (
            "halo_wgmma",
            "| permutation(PIXEL_CHUNKS);\n  const unsigned weights",
            ";\n  const unsigned weights",
        ),
        ("halo_wgmma", "wait_barrier(block.halo_free(buffer), turn.round ^ 1);", ""),
        ("halo_wgmma", "stage.skip(turn * STEPS);", ""),
        ("halo_wgmma", "wait_barrier(block.stage_full(after.buffer), after.round ^ 1);", ""),
        ("halo_wgmma", "arrive_warp(read_stage, lane);\n          read_stage = 0;", ""),
    ],
)
def test_the_emulator_notices_what_is_missing(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str, right: str, broken: str
) -> None:
    """Else the tests above would prove little."""
    examples = [e for e in EMULATED if e[0] == name]
    fails_if_changed(emulator, monkeypatch, examples, right, broken)


@pytest.mark.parametrize(
    ("name", "examples", "right", "broken"),
    [
        # less than three products of whole floats
        ("implicit_gemm_wgmma", WHOLE_FLOATS, "sums, rest[k],", "sums, held[k],"),
        (
            "implicit_gemm_wgmma",
            WHOLE_FLOATS,
            "filters_of(b + FILTER_BYTES, k)",
            "filters_of(b, k)",
        ),
        # the copy engine's places
        ("implicit_gemm_wgmma", "c112 h9 w11", "lowest_h + row * params.tap_step_h", "lowest_h"),
        ("implicit_gemm_wgmma", "c56 h7 w5 k196", "params.tap_w - lowest_w", "params.tap_w"),
        ("implicit_gemm_wgmma", "c112 h9 w11", "row = 0;\n      channel += TILE_K;", "row = 0;"),
        ("implicit_gemm_wgmma", "c112 h9 w11", "    (IM2COL ? A_BYTES", "    (0 ? A_BYTES"),
        (
            "implicit_gemm_wgmma",
            "c256 h7 w9",
            "first_row = work.group * params.m + work.m_tile",
            "first_row = work.m_tile",
        ),
        # the taps of a weight in channels_last
        ("implicit_gemm_wgmma", "dil2,1 nhwc wlast", "      tap++;\n", ""),
        ("implicit_gemm_wgmma", "dil2,1 nhwc wlast", "tap = work.first_step % taps;", "tap = 0;"),
        ("direct_mma", "pad3 nhwc bias wlast", "(WEIGHT_LAST ? tap * C + c :", "(false ? 0 :"),
        # filters that stay
        ("implicit_gemm_wgmma", "c96 h13", "wait_barrier(resident_barrier(shared), 0);", ""),
        (
            "implicit_gemm_wgmma",
            "c96 h13",
            "RESIDENT_AT + step * B_BYTES, full",
            "RESIDENT_AT, full",
        ),
        # slices of the output, and what is added to them
        *(
            ("implicit_gemm_wgmma", examples, right, broken)
            for examples, right, broken in [
                ("k136 r1 s1 nhwc bias", "          wait_stores<1>();\n", ""),
                ("k136 r1 s1 nhwc bias", "Warpgroup::sync();  // the slice that lay here", "//"),
                ("k136 r1 s1 nhwc bias", "Warpgroup::sync();  // the slice is complete", "//"),
                ("k136 r1 s1 nhwc bias", "(i * 8 + lane / 4) * 8", "lane / 4 * 8"),
                ("k136 r1 s1 nhwc bias", "threadIdx.x / GROUP * ROWS * 64", "0"),
                ("k136 r1 s1 nhwc bias", "    wait_stores<0>();\n    }\n  }\n};", "}}};"),
                ("k136 r1 s1 nhwc res", "wait_barrier(barriers + 8 * place, (count", "((count"),
                (
                    "k136 r1 s1 nhwc res",
                    "wait_stores<0>();\n          load_residual",
                    "load_residual",
                ),
                ("k136 r1 s1 nhwc res", "wait_stores<SLICES == 1 ? 1 : 0>();", ""),
                ("k136 r1 s1 nhwc res", "      publish_copies();\n      Warpgroup", "Warpgroup"),
                ("c72 h19 w13", "count += SLICES;", ""),
                ("c72 h19 w13", "  group = work.group;", "  group = 0;"),
            ]
        ),
        # boxes of a halo, and the filters beside them
        ("halo_wgmma", "c80 h9", "to += HALO_BYTES / boxes;", ""),
        ("halo_wgmma", "c80 h9", "first_w + w, first_h", "first_w, first_h"),
        ("halo_wgmma", "c80 h9", "chunk * TILE_K, tile.group, first", "chunk * TILE_K, 0, first"),
        ("halo_wgmma", "c40 h7 w7 k9 r2 s2 bias tf32 wlast", "* TAPS + tap,", "* TAPS,"),
        (
            "halo_wgmma",
            "groups2 residual act:relu wlast",
            "tile.group * params.m + m_tile * TILE_M",
            "m_tile * TILE_M",
        ),
        (
            "halo_wgmma",
            "c200 h8 w16 k130 r3 s3 pad1 nhwc bias wlast",
            "map, chunk * TILE_K, step",
            "map, 0, step",
        ),
        # the weight as it lies
        ("implicit_gemm_wgmma", "c72 h13 w11 k140", "row < rows && channel", "channel"),
        ("implicit_gemm_wgmma", "c72 h13 w11 k140", "&& channel < params.channels", ""),
        (
            "implicit_gemm_wgmma",
            "c72 h13 w11 k140",
            ": swizzled_matrix(b + k * 32)",
            ": swizzled_matrix(b)",
        ),
        # what a row misses, or has too much
        ("direct_mma", "c3 h10 w41", "past_the_taps(product, lane % 4)", "false"),
        (
            "direct_mma",
            "c20 h13 w39",
            "min(at / PIXEL_BYTES, S - 1)",
            "(product * 32 / PIXEL_BYTES)",
        ),
        ("direct_mma", "c3 h10 w41", "i * 32 + lane < ROW_ITEMS", "true"),
        ("direct_mma", "c24 h7 w35", "w_first + group", "w_s + group"),
        *(
            ("direct_mma", examples, right, "//")
            for examples, right in [
                ("c16 h6 w70", "__syncwarp();  // all lanes' part of it is there"),
                ("c3 h20 w46", "__syncwarp();  // the tile is complete"),
                ("c3 h20 w46", "__syncwarp();  // the residual is there, or"),
                ("c16 h6 w70", "__syncthreads();  // the filters are complete"),
            ]
        ),
        # who does not wait to store
        *(
            ("halo_wgmma", examples, right, "//")
            for examples, right in [
                ("k9 r2 s2 bias tf32", "__syncwarp();  // all lanes have read the slice before"),
                ("k70 r3 s3 pad1 bias residual", "__syncwarp();  // the residual is there"),
                ("k70 r3 s3 pad1 bias residual", "__syncwarp();  // the slice is complete"),
                ("k60 r3 s3 pad1 nhwc", "Warpgroup::sync();  // each element is replaced by"),
                ("k60 r3 s3 pad1 nhwc", "Warpgroup::sync();  // the slice is complete"),
            ]
        ),
    ],
)
def test_the_emulator_notices_what_is_wrong(
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    examples: str,
    right: str,
    broken: str,
) -> None:
    """With the examples in whose text that stands."""
    chosen = [e for e in EMULATED if e[0] == name and examples in e[1]]
    fails_if_changed(emulator, monkeypatch, chosen, right, broken)


@pytest.mark.parametrize(("channels", "resident"), [(32, True), (64, False), (128, False)])
def test_teams_that_share_a_tile_copy_its_halos_ahead(channels: int, resident: bool) -> None:
    """A weight stays only where there is room for two halos beside it; else it has more stages than
    a turn has steps."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse(f"conv2d f16 n16 c{channels} h112 w112 k128 r3 s3 nhwc")
    config = halo_config(224, 224, True, 128, min(channels, 64), 2)
    plan = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    constants = dict(plan.passes[-1].shader.constants)
    assert constants["SHARED"]
    assert constants["HALO_BUFFERS"] == 2
    assert constants["RESIDENT"] == resident
    assert constants["STAGES"] > constants["STEPS"]


@pytest.mark.parametrize(
    ("text", "k", "packed"),
    [
        ("conv2d f16 n4 c128 h28 w28 k128 r3 s3 pad1 nhwc wlast", 64, False),
        ("conv2d f32 n4 c128 h28 w28 k128 r3 s3 pad1 nhwc wlast tf32", 32, False),
        ("conv2d f16 n4 c128 h28 w28 k128 r3 s3 pad1 nhwc", 64, True),
        ("conv2d f16 n4 c128 h28 w28 k128 r3 s3 pad1 nhwc wlast", 32, True),  # half rows
        ("conv2d f16 n64 c128 h56 w56 k128 r3 s3 pad1 nhwc wlast", 64, False),  # many tiles
        ("conv2d f16 n4 c36 h28 w28 k128 r3 s3 pad1 nhwc wlast", 64, True),  # no whole copies
        ("conv_transpose2d f16 n4 c128 h28 w28 k128 r3 s3 pad1 nhwc wlast", 64, True),
    ],
)
def test_weights_that_a_halo_needs_not_packed(text: str, k: int, packed: bool) -> None:
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    config = halo_config(128, 128, True, 64, k, 1)
    problem = ConvProblem.parse(text)
    plan = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    assert bool(plan.prepare) == bool(plan.prepared) == packed
    assert dict(plan.passes[-1].shader.constants)["PACKED"] is packed


@pytest.mark.parametrize(
    ("window", "k", "last", "products"),
    [
        ("r3 s3", 64, True, 12),  # three taps
        ("r3 s3", 64, False, 12),
        ("r2 s2", 64, True, 8),
        ("r5 s5", 64, True, 4),
        ("r5 s5", 64, False, 10),
        ("r3 s3", 16, True, 9),
    ],
)
def test_the_steps_of_a_halo_are_long(window: str, k: int, last: bool, products: int) -> None:
    """After each of them products are waited for; those of a weight as it lies are whole taps."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse(f"conv2d f16 n4 c128 h28 w28 k128 {window} nhwc")
    config = halo_config(128, 128, True, 64, k, 1)
    plan = algorithm.lower(problem.with_(weight_last=last), config, HOPPER, HOPPER.workspace_limit)
    assert dict(plan.passes[-1].shader.constants)["STEP_PRODUCTS"] == products


@pytest.mark.parametrize(
    ("text", "bulk"),
    [
        ("conv2d f16 n16 c256 h28 w28 k64 r1 s1 nhwc", True),
        ("conv2d f32 n16 c256 h28 w28 k60 r3 s3 pad1 nhwc", True),
        ("conv2d f16 n16 c256 h28 w28 k144 r3 s3 stride2 groups2 nhwc residual", True),
        ("conv_transpose2d f16 n16 c256 h28 w28 k64 r3 s3 nhwc", True),
        ("conv_transpose2d f16 n16 c256 h28 w28 k64 r2 s2 stride2 nhwc", False),  # pixels apart
        ("conv_transpose2d f16 n16 c256 h28 w28 k64 r3 s3 stride1,2 outpad0,1 nhwc", False),
        ("conv2d f16 n16 c256 h28 w28 k60 r1 s1 nhwc", False),  # no whole copies
        ("conv2d f16 n16 c256 h28 w28 k136 r1 s1 groups2 nhwc", False),  # nor of a group
        ("conv2d f16 n16 c256 h28 w28 k64 r1 s1", False),
    ],
)
def test_the_copy_engine_brings_outputs_to_memory(text: str, bulk: bool) -> None:
    """Where its maps can describe them; they need no divisions and nobody waits for stores."""
    problem = ConvProblem.parse(text)
    for splits, cluster in ((1, 1), (2, 1), (2, 2)):
        config = wgmma_config(128, 64, 3, splits, cluster)
        plan = WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
        kernel = next(step for step in plan.passes if step.shader.file == WGMMA.name)
        assert dict(kernel.shader.constants)["BULK_OUT"] is (bulk and splits == 1)
        assert ("y" in tensor_maps(kernel)) is (bulk and splits == 1)
        assert ("residual" in tensor_maps(kernel)) is (problem.residual and splits == 1)


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("conv2d f16 n16 c96 h224 w224 k64 r1 s1 nhwc", True),
        ("conv2d f32 n16 c96 h224 w224 k64 r1 s1 nhwc", True),
        ("conv_transpose2d f16 n16 c64 h99 w99 k64 r2 s2 stride2 nhwc", True),
        ("conv2d f16 n1 c96 h28 w28 k64 r1 s1 nhwc", False),  # a tile for each block
        ("conv2d f16 n16 c512 h224 w224 k64 r3 s3 nhwc", False),  # too long sums
        ("conv2d f16 n16 c96 h99 w99 k6000 r1 s1 nhwc", False),  # too many filters
        # 132 blocks have six tiles each; of 128, which 16 kinds of filters would leave, some seven
        ("conv2d f16 n2 c96 h56 w56 k1024 r1 s1 nhwc", False),
        ("conv2d f16 n16 c128 h99 w99 k128 r1 s1 groups2 nhwc", False),
    ],
)
def test_filters_of_short_sums_stay(text: str, stays: bool) -> None:
    """In blocks that have the same filters in each of their tiles."""
    problem = ConvProblem.parse(text)
    plan = WGMMA.lower(problem, wgmma_config(128, 64, 6, 1, 1), HOPPER, HOPPER.workspace_limit)
    for step in plan.passes:
        constants, values = dict(step.shader.constants), dict(step.params)
        assert constants["RESIDENT"] is stays
        if stays:
            assert constants["K_STEPS"] == values["k_steps"]
            assert step.grid[0] % (values["m_tiles"] * values["phases"]) == 0


def test_a_halo_is_no_wider_than_a_copy() -> None:
    """Among the widths that a tile may have: of 129 columns its rows would be of 257 pixels."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse("conv2d f16 n1 c64 h600 w512 k64 r3 s3 stride2 nhwc")
    config = halo_config(128, 128, False, 64, 16, 1)
    plan = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    (x,) = (tensor_maps(step)["x"] for step in plan.passes)
    assert max(x.box) <= 256
    with pytest.raises(wgpuconv.errors.AlgorithmRefusedError, match="a tile of 128 pixels needs"):
        algorithm.lower(problem, config | {"tile_k": 128}, HOPPER, HOPPER.workspace_limit)


def test_blocks_of_halo_wgmma_share_no_multiprocessor() -> None:
    """However little they need: those that start early would, and leave others idle."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    problem = ConvProblem.parse("conv2d f16 n16 c64 h14 w14 k64 r3 s3 pad1 nhwc")
    for config in algorithm.configs(problem, HOPPER):
        (kernel,) = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit).passes
        of_block = interface(specialise(kernel.shader)).shared_bytes + SHARED_OF_CORE
        assert 2 * of_block > HOPPER.limits.max_workgroup_storage + SHARED_OF_CORE


@pytest.mark.parametrize("value", [np.nan, np.inf, np.finfo(np.float32).max], ids=str)
def test_a_special_pixel_of_whole_floats(emulator: Emulator, value: float) -> None:
    """Infinities, and what TF32 rounds to one, have no rest: they spoil what they reach, as NaN."""
    problem = ConvProblem.parse("conv2d f32 n1 c12 h9 w9 k8 r3 s3")
    (config, *_) = WGMMA.configs(problem, HOPPER)
    run = contract.Runner(
        emulator.device, WGMMA.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    )
    x, w, _ = reference.arrays(problem)
    clean, special, reach = x.copy(), x.copy(), np.zeros_like(x)
    clean[0, 5, 4, 4], special[0, 5, 4, 4], reach[0, 5, 4, 4] = 0, value, 1
    reached = reference.linear(problem, reach, np.ones_like(w)) > 0
    want, got = run(clean, w, None), run(special, w, None)
    np.testing.assert_array_equal(np.isnan(got), reached)
    np.testing.assert_array_equal(got[~reached], want[~reached])


def test_pairs_of_pixels_are_stored_together() -> None:
    """Of both kinds of rows, if the examples above are to hold that."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    stored = set()
    for name, text, config in EMULATED:
        problem = ConvProblem.parse(text)
        if name == "halo_wgmma" and problem.layout == "NCHW":
            plan = algorithm.lower(problem, config, FEW_CORES, FEW_CORES.workspace_limit)
            vector = dict(plan.passes[-1].shader.constants)["OUT_VECTOR"]
            stored.add((bool(config["rows_of_eight"]), vector))
    assert {(True, 2), (False, 2), (False, 1)} <= stored


def test_neighbouring_sizes_have_the_same_configurations() -> None:
    """So that one may take the other's winner, though its tiles are as wide as its image wants."""
    algorithm = next(a for a in ALGORITHMS if a.name == "halo_wgmma")
    for layout in ("NCHW", "NHWC"):
        problem = ConvProblem.parse("conv2d f16 n16 c64 h112 w112 k64 r3 s3 pad1")
        problem = problem.with_(layout=layout)
        mine, others = (
            [str(config) for config in algorithm.configs(p, HOPPER)]
            for p in (problem, problem.with_(h=120, w=116))
        )
        assert len(set(mine) & set(others)) >= 0.8 * len(mine)


@pytest.mark.parametrize(
    ("dtype", "right", "broken"),
    [
        ("f16", "multiply_add_async<Scalar, PLANES>(", "multiply_add_async<Scalar>("),
        ("f16", "1024, 1024) | 1ull << 62", "1024, 1024)"),  # not permuted
        ("f16", "ROW_BYTES, 1024, 1024)", "ROW_BYTES, 1024, 128)"),
        ("f16", "a + k * 16 * ROW_BYTES", "a + k * 32"),
        ("f16", "bool valid = channel + row < params.channels", "bool valid = true"),
        ("f32", "(chunk ^ (row % 4 * 2)) * 16", "chunk * 16"),  # all from two banks
        ("f32", "i / 2 * 4) * ROW_BYTES", "i / 2) * ROW_BYTES"),
    ],
)
def test_the_emulator_notices_what_is_wrong_in_planes(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: str, right: str, broken: str
) -> None:
    examples = [e for e in PLANES if f" {dtype} " in e[1]]
    fails_if_changed(emulator, monkeypatch, examples[:1], right, broken)


@pytest.mark.parametrize(
    ("name", "right", "broken"),
    [
        (
            "implicit_gemm_wgmma",
            "work.phase / params.phase_columns * params.y_phase_h",
            "work.phase / params.phases",
        ),
        ("implicit_gemm_wgmma", "work.phase % params.phase_columns * params.y_phase_w", "0"),
        ("implicit_gemm_wgmma", "(work.phase * params.groups + work.group)", "(work.group)"),
        ("pack_filters", "phase / params.phase_columns * params.w_r", "0"),
        ("pack_filters", "phase % params.phase_columns * params.w_s;", "0;"),
        ("pack_filters", "phase * tiles + row / TILE_M", "row / TILE_M"),
    ],
)
def test_the_emulator_notices_what_is_wrong_of_phases(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str, right: str, broken: str
) -> None:
    fails_if_changed(emulator, monkeypatch, SHARED[:1], right, broken, file=name)


def test_packing_ends_with_its_last_tile(emulator: Emulator) -> None:
    """Which has half of the filters that its block packs, of a transposed convolution."""
    (name, text, config) = next(e for e in EMULATED if e[0] == "halo_mma" and "transpose" in e[1])
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    problem = ConvProblem.parse(text)
    plan = algorithm.lower(problem, config, FEW_CORES, FEW_CORES.workspace_limit)
    _, w, _ = reference.arrays(problem)
    buffers = {"weight": filled(w.nbytes), "prepared": filled(plan.prepared + 4096)}
    emulator.write(buffers["weight"], w)
    emulator.prepare(emulator.compile(plan), buffers)
    assert (buffers["prepared"][: plan.prepared].view(np.float16)[-8:] == 0).all()
    assert (buffers["prepared"][plan.prepared :] == 0xFF).all()


def fails_if_changed(
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    examples: list[tuple[str, str, Config]],
    right: str,
    broken: str,
    *,
    file: str | None = None,
) -> None:
    """What stands once in a kernel of the examples, their own unless another ``file`` is named, and
    what would be wrong in its place."""
    from wgpuconv.plugins.cuda import source

    name = examples[0][0]
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    file = file or name
    assert load(file).count(right) == 1
    changed = load(file).replace(right, broken)
    monkeypatch.setattr(source, "load", lambda other: changed if other == file else load(other))

    def verify() -> None:
        for _, text, config in examples:
            problem = ConvProblem.parse(text)
            contract.verify(emulator.device, algorithm, problem, config, facts=FEW_CORES)

    with pytest.raises(AssertionError, match=r"elements are wrong|runs differ|block \d"):
        verify()


def test_tf32_is_told_from_f32(emulator: Emulator) -> None:
    """Its results are within its bound, and not within that of float32."""
    name, text, config = next(e for e in EMULATED if e[1].endswith("tf32"))
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    problem = ConvProblem.parse(text)
    plan = algorithm.lower(problem, config, HOPPER, HOPPER.workspace_limit)
    run = contract.Runner(emulator.device, plan)
    arrays = reference.arrays(problem)
    reference.check(problem, run(*arrays), *arrays)
    with pytest.raises(AssertionError, match="elements are wrong"):
        reference.check(problem.with_(precision="default"), run(*arrays), *arrays)
    judge = Check(problem)
    output = run(judge.data["input"], judge.data["weight"], judge.data.get("bias"))
    assert judge.fault(output) is None
    assert Check(problem.with_(precision="default")).fault(output) is not None


def test_bf16_is_rounded_once() -> None:
    """To nearest is right; cutting off, which errs up to twice as much, is not."""
    problem = ConvProblem.parse("conv2d bf16 n2 c5 h9 w9 k4 r3 s3 pad1 bias")
    judge = Check(problem)
    arrays = judge.data["input"], judge.data["weight"], judge.data["bias"]
    exact = reference.convolve(problem, *arrays).astype(np.float32)
    nearest, cut = exact.astype(reference.NUMPY["bf16"]), exact.copy()
    cut.view(np.uint32)[...] &= 0xFFFF0000
    assert judge.fault(nearest) is None
    reference.check(problem, nearest, *arrays)
    assert "wrong result" in str(judge.fault(cut.astype(nearest.dtype)))
    with pytest.raises(AssertionError, match="elements are wrong"):
        reference.check(problem, cut.astype(nearest.dtype), *arrays)


# ---- finding devices ----


def test_the_entry_point_is_declared() -> None:
    project = Path(__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    assert declared == {"wgpuconv.backends": {"cuda": "wgpuconv.plugins.cuda"}}
    plugin = importlib.import_module("wgpuconv.plugins.cuda")
    assert callable(plugin.devices)
    assert callable(plugin.open)


@pytest.fixture
def plugin_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point, whether or not the package is installed with it."""
    found = importlib.metadata.EntryPoint("cuda", "wgpuconv.plugins.cuda", "wgpuconv.backends")

    def entry_points(*, group: str, name: str = "cuda") -> list[Any]:
        return [found] if (group, name) == ("wgpuconv.backends", "cuda") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_without_cupy(plugin_found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str, package: str | None = None) -> Any:
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        return builtins.__import__(name, fromlist=["x"])

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(MissingExtraError, match=r"pip install 'wgpuconv\[cuda\]'") as caught:
        Device("cuda")
    assert caught.value.__suppress_context__  # one traceback, which ends with the advice
    (found,) = [d for d in devices() if d.backend == "cuda"]
    assert "pip install 'wgpuconv[cuda]'" in str(found.problem)
    assert "pip install 'cupy-cuda12x>=14' 'ml_dtypes>=0.5'" in str(found.problem)


@pytest.mark.parametrize(("version", "fits"), [("13.6.0", False), ("14.0.0rc1", True)])
def test_the_version_of_cupy(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "cupy", installed)
    if fits:
        assert entry.cupy() is installed
        return
    with pytest.raises(MissingExtraError, match=r"needs cupy 14 or newer, but .* is 13\.6\.0; "):
        entry.cupy()


class FakeRuntimeError(RuntimeError):
    pass


def fake_cupy(
    *, count: int | None, driver: int, capability: str = "90", runtime: int = 13020
) -> Any:
    def device_count() -> int:
        if count is None:
            raise FakeRuntimeError("cudaErrorInsufficientDriver")
        return count

    functions = SimpleNamespace(
        CUDARuntimeError=FakeRuntimeError,
        getDeviceCount=device_count,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: runtime,
        getDeviceProperties=lambda ordinal: {"name": b"a card"},
    )
    device = lambda ordinal: SimpleNamespace(compute_capability=capability)  # noqa: E731
    return SimpleNamespace(cuda=SimpleNamespace(runtime=functions, Device=device))


@pytest.mark.parametrize(
    ("api", "message"),
    [
        (fake_cupy(count=None, driver=0), "there is no NVIDIA driver"),
        (fake_cupy(count=None, driver=12040), r"supports CUDA 12\.4, .* built for CUDA 13\.2"),
        (fake_cupy(count=None, driver=13000), "cudaErrorInsufficientDriver"),
        (fake_cupy(count=0, driver=13000), "CUDA_VISIBLE_DEVICES"),
        (fake_cupy(count=1, driver=13000, capability="70"), r"has .* 7\.0, .* 'cupy-cuda12x>=14'"),
        (
            fake_cupy(count=1, driver=12090, capability="61", runtime=12090),
            r"capability 7\.0 or more, got 6\.1",
        ),
    ],
)
def test_no_device(monkeypatch: pytest.MonkeyPatch, api: Any, message: str) -> None:
    monkeypatch.setattr(entry, "cupy", lambda: api)
    with pytest.raises(NoAdapterError, match=message):
        entry.open("cuda")


@pytest.mark.parametrize("spec", ["cuda:2", "cuda:x", "cuda:", "cuda:-1"])
def test_numbers_that_are_not_there(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setattr(entry, "cupy", lambda: fake_cupy(count=2, driver=13000))
    with pytest.raises(NoAdapterError, match=rf"no device '{spec}': cuda has 2 device"):
        entry.open(spec)


def test_listed_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "cupy", lambda: fake_cupy(count=2, driver=13000))
    found = entry.devices()
    assert [d.spec for d in found] == ["cuda:0", "cuda:1"]
    assert {d.name for d in found} == {"a card"}
    assert {d.driver for d in found} == {"CUDA 13.0"}
    volta = fake_cupy(count=1, driver=12090, capability="70", runtime=12090)
    monkeypatch.setattr(entry, "cupy", lambda: volta)
    assert [d.problem for d in entry.devices()] == [None]
    monkeypatch.setattr(entry, "cupy", lambda: fake_cupy(count=1, driver=13000, capability="61"))
    (old,) = entry.devices()
    assert old.spec == ""
    assert "got 6.1" in str(old.problem)


# ---- on a GPU ----


@pytest.fixture(scope="module")
def cuda() -> Device:
    try:
        backend = entry.open("cuda")
    except (MissingExtraError, NoAdapterError) as error:
        pytest.skip(str(error))
    device = Device.__new__(Device)
    device._setup(backend, "off", ":memory:", None)
    return device


def every_kind_of(algorithm: Algorithm, problem: ConvProblem, device: Device) -> list[Config]:
    """Up to three configurations, others on each problem; those of larger problems included."""
    wide = problem.with_(n=64 * problem.n, k=64 * problem.k)
    configs = {str(c): c for like in (problem, wide) for c in algorithm.configs(like, device.facts)}
    step = max(len(configs) // 3, 1)
    return list(configs.values())[len(str(problem)) % step :: step][:3]


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("problem", PROBLEMS + TF32_PROBLEMS, ids=str)
def test_contract(cuda: Device, algorithm: Algorithm, problem: ConvProblem) -> None:
    reason = algorithm.refusal(problem, cuda.facts)
    if problem.precision == "tf32" and not algorithm.name.endswith("mma"):
        reason = "computes this as it does without TF32"
    if reason is not None:
        pytest.skip(reason)
    for config in every_kind_of(algorithm, problem, cuda):
        contract.verify(cuda, algorithm, problem, config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f32 tf32"])
def test_activations(cuda: Device, name: str, dtype: str) -> None:
    spec = {"clip": ("clip", -0.5, 0.75), "leaky_relu": ("leaky_relu", 0.3)}.get(name, name)
    base = ConvProblem.parse(f"conv2d {dtype} n2 c9 h8 w7 k12 r3 s3 pad1 bias")
    problem = base.with_(activation=Activation.of(spec))
    for algorithm in ALGORITHMS:
        if algorithm.refusal(problem, cuda.facts) is None:
            config = algorithm.configs(problem, cuda.facts)[0]
            contract.verify(cuda, algorithm, problem, config)


@pytest.mark.gpu
def test_activations_of_many_values(cuda: Device) -> None:
    check_activations(cuda)


@pytest.mark.gpu
def test_through_the_public_functions(cuda: Device) -> None:
    problem = ConvProblem.parse("conv2d f16 n2 c9 h8 w7 k12 r3 s3 pad1 bias")
    x, w, b = reference.arrays(problem)
    got = wgpuconv.conv2d(x, w, b, padding=1, device=cuda)
    reference.check(problem, got, x, w, b)
    t = wgpuconv.tensor(x, cuda)
    again = wgpuconv.conv2d(t, wgpuconv.tensor(w, cuda), wgpuconv.tensor(b, cuda), padding=1)
    assert isinstance(again, wgpuconv.Tensor)
    assert np.array_equal(again.numpy(), got)


@pytest.mark.gpu
def test_timing(cuda: Device) -> None:
    problem = ConvProblem.parse("conv2d f16 n4 c64 h56 w56 k64 r3 s3 pad1")
    choice = cuda.choose(problem)
    compiled = cuda.backend.compile(choice.plan)
    sizes = {"input": problem.input_bytes, "weight": problem.weight_bytes, "out": problem.out_bytes}
    buffers = {role: cuda.backend.allocate(size) for role, size in sizes.items()}
    once, more = cuda.backend.time([(compiled, buffers)] * 2, repeats=[1, 40])
    assert 1e-6 < more < 1e-2
    assert once > 0.5 * more


@pytest.mark.gpu
def test_bad_buffers(cuda: Device) -> None:
    problem = ConvProblem.parse("conv2d f16 n1 c8 h6 w6 k8 r3 s3")
    compiled = cuda.compiled(problem)
    small = cuda.backend.allocate(16)
    with pytest.raises(wgpuconv.errors.ProblemError, match="has 16 bytes, the plan needs"):
        cuda.backend.run(compiled, {"input": small, "weight": small, "out": small})
    with pytest.raises(wgpuconv.errors.DtypeError, match="is a CudaBuffer"):
        cuda.backend.check_usable(object())
    with pytest.raises(wgpuconv.errors.ProblemError, match="begin at a multiple of 16 bytes"):
        cuda.backend.check_usable(CudaBuffer(None, 0x1008, 64))
    with pytest.raises(wgpuconv.errors.UnsupportedFeatureError, match="process the batch in parts"):
        cuda.backend.allocate(1 << 50)
    assert cuda.backend.usable


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from wgpuconv.plugins.cuda import backend

    plain = specialise(Shader.of("copy_planes"))
    monkeypatch.setattr(backend, "specialise", lambda shader: plain + "nonsense")
    step = Pass(
        Shader.of("copy_planes", THREADS=64),
        tuple((n, 1) for n, _ in interface(plain).params),
        (("src", Region("input")), ("dst", Region("out"))),
        (1, 1, 1),
    )
    problem = ConvProblem.parse("conv2d f32 n1 c1 h1 w1 k1 r1 s1")
    with pytest.raises(wgpuconv.errors.ShaderError, match=r"copy_planes\.cu did not compile"):
        cuda.backend.compile(Plan(problem, "none", {}, (step,)))
    assert cuda.backend.usable
