"""Who may talk to engines: decisions without a clock."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorl_gym.inference.balance.admission_state import AdmissionState, ShortfallSum


def test_rollouts_are_admitted_while_they_fit():
    book = AdmissionState(budget=250)
    asked = [book.request_turn(name, 100) for name in ("a", "b", "c")]
    assert asked == [False, False, False]
    assert book.admit() == ["a", "b"]
    book.remove_session("a")
    assert book.admit() == ["c"]


def test_one_is_admitted_however_large_it_is():
    book = AdmissionState(budget=10)
    book.request_turn("a", 500)
    book.request_turn("b", 500)
    assert book.admit() == ["a"]


def test_the_youngest_waits_when_the_live_outgrow_the_budget_and_the_oldest_goes_on():
    book = AdmissionState(budget=300)
    for name in ("old", "middle", "young"):
        book.request_turn(name, 100)
    assert book.admit() == ["old", "middle", "young"]
    assert book.request_turn("old", 250)
    assert book.request_turn("middle", 45), "the young one makes room enough"
    assert not book.request_turn("young", 100)
    assert (book.live, book.waiting, book.suspensions) == (2, 1, 1)
    assert book.admit() == []


def test_who_was_suspended_comes_back_before_anybody_new():
    book = AdmissionState(budget=300)
    for name in ("old", "young"):
        book.request_turn(name, 100)
    book.admit()
    book.request_turn("old", 290)
    assert not book.request_turn("young", 100)
    book.request_turn("new", 10)
    book.remove_session("old")
    assert book.admit() == ["young", "new"]


def test_evaluation_is_admitted_first_and_not_suspended_for_training():
    book = AdmissionState(budget=200)
    book.request_turn("train", 100)
    book.request_turn("other", 100)
    book.request_turn("eval", 100, priority=1)
    assert book.admit() == ["eval", "train"]
    assert book.request_turn("eval", 190)
    assert not book.request_turn("train", 100)


def test_a_shared_prompt_fills_the_cache_once():
    book = AdmissionState(budget=140)
    for name in ("a", "b", "c"):
        book.request_turn(name, 10, group="g", shared=100)
    assert book.admit() == ["a", "b", "c"]
    assert book.used == 130
    for name in ("a", "b", "c"):
        book.remove_session(name)
    assert book.used == 0


def test_new_rollouts_count_with_their_expected_length():
    book = AdmissionState(budget=1000)
    for name in ("a", "b"):
        book.request_turn(name, 10)
    book.admit()
    assert book.request_turn("a", 800)
    book.remove_session("a")  # rollouts end at 800, so one that begins counts with half of it
    for name in ("c", "d"):
        book.request_turn(name, 10)
    assert book.admit() == ["c"]


def test_a_rollout_that_gives_up_waiting_is_forgotten():
    book = AdmissionState(budget=100)
    book.request_turn("a", 100)
    book.admit()
    book.request_turn("b", 100, group="g", shared=5)
    book.remove_session("b")
    book.remove_session("a")
    assert (book.admit(), book.live, book.waiting, book.tracked) == ([], 0, 0, 0)


def test_who_rests_has_no_place_and_comes_back_before_anybody_new():
    book = AdmissionState(budget=200)
    for name in ("a", "b", "c"):
        book.request_turn(name, 100)
    assert book.admit() == ["a", "b"]
    book.release_slot("a")
    book.release_slot("a")
    book.release_slot("c")  # it waits: it has no place to give
    assert book.admit() == ["c"]
    assert (book.live, book.waiting, book.used) == (2, 0, 200)
    book.request_turn("new", 100)
    assert not book.request_turn("a", 100)
    assert (book.live, book.waiting) == (2, 2)
    book.remove_session("b")
    assert book.admit() == ["a"]


def test_who_rests_and_is_over_leaves_nothing():
    book = AdmissionState(budget=200)
    book.request_turn("a", 100, group="g", shared=50)
    book.admit()
    book.release_slot("a")
    assert book.used == 0
    book.remove_session("a")
    assert (book.live, book.waiting, book.tracked) == (0, 0, 0)


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_a_budget_of_nothing_still_lets_one_through(budget):
    book = AdmissionState(budget)
    book.request_turn("a", 1)
    assert book.admit() == ["a"]


class Shortfalls(RuleBasedStateMachine):
    """Any changes of the numbers and of the expected one: the sum is the one that adding up gives."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = ShortfallSum()
        self.numbers: list[int] = []

    @rule(number=st.integers(0, 20) | st.integers(0, 10**9))
    def add(self, number: int) -> None:
        self.sum.add(number)
        self.numbers.append(number)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers))
        self.sum.remove(number)
        self.numbers.remove(number)

    @rule(expected=st.integers(0, 20) | st.floats(0, 10**9))
    def expect(self, expected: float) -> None:
        self.sum.expect(expected)

    @invariant()
    def it_is_what_adding_up_gives(self) -> None:
        lacking = [self.sum.expected - number for number in self.numbers if number < self.sum.expected]
        assert self.sum.total == pytest.approx(math.fsum(lacking), rel=1e-9, abs=1e-3)


Shortfalls.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShortfalls = Shortfalls.TestCase


class Admissions(RuleBasedStateMachine):
    """Any interleaving: the sums are right, no rollout is lost, the oldest is never held up."""

    def __init__(self) -> None:
        super().__init__()
        self.book = AdmissionState(500)
        self.order: list[str] = []
        self.live: set[str] = set()
        self.waiting: set[str] = set()
        self.resting: set[str] = set()
        self.tokens: dict[str, int] = {}
        """What each asked for last."""

    @rule(number=st.integers(0, 9), tokens=st.integers(1, 400), priority=st.integers(0, 1), group=st.booleans())
    def ask(self, number: int, tokens: int, priority: int, group: bool) -> None:
        name = f"s{number}"
        if name in self.waiting:
            return
        known = name in self.live
        self.tokens[name] = tokens
        shared_by = f"g{number // 5}" if group else ""
        if self.book.request_turn(name, tokens, priority=priority, group=shared_by, shared=50):
            assert known, "no rollout is live before admit returned it"
        else:
            self.live.discard(name)
            self.resting.discard(name)
            self.waiting.add(name)
        self.admit()

    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        name = f"s{number}"
        self.book.remove_session(name)
        self.live.discard(name)
        self.waiting.discard(name)
        self.resting.discard(name)
        self.admit()

    @rule(number=st.integers(0, 9))
    def rest(self, number: int) -> None:
        name = f"s{number}"
        self.book.release_slot(name)
        if name in self.live:
            self.live.remove(name)
            self.resting.add(name)
        self.admit()

    @rule(budget=st.floats(0, 2000))
    def move(self, budget: float) -> None:
        self.book.budget = budget
        self.admit()

    def admit(self) -> None:
        for name in self.book.admit():
            self.waiting.remove(name)
            self.live.add(name)

    @invariant()
    def counts_agree(self) -> None:
        assert self.book.live == len(self.live)
        assert self.book.waiting == len(self.waiting)
        assert self.book.used >= 0

    @invariant()
    def the_expected_use_is_what_adding_up_gives(self) -> None:
        expected = self.book.shortfall.expected
        shortfall = sum(max(0.0, expected - self.tokens[name]) for name in self.live)
        assert self.book.expected_use == pytest.approx(self.book.used + shortfall)

    @invariant()
    def somebody_can_go_on(self) -> None:
        assert self.live or not self.waiting

    def teardown(self) -> None:
        for name in self.live | self.waiting | self.resting:
            self.book.remove_session(name)
        assert (self.book.used, self.book.tracked) == (0, 0)


Admissions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmissions = Admissions.TestCase


def test_there_is_room_for_what_rollouts_come_to():
    book = AdmissionState(1000)
    assert [book.has_room(coming) for coming in (0, 7, 8)] == [True, True, False]
    for name in ("a", "b"):
        book.request_turn(name, 300)
    book.admit()
    assert [book.has_room(coming) for coming in (0, 1)] == [True, False], "one may come and be seen waiting"
    book.request_turn("c", 500)
    book.admit()
    assert not book.has_room(0)
