"""Messages that carry token ids: put together they are the sampled sequence, for any trajectory."""

from typing import Any

import pytest
import sample_records
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.api.compat.process_result import to_messages, to_process_result
from prorl_gym.errors import CancelReason, FailureKind, Limit
from prorl_gym.records import (
    NOT_SAMPLED,
    Generation,
    GradedSubmission,
    Message,
    Outcome,
    Rollout,
    Score,
    Segment,
    StageTime,
    ToolCall,
)
from prorl_gym.settings import RolloutSettings, resolve_settings


class Tape:
    """Makes a trajectory piece by piece."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.generations: list[Generation] = []
        self.messages: list[Message] = []

    def observe(self, count: int) -> None:
        self._add(count, 0)

    def sample(self, count: int, turn: int) -> None:
        start = len(self.ids)
        self._add(count, 1)
        self.generations.append(
            Generation(start=start, end=len(self.ids), turn=turn, finish_reason="stop", engine="e", seconds=0.0)
        )

    def say(self, role: Any, content: str = "text") -> None:
        self.messages.append(Message(role=role, content=content))

    def segment(self) -> Segment:
        return Segment(
            token_ids=self.ids,
            mask=self.mask,  # pyright: ignore[reportArgumentType]
            logprobs=[-float(token) * bit for token, bit in zip(self.ids, self.mask, strict=True)],
            policy_versions=[token % 3 if bit else NOT_SAMPLED for token, bit in zip(self.ids, self.mask, strict=True)],
            generations=self.generations,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            logprob_kind="raw",
        )

    def _add(self, count: int, bit: int) -> None:
        self.ids.extend(range(len(self.ids) + 1, len(self.ids) + 1 + count))
        self.mask.extend([bit] * count)


def record(tape: Tape, prompt: int, **fields: Any) -> Rollout:
    base: dict[str, Any] = {
        "run_id": "run",
        "environment": "math",
        "score": Score(reward=1.0),
        "segments": [tape.segment()] if tape.ids else [],
        "messages": tape.messages,
        "prompt_messages": prompt,
        "settings": resolve_settings(RolloutSettings(mask_overlong=(Limit.TOKENS, Limit.TIME))),
        "accepted_at": 100.0,
        "finished_at": 110.0,
    }
    return sample_records.record("r", **(base | fields))


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Tape, int]:
    """Few-shot prompts, turns in pieces, any number of observations, ends at any moment."""
    tape = Tape()
    prompt = draw(st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=4))
    for role in prompt:
        tape.say(role)
    tape.observe(draw(st.integers(0, 5)))
    for turn in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            tape.sample(draw(st.integers(0, 3)), turn)
        if draw(st.integers(0, 9)) == 0:
            break  # killed before the turn was complete
        tape.say("assistant")
        for _ in range(draw(st.integers(0, 3))):
            tape.say(draw(st.sampled_from(["tool", "user"])))
        tape.observe(draw(st.integers(0, 4)))
    return tape, len(prompt)


@given(trajectories())
def test_put_together_they_are_the_sampled_sequence(made: tuple[Tape, int]) -> None:
    tape, prompt = made
    messages = to_messages(record(tape, prompt), include_input_ids=True)
    if not any(tape.mask):
        assert not any("token_ids" in message for message in messages)
        return
    ids = [token for message in messages for token in message["token_ids"]]
    mask = [int(message["role"] == "assistant") for message in messages for _ in message["token_ids"]]
    assert (ids, mask) == (tape.ids, tape.mask)
    seen = 0
    for message in messages:
        count = len(message["token_ids"])
        if "logprobs" in message:
            piece = slice(seen, seen + count)
            assert message["logprobs"] == [-float(token) for token in tape.ids[piece]]
            assert message["policy_versions"] == [token % 3 for token in tape.ids[piece]]
            assert message["input_ids"] == tape.ids[:seen]
        seen += count
    kept = iter(messages)
    spoken = [(message.role, message.content) for message in tape.messages]
    assert all(any((one["role"], one["content"]) == wanted for one in kept) for wanted in spoken)  # in their order


@pytest.mark.parametrize("cause", ["template", "summary"])
@pytest.mark.parametrize(("policy", "lengths"), [("main", [3, 2, 4, 2, 1, 0]), ("last", [0, 0, 0, 0, 5, 1])])
def test_tokens_of_the_main_segment_are_on_its_own_messages(cause: Any, policy: Any, lengths: list[int]) -> None:
    first, second = Tape(), Tape()
    for role in ("user", "assistant", "user", "assistant", "user", "assistant"):
        first.say(role)
    first.observe(3)
    first.sample(2, 0)
    first.observe(4)
    first.sample(2, 1)
    first.observe(1)
    second.observe(5)
    second.sample(1, 2)
    after = second.segment().model_copy(update={"parent": 0, "cause": cause})
    settings = resolve_settings(RolloutSettings(trained_segments=policy))
    made = record(first, 1, segments=[first.segment(), after], settings=settings)
    assert [len(message["token_ids"]) for message in to_messages(made)] == lengths


def test_a_few_shot_answer_is_not_taken_for_sampled() -> None:
    tape = Tape()
    for role in ("system", "user", "assistant", "user"):
        tape.say(role)
    tape.observe(8)
    tape.sample(2, 0)
    tape.say("assistant")
    messages = to_messages(record(tape, 4))
    assert [len(message["token_ids"]) for message in messages] == [8, 0, 0, 0, 2]


def test_ids_that_stand_for_text_are_not_shown() -> None:
    tape = Tape()
    tape.say("user")
    tape.observe(3)
    tape.say("assistant")
    tape.generations.append(Generation(start=1, end=3, turn=0, finish_reason="stop", engine="e", seconds=0.0))
    assert to_messages(record(tape, 1)) == [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "text"},
    ]


def test_input_ids_are_asked_for() -> None:
    tape = Tape()
    tape.say("user")
    tape.observe(2)
    tape.sample(1, 0)
    tape.say("assistant")
    assert "input_ids" not in to_messages(record(tape, 1))[-1]


def test_calls_are_where_either_reader_looks() -> None:
    call = ToolCall(id="c1", name="python", arguments='{"code": "1"}')
    tape = Tape()
    tape.messages = [
        Message(role="user", content="go"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="1", tool_call_id="c1", name="python"),
    ]
    _, call_message, result = to_messages(record(tape, 1), include_tokens=False)
    [form] = call_message["tool_calls"]
    assert (form["name"], form["arguments"]) == (form["function"]["name"], form["function"]["arguments"])
    assert (result["tool_call_id"], result["name"]) == ("c1", "python")


def outcome_of(**fields: Any) -> dict[str, Any]:
    tape = Tape()
    tape.say("user")
    tape.observe(2)
    tape.sample(2, 0)
    tape.say("assistant")
    return to_process_result(record(tape, 1, **fields), instance_id="i", trajectory_id=3)


def test_a_limit_is_no_failure_and_filtered_by_choice() -> None:
    for limit, filtered in ((Limit.TURNS, False), (Limit.TOKENS, True), (Limit.TIME, True)):
        result = outcome_of(outcome=Outcome(status="truncated", limit=limit))
        assert (result["filter"], result["reward"], result["success"]) == (filtered, 1.0, False)
        assert result["critical_error"] == ("timeout" if limit is Limit.TIME else None)
        assert result["timing"]["timeout_triggered"] is (limit is Limit.TIME)
        assert limit.value in result["error"]


def test_a_failure_names_its_stage_and_has_no_reward() -> None:
    for kind, stage, expected in (
        (FailureKind.ENGINE_UNREACHABLE, "run", "run"),
        (FailureKind.GRADER_FAILED, "eval", "eval"),
        (FailureKind.SANDBOX_UNAVAILABLE, "init", "init"),
        (FailureKind.STAGE_TIMEOUT, "eval", "timeout"),
        (FailureKind.SERVICE_RESTARTED, "queue", "init"),
    ):
        outcome = Outcome(status="failed", kind=kind, stage=stage, message="It broke.")  # pyright: ignore[reportArgumentType]
        result = outcome_of(outcome=outcome, score=None)
        assert (result["critical_error"], result["error"]) == (expected, "It broke.")
        assert (result["reward"], result["resolved"], result["filter"]) == (None, False, True)


def test_a_graded_patch_is_returned() -> None:
    patch = GradedSubmission(kind="patch", text="diff")
    assert outcome_of(score=Score(reward=0.0), submission=patch)["git_patch"] == "diff"
    assert "git_patch" not in outcome_of(score=Score(reward=0.0), submission=GradedSubmission(text="41"))


def test_a_cancelled_one_is_reported_as_cancelled() -> None:
    result = outcome_of(outcome=Outcome(status="cancelled", reason=CancelReason.CLIENT), score=None)
    assert (result["critical_error"], result["error"]) == ("cancelled", "It was cancelled (client).")


def test_a_rewritten_history_is_filtered() -> None:
    tape = Tape()
    tape.say("user")
    tape.observe(2)
    tape.sample(2, 0)
    tape.say("assistant")
    tape.say("assistant")
    result = to_process_result(record(tape, 1, segments=[tape.segment(), tape.segment()]))
    assert result["filter"] is True
    assert "thinking: keep" in result["error"]
    assert [token for message in result["messages"] for token in message["token_ids"]] == tape.ids


def test_times_add_up() -> None:
    stages = {"init": StageTime(seconds=1.0), "run": StageTime(seconds=3.0, queued=2.0)}
    timing = outcome_of(stages=stages)["timing"]
    assert (timing["init_time"], timing["run_time"], timing["eval_time"]) == (1.0, 3.0, 0.0)
    assert (timing["counted_elapsed"], timing["others_time"]) == (4.0, 6.0)


def test_resolved_needs_the_full_reward() -> None:
    assert [outcome_of(score=Score(reward=reward))["resolved"] for reward in (0.0, 0.99, 1.0)] == [False, False, True]
