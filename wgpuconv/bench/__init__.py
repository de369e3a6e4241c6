"""The benchmark: every side of a problem, ours and other libraries', timed in one run."""

from .ours import OurDevice
from .result import Run
from .runner import run
from .session import Session

__all__ = ["OurDevice", "Run", "Session", "run"]
