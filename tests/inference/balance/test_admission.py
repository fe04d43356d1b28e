"""The door of a pool: who waits, and that every place is given back."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from virtual_time import virtually

from prorl_gym.deadlines import Deadline
from prorl_gym.errors import EngineError
from prorl_gym.inference.balance.admission import Admission, AdmissionOptions
from prorl_gym.inference.balance.admission_state import AdmissionState, AimdOptions
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.engine_conformance import request


def turn(session: str, tokens: int = 3, *, group: str = "", priority: int = 0) -> GenerationRequest:
    return request(session_id=session, prompt_ids=range(tokens), group_id=group, priority=priority)


def load(capacity: int | None, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=0, waiting=0, kv_usage=0.1, kv_capacity=capacity, preemptions=preemptions)


def door(live: int | None = None, *, capacity: int | None = None) -> Admission:
    aimd = AimdOptions(initial_share=1.0, max_share=1.0)
    at = Admission("policy", AdmissionOptions(max_live_rollouts=live, aimd=aimd))
    if capacity is not None:
        at.observe_loads({"e": load(capacity)}, 0, 1)
    return at


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def knock(at: Admission, *turns: GenerationRequest) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(at.begin_call(one)) for one in turns]
    await settle()
    return tasks


async def test_without_figures_and_cap_every_rollout_goes_ahead():
    at = door()
    assert [task.done() for task in await knock(at, *(turn(f"s{n}") for n in range(50)))] == [True] * 50


async def test_a_static_cap_counts_rollouts_and_the_next_goes_ahead_when_one_is_over():
    at = door(2)
    tasks = await knock(at, turn("a", 900), turn("b"), turn("c"))
    assert [task.done() for task in tasks] == [True, True, False]
    at.end_call("a", cut_short=False)
    await settle()
    assert not tasks[2].done(), "between its turns a rollout keeps its place"
    at.forget_session("a")
    await settle()
    assert tasks[2].done()


async def test_what_engines_tell_decides_instead_of_the_cap():
    at = door(1, capacity=100)
    tasks = await knock(at, turn("a", 40), turn("b", 40), turn("c", 40))
    assert [task.done() for task in tasks] == [True, True, False]
    at.observe_loads({"e": load(100)}, 0, 2)
    await settle()
    assert tasks[2].done(), "an engine that tells nothing is taken for average"


async def test_a_group_fills_the_cache_once():
    at = door(capacity=100)
    tasks = await knock(at, *(turn(f"s{n}", 90, group="g") for n in range(5)))
    assert all(task.done() for task in tasks)
    assert at.snapshot().used == 90


async def test_the_youngest_waits_at_its_next_turn_and_never_within_one():
    at = door(capacity=100)
    await knock(at, turn("old", 40), turn("young", 40))
    at.end_call("young", cut_short=True)
    await knock(at, turn("old", 90))
    (within,) = await knock(at, turn("young", 45))
    assert within.done()
    at.end_call("young", cut_short=False)
    (following,) = await knock(at, turn("young", 50))
    assert not following.done()
    assert at.snapshot().suspensions == 1
    at.forget_session("old")
    await following


async def test_evaluation_overtakes():
    at = door(1)
    _, train, evaluation = await knock(at, turn("a"), turn("train"), turn("eval", priority=1))
    at.forget_session("a")
    await settle()
    assert (train.done(), evaluation.done()) == (False, True)


async def test_preemptions_lower_the_budget():
    at = door(capacity=100)
    at.observe_loads({"e": load(100, preemptions=1)}, 0, 1)
    state = at.snapshot()
    assert (state.budget, state.cuts, state.in_tokens) == (85, 1, True)


async def test_an_unsteady_look_without_figures_changes_nothing():
    at = door(capacity=100)
    at.observe_loads({}, 0, 1)
    assert at.snapshot().budget == 100


@virtually
async def test_the_wait_is_charged_to_no_deadline():
    at = Admission("policy", AdmissionOptions(max_live_rollouts=1), asyncio.get_running_loop().time)
    await at.begin_call(turn("a"))

    async def work() -> Deadline:
        async with Deadline(0.02) as deadline:
            await at.begin_call(turn("b"))
        return deadline

    waiting = asyncio.create_task(work())
    await asyncio.sleep(0.06)
    at.forget_session("a")
    assert (await waiting).paused_seconds >= 0.05
    assert at.snapshot().waited_seconds >= 0.05


async def test_who_gives_up_waiting_leaves_no_trace():
    at = door(1)
    _, waiting, last = await knock(at, turn("a"), turn("b"), turn("c"))
    waiting.cancel()
    await settle()
    assert at.snapshot().waiting == 1
    at.forget_session("a")
    await last


async def test_forgetting_one_that_waits_does_not_leave_it_waiting():
    at = door(1)
    _, waiting = await knock(at, turn("a"), turn("b"))
    at.forget_session("b")
    at.forget_session("a")
    await asyncio.wait_for(waiting, 5)


async def test_a_silent_rollout_gives_up_its_place():
    now = [0.0]
    at = Admission("policy", AdmissionOptions(max_live_rollouts=1, idle_seconds=10), lambda: now[0])
    _, waiting = await knock(at, turn("a"), turn("b"))
    now[0] = 11.0
    at.observe_loads({}, 0, 1)
    await settle()
    assert not waiting.done(), "its call is still in flight"
    at.end_call("a", cut_short=False)
    now[0] = 22.0
    at.observe_loads({}, 0, 1)
    await settle()
    assert waiting.done()


async def test_there_is_room_when_no_rollout_waits():
    at = door(1)
    await asyncio.wait_for(at.wait_for_room("first"), 1)
    at.forget_session("first")
    waiting = (await knock(at, turn("a"), turn("b")))[1]
    asking = asyncio.create_task(at.wait_for_room("new"))
    await settle()
    assert not asking.done()
    at.end_call("a", cut_short=False)
    at.forget_session("a")
    await settle()
    assert asking.done()
    await waiting


async def test_closing_ends_every_wait():
    at = door(1)
    _, waiting = await knock(at, turn("a"), turn("b"))
    at.close()
    with pytest.raises(EngineError, match="pool policy: it was closed"):
        await waiting
    await asyncio.wait_for(at.wait_for_room("new"), 1)
    with pytest.raises(EngineError, match="it was closed"):
        await asyncio.wait_for(at.begin_call(turn("c")), 1)


async def test_who_rests_lets_another_in_and_asks_again():
    at = door(1)
    tasks = await knock(at, turn("a"), turn("b"))
    at.release_slot("a")
    await settle()
    assert not tasks[1].done(), "its call is under way"
    at.end_call("a", cut_short=True)
    at.release_slot("a")
    await settle()
    assert tasks[1].done()
    (again,) = await knock(at, turn("a"))
    assert not again.done(), "what was within a turn asks all the same: its place is gone"
    at.end_call("b", cut_short=False)
    at.forget_session("b")
    await settle()
    assert again.done()


async def test_arriving_rollouts_that_release_their_slot_do_not_count():
    at = door(1)
    await at.wait_for_room("a")
    other = asyncio.create_task(at.wait_for_room("b"))
    await settle()
    assert not other.done()
    at.release_slot("a")
    await settle()
    assert other.done()


async def room_seekers(at: Admission, count: int) -> list[asyncio.Task[None]]:
    seekers = [asyncio.create_task(at.wait_for_room(f"new-{n}")) for n in range(count)]
    await settle()
    return seekers


async def test_one_free_place_wakes_one_rollout_of_many_that_wait(monkeypatch: pytest.MonkeyPatch):
    at = door(1)
    await at.wait_for_room("first")
    seekers = await room_seekers(at, 200)
    asked: list[int] = []
    has_room = AdmissionState.has_room

    def count(state: AdmissionState, arriving: int) -> bool:
        asked.append(arriving)
        return has_room(state, arriving)

    monkeypatch.setattr(AdmissionState, "has_room", count)
    at.forget_session("first")
    await settle()
    assert [seeker.done() for seeker in seekers] == [True] + [False] * 199
    assert asked == [0, 1], "once for the one that goes ahead, and once for the next"


async def test_rollouts_find_room_in_the_order_in_which_they_came():
    at = door(1)
    await at.wait_for_room("first")
    seekers = await room_seekers(at, 4)
    seekers[1].cancel()
    late = asyncio.create_task(at.wait_for_room("late"))
    at.forget_session("first")
    for name, seeker in (("new-0", seekers[0]), ("new-2", seekers[2]), ("new-3", seekers[3]), ("late", late)):
        await settle()
        assert [one.done() for one in (*seekers, late) if not one.cancelled()].count(True) == 1
        assert seeker.done()
        seekers = [one for one in seekers if one is not seeker]
        at.forget_session(name)


async def test_who_is_cancelled_in_the_moment_of_finding_room_passes_it_on():
    at = door(1)
    await at.wait_for_room("first")
    seekers = await room_seekers(at, 2)
    at.forget_session("first")
    seekers[0].cancel()
    await settle()
    assert seekers[0].cancelled()
    assert seekers[1].done()
    assert at.snapshot().arriving == 1


class Door(RuleBasedStateMachine):
    """Calls, cancels, ends, changing caps and evaluation in any order; then every call ends, and nothing is held."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.at = door(2)
        self.calls: dict[str, asyncio.Task[None]] = {}
        self.comers: dict[str, asyncio.Task[None]] = {}
        self.preemptions = 0

    def let_go_on(self) -> None:
        self.loop.run_until_complete(settle())

    @rule(n=st.integers(0, 7), tokens=st.integers(1, 60), group=st.sampled_from(["", "g", "h"]))
    def ask(self, n: int, tokens: int, group: str) -> None:
        session = f"s{n}"
        comer = self.comers.get(session)
        if session not in self.calls and (comer is None or comer.done()):
            self.comers.pop(session, None)
            asked = turn(session, tokens, group=group, priority=n % 2)
            self.calls[session] = self.loop.create_task(self.at.begin_call(asked))

    @rule(n=st.integers(0, 7))
    def come(self, n: int) -> None:
        session = f"s{n}"
        if session not in self.calls and session not in self.comers:
            self.comers[session] = self.loop.create_task(self.at.wait_for_room(session))

    @rule()
    def go_on(self) -> None:
        self.let_go_on()

    @rule(n=st.integers(0, 7), cut_short=st.booleans())
    def answer(self, n: int, cut_short: bool) -> None:
        call = self.calls.get(f"s{n}")
        if call is not None and call.done():
            del self.calls[f"s{n}"]
            self.at.end_call(f"s{n}", cut_short=cut_short)

    @rule(n=st.integers(0, 7))
    def cancel(self, n: int) -> None:
        call = self.calls.pop(f"s{n}", None)
        if call is not None:
            call.cancel()
            self.let_go_on()
            self.at.end_call(f"s{n}", cut_short=False)
            self.at.forget_session(f"s{n}")

    @rule(n=st.integers(0, 7))
    def end(self, n: int) -> None:
        call = self.calls.get(f"s{n}")
        if call is None:
            comer = self.comers.pop(f"s{n}", None)
            if comer is not None:
                comer.cancel()
                self.let_go_on()
            self.at.forget_session(f"s{n}")

    @rule(n=st.integers(0, 7))
    def rest(self, n: int) -> None:
        comer = self.comers.get(f"s{n}")
        if comer is None or comer.done():
            self.at.release_slot(f"s{n}")

    @rule(capacity=st.sampled_from([None, 50, 200]), trouble=st.booleans())
    def look(self, capacity: int | None, trouble: bool) -> None:
        self.preemptions += trouble
        self.at.observe_loads({"e": load(capacity, self.preemptions)}, 0, 1)

    @invariant()
    def somebody_moves_and_sums_are_those_of_the_live_rollouts(self) -> None:
        state = self.at._state  # noqa: SLF001
        assert not state.waiting or state.live
        live = [entry for entry in state._entries.values() if entry.is_live]  # noqa: SLF001
        shared = sum(state._groups[name].tokens for name in {entry.group for entry in live if entry.group})  # noqa: SLF001
        assert (state.live, state.used) == (len(live), shared + sum(entry.tokens for entry in live))
        shortfall = sum(max(0.0, state.shortfall.expected - entry.tokens) for entry in live)
        assert state.expected_use == pytest.approx(state.used + shortfall)

    def teardown(self) -> None:
        while self.calls:
            for n in range(8):
                self.end(n)
            self.let_go_on()
            over = [session for session, call in self.calls.items() if call.done()]
            assert over, "every rollout waits, and none is live"
            for session in over:
                self.calls.pop(session).result()
                self.at.end_call(session, cut_short=False)
        for _ in range(len(self.comers)):
            self.let_go_on()
            woken = next((session for session, comer in self.comers.items() if comer.done()), None)
            assert woken is not None, "there is room, and no waiter is woken"
            self.end(int(woken[1:]))
        for n in range(8):
            self.end(n)
        state = self.at.snapshot()
        assert (state.live, state.waiting, state.arriving, state.used) == (0, 0, 0, 0)
        assert self.at._state.tracked == 0  # noqa: SLF001
        self.loop.run_until_complete(asyncio.wait_for(self.at.wait_for_room("another"), 10))
        self.loop.close()


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
