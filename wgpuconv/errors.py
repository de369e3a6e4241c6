"""Every exception that wgpuconv raises on purpose.

All of them are a :class:`WgpuConvError`, and each is also the builtin that a caller
who knows nothing of this package would catch::

    WgpuConvError
    ├── ProblemError (ValueError)            shapes or parameters that make no convolution
    │   └── DtypeError (TypeError)           an unsupported or mismatched dtype or argument type
    ├── AlgorithmError (ValueError)
    │   ├── UnknownAlgorithmError            no algorithm of that name
    │   └── AlgorithmRefusedError            the named algorithm does not apply; says why
    ├── TuningError (ValueError)             a tuning mode or budget that makes no sense
    ├── StoreError (ValueError)              a tuning bundle or store that cannot be used
    ├── BenchError (ValueError)              a benchmark that cannot be run or read
    ├── DeviceError (RuntimeError)
    │   ├── NoAdapterError                   nothing to run on; says what to install
    │   ├── UnsupportedFeatureError          the device lacks a feature (f16) or a limit
    │   ├── DeviceLostError                  the device is gone; make a new one
    │   ├── ForkedProcessError               a device made before fork() used in the child
    │   └── ShaderError                      a shader did not compile: a bug, please report
    ├── MixedDevicesError (ValueError)       arguments live on different devices
    ├── OutOfDeviceMemoryError (MemoryError)
    └── MissingExtraError (ImportError)      an optional package is absent; names the pip command

What is worth knowing but stops nothing is a warning (UserWarning): :class:`TuningWarning` and
:class:`ModelWarning`.
"""

from __future__ import annotations

from typing import Any


class WgpuConvError(Exception):
    """Base of all errors raised by wgpuconv."""


class ProblemError(WgpuConvError, ValueError):
    """Shapes or parameters that do not describe a convolution."""


class DtypeError(ProblemError, TypeError):
    """A dtype or argument type that is not supported here."""


class AlgorithmError(WgpuConvError, ValueError):
    """The requested algorithm cannot be used."""


class UnknownAlgorithmError(AlgorithmError):
    """No algorithm has that name."""


class AlgorithmRefusedError(AlgorithmError):
    """The algorithm exists but does not apply to this problem on this device."""


class TuningError(WgpuConvError, ValueError):
    """A tuning mode or budget that makes no sense."""


class StoreError(WgpuConvError, ValueError):
    """A tuning bundle that cannot be read or written."""


class BenchError(WgpuConvError, ValueError):
    """A benchmark that cannot be run or read as it was asked for."""


class DeviceError(WgpuConvError, RuntimeError):
    """Something is wrong with the device, not with the arguments."""


class NoAdapterError(DeviceError):
    """No adapter matches the request."""


class UnsupportedFeatureError(DeviceError):
    """The device lacks a feature or a limit that the call needs."""


class DeviceLostError(DeviceError):
    """The device was lost or destroyed."""


class ForkedProcessError(DeviceError):
    """A device was used in a process forked after the device was made."""


class ShaderError(DeviceError):
    """A shader of this package did not compile on this driver."""


class MixedDevicesError(WgpuConvError, ValueError):
    """The arguments of one call live on different devices."""


class OutOfDeviceMemoryError(WgpuConvError, MemoryError):
    """The device has no memory left for a buffer."""


class MissingExtraError(WgpuConvError, ImportError):
    """An optional dependency is not installed."""


class TuningWarning(UserWarning):
    """Tuning goes on without its file, or without a kernel that failed on this device."""


class ModelWarning(UserWarning):
    """A part of a model is left out."""


def kind_of(value: Any) -> str:
    """A value's type for a message: ``torch.Tensor``."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" else f"{package}.{kind.__qualname__}"


def described(value: Any) -> str:
    """A value by its type, with the article: ``a list``, ``an int``, ``None``."""
    if value is None:
        return "None"
    kind = kind_of(value)
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def counted(number: int, noun: str) -> str:
    """``1 channel``, ``2 channels``, ``2 passes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
