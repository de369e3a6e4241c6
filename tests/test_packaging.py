"""What is shipped: the wheel's content, what works once installed, and what an import costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import wgpuconv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SHADERS = {path.stem: path for path in (ROOT / "shaders").glob("*.wgsl")}
# What lies in the repository under bench/, by the folder that it has in the package.
BENCH = {
    f"wgpuconv/bench_{folder}/{path.name}": path
    for folder in ("peers", "problems")
    for path in (ROOT / "bench" / folder).iterdir()
    if path.is_file()
}

# Only features that were asked for may cost their import: an application that owns a GPU must not
# pay for our command line, and cupy or torch would take the GPU.
NOT_IMPORTED = ("PIL", "cupy", "matplotlib", "onnx", "rich", "torch", "typer", "wgpudawn")


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that knows nothing of this checkout."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation nothing is fetched: hatchling is among the development tools.
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that holds the wheel and no checkout."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    bin_dir = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", bin_dir / "python", "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    # The dependencies are borrowed. An editable install is not borrowed with them: it is made of
    # a .pth file, and Python ignores those in a folder that a .pth file added.
    site = run(
        bin_dir / "python",
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder,
    )
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site.strip(), "borrowed.pth").write_text("\n".join(sorted(borrowed)), encoding="utf-8")
    return bin_dir


def shaders_seen_by(python: Path, cwd: Path) -> dict[str, str]:
    """Where the package lies, under '', and the text of each shader that it finds."""
    code = (
        "import json, wgpuconv\n"
        "from wgpuconv.shader import load, shader_names\n"
        "found = {name: load(name) for name in shader_names()}\n"
        "print(json.dumps({'': wgpuconv.__file__, **found}))\n"
    )
    found: dict[str, str] = json.loads(run(python, "-c", code, cwd=cwd))
    return found


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"wgpuconv/shaders/{path.name}" for path in SHADERS.values()}
    expected |= BENCH.keys()
    expected |= {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "wgpuconv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert SHADERS
    assert "wgpuconv/bench_peers/torch_cpu.py" in BENCH
    assert "wgpuconv/bench_problems/burn.txt" in BENCH
    assert "wgpuconv/py.typed" in names
    package = {name for name in names if ".dist-info/" not in name}
    assert package == expected
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_an_installed_wheel_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    found = shaders_seen_by(installed / "python", tmp_path)
    assert not Path(found.pop("")).is_relative_to(ROOT)
    assert found == {name: path.read_text(encoding="utf-8") for name, path in SHADERS.items()}


def test_an_installed_wheel_finds_its_peers(installed: Path, tmp_path: Path) -> None:
    code = (
        "from wgpuconv.bench.peer_process import PeerProcess, peer_names\n"
        "with PeerProcess('torch-cpu') as peer: facts = peer.describe()\n"
        "print(*peer_names(), facts.absent, sep='\\n')\n"
    )
    *names, absent = run(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert "torch-cuda" in names
    assert absent in ("None", "No module named 'torch'; pip install torch")


def test_the_installed_command_starts(installed: Path, tmp_path: Path) -> None:
    assert "Usage" in run(installed / "wgpuconv", "--help", cwd=tmp_path)


def test_an_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    if not Path(wgpuconv.__file__).is_relative_to(ROOT / "wgpuconv"):
        pytest.skip("wgpuconv is not installed editable here")
    try:
        found = shaders_seen_by(Path(sys.executable), tmp_path)
    except AssertionError as error:
        if "No module named 'wgpuconv'" not in str(error):
            raise
        pytest.skip("wgpuconv is found through the working directory, not installed editable")
    assert Path(found.pop("")).is_relative_to(ROOT)
    assert found == {name: path.read_text(encoding="utf-8") for name, path in SHADERS.items()}


def test_an_editable_install_copies_no_data(tmp_path: Path) -> None:
    # A copy in site-packages would go stale at the next edit of a shader.
    pytest.importorskip("hatchling")
    code = "import sys, hatchling.build; hatchling.build.build_editable(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=ROOT)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        copied = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert [Path(name).suffix for name in copied] == [".pth"]


def test_importing_the_package_imports_no_optional_module() -> None:
    code = f"import sys, wgpuconv; print(*sorted(set({NOT_IMPORTED!r}) & set(sys.modules)))"
    assert run(sys.executable, "-c", code, cwd=ROOT).split() == []


def test_importing_the_package_is_quick() -> None:
    code = (
        "import time; start = time.perf_counter(); import wgpuconv\n"
        "print(time.perf_counter() - start)"
    )
    # The best of three, since the first one may compile bytecode and the machine may be busy.
    best = min(float(run(sys.executable, "-c", code, cwd=ROOT)) for _ in range(3))
    assert best < 1.0


def test_public_names_exist_once_and_in_order() -> None:
    def order(name: str) -> tuple[int, str]:  # that of ruff's RUF022: CONSTANTS, Classes, the rest
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    names = list(wgpuconv.__all__)
    assert [name for name in names if not hasattr(wgpuconv, name)] == []
    assert names == sorted(set(names), key=order)


def test_the_version_is_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["version"] == wgpuconv.__version__


def test_dev_has_what_image_has() -> None:
    # `make demo` after `make test` installs nothing, because of this.
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(extras["image"]) <= set(extras["dev"])


def test_the_readme_names_every_extra() -> None:
    (listed,) = [
        text
        for text in (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
        if text.startswith("The extras are ")
    ]
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert [name for name in extras if f"`{name}` (" not in listed] == []
