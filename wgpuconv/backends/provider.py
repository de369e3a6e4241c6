"""Where the WebGPU API comes from: wgpu (wgpu-native) or wgpudawn (the same API on Dawn)."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from ..errors import MissingExtraError

PROVIDERS = {"wgpu": "wgpu", "dawn": "wgpudawn"}
"""Module by the name that a device spec uses."""


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
        self._trusted_lock = threading.Lock()

    @property
    def version(self) -> str:
        return f"{PROVIDERS[self.name]} {self.api.__version__}"

    def adapters(self) -> list[Any]:
        """The adapters that compute shaders run on, in the API's own order.

        An OpenGL adapter shows the same hardware again with fewer features, so it is left out.
        """
        found = self.api.gpu.enumerate_adapters_sync()
        return [a for a in found if a.info["backend_type"] not in ("OpenGL", "OpenGLES", "Null")]

    def request_device(self, adapter: Any, features: list[str], limits: dict[str, int]) -> Any:
        return adapter.request_device_sync(required_features=features, required_limits=limits)

    def shader_module(self, device: Any, code: str, *, trusted: bool) -> Any:
        """A shader module; ``trusted`` leaves out wgpu-native's loop counters and clamps.

        wgpu-py offers no API for that yet, so its library's own entry point stands in for the
        plain one during the call. Where it is not there, the module is a checked one.
        """
        library = self._native_library() if trusted else None
        if library is None:
            return device.create_shader_module(code=code)
        plain = library.wgpuDeviceCreateShaderModule
        thread = threading.get_ident()

        def create(device_id: Any, descriptor: Any) -> Any:
            if threading.get_ident() != thread:  # another user of wgpu-py in this process
                return plain(device_id, descriptor)
            return library.wgpuDeviceCreateShaderModuleTrusted(device_id, descriptor, 0)

        with self._trusted_lock:
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


_providers: dict[str, Provider] = {}


def provider(name: str) -> Provider:
    """The provider of that name, imported once."""
    if name not in _providers:
        _providers[name] = Provider(name)
    return _providers[name]
