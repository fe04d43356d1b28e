"""The loop: what ends a rollout, and what becomes an observation."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from model_talk import Talk
from token_codecs import codec

from prorl_gym.agents.loop import run_agent
from prorl_gym.agents.protocol import Artifacts, AssistantTurn, Observation, ToolSpec
from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.agents.tools import FinishTool
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, SandboxError
from prorl_gym.records import Message, ToolCall
from prorl_gym.rollout.scheduling.model_source import ModelPolicy

PROMPT = (Message(role="system", content="Be brief."), Message(role="user", content="Add."))


class Echo:
    """Says what it was given."""

    spec = ToolSpec(
        "echo",
        "Echo.",
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "loud": {"type": "boolean"}},
            "required": ["text"],
        },
    )

    def __init__(self, error: Exception | None = None) -> None:
        self.heard: list[str] = []
        self._error = error

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        if self._error:
            raise self._error
        self.heard.append(arguments["text"])
        return Observation(f"you said {arguments['text']}")


def call(name: str, arguments: str, call_id: str = "c1") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def calls(*made: ToolCall, **more: Any) -> AssistantTurn:
    return AssistantTurn("", made, **more)


def hermes(name: str, **arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


async def play(*script: AssistantTurn | ScriptedStep, tool: Echo | None = None, max_turns: int | None = None):
    policy, artifacts, echo = ScriptedPolicy(script, max_turns), Artifacts(), tool or Echo()
    error: BaseException | None = None
    try:
        await run_agent(PROMPT, [echo, FinishTool()], policy, artifacts)
    except (LimitReached, EngineError, SandboxError) as caught:
        error = caught
    return policy, artifacts, echo, error


async def test_turn_without_calls_is_the_answer():
    policy, artifacts, _, error = await play(AssistantTurn("four"))
    assert (artifacts.answer, error, policy.turn_count) == ("four", None, 1)
    assert [message.role for message in artifacts.messages] == ["system", "user", "assistant"]
    assert [tool.name for tool in policy.tools] == ["echo", "finish"]
    assert policy.received == list(PROMPT)


THOUGHTS = [
    ("<think>2 and 2 make \\boxed{4}. Let me check.", "", []),
    ("<think>2 and 2 make \\boxed{4}. Let me ch", "", Limit.TOKENS),
    (f"<think>So {hermes('finish', answer='4')}", "", []),
    (f"<think>So {hermes('echo', text='a')}", "", []),
    ("<think>\\boxed{3}?</think>\n\\boxed{4}", "\n\\boxed{4}", []),
    ("<think>Hm.</think>\n<think>\\boxed{4}", "", []),
    ("<think>Hm.</think>\n<think>\\boxed{3}</think>\\boxed{4}", "\\boxed{4}", []),
    ("<think>Hm.</think>a</think>\\boxed{4}", "a</think>\\boxed{4}", []),
    ("<think>Hm.</think>`<think>` begins \\boxed{4}", "`<think>` begins \\boxed{4}", []),
    (f"<think>Hm.</think>{hermes('echo', text='</think>')}", "done", ["</think>"]),
]
"""Turns, the answers in them, and what the tool heard or the limit that ends them."""


@pytest.mark.parametrize("name", ["small", "small-opens"])
@pytest.mark.parametrize(("turn", "answer", "then"), THOUGHTS)
async def test_thoughts_end_where_they_are_closed(name: str, turn: str, answer: str, then: Any):
    said, echo, artifacts = turn.removeprefix("<think>" if name == "small-opens" else ""), Echo(), Artifacts()
    limit = {"max_turn_tokens": len(codec(name).tokenizer.encode_trusted(said))} if then is Limit.TOKENS else {}
    talk = Talk([said, "</think>done" if name == "small-opens" else "done"], name, **limit)
    with pytest.raises(LimitReached) if limit else nullcontext():
        await run_agent(PROMPT, [echo, FinishTool()], ModelPolicy(talk.session), artifacts)
    assert (artifacts.answer, echo.heard) == (answer, [] if limit else then)


async def test_a_prompt_that_closes_the_thoughts_has_none():
    """Its ids decide, not the template alone."""
    talk, artifacts = Talk(["\\boxed{4}, not </think>"], "small-opens"), Artifacts()
    await run_agent([Message(role="system", content="/no_think")], [], ModelPolicy(talk.session), artifacts)
    assert artifacts.answer == "\\boxed{4}, not </think>"


async def test_observation_answers_its_call():
    policy, artifacts, _, _ = await play(calls(call("echo", '{"text": "hi"}', "abc")), AssistantTurn("done"))
    said = policy.received[-1]
    assert said == Message(role="tool", content="you said hi", tool_call_id="abc", name="echo")
    assert artifacts.messages[3] == said
    assert artifacts.answer == "done"


async def test_calls_of_one_turn_run_in_order_and_are_answered_together():
    made = [call("echo", json.dumps({"text": word}), word) for word in ("a", "b", "c")]
    policy, _, echo, _ = await play(calls(*made), AssistantTurn("done"))
    assert echo.heard == ["a", "b", "c"]
    assert [message.tool_call_id for message in policy.received[2:]] == ["a", "b", "c"]
    assert policy.turn_count == 2


async def test_finish_ends_at_once():
    turn = calls(call("finish", '{"answer": "4"}'), call("echo", '{"text": "after"}'))
    policy, artifacts, echo, _ = await play(turn, AssistantTurn("never"))
    assert (artifacts.answer, policy.turn_count, echo.heard) == ("4", 1, [])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call("shout", "{}"), "There is no tool 'shout'. Tools: echo(text: string, loud?: boolean), finish("),
        (call("", "{}"), "There is no tool ''."),
        (call("echo", "{"), "not valid JSON"),
        (call("echo", "[" * 100_000), "not valid JSON"),
        (call("echo", '{"text": ' + "9" * 5000 + "}"), "not valid JSON"),
        (call("echo", "[]"), "not a JSON object"),
        (call("echo", "null"), "not a JSON object"),
        (call("echo", "{}"), "'text' is missing"),
        (call("echo", '{"text": 3}'), "'text' must be of type string"),
        (call("echo", '{"text": null}'), "'text' must be of type string"),
        (call("echo", '{"text": "a", "loud": 1}'), "'loud' must be of type boolean"),
        (call("echo", '{"text": "a", "volume": 1}'), "'volume' is not one of them"),
        (call("echo", '{"text": "\\ud800"}'), "not valid Unicode"),
        (call("echo", '{"text": "a", "\\ud800": 1}'), "is not one of them"),
        (call("finish", '{"answer": 4}'), "'answer' must be of type string"),
    ],
)
async def test_bad_call_is_an_observation_with_what_is_expected(made: ToolCall, expected: str):
    policy, artifacts, echo, error = await play(calls(made), AssistantTurn("four"))
    said = policy.received[-1]
    assert said.role == "tool"
    assert expected in said.content
    assert len(said.content) < 400
    assert said.content.encode()
    assert (error, echo.heard, artifacts.answer) == (None, [], "four")


async def test_unreadable_call_is_answered_as_user_beside_the_good_ones():
    turn = calls(call("echo", '{"text": "hi"}'), parse_errors=("The second call is not JSON.",))
    policy, artifacts, _, _ = await play(turn, AssistantTurn("four"))
    assert [(message.role, message.content) for message in policy.received[2:]] == [
        ("tool", "you said hi"),
        ("user", "The second call is not JSON."),
    ]
    assert [message.role for message in artifacts.messages[3:]] == ["tool", "user", "assistant"]


async def test_only_an_unreadable_call_does_not_end_the_rollout():
    policy, artifacts, _, _ = await play(AssistantTurn("try", parse_errors=("Not JSON.",)), AssistantTurn("four"))
    assert (policy.turn_count, artifacts.answer) == (2, "four")


async def test_an_unreadable_call_stays_in_the_text_of_its_turn_and_is_no_answer():
    """Trainers look for it there: NeMo-RL's ``invalid_tool_call_advantage`` goes by the text of a row's items."""
    sampled = '"four" <tool_call>{"name": "echo", broken'
    _, artifacts, _, _ = await play(AssistantTurn("four", parse_errors=("?",), raw_text=sampled), max_turns=1)
    assert artifacts.messages[-2].content == sampled
    assert artifacts.answer == "four"


async def test_cut_turn_truncates_and_keeps_its_text():
    cut = AssistantTurn("It is \\boxed{4}, because", (call("echo", '{"text": "hi"}'),), finish_reason="length")
    _, artifacts, echo, error = await play(cut)
    assert isinstance(error, LimitReached)
    assert error.limit is Limit.TOKENS
    assert echo.heard == [], "calls of a cut turn are not run"
    assert artifacts.answer == "It is \\boxed{4}, because"
    assert artifacts.messages[-1].role == "assistant"


async def test_turn_limit_passes_through_and_keeps_what_there_is():
    _, artifacts, echo, error = await play(calls(call("echo", '{"text": "hi"}')), max_turns=1)
    assert isinstance(error, LimitReached)
    assert error.limit is Limit.TURNS
    assert [message.role for message in artifacts.messages] == ["system", "user", "assistant", "tool"]
    assert echo.heard == ["hi"]


async def test_unexplained_abort_is_the_engines_fault():
    _, _, _, error = await play(AssistantTurn("It", finish_reason="abort"))
    assert isinstance(error, EngineError)
    assert error.retryable


async def test_lost_sandbox_passes_through():
    broken = Echo(SandboxError(FailureKind.SANDBOX_LOST, "gone"))
    _, artifacts, _, error = await play(calls(call("echo", '{"text": "hi"}')), tool=broken)
    assert isinstance(error, SandboxError)
    assert artifacts.messages[-1].role == "assistant"


async def test_step_uses_the_last_observation():
    steps = [
        ScriptedStep(tool="echo", arguments={"text": "hi"}),
        ScriptedStep("It said {observation}.", "echo", {"text": "<{observation}>"}),
        ScriptedStep("\\boxed{{observation}}"),
    ]
    _, artifacts, echo, _ = await play(*steps)
    assert echo.heard == ["hi", "<you said hi>"]
    assert artifacts.messages[4].content == "It said you said hi."
    assert artifacts.answer == "\\boxed{you said <you said hi>}"
