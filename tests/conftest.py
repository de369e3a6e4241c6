"""Devices for the tests, and what keeps runs alike: no tuning, an empty cache, fixed examples."""

from __future__ import annotations

import os
import tempfile

# Before numpy comes: every worker of pytest-xdist has a core to itself, and matrix products on
# all cores at once would only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Before a driver comes: lavapipe spends most of the tests in LLVM, which takes less than half as
# long for vectors of four lanes as for eight. What a kernel computes does not depend on it, nor
# does a kernel in Mesa's cache: it holds its width, and runs under either.
os.environ.setdefault("LP_NATIVE_VECTOR_WIDTH", "128")

import hypothesis
import pytest

# Set before wgpuconv is used, and inherited by the processes that tests start: nothing is measured
# unless a test asks for it, and nobody's own store is read or written.
_cache = tempfile.TemporaryDirectory(prefix="wgpuconv-tests-")
os.environ["WGPUCONV_CACHE_DIR"] = _cache.name
os.environ["WGPUCONV_TUNE"] = "off"

from wgpuconv import Device  # noqa: E402
from wgpuconv.errors import NoAdapterError  # noqa: E402
from wgpuconv.facts import WEBGPU_DEFAULTS  # noqa: E402

# The same examples on every run, so that a red run is the change's doing. A first call compiles
# kernels, so an example has no deadline; pytest-timeout ends what hangs.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=60, database=None
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    # A pipeline takes a software driver seconds to compile and lives in one process: with
    # pytest-xdist, tests that share one (xdist_group) go to the same worker.
    if config.getoption("dist", "no") == "load":
        config.option.dist = "loadgroup"
    if hasattr(config, "workerinput"):  # a worker is told of the command line alone
        config.option.loadgroup = True
    config.addinivalue_line("markers", "xdist_group(name): tests that share pipelines")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and item.session.config.stash.get(_HARDWARE, None) is None:
        item.session.config.stash[_HARDWARE] = _has_hardware()
    if item.get_closest_marker("gpu") and not item.session.config.stash[_HARDWARE]:
        pytest.skip("needs a hardware GPU; only a software driver was found")
    if item.get_closest_marker("swiftshader"):
        icd = os.environ.get("WGPUCONV_SWIFTSHADER_ICD", "")
        if not os.path.isfile(icd):
            pytest.skip(f"WGPUCONV_SWIFTSHADER_ICD names no file (it is {icd!r})")


_HARDWARE = pytest.StashKey[bool]()


def _has_hardware() -> bool:
    from wgpuconv import devices

    return any(found.problem is None and found.kind != "CPU" for found in devices())


@pytest.fixture(scope="session")
def device() -> Device:
    """The machine's best device, with its own limits; shaders without run-time checks."""
    return Device()


@pytest.fixture(scope="session")
def checked() -> Device:
    """The same, with wgpu-native's run-time checks in the shaders."""
    return Device(trusted=False)


@pytest.fixture(scope="session")
def default_limits() -> Device:
    """The same, with no more than the limits that WebGPU guarantees everywhere."""
    return Device(limits=WEBGPU_DEFAULTS)


@pytest.fixture(scope="session")
def dawn() -> Device:
    """The machine's best device through Dawn."""
    pytest.importorskip("wgpudawn")
    try:
        return Device("dawn")
    except NoAdapterError as error:
        pytest.skip(f"Dawn sees no adapter: {error}")
