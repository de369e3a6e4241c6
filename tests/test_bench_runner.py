"""The bench's order of things, with sides and a clock that are made up."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from wgpuconv.bench import runner
from wgpuconv.bench.accuracy import Judge
from wgpuconv.bench.result import ProblemResult, Side
from wgpuconv.bench.runner import EVERYTHING, FEW, Offer, Racer, race, rotated, run
from wgpuconv.bench.summary import leaders
from wgpuconv.errors import DeviceLostError, ProblemError
from wgpuconv.suites import parse_entry
from wgpuconv.tuning.timing import MOST_REPEATS, Rules

ENTRY = parse_entry("tiny: conv2d f32 n1 c2 h6 w5 k3 r3 s3 stride1 pad1 bias x3")
RULES = Rules(spin_up=0.5, sample=2e-3, rounds=7)


class World:
    """A clock, and a log of who did what for how long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []

    def clock(self) -> float:
        return self.now


class Fake:
    """A side that takes ``seconds``, or what a function of its samples says."""

    def __init__(
        self,
        world: World,
        name: str,
        seconds: float | Callable[[int], float],
        *,
        on: str = "gpu",
        fails_at: int | None = None,
        wrong: bool = False,
        alone: bool = True,
        meet: threading.Barrier | None = None,
        **more: Any,
    ) -> None:
        self.alone, self._meet = alone, meet
        self.side = Side(on, name, "f32", True, label=f"{name}()", **more)
        self._world, self._fails_at, self._wrong = world, fails_at, wrong
        self._seconds = seconds if callable(seconds) else lambda taken, value=seconds: value
        self.taken = 0
        self.verified = False

    def verify(self, judge: Judge) -> float:
        assert judge.problem == ENTRY.problem
        if self._meet is not None:
            self._meet.wait(timeout=10)
        if self._wrong:
            raise ValueError("wrong result:\n0 of 1")
        self.verified = True
        return 1e-7

    def sample(self, repeats: int) -> float:
        assert self.verified
        self.taken += 1
        if self.taken == self._fails_at:
            raise RuntimeError("it died: Segmentation fault")
        seconds = self._seconds(self.taken)
        self._world.now += seconds * repeats
        self._world.log.append((self.side.what, repeats))
        return seconds

    def workspace(self) -> int | None:
        return 64

    def call(self) -> float | None:
        return 5e-5

    def end_to_end(self) -> float | None:
        raise RuntimeError("no numpy here")

    def first_call(self) -> float | None:
        return 1.5


class Group:
    """A participant with those sides."""

    def __init__(
        self, name: str, fakes: Sequence[Fake], *, ours: bool = True, error: Exception | None = None
    ) -> None:
        self.name, self.ours = name, ours
        self._fakes, self._error = fakes, error
        self.left = 0

    def offer(self, problem: Any, tell: Callable[[str], None]) -> Offer:
        if self._error is not None:
            raise self._error
        label = self._fakes[0].side.label if self._fakes else ""
        return Offer(self._fakes, {f"{self.name} x": "needs y"}, label, "tuned", "today")

    def leave(self) -> None:
        self.left += 1


def racers(*fakes: Fake) -> list[Racer]:
    for fake in fakes:
        fake.verified = True
    return [Racer(fake) for fake in fakes]


def measured(
    *groups: Group, world: World, rules: Rules = RULES, measures: tuple[str, ...] = ("kernel",)
) -> ProblemResult:
    (found,) = run([ENTRY], groups, rules=rules, clock=world.clock, measures=measures)
    assert all(group.left == 1 for group in groups)
    return found


# ---- rounds ----


def test_rounds_take_turns_in_a_changing_order() -> None:
    world = World()
    names = ["a", "b", "c", "d", "e"]
    rules = replace(RULES, spin_up=0.0, rounds=5)
    sides = racers(*(Fake(world, name, 1e-3) for name in names))
    race(sides, rules, clock=world.clock)
    order = [name for name, _ in world.log[2 * len(names) :]]  # after two first runs of each
    rounds = [order[i : i + 5] for i in range(0, 25, 5)]
    assert all(sorted(each) == names for each in rounds)
    assert {each[0] for each in rounds} == set(names)  # everybody begins a round once
    followers = {(one, other) for each in rounds for one, other in itertools.pairwise(each)}
    assert {("a", "b"), ("b", "a")} <= followers  # and has other neighbours
    assert all(len(racer.samples) == 5 for racer in sides)


def test_the_order_of_a_round_leaves_nobody_out() -> None:
    world = World()
    sides = racers(*(Fake(world, str(i), 1.0) for i in range(3)))
    for rounds in (1, 3, 7):
        for number in range(rounds):
            order = rotated(sides, number, rounds)
            assert sorted(map(id, order)) == sorted(map(id, sides))
    assert rotated([], 3, 7) == []


def test_repeats_fill_a_sample_and_stay_the_same() -> None:
    world = World()
    race(racers(Fake(world, "a", 1e-5), Fake(world, "b", 1e-4)), RULES, clock=world.clock)
    assert world.log[:2] == [("a", 1), ("a", 200)]
    last = dict(world.log[-14:])
    assert last == {"a": 200, "b": 20}
    assert len(set(world.log[-14:])) == 2
    tiny = Fake(world, "tiny", 1e-9)
    race(racers(tiny), replace(RULES, spin_up=0), clock=world.clock)
    assert world.log[-1] == ("tiny", MOST_REPEATS)


def test_nothing_is_counted_before_all_are_spun_up() -> None:
    """The clock rises while a side runs: whoever was counted early would look slow."""
    world = World()

    def rising(taken: int) -> float:
        return 1e-3 if world.now > 0.4 else 4e-3

    seen: list[float] = []
    sides = racers(Fake(world, "a", rising), Fake(world, "b", rising))
    race(sides, RULES, clock=world.clock, spun_up=lambda: seen.append(world.now))
    assert all(set(racer.samples) == {1e-3} for racer in sides)
    assert len(seen) == 1
    assert seen[0] > 0.5


def test_the_spin_up_goes_on_while_a_turn_becomes_faster_but_not_for_ever() -> None:
    world = World()
    race(racers(Fake(world, "a", lambda n: 1.0 / n)), RULES, clock=world.clock)
    spun = world.log[: -RULES.rounds]
    assert sum(1.0 / n for n in range(1, len(spun) + 1)) >= runner.LONGEST_SPIN * RULES.spin_up


def test_slow_sides_take_few_samples_after_the_others() -> None:
    world = World()
    quick, near, slow = (
        Fake(world, "quick", 1e-3), Fake(world, "near", 1.9e-2), Fake(world, "slow", 2.1e-2)
    )  # fmt: skip
    sides = racers(slow, quick, near)
    seen: list[int] = []
    race(sides, RULES, clock=world.clock, spun_up=lambda: seen.append(len(world.log)))
    assert [len(racer.samples) for racer in sides] == [FEW, 7, 7]
    counted = [name for name, _ in world.log[seen[0] :]]
    assert counted == ["slow"] * 2 * FEW  # each after a run that is not counted
    assert [name for name, _ in world.log[: seen[0]]].count("slow") == 2  # both at the beginning


def test_a_side_is_not_slow_because_it_was_disturbed_once() -> None:
    world = World()
    disturbed = Fake(world, "disturbed", lambda n: 0.1 if n == 1 else 1e-3)
    sides = racers(Fake(world, "a", 1e-3), disturbed)
    race(sides, RULES, clock=world.clock)
    assert [len(racer.samples) for racer in sides] == [7, 7]


def test_a_side_that_turns_out_slow_is_dropped_after_a_few_rounds() -> None:
    world = World()
    late = Fake(world, "late", lambda n: 1e-3 if n <= 2 else 0.5)
    sides = racers(Fake(world, "a", 1e-3), late)
    race(sides, replace(RULES, spin_up=0.0), clock=world.clock)
    assert [len(racer.samples) for racer in sides] == [7, FEW]


def test_a_very_slow_side_takes_at_least_one_sample() -> None:
    world = World()
    sides = racers(Fake(world, "a", 1e-3), Fake(world, "b", 30.0))
    race(sides, RULES, clock=world.clock)
    assert len(sides[1].samples) == 1


# ---- failures ----


@pytest.mark.parametrize("at", [1, 2, 5, 20])
def test_a_side_that_dies_leaves_the_others_alone(at: int) -> None:
    world = World()
    rules = replace(RULES, spin_up=0.05)
    bad = Fake(world, "bad", 1e-3, fails_at=at)
    found = measured(Group("gpu", [bad, Fake(world, "good", 1e-3)]), world=world, rules=rules)
    good, failed = found.sides
    assert (good.what, len(good.samples)) == ("good", 7)
    assert (failed.samples, failed.failure) == ((), "it died: Segmentation fault")
    assert found.failure is None
    assert found.failed
    assert bad.taken == at  # not asked again


def test_a_wrong_result_is_not_timed() -> None:
    world = World()
    wrong = Fake(world, "wrong", 1e-6, wrong=True)
    found = measured(Group("gpu", [wrong, Fake(world, "good", 1e-3)]), world=world)
    assert [side.failure for side in found.sides] == [None, "wrong result: 0 of 1"]
    assert wrong.taken == 0


def test_peers_are_verified_side_by_side_except_who_measures() -> None:
    world, meet = World(), threading.Barrier(2)
    found = measured(
        Group("gpu", [Fake(world, "alone", 1e-3)]),
        Group("a", [Fake(world, "a", 1e-3, on="a", alone=False, meet=meet)]),
        Group("b", [Fake(world, "b", 1e-3, on="b", alone=False, meet=meet)]),
        Group("c", [Fake(world, "c", 1e-3, on="c", alone=False, wrong=True)]),
        world=world,
    )
    failed = {side.what: side.failure for side in found.sides}
    assert failed == {"alone": None, "a": None, "b": None, "c": "wrong result: 0 of 1"}
    lonely = threading.Barrier(2)

    def short_wait(timeout: float) -> int:
        return threading.Barrier.wait(lonely, 0.01)

    lonely.wait = short_wait  # type: ignore[assignment, method-assign]
    fakes = [Fake(world, name, 1e-3, on=name, meet=lonely) for name in "ab"]
    found = measured(*(Group(fake.side.on, [fake]) for fake in fakes), world=world)
    assert found.failure is not None  # neither was there while the other waited


def test_a_participant_that_fails_is_a_line() -> None:
    world = World()
    lost = Group("dawn", [], error=DeviceLostError("the device is lost"))
    found = measured(lost, Group("gpu", [Fake(world, "good", 1e-3)]), world=world)
    assert [(side.on, side.what, side.failure) for side in found.sides] == [
        ("gpu", "good", None),
        ("dawn", EVERYTHING, "the device is lost"),
    ]
    assert found.failure is None


def test_a_peers_failure_is_not_ours() -> None:
    world = World()
    peer = Group("torch", [], ours=False, error=RuntimeError("gone"))
    found = measured(Group("gpu", [Fake(world, "good", 1e-3)]), peer, world=world)
    assert found.sides[1].failure == "gone"
    assert not found.failed


def test_a_problem_that_nobody_computes_does_not_end_the_suite() -> None:
    world = World()
    wrong = Group("gpu", [Fake(world, "wrong", 1e-6, wrong=True)])
    first, second = run([ENTRY, ENTRY], [wrong], rules=RULES, clock=world.clock)
    assert first.failure == "no side computes this problem: gpu wrong: wrong result: 0 of 1"
    assert second.failed
    assert wrong.left == 2
    (none,) = run([ENTRY], [Group("gpu", [])], rules=RULES, clock=world.clock)
    assert none.failure == "nothing here computes this problem"


def test_a_problem_larger_than_the_memory_is_not_begun() -> None:
    world = World()
    huge = parse_entry("conv2d f32 n1 c4096 h32768 w4096 k1 r1 s1 stride1 pad0")
    fake = Fake(world, "a", 1e-3)
    (found,) = run([huge], [Group("gpu", [fake])], rules=RULES, clock=world.clock)
    assert found.failure is not None
    assert "GiB of this machine's memory" in found.failure
    assert found.sides == ()
    assert not fake.verified


def test_data_that_do_not_fit_are_one_problems_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(problem: Any) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(runner, "Check", full)
    found = measured(Group("gpu", [Fake(World(), "a", 1e-3)]), world=World())
    assert found.failure == "this machine has no memory for the data: Unable to allocate 9 GiB"


def test_an_empty_problem_is_refused() -> None:
    empty = replace(ENTRY, problem=ENTRY.problem.with_(n=0))
    with pytest.raises(ProblemError, match="without images"):
        next(run([empty], []))


# ---- results ----


def test_a_result_says_all_of_a_problem() -> None:
    world = World()
    found = measured(Group("gpu", [Fake(world, "b", 2e-3), Fake(world, "a", 1e-3)]), world=world)
    assert (found.name, found.count, found.problem) == ("tiny", 3, str(ENTRY.problem))
    assert found.flop == 2 * 6 * 5 * 2 * 9 * 3
    assert found.nbytes == 4 * (2 * 6 * 5 + 3 * 2 * 9 + 3 * 6 * 5 + 3)
    assert [side.what for side in found.sides] == ["a", "b"]  # fastest first
    assert (found.sides[0].error, found.sides[0].workspace) == (1e-7, 64)
    assert found.refusals == {"gpu x": "needs y"}
    assert (found.choice, found.source, found.note) == (
        {"gpu": "b()"}, {"gpu": "tuned"}, {"gpu": "today"}
    )  # fmt: skip
    chosen = found.chosen("gpu")
    assert chosen is not None
    assert chosen.what == "b"
    assert found.chosen("dawn") is None


def test_no_winner_inside_the_spread() -> None:
    world = World()
    noisy = Fake(world, "noisy", lambda n: 1e-3 * (1 + n % 3 / 10))
    steady = Fake(world, "steady", 1.05e-3)
    far = Fake(world, "far", 1.5e-3)
    found = measured(Group("gpu", [noisy, steady, far]), world=world)
    assert {side.what for side in leaders(found)} == {"noisy", "steady"}
    world = World()
    apart = [Fake(world, "a", 1e-3), Fake(world, "b", 1.05e-3)]
    assert [s.what for s in leaders(measured(Group("gpu", apart), world=world))] == ["a"]


def test_calls_are_measured_of_the_choice_and_the_fastest() -> None:
    world = World()
    names = {"chosen": 3e-3, "fastest": 1e-3, "other": 2e-3}
    fakes = [Fake(world, name, seconds) for name, seconds in names.items()]
    fakes.append(Fake(world, "cheat", 1e-4, prepared=True))
    fakes.append(Fake(world, "no other", 1e-3, on="ncnn", prepared=True))
    fakes.append(Fake(world, "less", 1e-4, same_work=False))
    found = measured(
        Group("gpu", fakes), world=world, measures=("kernel", "call", "end-to-end", "first")
    )
    called = {side.what for side in found.sides if side.call is not None}
    assert called == {"chosen", "fastest", "no other"}
    assert {side.first_call for side in found.sides} == {None, 1.5}
    assert all(side.end_to_end is None for side in found.sides)
    assert found.refusals["gpu fastest: end-to-end"] == "no numpy here"


def test_only_the_kernel_is_measured_where_only_that_is_asked() -> None:
    world = World()
    found = measured(Group("gpu", [Fake(world, "a", 1e-3)]), world=world)
    assert (found.sides[0].call, found.sides[0].first_call) == (None, None)
    assert math.isclose(found.sides[0].seconds or 0, 1e-3)
