"""The dtypes of arrays, by the names that problems have for them, and as numpy knows them.

numpy itself has no bfloat16; the package ml_dtypes brings one, and is imported when a problem is
in bfloat16.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np

from .errors import MissingExtraError

ALLOWED = "float32, float16 or bfloat16"
"""For messages."""
_NAMES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "bfloat16": "bf16"}


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """``np.dtype(dtype)``, with the names that problems have, and 'bfloat16', which numpy knows
    only once somebody has imported ml_dtypes. Raises TypeError as numpy does."""
    if isinstance(dtype, str) and dtype in _NAMES:
        return numpy_dtype(_NAMES[dtype])
    found: np.dtype[Any] = np.dtype(dtype)
    return found


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of 'f32', 'f16' or 'bf16'. Raises MissingExtraError without ml_dtypes."""
    if name != "bf16":
        return np.dtype({"f32": np.float32, "f16": np.float16}[name])
    try:
        found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise MissingExtraError(
            f"bfloat16 needs the package ml_dtypes, which brings it to numpy ({error}); install "
            "it with: pip install ml_dtypes"
        ) from error
    return found


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """'f32', 'f16' or 'bf16'; empty for all others, those in foreign byte order included."""
    for name in ("f32", "f16"):
        if dtype == numpy_dtype(name):
            return name
    # Whoever has such a dtype has ml_dtypes.
    return "bf16" if dtype.name == "bfloat16" and dtype == numpy_dtype("bf16") else ""


def numpy_name(dtype: np.dtype[Any]) -> str:
    """As a caller writes it: ``numpy.float32``, ``ml_dtypes.bfloat16``."""
    return f"{dtype.type.__module__}.{dtype.name}"
