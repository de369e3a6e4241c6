"""What a program may ask of the tuner: explain, prewarm, and bundles to ship."""

from __future__ import annotations

import os
from collections.abc import Iterable

from .device import Device, default_device
from .errors import DtypeError, described
from .explain import Explanation
from .problem import ConvProblem
from .tensor import as_device
from .tuning.bundle import merge, read_bundle, write_bundle
from .tuning.store import Store


def explain(
    problem: ConvProblem | str,
    device: Device | str | None = None,
    *,
    algorithm: str = "auto",
    workspace_limit: int | None = None,
    everything: bool = False,
) -> Explanation:
    """What could compute a problem, what each candidate costs, and what is chosen and why.

    ``problem`` may be its text: ``"conv2d f32 n1 c64 h56 w56 k64 r3 s3 stride1 pad1"``. The
    choice is made as a call would make it, so this may measure; ``everything`` lists every
    candidate instead of the best few of each algorithm.
    """
    on = as_device(device) or default_device()
    return on.explain(
        _problem(problem),
        algorithm=algorithm,
        workspace_limit=workspace_limit,
        everything=everything,
    )


def prewarm(
    problems: Iterable[ConvProblem | str] | ConvProblem | str,
    device: Device | str | None = None,
    *,
    algorithm: str = "auto",
    workspace_limit: int | None = None,
) -> None:
    """Chooses and compiles kernels now, measuring as the device's ``tune`` says, so that the
    first calls need not. Where calls would lean on what is known of other sizes, these problems
    are measured all the same. Calls with PyTorch's ``channels_last`` are those of ``nhwc``
    problems, and of ``wlast`` ones where their weights have it too."""
    on = as_device(device) or default_device()
    if isinstance(problems, str | ConvProblem):
        problems = [problems]
    if not isinstance(problems, Iterable):
        raise DtypeError(f"prewarm takes problems or their texts, got {described(problems)}")
    for problem in [_problem(p) for p in problems]:
        on.prewarm(problem, algorithm=algorithm, workspace_limit=workspace_limit)


def export_bundle(path: str | os.PathLike[str], source: Device | Store | str | None = None) -> int:
    """Writes what a device's store knows (of all devices) to a JSON file to ship with an
    application; returns the number of entries. ``source`` is a device, its spec or a store;
    without it, the default device. Raises StoreError where the file cannot be written."""
    return write_bundle(_store(source), path)


def import_bundle(path: str | os.PathLike[str], target: Device | Store | str | None = None) -> int:
    """Adds a bundle's results to a device's store; returns how many were better than what it
    knew: of results for the same kernels the faster one is kept, else the newer one. Raises
    StoreError where the file is no bundle."""
    count = merge(_store(target), read_bundle(path))
    if not isinstance(target, Store):
        (as_device(target) or default_device()).trim()  # choices made without it
    return count


def _problem(problem: ConvProblem | str) -> ConvProblem:
    if isinstance(problem, ConvProblem):
        return problem
    if isinstance(problem, str):
        return ConvProblem.parse(problem)
    raise DtypeError(f"a problem must be a ConvProblem or its text, got {described(problem)}")


def _store(of: Device | Store | str | None) -> Store:
    return of if isinstance(of, Store) else (as_device(of) or default_device()).tuner.store
