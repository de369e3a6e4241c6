"""The benchmark: every side of a problem, ours and other libraries', timed in one run."""

from .runner import Measurement, Result, geometric_mean, machine, report, run

__all__ = ["Measurement", "Result", "geometric_mean", "machine", "report", "run"]
