"""Where the WebGPU API comes from: wgpu (wgpu-native) or wgpudawn (the same API on Dawn)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from typing import Any

from ..errors import ForkedProcessError, MissingExtraError

PROVIDERS = {"wgpu": "wgpu", "dawn": "wgpudawn"}
"""Module by the name that a device spec uses."""

_BOUNDS_CHECKS = 1  # WGPUShaderRuntimeChecks_BoundsChecks of wgpu.h


_OPENGL = "not used: OpenGL offers fewer features of the same hardware than Vulkan"
_LEFT_OUT = {
    "OpenGL": _OPENGL,
    "OpenGLES": _OPENGL,
    "Null": "not used: it computes nothing",
}
"""Why adapters of these backends are left out."""


class Provider:
    """One implementation of the WebGPU API, and what differs between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        # EGL complains on stderr where no session set this; nothing is ever written there.
        os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")
        try:
            self.api: Any = importlib.import_module(PROVIDERS[name])
        except ImportError as error:
            raise MissingExtraError(
                f"the backend {name!r} needs the package {PROVIDERS[name]!r} "
                f"({error}); install it with: pip install 'wgpuconv[{name}]'"
                if name != "wgpu"
                else f"wgpu does not import ({error}); install it with: pip install wgpu"
            ) from error
        self.lock = threading.RLock()
        """Held while adapters and devices are made: Dawn finds no adapter in one of two threads
        that ask at the same time."""
        self._opened_in: int | None = None
        if name == "dawn":
            self._configure_dawn()

    def _configure_dawn(self) -> None:
        from wgpudawn.backends.dawn import extras

        # An application that used Dawn before us has configured it already, and keeps its choice.
        with contextlib.suppress(RuntimeError):
            extras.set_instance_extras(enable_toggles=["vulkan_enable_f16_on_nvidia"])

    @property
    def version(self) -> str:
        return f"{PROVIDERS[self.name]} {self.api.__version__}"

    @property
    def threadsafe(self) -> bool:
        """Whether several threads may use several devices at the same time."""
        return self.name == "wgpu"

    def opening(self) -> None:
        """Notes that this process has a device, after which no child of its can have one.

        Drivers start threads, which a fork does not take along: in the child the first wait
        would never end, on a new device as on the old one.
        """
        self.refuse_fork()
        self._opened_in = os.getpid()

    def refuse_fork(self) -> None:
        """Raises in a child forked from a process that had a device."""
        if self._opened_in not in (None, os.getpid()):
            raise ForkedProcessError(
                f"process {self._opened_in} opened a GPU device before it forked this one, where "
                "no GPU call would return; start child processes with the 'spawn' method "
                "(multiprocessing.get_context('spawn')), or open devices in the children only"
            )

    def adapters(self) -> list[Any]:
        """The adapters that compute shaders run on, in the API's own order."""
        return [a for a in self._all_adapters() if a.info["backend_type"] not in _LEFT_OUT]

    def left_out(self) -> list[tuple[Any, str]]:
        """The other adapters, and why they are not used."""
        found = [(a, _LEFT_OUT.get(a.info["backend_type"])) for a in self._all_adapters()]
        return [(adapter, reason) for adapter, reason in found if reason is not None]

    def _all_adapters(self) -> list[Any]:
        self.refuse_fork()
        with self.lock:
            return list(self.api.gpu.enumerate_adapters_sync())

    def request_device(self, adapter: Any, features: list[str], limits: dict[str, int]) -> Any:
        self.opening()
        with self.lock:
            if self.name == "dawn":
                # Quantised time stamps, a defence for browsers, come in steps of 65 us.
                from wgpudawn.backends.dawn import extras

                return extras.request_device_sync(
                    adapter,
                    required_features=features,
                    required_limits=limits,
                    disable_toggles=["timestamp_quantization"],
                )
            return adapter.request_device_sync(required_features=features, required_limits=limits)

    def shader_module(self, device: Any, code: str, *, trusted: bool) -> Any:
        """A shader module; ``trusted`` leaves out wgpu-native's loop counters and clamps.

        Kernels read past the ends of a buffer what they then mask away. Vulkan's and DX12's
        devices make that harmless themselves; Metal does not, so there the clamps stay.

        wgpu-py offers no API for that yet, so its library's own entry point stands in for the
        plain one during the call. Where it is not there, the module is a checked one.
        """
        library = self._native_library() if trusted else None
        if library is None:
            return device.create_shader_module(code=code)
        thread = threading.get_ident()
        checks = _BOUNDS_CHECKS if device.adapter_info["backend_type"] == "Metal" else 0

        def create(device_id: Any, descriptor: Any) -> Any:
            if threading.get_ident() != thread:  # another user of wgpu-py in this process
                return plain(device_id, descriptor)
            return library.wgpuDeviceCreateShaderModuleTrusted(device_id, descriptor, checks)

        with self.lock:  # without it, what is found here may be another thread's stand-in
            plain = library.wgpuDeviceCreateShaderModule
            library.wgpuDeviceCreateShaderModule = create
            try:
                return device.create_shader_module(code=code)
            finally:
                library.wgpuDeviceCreateShaderModule = plain

    def _native_library(self) -> Any:
        if self.name != "wgpu":
            return None
        try:
            from wgpu.backends.wgpu_native import _api

            library = _api.libf
            return library if hasattr(library, "wgpuDeviceCreateShaderModuleTrusted") else None
        except (ImportError, AttributeError):
            return None

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds of a timestamp tick."""
        try:
            library = self._native_library()
            return float(library.wgpuQueueGetTimestampPeriod(device.queue._internal))
        except AttributeError:
            return 1.0  # Dawn converts to nanoseconds itself


def is_installed(name: str) -> bool:
    """Whether the package of a provider can be found; it is not imported."""
    return importlib.util.find_spec(PROVIDERS[name]) is not None


_providers: dict[str, Provider] = {}
_providers_lock = threading.Lock()


def provider(name: str) -> Provider:
    """The provider of that name, imported once."""
    with _providers_lock:
        if name not in _providers:
            _providers[name] = Provider(name)
        return _providers[name]
