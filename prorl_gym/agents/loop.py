"""The agent loop: sample a turn, run the tools it calls, append their results, until the policy finishes.

A context that has grown beyond a threshold is compacted: the policy is asked for a summary, and goes on from the first
prompt and that.

Everything the model can get wrong is an observation; nothing the model writes raises. Limits (turns, tokens, time)
come from the policy or from outside and pass through; ``artifacts`` is filled while the agent works, so that a kill at
any moment leaves what there is.
"""

from collections.abc import Mapping, Sequence

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, Observation, Policy, Tool
from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments, tool_signature
from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached
from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Message, ToolCall
from prorl_gym.thoughts import split_thinking


async def run_agent(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    policy: Policy,
    artifacts: Artifacts,
    compact_tokens: int = 0,
) -> None:
    """Let the policy work on a task until it finishes.

    It finishes by calling ``finish``, or by a turn without tool calls, whose text then is the answer. At any earlier
    end (a limit, a kill) the answer is the text of the last turn.

    A turn that was cut by its length limit ends the rollout as truncated: half a call cannot be run, and a model
    that may continue after a cut learns to rely on it.

    From ``compact_tokens`` of context on, a summary is requested (0: never). A policy that calls a tool then gets the
    tool's result, and the request again.

    Raises ``LimitReached`` (turns or tokens), ``EngineError`` (no engine could answer), ``SandboxError`` (a tool's
    sandbox is lost or could not be started).
    """
    by_name, specs = {tool.spec.name: tool for tool in tools}, [tool.spec for tool in tools]
    artifacts.messages.extend(messages)
    turn = await policy.start_conversation(messages, specs)
    is_asked = False  # for a summary
    while True:
        _record_turn(turn, artifacts)
        if not turn.tool_calls and not turn.parse_errors:
            if not is_asked:
                return
            if summary := split_thinking(turn.text)[1].strip():
                is_asked = False
                artifacts.messages.append(SUMMARY_CONTINUATION)
                said = Message(role="assistant", content=summary)
                turn = await policy.start_conversation([*messages, said, SUMMARY_CONTINUATION], specs)
                continue
        observations: list[Message] = []
        for call in turn.tool_calls:
            observation = await _run_call(call, by_name)
            if observation.answer is not None:
                artifacts.answer = observation.answer
                return
            observed = Message(role="tool", content=observation.text, tool_call_id=call.id, name=call.name)
            observations.append(observed)
            artifacts.messages.append(observed)
        # A complaint answers no call, so it has the user's role.
        complaints = [Message(role="user", content=complaint) for complaint in turn.parse_errors]
        is_asked = 0 < compact_tokens <= turn.context_tokens
        remarks = [*complaints, *([SUMMARY_REQUEST] if is_asked else [])]
        artifacts.messages.extend(remarks)
        turn = await policy.respond([*observations, *remarks])


def _record_turn(turn: AssistantTurn, artifacts: Artifacts) -> None:
    # A call that could not be read is text: trainers look for it there. One that the length limit cut is neither.
    text = turn.raw_text if turn.parse_errors and turn.raw_text and turn.finish_reason != "length" else turn.text
    artifacts.messages.append(Message(role="assistant", content=text, tool_calls=turn.tool_calls))
    artifacts.answer = split_thinking(turn.text)[1]
    if turn.finish_reason == "length":
        raise LimitReached(Limit.TOKENS)
    if turn.finish_reason == "abort":
        raise EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            "The engine aborted a turn that was not cancelled.",
            "Look for a restart or a weight update in the engine's log.",
        )


async def _run_call(call: ToolCall, tools: Mapping[str, Tool]) -> Observation:
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tool_signature(known.spec) for known in tools.values()) or "none"
        return Observation(f"There is no tool '{call.name[:40]}'. Tools: {known}.")
    try:
        arguments = parse_arguments(tool.spec, call.arguments)
    except BadArguments as complaint:
        return Observation(str(complaint))
    return await tool(arguments)
