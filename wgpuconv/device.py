"""Devices: finding them, opening them, and choosing plans on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .algorithms import Algorithm, find
from .backends.base import Compiled, Identity
from .backends.provider import PROVIDERS, Provider, is_installed, provider
from .backends.webgpu import WebGpuBackend, adapter_name, identity_of, open_device
from .errors import (
    DeviceError,
    DtypeError,
    NoAdapterError,
    ProblemError,
    UnknownAlgorithmError,
    UnsupportedFeatureError,
    WgpuConvError,
    counted,
)
from .explain import Explanation, basis, explanation
from .facts import Facts, Limits
from .plan import Plan
from .planner import Candidate, Survey, lower, only, survey
from .problem import ConvProblem
from .tuning.session import Progress
from .tuning.store import Store, default_path
from .tuning.tuner import Choice, Tuner

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENV_DEVICE = "WGPUCONV_DEVICE"
PLUGIN_GROUP = "wgpuconv.backends"
CACHED_PLANS = 1024
"""Problems of which a device keeps the plan, and calls of which it keeps the arguments."""


@dataclass(frozen=True)
class DeviceInfo:
    """One device that could be opened, or why it cannot."""

    spec: str
    """What ``Device(spec)`` takes to open it; empty where nothing does."""
    name: str
    backend: str
    kind: str
    """'DiscreteGPU', 'IntegratedGPU', 'CPU', ..."""
    driver: str
    features: tuple[str, ...] = ()
    problem: str | None = None
    """Why it cannot be used; None where it can."""
    identity: Identity | None = None
    """What its measurements are stored by."""


@dataclass
class _Open:
    """What a device keeps for one (problem, algorithm, workspace limit)."""

    choice: Choice
    compiled: Compiled


class CallCache:
    """Compiled plans by the raw arguments of a call, so that a repeated call validates nothing.

    Parameters are told apart by how they are written: 1, 1.0 and True are equal, but not all of
    them are accepted, and lists have no hash.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Compiled] = {}

    def get(self, key: Any, parameters: tuple[Any, ...]) -> Compiled | None:
        return self._found.get((key, repr(parameters)))

    def put(self, key: Any, parameters: tuple[Any, ...], compiled: Compiled) -> None:
        if len(self._found) >= CACHED_PLANS:
            self._found.clear()
        self._found[key, repr(parameters)] = compiled

    def clear(self) -> None:
        self._found.clear()


class Device:
    """A GPU (or a software driver) opened for convolutions.

    ``spec`` is ``"wgpu"`` or ``"dawn"`` (the best adapter of that implementation),
    ``"wgpu:1"`` (by number), a part of an adapter's name, or a plugin's device (``"cuda"`` for the
    first NVIDIA GPU, ``"cuda:1"``; with the extra ``cuda``). Without one, the environment
    variable WGPUCONV_DEVICE is used, then the best adapter there is: hardware before software,
    discrete before integrated. ``limits`` asks for less than the adapter offers (for tests);
    ``trusted=False`` keeps wgpu-native's own run-time checks in shaders.

    ``tune`` says how the fastest kernel is found: ``"auto"`` measures a few candidates the
    first time a problem is met on a GPU, with a budget of a second, or what the environment
    variable WGPUCONV_TUNE_BUDGET says, but at least three (not on a software driver),
    ``"full"`` all of them, ``"stored"`` uses what was measured before, else the cost model,
    and ``"off"`` the cost model alone. Without it, the environment variable WGPUCONV_TUNE
    is used, then "auto". Before the first problem of all is measured, the device's own speeds are.
    ``store`` is the file that measurements are kept in (":memory:":
    none); without it, one in the user's cache folder, or in the folder WGPUCONV_CACHE_DIR.
    ``progress`` is called while something is measured.
    """

    def __init__(
        self,
        spec: str | None = None,
        *,
        trusted: bool = True,
        limits: Limits | None = None,
        tune: str | None = None,
        store: Store | str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(spec, str | None):
            raise DtypeError(
                f"a device's spec must be a string such as 'wgpu:0', got {type(spec).__name__}; "
                "Device.from_wgpu adopts a GPUDevice"
            )
        self._setup(_open(spec, trusted, limits), tune, store, progress)

    @classmethod
    def from_wgpu(
        cls,
        gpu_device: Any,
        *,
        trusted: bool = True,
        tune: str | None = None,
        store: Store | str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Device:
        """Adopts an application's own ``GPUDevice`` (of wgpu or wgpudawn)."""
        module = type(gpu_device).__module__.partition(".")[0]
        for name, package in PROVIDERS.items():
            if module == package and isinstance(gpu_device, provider(name).api.GPUDevice):
                device = cls.__new__(cls)
                backend = WebGpuBackend(provider(name), gpu_device, trusted=trusted)
                device._setup(backend, tune, store, progress)
                return device
        raise DtypeError(
            f"from_wgpu takes a GPUDevice of {' or '.join(PROVIDERS.values())}, "
            f"got {type(gpu_device).__module__}.{type(gpu_device).__qualname__}"
        )

    def _setup(
        self,
        backend: Any,
        tune: str | None,
        store: Store | str | os.PathLike[str] | None,
        progress: Progress | None,
    ) -> None:
        self.backend: Any = backend
        if not isinstance(store, Store):
            store = Store(default_path() if store is None else store)
        self.tuner = Tuner(backend, store, mode=tune, progress=progress)
        self.call_cache = CallCache()
        self._open: dict[tuple[ConvProblem, str, int | None], _Open] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Device({self.backend.identity})"

    def __reduce__(self) -> NoReturn:
        raise DeviceError(
            "a Device, and a module or plan on one, can be neither copied nor pickled; in another "
            "process, open a Device and make it there"
        )

    @property
    def name(self) -> str:
        return str(self.backend.identity.adapter)

    @property
    def facts(self) -> Facts:
        """The backend's facts; what was measured of the device stands in place of guesses."""
        return self.tuner.facts

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        return self.backend.algorithms  # type: ignore[no-any-return]

    # ---- choosing ----

    def survey(self, problem: ConvProblem, *, workspace_limit: int | None = None) -> Survey:
        """Every candidate for a problem here, and why other algorithms refuse."""
        if problem.dtype == "f16" and not self.facts.f16:
            raise UnsupportedFeatureError(
                f"float16 needs the feature 'shader-f16', which {self.name} does not offer; "
                "use float32 arrays"
            )
        if problem.dtype == "bf16" and not self.facts.bf16:
            raise UnsupportedFeatureError(
                f"bfloat16 needs a CUDA device, got {self.name} of "
                f"{self.backend.identity.backend}, whose shaders have no such type; use float16 "
                "arrays, or device='cuda'"
            )
        if problem.precision == "tf32" and not self.facts.tf32:
            raise UnsupportedFeatureError(
                f"precision 'tf32' needs a CUDA device of compute capability 8.0 or more, got "
                f"{self.name} of {self.backend.identity.backend}; leave it out"
            )
        if problem.weight_last and not self.facts.weight_last:
            raise UnsupportedFeatureError(
                f"a weight with its channels last ('wlast') needs a CUDA device, got {self.name} "
                f"of {self.backend.identity.backend}; leave it out"
            )
        return survey(problem, self.facts, self.algorithms, workspace_limit=workspace_limit)

    def choose(
        self,
        problem: ConvProblem,
        *,
        algorithm: str = "auto",
        workspace_limit: int | None = None,
    ) -> Choice:
        """The plan for a problem: the algorithm asked for, or the best one known."""
        return self._opened(problem, algorithm, workspace_limit).choice

    def compiled(
        self,
        problem: ConvProblem,
        *,
        algorithm: str = "auto",
        workspace_limit: int | None = None,
    ) -> Compiled:
        """The chosen plan, ready to run; made once and kept."""
        return self._opened(problem, algorithm, workspace_limit).compiled

    def prewarm(
        self,
        problem: ConvProblem,
        *,
        algorithm: str = "auto",
        workspace_limit: int | None = None,
    ) -> Choice:
        """Chooses and compiles now what a call will use, and measures as ``tune`` says.

        A problem that is named here is worth measuring, so that in mode "auto" this does not
        fall back on other sizes of the same kind, however many are known.
        """
        key = (problem, algorithm, workspace_limit)
        with self._lock:
            found = self._open.get(key)
            if found is None or found.choice.source == "similar":
                found = _Open(*self._choose(*key, every_size=True))
                self._open[key] = found
                self.call_cache.clear()
            return found.choice

    def _opened(self, problem: ConvProblem, algorithm: str, workspace_limit: int | None) -> _Open:
        _check_choice(algorithm, workspace_limit)
        key = (problem, algorithm, workspace_limit)
        found = self._open.get(key)
        if found is None:
            with self._lock:
                found = self._open.get(key)
                if found is None:
                    found = _Open(*self._choose(problem, algorithm, workspace_limit))
                    if len(self._open) >= CACHED_PLANS:
                        del self._open[next(iter(self._open))]
                    self._open[key] = found
        return found

    def _choose(
        self,
        problem: ConvProblem,
        algorithm: str,
        workspace_limit: int | None,
        *,
        every_size: bool = False,
    ) -> tuple[Choice, Compiled]:
        scope = algorithm if workspace_limit is None else f"{algorithm} {workspace_limit}"
        self.tuner.measure_device(problem, scope)
        found = self._candidates(problem, algorithm, workspace_limit)
        lowering = self._lowering(problem, workspace_limit)
        return self.tuner.choose(found, lowering, scope=scope, every_size=every_size)

    def _candidates(
        self, problem: ConvProblem, algorithm: str, workspace_limit: int | None
    ) -> Survey:
        found = self.survey(problem, workspace_limit=workspace_limit)
        if algorithm == "auto":
            return found
        try:
            find(algorithm, self.algorithms)
        except UnknownAlgorithmError as error:
            fitting = ", ".join(dict.fromkeys(c.algorithm for c in found.candidates))
            raise UnknownAlgorithmError(f"{error}; {fitting} apply to {problem}") from None
        return only(found, algorithm)

    def _lowering(
        self, problem: ConvProblem, workspace_limit: int | None
    ) -> Callable[[Candidate], Plan]:
        def lowered(candidate: Candidate) -> Plan:
            return lower(
                problem, candidate, self.facts, self.algorithms, workspace_limit=workspace_limit
            )

        return lowered

    def explain(
        self,
        problem: ConvProblem,
        *,
        algorithm: str = "auto",
        workspace_limit: int | None = None,
        everything: bool = False,
    ) -> Explanation:
        """What could compute a problem, what each candidate costs, and what was chosen and why.

        The choice is made as a call would make it, so this may measure. Of each algorithm the
        few best candidates are listed, or all with ``everything``.
        """
        choice = self.choose(problem, algorithm=algorithm, workspace_limit=workspace_limit)
        found = self._candidates(problem, algorithm, workspace_limit)
        return explanation(
            found,
            choice,
            self._lowering(problem, workspace_limit),
            device=str(self.backend.identity),
            basis=basis(self.facts, self.tuner.speeds),
            everything=everything,
        )

    def trim(self) -> None:
        """Gives cached plans and pooled memory back to the driver."""
        with self._lock:
            self._open.clear()
            self.call_cache.clear()
            self.tuner.forget_device()
            self.backend.trim()


def _check_choice(algorithm: Any, workspace_limit: Any) -> None:
    if not isinstance(algorithm, str):
        raise DtypeError(f"algorithm must be a name or 'auto', got {algorithm!r}")
    if workspace_limit is None:
        return
    if isinstance(workspace_limit, bool) or not isinstance(workspace_limit, Integral):
        raise DtypeError(
            f"workspace_limit must be a number of bytes or None, got {workspace_limit!r}"
        )
    if workspace_limit < 0:
        raise ProblemError(f"workspace_limit must be zero or more bytes, got {workspace_limit}")


_shared: dict[str | None, Device] = {}
_shared_lock = threading.RLock()


def shared_device(spec: str | None = None) -> Device:
    """The one device of this process for a spec; a lost one gives way to a new one.

    Repeated calls so share its caches.
    """
    device = _shared.get(spec)
    if device is None or not device.backend.usable:
        with _shared_lock:
            device = _shared.get(spec)
            if device is None or not device.backend.usable:
                device = _shared[spec] = Device(spec)
    return device


def default_device() -> Device:
    """The device of calls that name none: opened once per process."""
    return shared_device()


def devices() -> list[DeviceInfo]:
    """Everything that could run a convolution here, and why something cannot be used.

    Never raises: what went wrong is the ``problem`` of an entry.
    """
    found: list[DeviceInfo] = []
    for name in PROVIDERS:
        try:
            adapters = provider(name).adapters()
        except Exception as error:
            found.append(DeviceInfo(name, "", name, "", "", problem=str(error)))
            continue
        if not adapters:
            found.append(DeviceInfo(name, "", name, "", "", problem=_nothing_found()))
        found += [_info(name, adapter, f"{name}:{i}") for i, adapter in enumerate(adapters)]
        found += [_info(name, a, "", reason) for a, reason in provider(name).left_out()]
    for entry in _plugins():
        try:
            found += entry.load().devices()
        except Exception as error:  # a plugin must not take the others along
            found.append(DeviceInfo(entry.name, "", entry.name, "", "", problem=str(error)))
    return found


_FEATURES = ("shader-f16", "timestamp-query", "subgroup", "subgroups")


def _info(name: str, adapter: Any, spec: str, problem: str | None = None) -> DeviceInfo:
    info = adapter.info
    return DeviceInfo(
        spec,
        info["device"],
        f"{name} ({info['backend_type']})",
        info["adapter_type"],
        info["description"] or info["vendor"],
        tuple(f for f in _FEATURES if f in adapter.features),
        problem,
        identity_of(provider(name), info),
    )


_KINDS = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")


def _open(spec: str | None, trusted: bool, limits: Limits | None) -> Any:
    origin = ""
    if not spec:
        spec = os.environ.get(ENV_DEVICE) or None
        origin = f" (from the environment variable {ENV_DEVICE})" if spec else ""
    name, colon, number = (spec or "").partition(":")
    for entry in _plugins():
        if entry.name == name:
            return _open_plugin(entry, spec)
    if name in PROVIDERS:
        source = provider(name)
        adapters = source.adapters()
        if colon:
            if not number.isdigit() or int(number) >= len(adapters):
                raise NoAdapterError(
                    f"no device {spec!r}{origin}: {name} has "
                    f"{counted(len(adapters), 'adapter')}, "
                    "numbered from 0; see wgpuconv.devices()"
                )
            return _backend(source, adapters[int(number)], trusted, limits)
    else:
        source = provider("wgpu")
        adapters = source.adapters()
        if spec is not None:
            matching = [a for a in adapters if _is_named(a, spec)]
            if adapters and not matching:
                names = ", ".join(repr(a.info["device"]) for a in adapters)
                installed = [name for name in PROVIDERS if is_installed(name)]
                kinds = ", ".join([*map(repr, installed), *plugins()])
                raise NoAdapterError(
                    f"no device is named like {spec!r}{origin}; there are {names}, and {kinds} "
                    "for the best one of each kind; 'wgpuconv devices' lists all"
                    f"{_missing_plugins()}"
                )
            adapters = matching
    if not adapters:
        others = f"; or name another kind of device: {', '.join(plugins())}" if plugins() else ""
        raise NoAdapterError(_nothing_found() + others)
    adapters.sort(key=lambda a: _rank(a.info["adapter_type"]))
    return _backend(source, adapters[0], trusted, limits)


def plugins() -> list[str]:
    """The names of devices that other packages, or our own extras, bring along."""
    return [repr(entry.name) for entry in _plugins()]


def _plugins() -> Iterable[EntryPoint]:
    import importlib.metadata  # a tenth of the package's import, for what is needed once

    return importlib.metadata.entry_points(group=PLUGIN_GROUP)


def _missing_plugins() -> str:
    """Why devices of plugins, our own among them, are not known; empty where they are."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("wgpuconv")
    except PackageNotFoundError:
        folder = Path(__file__).parents[1]
        return (
            f" (those of plugins, as 'cuda', are known where wgpuconv is installed, and {folder} "
            f"is not: pip install -e {folder})"
        )
    return ""


def _is_named(adapter: Any, spec: str) -> bool:
    """Whether a spec is a part of an adapter's name, or that name as a Device prints it."""
    wanted = spec.lower()
    return wanted in adapter.info["device"].lower() or wanted == adapter_name(adapter.info).lower()


def _open_plugin(entry: EntryPoint, spec: str | None) -> Any:
    try:
        return entry.load().open(spec)
    except WgpuConvError:
        raise
    except Exception as error:
        raise DeviceError(
            f"the backend {entry.name!r} ({entry.value}) could not be opened: "
            f"{type(error).__name__}: {error}"
        ) from error


def _rank(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else _KINDS.index("Unknown")


def _backend(source: Provider, adapter: Any, trusted: bool, limits: Limits | None) -> Any:
    return WebGpuBackend(source, open_device(source, adapter, limits), trusted=trusted)


def _nothing_found() -> str:
    return (
        "no Vulkan, Metal or DX12 adapter was found; install your GPU's driver, or a software "
        "one (Debian and Ubuntu: apt install mesa-vulkan-drivers, Mesa 25 or newer)"
    )
