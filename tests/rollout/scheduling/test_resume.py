"""Rollouts that resume after their last whole turn: their tokens are those of a rollout that nothing struck."""

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import virtually

from prorl_gym.agents.protocol import Artifacts, Observation, Tool, ToolSpec
from prorl_gym.agents.tools import FinishTool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import TaskRow
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.errors import EngineError, FailureKind, GraderError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import SUMMARY_REQUEST, GradedSubmission, Rollout, RolloutRequest, Score
from prorl_gym.rollout.protocol import AttemptMoved, StageEntered, TurnEnded
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

CODEC = load_codec("small")
GOLD = "gold-needle"
RESUME = RolloutSettings(resume=True, seed=3)


class Row(TaskRow):
    turns: int


class AddTool:
    """Answers the sum of all that it was given: what it answers depends on every call before."""

    def __init__(self, drift: Iterator[int] | None, seconds: float) -> None:
        self._sum = 0
        self._drift = drift
        self._seconds = seconds

    @property
    def spec(self) -> ToolSpec:
        number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        return ToolSpec("add", "Add a number.", number)

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        self._sum += arguments["n"]
        await asyncio.sleep(self._seconds)
        drift = 0 if self._drift is None else next(self._drift)
        return Observation(f"The sum is {self._sum + drift}, after 0.{self._sum} s.")


class Adder(SimpleEnvironment[Row]):
    """Its agent adds numbers. ``drift`` is added to each answer; ``failing_grades`` are broken gradings to come."""

    name = "adder"
    row_model = Row
    prompt = "Add."
    settings = RolloutSettings(max_turns=50)

    def __init__(self, drift: Iterator[int] | None = None, seconds: float = 0.0) -> None:
        self.failing_grades = 0
        self.graded_failures = 0
        self._drift = drift
        self._seconds = seconds

    def tools(self, sandbox: SandboxSource, settings: ResolvedSettings) -> Sequence[Tool]:
        return AddTool(self._drift, self._seconds), FinishTool(self.finish)

    async def evaluate(self, task: Row, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        if self.failing_grades:
            self.failing_grades -= 1
            raise GraderError("the grader broke.")
        artifacts.submission = GradedSubmission(text=artifacts.answer or "")
        if self.graded_failures:
            self.graded_failures -= 1
            raise GraderError(f"the grader broke at {GOLD}.")
        return Score(reward=7.0 if artifacts.answer == "7" else 0.0, expected=GOLD, report=f"passed {GOLD}")


class ReplayableAdder(Adder):
    def normalize_answer(self, text: str) -> str:
        return text


class CountingEngine(FakeEngine):
    """Adds until it has made its turns; its version is the number of the turn, whichever attempt asks for it.

    The second turn takes two calls. ``trouble`` is what becomes of each call of a turn, by turn, until it is used up.
    """

    def __init__(self, turns: int) -> None:
        super().__init__("e", self._reply)
        self.trouble: dict[int, list[EngineError | asyncio.Event]] = {}
        self.prompts: list[str] = []
        self.asked: Counter[tuple[int, int]] = Counter()
        """How often it was asked for a turn, by number of the turn and how much of it was there already."""
        self._turns = turns

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.version = self._place(request)[0]
        return await super().generate(request)

    def _place(self, request: GenerationRequest) -> tuple[int, int]:
        text = CODEC.decode(list(request.prompt_ids))
        said = text.split("<|im_start|>assistant\n")[1:]
        return len(said) - 1, len(CODEC.tokenizer.encode_trusted(said[-1]))

    def _reply(self, request: GenerationRequest) -> Reply | EngineError:
        number, begun = self._place(request)
        self.prompts.append(CODEC.decode(list(request.prompt_ids)))
        self.asked[number, begun] += 1
        last = number == self._turns - 1
        call = {"name": "finish", "arguments": {"answer": "7"}} if last else {"name": "add", "arguments": {"n": number}}
        text = f"turn {number}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = (*CODEC.tokenizer.encode_trusted(text), CODEC.terminator_id)[begun:]
        trouble = self.trouble.get(number)
        struck = trouble.pop(0) if trouble else None
        if isinstance(struck, EngineError):
            return struck
        if number == 1 and not begun:
            return Reply(ids[:3], "abort", hold=struck)
        return Reply(ids, hold=struck)


class CountingLedger(MemoryLedger):
    """Notes the turns that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[TurnEnded] = []

    @property
    def logged(self) -> int:
        return len(self.turns)

    async def log_turn(self, ended: TurnEnded) -> None:
        self.turns.append(ended)
        await super().log_turn(ended)


class Place:
    """A ledger, an engine, and services over them, one after the other."""

    def __init__(self, turns: int, environment: Adder, level: RolloutSettings) -> None:
        self.ledger = CountingLedger()
        self.engine = CountingEngine(turns)
        self.environment = environment
        self.level = level
        self._request = RolloutRequest(rollout_id="r", environment="adder", task={"question": "?", "turns": turns})

    async def serve(self, *, cancel_in: str = "") -> Rollout:
        """Serve until the rollout has its record; ``cancel_in`` names the stage in which it is cancelled."""
        async with self._serving(drain=True) as service:
            if cancel_in:
                await self._entered[cancel_in].wait()
                await service.cancel(["r"])
            rollout = await service.result("r", wait=60)
        assert rollout is not None
        return rollout

    async def serve_until_held(self, turn: int) -> None:
        """Serve until the engine holds the call of a turn; then stop as at a restart."""
        self.engine.trouble[turn] = [asyncio.Event()]
        async with self._serving(drain=False):
            await self.engine.call_held.wait()
            self.engine.call_held.clear()

    @asynccontextmanager
    async def _serving(self, *, drain: bool) -> AsyncGenerator[RolloutService]:
        self.stages: list[str] = []
        self._entered: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

        def note(event: AttemptMoved) -> None:
            if isinstance(event, StageEntered):
                self.stages.append(event.stage)
                self._entered[event.stage].set()

        async with EnginePool("policy", failover=FailoverOptions(recovery_seconds=0.0)) as pool:
            pool.add_engine(self.engine)
            source = ModelPolicySource(pool, CODEC)
            runner = InProcessRunner(
                lambda name: self.environment, source, EmptyBackend(), run_settings={"default": self.level}
            )
            service = RolloutService(self.ledger, runner, RetryConfig(pause_seconds=0))
            service.stage_observers.append(note)
            await service.start()
            await service.submit([self._request])
            yield service
            await service.stop(drain=drain)
        self.ledger.reopen()


async def undisturbed(turns: int, environment: Adder | None = None) -> Rollout:
    place = Place(turns, environment or ReplayableAdder(), RESUME)
    rollout = await place.serve()
    assert (rollout.resumed_turns, rollout.resume_refused, place.ledger.logged) == (0, "", turns)
    return rollout


def assert_same_work(rollout: Rollout, other: Rollout) -> None:
    assert rollout.segments == other.segments
    assert rollout.messages == other.messages
    assert (rollout.outcome, rollout.score, rollout.tools) == (other.outcome, other.score, other.tools)


REFUSED = EngineError(FailureKind.ENGINE_REFUSED, "engine e: refused.")


@settings(max_examples=12, deadline=None)
@given(turns=st.integers(1, 6), by_restart=st.booleans())
async def test_a_resumed_rollout_has_the_tokens_of_an_undisturbed_one(turns: int, by_restart: bool) -> None:
    wanted = await undisturbed(turns)
    versions = [version for version in wanted.segments[0].policy_versions if version >= 0]
    assert sorted(set(versions)) == list(range(turns))
    for cut in range(turns):
        place = Place(turns, ReplayableAdder(), RESUME)
        if by_restart:
            await place.serve_until_held(cut)
            assert place.ledger.logged == cut
        else:
            place.engine.trouble[cut] = [REFUSED]
        rollout = await place.serve()
        assert_same_work(rollout, wanted)
        assert (rollout.resumed_turns, len(rollout.retries), place.ledger.logged) == (cut, int(not by_restart), turns)
        assert place.engine.asked.pop((cut, 0)) == 2
        assert set(place.engine.asked.values()) <= {1}, "the engine saw a turn again that was whole"


class SummarisingEngine(CountingEngine):
    """Counts turns over summaries, and writes one where it is asked to."""

    def _place(self, request: GenerationRequest) -> tuple[int, int]:
        number, begun = super()._place(request)
        text = CODEC.decode(list(request.prompt_ids))
        before = re.search(r"Summary of (\d+) turns", text)
        return number - 1 + int(before[1]) if before else number, begun

    def _reply(self, request: GenerationRequest) -> Reply | EngineError:
        text = CODEC.decode(list(request.prompt_ids))
        reply = super()._reply(request)
        if isinstance(reply, EngineError) or SUMMARY_REQUEST.content not in text.rpartition("<|im_start|>user")[2]:
            return reply
        number, begun = self._place(request)
        ids = (*CODEC.tokenizer.encode_trusted(f"Summary of {number + 1} turns."), CODEC.terminator_id)[begun:]
        return replace(reply, token_ids=ids if reply.finish_reason is None else ids[:3])


@pytest.mark.parametrize("by_restart", [True, False])
async def test_a_compacted_rollout_resumes_in_the_middle_of_a_segment_and_of_a_summary(by_restart: bool) -> None:
    level = RESUME.model_copy(update={"compact_tokens": 260})

    def made() -> Place:
        place = Place(8, ReplayableAdder(), level)
        place.engine = SummarisingEngine(8)
        return place

    wanted = await made().serve()
    assert [segment.cause for segment in wanted.segments][:3] == ["first", "summary", "summary"]
    assert wanted.outcome.status == "completed"
    count = len({call.turn for segment in wanted.segments for call in segment.generations})
    for cut in range(count):
        place = made()
        if by_restart:
            await place.serve_until_held(cut)
        else:
            place.engine.trouble[cut] = [REFUSED]
        rollout = await place.serve()
        assert_same_work(rollout, wanted)
        assert (rollout.resumed_turns, rollout.resume_refused) == (cut, "")


async def test_a_rollout_that_was_over_is_graded_without_the_engine() -> None:
    wanted = await undisturbed(3)
    place = Place(3, ReplayableAdder(), RESUME)
    place.environment.failing_grades = 1
    rollout = await place.serve()
    assert_same_work(rollout, wanted)
    assert (rollout.resumed_turns, len(rollout.retries)) == (3, 1)
    assert set(place.engine.asked.values()) == {1}


@pytest.mark.parametrize("answers", [[0, 0, 0, 0], [0, 0, 100, 0, 0]], ids=["resumed", "started over"])
async def test_what_grading_knows_reaches_no_later_attempt(answers: list[int]) -> None:
    place = Place(3, ReplayableAdder(iter(answers)), RESUME)
    place.environment.graded_failures = 1
    rollout = await place.serve()
    assert rollout.score is not None
    assert (rollout.score.expected, len(rollout.retries)) == (GOLD, 1)
    assert rollout.submission == GradedSubmission(text="7")
    seen = [*place.engine.prompts, *(one.model_dump_json() for one in place.ledger.turns)]
    seen += [message.content for message in rollout.messages] + [json.dumps(rollout.tools)]
    assert rollout.resumed_turns == (3 if len(answers) == 4 else 0)
    assert place.engine.prompts
    assert not any(GOLD in text for text in seen)


async def test_an_attempt_after_one_that_came_no_further_starts_from_nothing() -> None:
    place = Place(4, ReplayableAdder(), RESUME)
    place.engine.trouble[2] = [REFUSED, REFUSED]
    rollout = await place.serve()
    assert_same_work(rollout, await undisturbed(4))
    assert (rollout.resumed_turns, rollout.resume_refused, len(rollout.retries)) == (0, "", 2)
    assert place.engine.asked[0, 0] == 2


async def test_another_answer_in_the_replay_starts_over() -> None:
    """The first answers are 0 and 1, those of the replay 100 more: it is not the sandbox that the policy saw."""
    place = Place(4, ReplayableAdder(iter([0, 0, 100, 0, 0, 0])), RESUME)
    await place.serve_until_held(2)
    rollout = await place.serve()
    assert_same_work(rollout, await undisturbed(4))
    assert (rollout.resumed_turns, rollout.retries) == (0, [])
    assert rollout.resume_refused == "turn 0: its tools answered otherwise than before."
    assert place.stages == ["queue", "init", "run", "init", "run", "eval"]
    assert [place.engine.asked[number, 0] for number in range(4)] == [2, 2, 2, 1]


async def test_answers_are_compared_as_the_environment_normalizes_them() -> None:
    class Lenient(Adder):
        def normalize_answer(self, text: str) -> str:
            return text.partition(",")[2]

    place = Place(3, Lenient(iter([0, 0, 100, 0])), RESUME)
    await place.serve_until_held(2)
    rollout = await place.serve()
    assert (rollout.resumed_turns, rollout.resume_refused) == (2, "")
    assert rollout.segments == (await undisturbed(3)).segments  # the policy is shown what it was shown before


async def test_turns_sampled_with_other_settings_are_not_resumed() -> None:
    place = Place(3, ReplayableAdder(), RESUME)
    await place.serve_until_held(1)
    place.level = RESUME.model_copy(update={"temperature": 0.5})
    rollout = await place.serve()
    assert rollout.resumed_turns == 0
    assert rollout.resume_refused == "turn 0: its prompt or sampling settings differ from the logged ones."
    assert rollout.segments[0].temperature == 0.5


async def test_a_limit_in_the_replay_starts_over() -> None:
    """The time for RUN is shorter now than the tools alone take: it is no limit that the policy reached."""
    place = Place(3, ReplayableAdder(seconds=0.05), RESUME)
    await place.serve_until_held(2)
    place.level = RESUME.model_copy(update={"run_seconds": 0.02})
    rollout = await place.serve()
    assert rollout.resume_refused == "turn 0: the agent was stopped before it, and had not been before."
    assert rollout.outcome.status == "truncated"


@virtually
async def test_a_replay_is_set_up_and_what_the_turns_took_before_is_charged() -> None:
    """Each turn takes 10 s. A rollout of seven is truncated after 45 s of RUN, in whichever attempt they fall."""
    level = RESUME.model_copy(update={"run_seconds": 45.0})
    place = Place(7, ReplayableAdder(seconds=10.0), level)
    await place.serve_until_held(3)
    rollout = await place.serve()
    assert (rollout.outcome.limit, rollout.resumed_turns, rollout.turns) == ("time", 3, 6)  # turn 1 took two calls
    assert rollout.stages["init"].seconds == pytest.approx(30.0, abs=0.5)
    assert rollout.stages["run"].queued == pytest.approx(0.0, abs=0.5)


async def test_a_cancel_in_the_replay_counts_it_as_set_up() -> None:
    place = Place(3, ReplayableAdder(seconds=0.3), RESUME)
    await place.serve_until_held(2)
    rollout = await place.serve(cancel_in="run")
    assert (rollout.outcome.status, rollout.resumed_turns) == ("cancelled", 0)
    assert rollout.stages["init"].seconds > rollout.stages["run"].seconds == 0.0


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        pytest.param(ReplayableAdder(), RolloutSettings(seed=3), id="not asked for"),
        pytest.param(Adder(), RESUME, id="not replay safe"),
    ],
)
async def test_without_it_nothing_is_written(environment: Adder, level: RolloutSettings) -> None:
    place = Place(3, environment, level)
    await place.serve_until_held(2)
    assert place.ledger.logged == 0
    rollout = await place.serve()
    assert (rollout.resumed_turns, rollout.resume_refused) == (0, "")
    assert place.engine.asked[0, 0] == 2
