"""Runs the benchmark: of each problem all sides, verified first, then timed in turns.

Who takes part is handed in (``Participant``): devices of ours (ours.py), other libraries
(theirs.py), or what a test makes up. The order of things is that of an honest comparison: nobody
is timed before its output was checked; everybody is spun up together; samples are taken in
rounds, one side after the other, in an order that changes from round to round.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..errors import ProblemError
from ..problem import ConvProblem
from ..suites import Entry
from ..tuning import timing
from ..tuning.timing import Rules
from ..tuning.verify import Check
from .accuracy import Judge
from .result import ProblemResult, Side

Step = Callable[[str, str], None]
"""Told what is about to happen, for a progress line: the problem's label and the step."""

MEASURES = ("kernel", "call", "end-to-end", "first")
USUAL_MEASURES = ("kernel", "call", "end-to-end")
"""Without the first call, which takes a process and seconds of tuning a side."""

HARDWARE = replace(timing.HARDWARE, sample=4e-3)
SOFTWARE = replace(timing.SOFTWARE, sample=4e-3)

SLOW = 20.0
"""Times the fastest; sides slower than that take few samples, after the others, whose clock
would drop during the long samples."""
FEW = 3
"""Rounds of slow sides."""
SLOW_SECONDS = 10.0
"""Seconds after which a slow side begins no further round."""
SETTLED, LONGEST_SPIN = timing.SETTLED, timing.LONGEST_SPIN


class Contender(Protocol):
    """A side that can be verified and timed. Any method may raise: that side then fails."""

    @property
    def side(self) -> Side:
        """What it is, without anything measured."""

    @property
    def alone(self) -> bool:
        """Whether nothing else may run while it is verified. The others of a participant are
        verified one after the other, beside those of other participants."""

    def verify(self, judge: Judge) -> float:
        """Makes it ready to run; the error of its output. Raises where that is wrong."""

    def sample(self, repeats: int) -> float:
        """Device seconds of one run, the mean of that many back to back."""

    def workspace(self) -> int | None: ...

    def call(self) -> float | None: ...

    def end_to_end(self) -> float | None: ...

    def first_call(self) -> float | None: ...


@dataclass(frozen=True)
class Offer:
    """The sides that a participant has for a problem."""

    contenders: Sequence[Contender] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    """Reason by the full name of a side that does not apply, or by the participant's."""
    choice: str = ""
    """Label of what the participant's tuner takes."""
    source: str = ""
    """How that was found."""
    note: str = ""
    """Why it was found this way."""


class Participant(Protocol):
    """A device of ours or a peer."""

    @property
    def name(self) -> str: ...

    @property
    def ours(self) -> bool: ...

    def offer(self, problem: ConvProblem, tell: Callable[[str], None]) -> Offer:
        """Needs no data. What it raises is the participant's failure on this problem."""

    def leave(self) -> None:
        """Frees what it holds for the problem."""


def run(
    entries: Iterable[Entry],
    participants: Sequence[Participant],
    *,
    measures: Sequence[str] = ("kernel",),
    rules: Rules = HARDWARE,
    tell: Step = lambda label, step: None,
    clock: Callable[[], float] = time.perf_counter,
    spun_up: Callable[[], None] = lambda: None,
) -> Iterator[ProblemResult]:
    """Measures the entries one after the other. ``spun_up`` is called after the rounds of each,
    while devices still run at their clock. Raises ProblemError where a problem has nothing to
    time."""
    entries = list(entries)
    for entry in entries:
        if entry.problem.empty:
            raise ProblemError(f"a problem without images takes no time: {entry.problem}")
    for entry in entries:
        yield _Heat(entry, participants, rules, tell, clock, spun_up).result(measures)


class _Heat:
    """All sides on one problem."""

    def __init__(
        self,
        entry: Entry,
        participants: Sequence[Participant],
        rules: Rules,
        tell: Step,
        clock: Callable[[], float],
        spun_up: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._participants = participants
        self._rules = rules
        self._tell = tell
        self._clock = clock
        self._spun_up = spun_up
        self._offers: dict[str, Offer] = {}
        self._refusals: dict[str, str] = {}
        self._failed: list[Side] = []

    def result(self, measures: Sequence[str]) -> ProblemResult:
        try:
            racers = [
                Racer(contender)
                for participant in self._participants
                for contender in self._offer(participant).contenders
            ]
            failure = self._race(racers) if racers else "nothing here computes this problem"
            self._measure_calls(racers, measures)
        finally:
            for participant in self._participants:
                self._leave(participant)
        sides = [racer.side for racer in racers if failure is None or not racer.runs]
        sides += self._failed
        return ProblemResult(
            name=self._entry.name,
            problem=str(self._entry.problem),
            count=self._entry.count,
            flop=2 * self._entry.problem.multiply_adds,
            nbytes=_nbytes(self._entry.problem),
            sides=tuple(sorted(sides, key=lambda side: side.seconds or math.inf)),
            refusals=self._refusals,
            choice={name: offer.choice for name, offer in self._offers.items() if offer.choice},
            source={name: offer.source for name, offer in self._offers.items() if offer.choice},
            note={name: offer.note for name, offer in self._offers.items() if offer.note},
            failure=failure,
        )

    def _say(self, step: str) -> None:
        self._tell(self._entry.label, step)

    def _offer(self, participant: Participant) -> Offer:
        try:
            offer = participant.offer(self._entry.problem, self._say)
        except Exception as error:  # whatever it is, it is this participant's, and is listed
            self._fail(participant, error)
            return Offer()
        self._offers[participant.name] = offer
        self._refusals |= offer.refusals
        return offer

    def _fail(self, participant: Participant, error: Exception) -> None:
        name, precision = participant.name, self._entry.problem.arithmetic
        side = Side(name, EVERYTHING, precision, participant.ours, failure=sentence(error))
        self._failed.append(side)

    def _leave(self, participant: Participant) -> None:
        try:
            participant.leave()
        except Exception as error:  # its samples stand; what is lost says so at the next problem
            self._refusals[participant.name] = f"did not end this problem well: {sentence(error)}"

    def _race(self, racers: Sequence[Racer]) -> str | None:
        """Verifies and times; why nothing could be, where that is so."""
        shortage = _shortage(self._entry.problem)
        if shortage is not None:
            return shortage
        self._say("making data")
        try:
            judge = Judge(Check(self._entry.problem))
        except MemoryError as error:
            return f"this machine has no memory for the data: {sentence(error)}"
        self._verify(racers, judge)
        race(
            [racer for racer in racers if racer.runs],
            self._rules,
            clock=self._clock,
            tell=self._say,
            spun_up=self._spun_up,
        )
        if any(racer.runs for racer in racers):
            return None
        return "no side computes this problem: " + "; ".join(
            f"{racer.side.name}: {racer.side.failure}" for racer in racers[:3]
        )

    def _verify(self, racers: Sequence[Racer], judge: Judge) -> None:
        beside: dict[str, list[Racer]] = {}
        for racer in racers:
            if racer.alone:
                self._say(f"checking {racer.side.name}")
                racer.verify(judge)
            else:
                beside.setdefault(racer.side.on, []).append(racer)
        if not beside:
            return

        def verify(same: Sequence[Racer]) -> None:
            for racer in same:
                racer.verify(judge)

        # Most of it is compiling, in a process each.
        self._say(f"checking {', '.join(beside)}")
        with ThreadPoolExecutor(len(beside)) as pool:
            list(pool.map(verify, beside.values()))

    def _measure_calls(self, racers: Sequence[Racer], measures: Sequence[str]) -> None:
        """What a call costs from Python, of those that a user would call: of each participant
        and precision the fastest side, and what the tuner takes."""
        if self._entry.problem.weight_last:
            return  # calls take tensors and numpy arrays, whose weights are contiguous
        wanted = [name for name in measures if name != "kernel"]
        for racer in _called(racers, self._offers) if wanted else ():
            for name in wanted:
                self._say(f"{name} of {racer.side.name}")
                try:
                    racer.measure(name)
                except Exception as error:
                    self._refusals[f"{racer.side.name}: {name}"] = sentence(error)


EVERYTHING = "everything"
"""The ``what`` of the side that stands for a participant which failed as a whole."""


class Racer:
    """A contender, and what was measured of it so far."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._side = contender.side
        self._failure: str | None = None
        self.samples: list[float] = []
        self.estimate = math.inf
        """Seconds of one run, as known so far."""
        self.repeats = 1

    @property
    def side(self) -> Side:
        """With what was measured; a side that failed has no samples."""
        if self._failure is not None:
            return replace(self._side, samples=(), failure=self._failure)
        return replace(self._side, samples=tuple(self.samples))

    @property
    def alone(self) -> bool:
        return self._contender.alone

    @property
    def runs(self) -> bool:
        return self._failure is None

    def verify(self, judge: Judge) -> None:
        try:
            error = self._contender.verify(judge)
            self._side = replace(self._side, error=error, workspace=self._contender.workspace())
        except Exception as error:  # whatever it is, it is this side's, and is listed
            self._failure = sentence(error)

    def take(self, repeats: int) -> float | None:
        """One sample, not yet counted; None where it failed, now or before."""
        if self._failure is None:
            try:
                seconds = self._contender.sample(repeats)
                self.estimate = min(self.estimate, seconds)
                return seconds
            except Exception as error:
                self._failure = sentence(error)
        return None

    def measure(self, name: str) -> None:
        if name == "call":
            self._side = replace(self._side, call=self._contender.call())
        elif name == "end-to-end":
            self._side = replace(self._side, end_to_end=self._contender.end_to_end())
        else:
            self._side = replace(self._side, first_call=self._contender.first_call())


def race(
    racers: Sequence[Racer],
    rules: Rules,
    *,
    clock: Callable[[], float],
    tell: Callable[[str], None] = lambda step: None,
    spun_up: Callable[[], None] = lambda: None,
) -> None:
    """Fills the racers' samples."""
    tell("first runs")
    for racer in racers:
        racer.take(1)
        if racer.estimate < rules.sample:  # too short to tell from the cost of taking it
            short, racer.estimate = racer.estimate, math.inf
            racer.take(_repeats(short, rules.sample))
    limit = SLOW * min((racer.estimate for racer in racers if racer.runs), default=math.inf)
    for racer in racers:
        if racer.estimate > limit:  # or it was disturbed
            racer.take(_repeats(racer.estimate, rules.sample))
    quick = [racer for racer in racers if racer.estimate <= limit]
    slow = [racer for racer in racers if racer.estimate > limit]
    tell("spinning up")
    _spin_up(quick, rules, clock)
    for racer in racers:
        racer.repeats = _repeats(racer.estimate, rules.sample)
    for number in range(rules.rounds):
        tell(f"round {number + 1} of {rules.rounds}")
        for racer in rotated(_running(quick, number), number, rules.rounds):
            _count(racer)
    spun_up()
    begin = {id(racer): 0.0 for racer in slow}
    for number in range(min(FEW, rules.rounds)):
        tell(f"slow sides, round {number + 1}")
        for racer in rotated(slow, number, FEW):
            spent = begin[id(racer)]
            if spent > SLOW_SECONDS:
                continue
            start = clock()
            if rules.spin_up and racer.estimate * racer.repeats < SLOW_SECONDS / (8 * FEW):
                racer.take(racer.repeats)  # the device may have rested meanwhile
            _count(racer)
            begin[id(racer)] = spent + clock() - start


def _count(racer: Racer) -> None:
    seconds = racer.take(racer.repeats)
    if seconds is not None:
        racer.samples.append(seconds)


def _running(racers: Sequence[Racer], rounds: int) -> list[Racer]:
    """Those that go through another round: not failed, and not far behind after a few."""
    running = [racer for racer in racers if racer.runs]
    if rounds < FEW or not running:
        return running
    fastest = min(min(racer.samples) for racer in running)
    return [racer for racer in running if min(racer.samples) <= SLOW * fastest]


def rotated(racers: Sequence[Racer], number: int, rounds: int) -> list[Racer]:
    """The order of a round: over all rounds the beginning wanders through all sides, and the
    direction changes, so that nobody always follows the same neighbour."""
    count = len(racers)
    first = number * count // rounds
    step = 1 if number % 2 == 0 else -1
    return [racers[(first + step * i) % count] for i in range(count)]


def _spin_up(racers: Sequence[Racer], rules: Rules, clock: Callable[[], float]) -> None:
    """Keeps the device busy with all sides until its clock has risen: for a while, and until a
    turn of all sides takes no less time than the one before."""
    if not rules.spin_up or not any(racer.runs for racer in racers):
        return
    begin, before, settled, spent = clock(), math.inf, False, 0.0
    while spent < rules.spin_up or not settled:
        turn = sum(racer.take(_repeats(racer.estimate, rules.sample)) or 0.0 for racer in racers)
        spent = clock() - begin
        settled = turn * SETTLED >= before or spent >= LONGEST_SPIN * rules.spin_up
        before = turn


def _repeats(estimate: float, seconds: float) -> int:
    if not 0 < estimate < math.inf:
        return 1
    return min(max(math.ceil(seconds / estimate), 1), timing.MOST_REPEATS)


def _called(racers: Sequence[Racer], offers: dict[str, Offer]) -> list[Racer]:
    """What tuners take, and of each participant and precision the fastest that does all the
    work, with weights prepared beforehand only where it has no other."""
    best: dict[tuple[str, str], tuple[bool, float, Racer]] = {}
    chosen: list[Racer] = []
    for racer in racers:
        side = racer.side
        if side.seconds is None or not side.same_work:
            continue
        offer = offers.get(side.on)
        if offer is not None and side.label and side.label == offer.choice:
            chosen.append(racer)
        key, found = (side.on, side.precision), (side.prepared, side.seconds, racer)
        best[key] = min(best.get(key, found), found, key=lambda each: each[:2])
    return [*chosen, *(racer for *_, racer in best.values() if racer not in chosen)]


def _nbytes(problem: ConvProblem) -> int:
    bias = problem.k * problem.itemsize if problem.bias else 0
    added = bias + problem.residual_bytes
    return problem.input_bytes + problem.weight_bytes + problem.out_bytes + added


def _shortage(problem: ConvProblem) -> str | None:
    """Why this machine's memory does not hold a problem: the arguments, outputs, and as much
    again for what a peer holds. (Asked before, since a system may rather end the process.)"""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None
    needed = 4 * _nbytes(problem)
    if needed <= memory:
        return None
    gibi = 1 << 30
    return (
        f"needs about {needed / gibi:,.0f} GiB of this machine's memory, which has "
        f"{memory / gibi:,.0f} GiB; use a smaller batch"
    )


def sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
