"""What device.py asks of a plugin: the devices that it finds, and one of them opened."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ...device import DeviceInfo
from ...errors import MissingExtraError, NoAdapterError, counted
from .facts import TURING, VOLTA

if TYPE_CHECKING:
    from .backend import CudaBackend

LEAST_CUPY = 14
"""The first major version whose streams take another library's (``Stream.from_external``)."""


def cupy() -> Any:
    """The module cupy. Raises MissingExtraError with the pip command where it is absent or old."""
    try:
        found = importlib.import_module("cupy")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise _no_cupy("it is not installed") from None
        raise _no_cupy(f"it cannot be imported ({error})") from error
    if int(found.__version__.partition(".")[0]) < LEAST_CUPY:
        raise _no_cupy(f"the one installed is {found.__version__}")
    return found


def _no_cupy(why: str) -> MissingExtraError:
    return MissingExtraError(
        f"the device 'cuda' needs cupy {LEAST_CUPY} or newer, but {why}; for a CUDA 13 driver (580 "
        "and newer) install it with: pip install 'wgpuconv[cuda]', for a CUDA 12 driver with: "
        f"pip install 'cupy-cuda12x>={LEAST_CUPY}' 'ml_dtypes>=0.5'"
    )


def count(api: Any) -> int:
    """How many CUDA devices there are. Raises NoAdapterError where there is none."""
    runtime = api.cuda.runtime
    try:
        found = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        driver, wanted = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if not driver:
            reason = "there is no NVIDIA driver; install the one for your GPU"
        elif driver < wanted // 1000 * 1000:
            reason = (
                f"the driver supports CUDA {version(driver)}, but the installed cupy was built for "
                f"CUDA {version(wanted)}; update the driver, or install cupy-cuda12x instead"
            )
        else:
            reason = str(error)
        raise NoAdapterError(f"no CUDA device can be used: {reason}") from error
    if not found:
        raise NoAdapterError("the CUDA driver finds no device (is CUDA_VISIBLE_DEVICES set?)")
    return found


def version(number: int) -> str:
    """``13.2`` for 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"


def capability(api: Any, ordinal: int) -> tuple[int, int]:
    text = str(api.cuda.Device(ordinal).compute_capability)
    return int(text[:-1]), int(text[-1])


def name(api: Any, ordinal: int) -> str:
    found = api.cuda.runtime.getDeviceProperties(ordinal)["name"]
    return str(found.decode() if isinstance(found, bytes) else found)


def unusable(api: Any, ordinal: int) -> str | None:
    """Why that device cannot be used; None where it can.

    The compiler of CUDA 13 does not know Volta any more; that of CUDA 12 does.
    """
    major, minor = capability(api, ordinal)
    if (major, minor) >= TURING:
        return None
    if (major, minor) < VOLTA:
        return f"needs compute capability 7.0 or more, got {major}.{minor}"
    if api.cuda.runtime.runtimeGetVersion() < 13000:
        return None
    return (
        f"has compute capability {major}.{minor}, which needs cupy for CUDA 12; instead of the one "
        f"installed, which is for CUDA 13: pip install 'cupy-cuda12x>={LEAST_CUPY}'"
    )


def devices() -> list[DeviceInfo]:
    """All CUDA devices. Raises where there can be none."""
    api = cupy()
    driver = f"CUDA {version(api.cuda.runtime.driverGetVersion())}"
    return [
        DeviceInfo(
            spec=f"cuda:{i}" if unusable(api, i) is None else "",
            name=name(api, i),
            backend="cuda",
            kind="DiscreteGPU",
            driver=driver,
            features=("shader-f16", "timestamp-query", "subgroup"),
            problem=unusable(api, i),
        )
        for i in range(count(api))
    ]


def open(spec: str) -> CudaBackend:
    """The backend of ``cuda`` (the first device) or ``cuda:N``."""
    from .backend import CudaBackend

    api = cupy()
    found = count(api)
    _, colon, number = spec.partition(":")
    if colon and (not number.isdigit() or int(number) >= found):
        raise NoAdapterError(
            f"no device {spec!r}: cuda has {counted(found, 'device')}, numbered from 0; "
            "see wgpuconv.devices()"
        )
    ordinal = int(number) if colon else 0
    problem = unusable(api, ordinal)
    if problem is not None:
        raise NoAdapterError(f"{name(api, ordinal)} {problem}")
    return CudaBackend(api, ordinal)
