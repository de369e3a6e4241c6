"""Peers as participants of the benchmark."""

from __future__ import annotations

from collections.abc import Callable

from ..problem import ConvProblem
from .accuracy import Judge
from .peer import Refusal, Variant
from .peer_process import PeerProcess
from .result import Side
from .runner import Offer


class TheirLibrary:
    """One peer, asked through its process."""

    ours = False

    def __init__(self, process: PeerProcess) -> None:
        self.process = process
        self.name = process.name

    def offer(self, problem: ConvProblem, tell: Callable[[str], None]) -> Offer:
        # The order of its weight is each library's own affair.
        problem = problem.with_(weight_last=False)
        try:
            variants = self.process.variants(problem)
        except Refusal as error:
            return Offer(refusals={self.name: str(error)})
        return Offer([_Theirs(self.process, problem, variant) for variant in variants])

    def leave(self) -> None:
        self.process.unload()


class _Theirs:
    """One variant of a peer."""

    def __init__(self, process: PeerProcess, problem: ConvProblem, variant: Variant) -> None:
        self._process = process
        self._problem = problem
        self._variant = variant
        self.side = Side(
            process.name,
            variant.what,
            variant.precision,
            False,
            prepared=variant.prepared,
            same_work=variant.same_work,
        )
        self.alone = variant.measures

    def verify(self, judge: Judge) -> float:
        self._data = judge.check.callers_data
        self._process.load(self._problem, self._variant, self._data)
        found = self._process.output(self._variant, judge.points)
        # What a peer may leave out is the bias; see Variant.same_work.
        return judge.error(found, self._variant.precision, bias=self._variant.same_work)

    def sample(self, repeats: int) -> float:
        return self._process.time(self._variant, repeats)

    def workspace(self) -> int | None:
        return self._process.workspace(self._variant)

    def call(self) -> float | None:
        return self._process.call(self._variant)

    def end_to_end(self) -> float | None:
        return self._process.end_to_end(self._variant, self._data)

    def first_call(self) -> float | None:
        return None
