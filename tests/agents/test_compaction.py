"""Compaction of the loop's context: what is asked, what is recorded, and what ends it."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_codecs import ALL, BOUNDED, codec

from prorl_gym.agents.loop import run_agent
from prorl_gym.agents.protocol import Artifacts, Observation, ToolSpec
from prorl_gym.agents.tools import FinishTool
from prorl_gym.errors import EngineError, Limit, LimitReached, TaskError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.token_stream import DRIFT
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Message, Segment
from prorl_gym.rollout.scheduling.model_source import ModelPolicy
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

PROMPT = (Message(role="system", content="Be brief."), Message(role="user", content="Count."))
FEW = settings(BOUNDED, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


class Echo:
    """Says what it was given."""

    spec = ToolSpec("echo", "Echo.", {"type": "object", "properties": {"text": {"type": "string"}}})

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        return Observation(str(arguments.get("text", "")))


def spoken(text: str, name: str = "small") -> Reply:
    return Reply((*codec(name).tokenizer.encode_trusted(text), codec(name).terminator_id))


def called(tool: str, name: str = "small", **arguments: Any) -> Reply:
    if name == "llama":
        return spoken(json.dumps({"name": tool, "parameters": arguments}), name)
    if name in ("qwen3-coder", "qwen3.5"):
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return spoken(f"<tool_call>\n<function={tool}>\n{given}</function>\n</tool_call>", name)
    return spoken(f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>", name)


@dataclass
class Played:
    """What became of a rollout."""

    engine: FakeEngine
    segments: list[Segment]
    artifacts: Artifacts
    error: BaseException | None


async def play(
    script: Callable[[int], Reply], name: str = "small", thinking: ThinkingMode = "keep", **limits: Any
) -> Played:
    """Run the loop on an engine that answers each call by its number."""

    def reply(_: GenerationRequest) -> Reply:
        engine.version = len(engine.requests)  # of the next call: the weights change between any two
        return script(len(engine.requests) - 1)

    engine = FakeEngine("e", reply)
    async with EnginePool("policy") as pool:
        pool.add_engine(engine)
        resolved = resolve_settings(RolloutSettings(**limits))
        session = ModelSession(pool, codec(name), resolved, rollout_id="r", thinking=thinking)
        artifacts, error = Artifacts(), None
        tools = [Echo(), FinishTool()]
        try:
            await run_agent(PROMPT, tools, ModelPolicy(session), artifacts, resolved.compact_tokens)
        except (LimitReached, EngineError, TaskError) as caught:
            error = caught
        return Played(engine, session.segments(), artifacts, error)


def listed(*replies: Reply) -> Callable[[int], Reply]:
    return lambda number: replies[number]


def texts(played: Played) -> list[str]:
    return [message.content for message in played.artifacts.messages[len(PROMPT) :]]


async def test_the_policy_goes_on_from_its_first_prompt_and_its_summary():
    played = await play(
        listed(called("echo", text="one"), spoken("<think>so</think>Said one."), called("finish", answer="1")),
        compact_tokens=50,
    )
    first, second = played.segments
    assert (first.cause, first.parent, second.cause, second.parent) == ("first", None, "summary", 0)
    prompts = [list(request.prompt_ids) for request in played.engine.requests]
    assert len(prompts[2]) < len(prompts[1])
    assert first.token_ids[: len(prompts[1])] == prompts[1]
    assert second.token_ids[: len(prompts[2])] == prompts[2]
    decode = codec("small").decode
    assert decode(prompts[1]).count(SUMMARY_REQUEST.content) == 1
    assert decode([token for token, bit in zip(first.token_ids, first.mask, strict=True) if bit]).count("Said one.")
    opening = decode(prompts[2])
    assert opening.startswith(decode(prompts[0]).rpartition("<|im_start|>")[0])
    assert opening.count("Said one.") == opening.count(SUMMARY_CONTINUATION.content) == 1
    assert "so</think>" not in opening
    assert "echo" not in opening.partition("Said one.")[2]
    assert second.shared_tokens >= len(codec("small").encode_prompt(PROMPT, [Echo.spec.as_function()])) // 2
    assert texts(played) == [
        *("", "one", SUMMARY_REQUEST.content, "<think>so</think>Said one.", SUMMARY_CONTINUATION.content, "")
    ]
    assert played.artifacts.answer == "1"


async def test_without_the_setting_nothing_is_asked():
    played = await play(listed(called("echo", text="one " * 200), spoken("done")))
    assert len(played.segments) == 1
    assert SUMMARY_REQUEST not in played.artifacts.messages


async def test_a_tool_in_place_of_a_summary_is_run_and_the_policy_is_asked_again():
    played = await play(
        listed(called("echo", text="a"), called("echo", text="b"), spoken("Both."), spoken("end")), compact_tokens=50
    )
    request, after = SUMMARY_REQUEST.content, SUMMARY_CONTINUATION.content
    assert texts(played) == ["", "a", request, "", "b", request, "Both.", after, "end"]
    assert [len(segment.generations) for segment in played.segments] == [3, 1]
    assert (played.artifacts.answer, played.error) == ("end", None)


@pytest.mark.parametrize("said", [" ", "So: <tool_call>oops</tool_call>"], ids=["empty", "a broken call"])
async def test_what_is_no_summary_is_asked_for_again(said: str):
    played = await play(listed(called("echo", text="a"), spoken(said), spoken("So."), spoken("end")), compact_tokens=50)
    assert [message.content for message in played.artifacts.messages].count(SUMMARY_REQUEST.content) == 2
    assert [len(segment.generations) for segment in played.segments] == [3, 1]


async def test_an_answer_in_place_of_a_summary_ends_the_rollout():
    played = await play(listed(called("echo", text="a"), called("finish", answer="7")), compact_tokens=50)
    assert (played.artifacts.answer, len(played.segments)) == ("7", 1)


async def test_a_policy_that_never_summarises_is_bounded():
    played = await play(lambda _: called("echo", text="a"), compact_tokens=1, max_turns=7)
    assert isinstance(played.error, LimitReached)
    assert (played.error.limit, len(played.engine.requests), len(played.segments)) == (Limit.TURNS, 7, 1)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [({"max_turns": 8}, Limit.TURNS), ({"max_tokens": 500, "max_turns": 999}, Limit.TOKENS)],
    ids=["turns", "tokens of all segments together"],
)
async def test_a_policy_that_only_summarises_is_bounded(limits: dict[str, int], limit: Limit):
    """Its first prompt is beyond the threshold already, so each turn is followed by a summary."""
    turns = (called("echo", text="a"), spoken("So."))
    played = await play(lambda number: turns[number % 2], compact_tokens=1, **limits)
    assert isinstance(played.error, LimitReached)
    assert played.error.limit is limit
    if limit is Limit.TURNS:
        assert len(played.segments) == 4
    else:
        assert 15 * 500 < sum(len(segment.token_ids) for segment in played.segments) <= 16 * 500


async def test_a_summary_that_is_cut_ends_the_rollout():
    cut = Reply(tuple(codec("small").tokenizer.encode_trusted("So far I " * 30)))
    played = await play(listed(called("echo", text="a"), cut), compact_tokens=50, max_turn_tokens=40)
    assert isinstance(played.error, LimitReached)
    assert played.error.limit is Limit.TOKENS
    assert sum(sum(segment.mask) for segment in played.segments) == len(called("echo", text="a").token_ids) + 40
    assert played.artifacts.messages[-2] == SUMMARY_REQUEST


async def test_a_summary_that_fills_the_context_ends_the_rollout():
    """The summary fits behind the first segment's prompt, and not twice: the next prompt has no room for a token."""
    room = len((await play(listed(spoken("x")))).engine.requests[0].prompt_ids)
    played = await play(listed(called("echo", text=""), spoken("So " * 150)), compact_tokens=50, max_tokens=room + 290)
    assert isinstance(played.error, LimitReached)
    assert played.error.limit is Limit.TOKENS


turns = st.lists(
    st.tuples(st.sampled_from(["call", "call", "say", "break", "abort"]), st.integers(1, 40)), min_size=1, max_size=12
)


def check_record(played: Played, name: str, kept: list[tuple[int, ...]]) -> None:
    """Check that what was sampled is recorded once, on exactly what the engine saw."""
    prompts = [list(request.prompt_ids) for request in played.engine.requests]
    places = [(n, call) for n, segment in enumerate(played.segments) for call in segment.generations]
    assert len(places) == len(prompts) == len(kept)
    for version, ((n, call), prompt, sampled) in enumerate(zip(places, prompts, kept, strict=True)):
        segment = played.segments[n]
        assert segment.token_ids[: call.start] == prompt
        assert tuple(segment.token_ids[call.start : call.end]) == sampled
        assert all(segment.mask[call.start : call.end])
        assert set(segment.policy_versions[call.start : call.end]) <= {version}
    assert sum(sum(segment.mask) for segment in played.segments) == sum(map(len, kept))
    assert [call.turn for _, call in places] == sorted(call.turn for _, call in places)
    for (before, parent), segment in zip(enumerate(played.segments), played.segments[1:], strict=False):
        assert segment.parent == before
        assert segment.cause in ("summary", "template")
        shared = segment.shared_tokens
        assert segment.token_ids[:shared] == parent.token_ids[:shared]
    asked = SUMMARY_REQUEST in played.artifacts.messages
    assert asked or all(segment.cause != "summary" for segment in played.segments)
    for one, two in pairwise(played.artifacts.messages):
        if one == SUMMARY_REQUEST:
            assert two.role == "assistant"


@pytest.mark.parametrize("thinking", ["keep", "template"])
@pytest.mark.parametrize("name", ALL)
@FEW
@given(turns=turns, compact_tokens=st.integers(1, 700), max_tokens=st.integers(300, 1500))
def test_what_was_sampled_is_recorded_once_on_what_the_engine_saw(name, thinking, turns, compact_tokens, max_tokens):
    replies: list[Reply] = []
    for kind, size in turns:
        if kind == "call":
            replies.append(called("echo", name, text="word " * size))
        else:
            replies.append(spoken("<tool_call>" * (kind == "break") + "word " * size, name))
            if kind == "abort":
                whole = replies[-1].token_ids
                replies[-1:] = [Reply(whole[: size // 2 + 1], "abort"), Reply(whole[size // 2 + 1 :])]
    drifted, kept = DRIFT.drifted, list[tuple[int, ...]]()

    def reply(number: int) -> Reply:
        answer = replies[number] if number < len(replies) else called("finish", name, answer="1")
        kept.append(answer.token_ids)
        return answer

    limits = {"compact_tokens": compact_tokens, "max_tokens": max_tokens, "max_turns": 30}
    played = asyncio.run(play(reply, name, thinking, **limits))
    cut = [ids[: request.max_tokens] for ids, request in zip(kept, played.engine.requests, strict=True)]
    check_record(played, name, cut)
    assert DRIFT.drifted == drifted
