"""Finding and opening devices: specs, the environment, plugins, adoption, and nothing to find."""

from __future__ import annotations

import builtins
import copy
import gc
import importlib
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import wgpuconv
from wgpuconv import Device, Tensor, conv2d, devices, tensor
from wgpuconv import device as device_module
from wgpuconv.backends import provider as provider_module
from wgpuconv.device import ENV_DEVICE, PLUGIN_GROUP, CallCache, default_device, shared_device
from wgpuconv.errors import (
    DeviceError,
    DtypeError,
    MissingExtraError,
    NoAdapterError,
    UnsupportedFeatureError,
)
from wgpuconv.facts import WEBGPU_DEFAULTS
from wgpuconv.shader import load

X = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
W = np.ones((1, 1, 2, 2), np.float32)
Y = np.array([[[[10, 14, 18], [26, 30, 34], [42, 46, 50]]]], np.float32)


def works(device: Device) -> bool:
    return np.array_equal(conv2d(X, W, device=device), Y)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_DEVICE, raising=False)


# ---- specs ----


def test_specs(device: Device, no_environment: None) -> None:
    name = devices()[0].name
    for spec in ("wgpu", "wgpu:0", name, name[: len(name) // 2].upper(), None, ""):
        opened = Device(spec)
        assert opened.backend.provider.name == "wgpu"
        assert name in opened.name
    assert works(opened)


def test_repr_names_what_it_is(device: Device) -> None:
    for part in (device.backend.identity.driver, device.name, "wgpu 0."):
        assert part in repr(device)


@pytest.mark.parametrize("spec", ["wgpu:9", "wgpu:x", "wgpu:-1", "wgpu:", "wgpu:0:0"])
def test_numbers_that_are_not_there(device: Device, spec: str) -> None:
    with pytest.raises(NoAdapterError, match=rf"no device '{spec}': wgpu has \d+ adapter.*devices"):
        Device(spec)


def test_the_name_that_is_printed(device: Device) -> None:
    assert Device(device.name).name == device.name


def test_unknown_names_are_answered_with_what_is_installed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "is_installed", lambda name: name == "wgpu")
    monkeypatch.setattr(device_module, "plugins", lambda: ["'cuda'"])
    with pytest.raises(NoAdapterError, match=r"and 'wgpu', 'cuda' for .*'wgpuconv devices' lists"):
        Device("Voodoo")


def test_where_nothing_is_installed_plugins_are_missed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that is only on the path has no entry points."""

    def distribution(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(device_module, "plugins", lambda: [])
    with pytest.raises(
        NoAdapterError, match=r"as 'cuda', are known where wgpuconv is installed.*-e"
    ):
        Device("Voodoo")


def test_unknown_name(device: Device) -> None:
    with pytest.raises(NoAdapterError) as caught:
        Device("Voodoo 3dfx")
    assert "'Voodoo 3dfx'; there are " in str(caught.value)
    assert devices()[0].name in str(caught.value)


@pytest.mark.parametrize("spec", [0, 1.5, ["wgpu"], b"wgpu"])
def test_other_types(spec: Any) -> None:
    with pytest.raises(DtypeError, match="spec must be a string such as 'wgpu:0'"):
        Device(spec)
    with pytest.raises(DtypeError, match="device must be a Device, its spec or None"):
        conv2d(X, W, device=spec)


def test_environment(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DEVICE, "wgpu:0")
    assert works(Device())
    monkeypatch.setenv(ENV_DEVICE, "wgpu:77")
    with pytest.raises(NoAdapterError, match=rf"'wgpu:77' \(from the environment .*{ENV_DEVICE}"):
        Device()
    assert works(Device("wgpu"))  # what is said in the call wins
    monkeypatch.setenv(ENV_DEVICE, "Voodoo")
    with pytest.raises(NoAdapterError, match=rf"'Voodoo' \(from the environment .*{ENV_DEVICE}"):
        Device()
    monkeypatch.setenv(ENV_DEVICE, "")
    assert works(Device())


def test_one_device_a_spec(device: Device, no_environment: None) -> None:
    assert shared_device("wgpu:0") is shared_device("wgpu:0")
    assert default_device() is default_device()
    assert tensor(X).device is default_device()
    assert tensor(X, "wgpu:0").device is shared_device("wgpu:0")
    assert isinstance(conv2d(tensor(X, "wgpu:0"), W), Tensor)
    assert np.array_equal(conv2d(X, W, device="wgpu:0"), Y)


def test_limits(default_limits: Device) -> None:
    facts = default_limits.facts.limits
    for name in ("max_invocations", "max_workgroup_storage", "max_binding", "max_storage_buffers"):
        assert getattr(facts, name) <= getattr(WEBGPU_DEFAULTS, name)
    assert works(default_limits)
    most = default_limits.facts.limits.max_buffer
    with pytest.raises(UnsupportedFeatureError, match=f"max-buffer-size {most}"):
        Tensor.empty((most // 4 + 1,), device=default_limits)


# ---- listing ----


def test_devices(device: Device) -> None:
    found = [d for d in devices() if d.problem is None]
    assert found[0].spec == "wgpu:0"
    for entry in found:
        assert entry.name
        assert entry.driver
        assert re.fullmatch(r"(wgpu|dawn) \(\w+\)", entry.backend)
        assert entry.kind in ("DiscreteGPU", "IntegratedGPU", "CPU", "Unknown", "VirtualGPU")
        assert set(entry.features) <= {
            "shader-f16",
            "timestamp-query",
            "subgroup",
            "subgroups",
        }


def test_devices_that_are_left_out_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter:
        info: ClassVar[dict[str, str]] = {
            "device": "a card",
            "backend_type": "OpenGL",
            "adapter_type": "Unknown",
            "description": "",
            "vendor": "a vendor",
        }
        features: ClassVar[set[str]] = set()

    monkeypatch.setattr(provider_module.Provider, "_all_adapters", lambda self: [Adapter()])
    left_out = [d for d in devices() if d.name == "a card"]
    assert left_out
    for entry in left_out:
        assert entry.spec == ""
        assert "OpenGL offers fewer features" in (entry.problem or "")
    with pytest.raises(NoAdapterError):
        Device("wgpu")


def test_devices_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        raise RuntimeError("the driver is in a mood")

    monkeypatch.setattr(provider_module.Provider, "adapters", broken)
    found = devices()
    assert found
    assert all("in a mood" in entry.problem or "pip install" in entry.problem for entry in found)


def test_no_adapter() -> None:
    code = """
import numpy as np, wgpuconv
found = wgpuconv.devices()
assert found and all(entry.problem for entry in found), found
x = np.ones((1, 1, 2, 2), "f4")
for use in (wgpuconv.Device, lambda: wgpuconv.Device("wgpu"), lambda: wgpuconv.conv2d(x, x),
            lambda: wgpuconv.Device("anything")):
    try:
        use()
    except wgpuconv.errors.NoAdapterError as error:
        assert isinstance(error, RuntimeError)
        assert "apt install mesa-vulkan-drivers" in str(error), error
    else:
        raise AssertionError("found something")
"""
    nowhere = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **nowhere, ENV_DEVICE: ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "found something" in done.stderr and sys.platform != "linux":
        pytest.skip("these variables hide only Vulkan drivers")
    assert done.returncode == 0, done.stderr


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    plain = builtins.__import__

    def without_dawn(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "wgpudawn":
            raise ModuleNotFoundError("No module named 'wgpudawn'", name="wgpudawn")
        return plain(name, *args, **kwargs)

    def import_module(name: str, package: str | None = None) -> Any:
        return without_dawn(name, fromlist=["x"])

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(provider_module, "_providers", {})
    with pytest.raises(MissingExtraError, match=r"pip install 'wgpuconv\[dawn\]'") as caught:
        Device("dawn")
    assert isinstance(caught.value, ImportError)
    (entry,) = [d for d in devices() if d.spec == "dawn"]
    assert "pip install 'wgpuconv[dawn]'" in str(entry.problem)


# ---- plugins ----


class FakeEntry:
    """An entry point that loads what the test gives it."""

    def __init__(self, name: str, plugin: Any) -> None:
        self.name, self.value, self.plugin = name, "fake_plugin:plugin", plugin

    def load(self) -> Any:
        if isinstance(self.plugin, Exception):
            raise self.plugin
        return self.plugin


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch):
    def install(**plugin: Any) -> None:
        entries = [FakeEntry(name, what) for name, what in plugin.items()]

        def entry_points(*, group: str, name: str | None = None) -> list[FakeEntry]:
            assert group == PLUGIN_GROUP
            return [e for e in entries if name is None or e.name == name]

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def test_what_lives_on_a_device_is_not_pickled(device: Device) -> None:
    weight = np.zeros((2, 1, 1, 1), np.float32)
    on_it = tensor(weight, device), wgpuconv.Conv2d(weight, device=device)
    plan = wgpuconv.plan_conv2d((1, 1, 4, 4), weight.shape, device=device)
    for each in (device, *on_it, plan):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(DeviceError, match="neither copied nor pickled; in another proc"):
                copied(each)


def test_a_shallow_copy_never_holds_what_went_back(device: Device) -> None:
    """A tensor's would be left without its buffer; a module's keeps the tensors themselves."""
    for each in (device, tensor(X, device)):
        with pytest.raises(DeviceError, match="neither copied nor pickled"):
            copy.copy(each)
    layer = wgpuconv.Conv2d(W, device=device)
    copied = copy.copy(layer)
    del layer
    gc.collect()
    other = tensor(np.zeros_like(W), device)  # would get the weight's buffer
    np.testing.assert_array_equal(copied(X), Y)
    assert other.buffer is not copied.weight.buffer


def test_the_entry_point_call_is_real() -> None:
    """What the fake stands in for accepts the same arguments."""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name="nothing of this name")
    assert isinstance(found, EntryPoints)
    assert hasattr(EntryPoint, "load")


def test_plugin(plugins: Any, device: Device) -> None:
    opened = []
    info = wgpuconv.DeviceInfo("fake:0", "Fake 1", "fake", "DiscreteGPU", "1.0")

    def open_(spec: str) -> Any:
        opened.append(spec)
        return device.backend

    plugins(fake=SimpleNamespace(devices=lambda: [info], open=open_))
    assert info in devices()
    for spec in ("fake", "fake:0", "fake:1"):
        assert works(Device(spec))
    assert opened == ["fake", "fake:0", "fake:1"]
    assert Device("wgpu").backend is not device.backend


def test_broken_plugins(plugins: Any, device: Device) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("libfake.so: cannot open")

    def missing(*_: Any) -> Any:
        raise MissingExtraError("install it with: pip install 'wgpuconv[fake]'")

    plugins(
        unloadable=ImportError("no module fake"),
        failing=SimpleNamespace(devices=fail, open=fail),
        missing=SimpleNamespace(devices=missing, open=missing),
    )
    problems = {d.spec: d.problem for d in devices()}
    assert problems["unloadable"] == "no module fake"
    assert problems["failing"] == "libfake.so: cannot open"
    assert "pip install" in str(problems["missing"])
    assert problems["wgpu:0"] is None  # the others are as they were
    with pytest.raises(DeviceError, match=r"'unloadable' \(fake_plugin:plugin\).*no module fake"):
        Device("unloadable")
    with pytest.raises(DeviceError, match=r"OSError: libfake\.so"):
        Device("failing:0")
    with pytest.raises(MissingExtraError, match="pip install"):
        Device("missing")


# ---- an application's own device ----


def own_device(module: str, **wanted: Any) -> Any:
    api = pytest.importorskip(module)
    adapters = api.gpu.enumerate_adapters_sync()
    vulkan = [a for a in adapters if a.info["backend_type"] not in ("OpenGL", "OpenGLES", "Null")]
    if not vulkan:
        pytest.skip(f"{module} finds no adapter")
    return vulkan[0].request_device_sync(**wanted)


@pytest.mark.parametrize("module", ["wgpu", "wgpudawn"])
def test_from_wgpu(module: str) -> None:
    """No features, default limits: enough for everything but float16."""
    limits = {
        "max-compute-invocations-per-workgroup": 256,
        "max-compute-workgroup-storage-size": 16384,
        "max-storage-buffers-per-shader-stage": 8,
    }
    gpu_device = own_device(module, required_limits=limits)
    device = Device.from_wgpu(gpu_device)
    assert device.backend.gpu_device is gpu_device
    assert not device.facts.f16
    assert works(device)
    assert device.facts.limits.max_invocations == 256
    assert device.facts.limits.max_storage_buffers == 8
    with pytest.raises(UnsupportedFeatureError, match=r"shader-f16.*use float32"):
        conv2d(X.astype(np.float16), W.astype(np.float16), device=device)
    assert works(device)


@pytest.mark.parametrize(("api", "checks"), [("Vulkan", 0), ("D3D12", 0), ("Metal", 1)])
def test_metal_keeps_its_bounds_checks(api: str, checks: int) -> None:
    """It has no robust access, and masked loads of the GEMM kernels reach past a buffer."""
    calls: list[tuple[Any, ...]] = []
    library = SimpleNamespace(
        wgpuDeviceCreateShaderModule=lambda *given: pytest.fail("the checked entry point"),
        wgpuDeviceCreateShaderModuleTrusted=lambda *given: calls.append(given),
    )
    source = provider_module.Provider("wgpu")
    source._native_library = lambda: library  # type: ignore[method-assign]
    gpu_device = SimpleNamespace(
        adapter_info={"backend_type": api},
        create_shader_module=lambda code: library.wgpuDeviceCreateShaderModule("id", code),
    )
    source.shader_module(gpu_device, "text", trusted=True)
    assert calls == [("id", "text", checks)]


def test_an_applications_shaders_stay_checked(device: Device) -> None:
    """The stand-in for wgpu-py's entry point is gone after threads have compiled side by side."""
    api = importlib.import_module("wgpu.backends.wgpu_native._api")
    plain = api.libf.wgpuDeviceCreateShaderModule
    backend = device.backend
    with ThreadPoolExecutor(8) as pool:
        made = [
            pool.submit(
                backend.provider.shader_module, backend.gpu_device, load("direct"), trusted=True
            )
            for _ in range(24)
        ]
    assert all(module.result() for module in made)
    assert api.libf.wgpuDeviceCreateShaderModule is plain


@pytest.mark.parametrize("module", ["wgpu", "wgpudawn"])
def test_timing_without_the_feature(module: str) -> None:
    """No timestamp-query: the wall clock."""
    device = Device.from_wgpu(own_device(module))
    compiled = device.compiled(wgpuconv.ConvProblem.from_call("conv2d", X.shape, W.shape))
    x, w = tensor(X, device), tensor(W, device)
    out = Tensor.empty(Y.shape, device=device)
    buffers = {"input": x.buffer, "weight": w.buffer, "out": out.buffer}
    (seconds,) = device.backend.time([(compiled, buffers)], repeats=[2])
    assert 0 < seconds < 60
    assert np.array_equal(out.numpy(), Y)


@pytest.mark.parametrize("thing", [None, 3, "wgpu"])
def test_from_wgpu_takes_devices_only(thing: Any, device: Device) -> None:
    for given in (
        thing,
        device,
        device.backend.gpu_device.queue,
        device.backend.gpu_device.adapter,
    ):
        with pytest.raises(DtypeError, match="from_wgpu takes a GPUDevice of wgpu or wgpudawn"):
            Device.from_wgpu(given)


def test_f16_needs_the_feature(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(device.backend, "facts", replace(device.facts, f16=False))
    with pytest.raises(UnsupportedFeatureError, match=r"'shader-f16', which .* does not offer"):
        conv2d(X.astype(np.float16)[:, :, 1:], W.astype(np.float16), device=device)


# ---- caches ----


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch, no_environment: None) -> None:
    monkeypatch.setattr("wgpuconv.device.CACHED_PLANS", 5)
    device = Device()
    for width in range(2, 14):
        x = np.ones((1, 1, 2, width), np.float32)
        got = conv2d(x, W, device=device, algorithm="direct")
        assert np.array_equal(got, np.full((1, 1, 1, width - 1), 4, np.float32))
    assert len(device._open) == 5
    assert len(device.call_cache._found) <= 5
    assert works(device)


def test_call_cache() -> None:
    cache, compiled = CallCache(), object()
    cache.put("key", (1, (2, 3)), compiled)
    assert cache.get("key", (1, (2, 3))) is compiled
    assert cache.get("key", (True, (2, 3))) is None
    assert cache.get("key", (1, (2.0, 3))) is None
    assert cache.get("other", (1, (2, 3))) is None
    cache.put("key", ([1],), compiled)
    assert cache.get("key", ([1],)) is compiled
    cache.clear()
    assert cache.get("key", (1, (2, 3))) is None


def test_trim(no_environment: None) -> None:
    device = Device()
    assert works(device)
    kept = tensor(X, device)
    device.trim()
    assert not device._open
    assert not device.backend._groups
    assert works(device)
    assert np.array_equal(kept.numpy(), X)


def test_bind_groups_let_go_of_dropped_buffers(
    monkeypatch: pytest.MonkeyPatch, no_environment: None
) -> None:
    """A pool over its capacity frees memory; a kept bind group must not hold it."""
    monkeypatch.setattr("wgpuconv.backends.webgpu.POOL_CAPACITY", 64 << 10)
    device = Device()
    for size in range(40, 240, 20):  # growing: no buffer can be used again
        x = tensor(np.ones((1, 1, size, size), np.float32), device)
        conv2d(x, W, algorithm="direct")
    del x
    Tensor.empty((1,), device=device)
    assert len(device.backend._owned) < 12
    assert works(device)
