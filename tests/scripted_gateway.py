"""Gateways of rollouts whose engine calls are noted, to compare them with the record; one plays a script.

Tokens, session and wires are those of a service. Only what the script's engine samples is invented, in spellings that
no rendering of the history gives: tokens that no tokenizer chooses, blanks and escapes in arguments, thoughts.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from prorl_gym.harness.rollout_gateway import RolloutGateway
from prorl_gym.inference.balance.call_gate import CallExecutor
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import PoolEngine
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Segment
from prorl_gym.settings import ResolvedSettings, RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

_SHELL_TOOLS = ("bash", "Bash", "exec_command", "shell", "run_shell_command", "terminal")
"""What agent programs call the tool that runs commands."""
_COMMAND_ARGUMENTS = ("command", "cmd")
_REQUIRED = {"description": "Run a command.", "is_background": False, "security_risk": "LOW", "summary": "Run"}
"""Values of further arguments that such tools require."""
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_TURN = "<|im_start|>assistant\n"
_RESULT = re.compile(r"RESULT=([^\s\"\\]+)")
_THOUGHT = "<think>\nWhat next?\n</think>\n\n"
_PIECE = 5
"""Characters that are encoded at a time."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call of an engine: its prompt, and the tokens that it sampled."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def recorded_calls(segments: Sequence[Segment]) -> Iterator[SampledCall]:
    """Return the calls of a record, each with all tokens before it as its prompt."""
    for segment in segments:
        for call in segment.generations:
            sampled = slice(call.start, call.end)
            yield SampledCall(
                tuple(segment.token_ids[: call.start]),
                tuple(segment.token_ids[sampled]),
                tuple(segment.logprobs[sampled]),
                tuple(segment.policy_versions[sampled]),
            )


class NotedGateway(RolloutGateway):
    """The gateway of a rollout that notes what its engine samples.

    Args:
        engine: samples.
        codec: tokenizer and chat template of the engine.
        settings: of the rollout.
        max_model_len: context of the engine in tokens, if it has one.
        side_calls: of the program.
    """

    def __init__(
        self,
        engine: PoolEngine,
        codec: ChatCodec,
        settings: ResolvedSettings,
        max_model_len: int | None = None,
        side_calls: Sequence[str] = (),
    ) -> None:
        self.pool = _NotingPool("policy", max_model_len=max_model_len)
        self.pool.add_engine(engine)
        self.session = HarnessSession(self.pool, codec, settings, rollout_id="r")
        super().__init__(self.session, codec, settings, side_calls, program="scripted")

    def count_captured(self) -> tuple[int, int]:
        """Return how many tokens the engine sampled, and how many of them are recorded exactly.

        Exactly: once, in order, after the prompt that the engine got, with its log-prob and its policy version. None
        counts where the record has tokens that were not sampled.
        """
        segments = self.session.segments()
        sampled, recorded = Counter(self.pool.calls), Counter(recorded_calls(segments))
        count = sum(sum(segment.mask) for segment in segments)
        exact = _count_tokens(sampled & recorded)
        return _count_tokens(sampled), exact if exact == count else 0


def _count_tokens(calls: Counter[SampledCall]) -> int:
    return sum(len(call.ids) * times for call, times in calls.items())


class _NotingPool(EnginePool):
    """Notes its calls: the prompt in the form that is sent, and what came back."""

    def __init__(self, name: str, *, max_model_len: int | None) -> None:
        super().__init__(name, max_model_len=max_model_len)
        self.calls: list[SampledCall] = []

    async def generate(self, request: GenerationRequest, executor: CallExecutor | None = None) -> GenerationResult:
        result = await super().generate(request, executor)
        sent = request.prompt_ids
        if request.prompt_ids_json is not None:
            sent = json.loads(b"[%b]" % request.prompt_ids_json)
        call = SampledCall(tuple(sent), tuple(result.token_ids), tuple(result.logprobs), tuple(result.versions))
        self.calls.append(call)
        return result


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """A turn. ``{result}`` in both stands for what the last output said after ``RESULT=``."""

    text: str = ""
    command: str | None = None
    """Run by the program's own shell tool."""


class ScriptedGateway(NotedGateway):
    """The gateway of a rollout whose policy plays a script.

    A call with tools gets the turn that follows the turns in its history, an empty one after the last; a call without
    (a title, a summary) gets a word.
    """

    def __init__(self, turns: Sequence[ScriptedTurn], *, max_turns: int = 50, side_calls: Sequence[str] = ()) -> None:
        self.codec = _codec()
        self.turns = list(turns)
        self.engine = _ScriptedEngine(self.codec, self.turns)
        limits = RolloutSettings(max_turns=max_turns, max_tokens=400_000, max_turn_tokens=30_000)
        super().__init__(self.engine, self.codec, resolve_settings(limits), side_calls=side_calls)


@cache
def _codec() -> ChatCodec:
    return load_codec("small")


class _ScriptedEngine(FakeEngine):
    """Plays turns; each token has a log-prob of its own, and each call a policy version."""

    def __init__(self, codec: ChatCodec, turns: Sequence[ScriptedTurn]) -> None:
        super().__init__("scripted", self._reply)
        self.reports_versions = True
        self._codec = codec
        self._turns = turns
        self._sampled = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.version += 1
        result = await super().generate(request)
        logprobs = [-(self._sampled + place + 1) / 4096 for place in range(len(result.token_ids))]
        self._sampled += len(logprobs)
        return replace(result, logprobs=logprobs)

    def _reply(self, request: GenerationRequest) -> Reply:
        text = self._codec.decode(request.prompt_ids)
        tools = _TOOLS.search(text)
        if tools is None:
            return Reply((*self._codec.tokenizer.encode_trusted("Work"), self._codec.terminator_id))
        number, seen = text.count(_TURN) - 1, _RESULT.findall(text)
        turn = self._turns[number] if number < len(self._turns) else ScriptedTurn()
        result = seen[-1] if seen else ""
        ids = [*self._codec.tokenizer.encode_trusted(_THOUGHT), *self._in_pieces(turn.text.replace("{result}", result))]
        if turn.command is not None:
            call = _shell_call(turn.command.replace("{result}", result), tools[1].split("\n"))
            ids += self._codec.tokenizer.encode_trusted("\n<tool_call>\n")
            ids += self._in_pieces(json.dumps(call, separators=(" ,", " :  ")).replace("/", "\\/"))
            ids += self._codec.tokenizer.encode_trusted("\n</tool_call>")
        return Reply((*ids, self._codec.terminator_id))

    def _in_pieces(self, text: str) -> list[int]:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [token for piece in pieces for token in self._codec.tokenizer.encode_untrusted(piece)]


def _shell_call(command: str, tools: Sequence[str]) -> dict[str, Any]:
    """Return the call of the program's shell tool that runs a command."""
    by_name: dict[str, Mapping[str, Any]] = {tool["name"]: tool for tool in map(json.loads, tools)}
    name = next((name for name in _SHELL_TOOLS if name in by_name), None)
    if name is None:
        raise AssertionError(f"no shell tool among {list(by_name)}")
    schema = by_name[name]["parameters"]
    properties: Mapping[str, Any] = schema["properties"]
    argument = next(name for name in _COMMAND_ARGUMENTS if name in properties)
    is_list = properties[argument].get("type") == "array"
    filled: dict[str, Any] = {argument: ["bash", "-c", command] if is_list else command}
    for required in schema.get("required", ()):
        if required not in filled:
            values = properties[required].get("enum")
            filled[required] = values[0] if values else _REQUIRED[required]
    return {"name": name, "arguments": filled}
