"""One long rollout through a session and vLLM's wire, in process: what the client's side of each turn costs.

Counted: encoding the new messages, the digest, writing the request, reading and checking the answer, finding tool
calls, and the export. Not counted: the server, which is played here, and the socket.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from _token_models import TOOLS, Model

from prorl_gym.inference.balance.call_gate import InFlightCall
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.engines.dialect import AnsweredCall
from prorl_gym.inference.engines.vllm import VllmDialect, VllmOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.records import Message
from prorl_gym.settings import RolloutSettings, resolve_settings

TURNS = 100
TOKENS = 64_000


@dataclass(slots=True)
class Cost:
    """CPU seconds of the client."""

    turns: list[float] = field(default_factory=list[float])
    export: float = 0.0
    tokens: int = 0

    @property
    def total(self) -> float:
        """Of the rollout."""
        return sum(self.turns) + self.export


class ScriptedServer:
    """A vLLM that says what it is told; its own work is kept apart.

    Args:
        model: whose ids it says.
        script: ids of each turn.
    """

    max_model_len = None

    def __init__(self, model: Model, script: Sequence[list[int]]) -> None:
        options = VllmOptions(model="m", vocab_size=model.codec.vocab_size, logprob_kind="processed")
        self._dialect = VllmDialect("http://127.0.0.1:1/v1", options)
        self._script = iter(script)
        self.seconds = 0.0
        """CPU time of the server's part."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Write the request, play the server, read the answer."""
        body = self._dialect.sample_request(request).encode_body()
        began = time.process_time()
        payload = _answer(next(self._script), request, body or b"")
        self.seconds += time.process_time() - began
        return self._dialect.read_sample(payload, request, AnsweredCall(engine="e", version=0, seconds=0.0))

    async def cancel(self, request_id: str) -> bool:
        """Know no such call."""
        return False

    def find_call(self, request_id: str) -> InFlightCall | None:
        """Have no call under way: each is answered at once."""
        return None

    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool:
        """Sample always."""
        return True

    def forget_session(self, session_id: str) -> None:
        """Remember nothing."""


def rollout(model: Model, text: str, seed: int) -> Cost:
    """Play a rollout of ``TURNS`` turns and about ``TOKENS`` tokens; return what it cost.

    Raises:
        RuntimeError: the rollout is not of the length that the figures are for.
    """
    return asyncio.run(_rollout(model, text, seed))


def rendered_again(model: Model, text: str, seed: int, turns: Sequence[int]) -> dict[int, float]:
    """Return what the same rollout costs at some turns when the whole history is rendered and encoded again.

    It also writes the prompt as JSON, as any client must.
    """
    said, heard = _script(model, text, seed)
    history = [Message(role="user", content=text[:2000])]
    costs: dict[int, float] = {}
    for number, (ids, news) in enumerate(zip(said, heard, strict=True)):
        if number in turns:
            began = time.process_time()
            json.dumps(model.codec.encode_prompt(history, TOOLS))
            costs[number] = time.process_time() - began
        parsed = model.codec.parse_turn(model.codec.decode_turn(ids), TOOLS)
        history += [Message(role="assistant", content=parsed.text), news]
    return costs


async def _rollout(model: Model, text: str, seed: int) -> Cost:
    said, heard = _script(model, text, seed)
    server = ScriptedServer(model, said)
    settings = resolve_settings(RolloutSettings(max_turns=TURNS, max_tokens=4 * TOKENS, max_turn_tokens=4096))
    session = ModelSession(server, model.codec, settings, rollout_id="r")
    cost = Cost()
    for number in range(TURNS):
        began, played = time.process_time(), server.seconds
        if number == 0:
            await session.start_conversation([Message(role="user", content=text[:2000])], TOOLS)
        else:
            await session.respond([heard[number - 1]])
        cost.turns.append(time.process_time() - began - (server.seconds - played))
    began = time.process_time()
    (segment,) = session.segments()
    cost.export = time.process_time() - began
    cost.tokens = len(segment.token_ids)
    if not 0.9 * TOKENS <= cost.tokens <= 1.1 * TOKENS or len(segment.generations) != TURNS:
        raise RuntimeError(f"the rollout has {len(segment.generations)} turns and {cost.tokens} tokens")
    return cost


def _script(model: Model, text: str, seed: int) -> tuple[list[list[int]], list[Message]]:
    """Cut turns and tool results of about the same length out of a text."""
    chance = random.Random(seed)
    encode, end = model.codec.tokenizer.encode_untrusted, model.codec.terminator_id
    half = TOKENS // TURNS // 2
    pool = encode(text)
    said: list[list[int]] = []
    heard: list[Message] = []
    for number in range(TURNS):
        begin = chance.randrange(len(pool) - 2 * half)
        call = model.codec.tokenizer.encode_trusted(model.render_turn("", {"command": f"sed -n {number}p notes.md"}))
        alone = model.codec.parser.name == "llama"  # the call is the whole turn there
        said.append([*([] if alone else pool[begin : begin + half - len(call) - 20]), *call, end])
        result = model.codec.decode(pool[begin : begin + (2 * half - len(call) if alone else half) - 10])
        heard.append(Message(role="tool", content=result, tool_call_id="c", name="bash"))
    return said, heard


def _answer(ids: list[int], request: GenerationRequest, body: bytes) -> bytes:
    """Write what vLLM answers, the prompt echoed."""
    names = [f"token_id:{token}" for token in ids]
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "stop_reason": ids[-1],
        "token_ids": ids,
        "prompt_token_ids": None,
        "logprobs": {"tokens": names, "token_logprobs": [-0.25] * len(ids), "top_logprobs": None, "text_offset": []},
    }
    usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(ids)}
    answer = {"id": f"cmpl-{request.request_id}", "object": "text_completion", "choices": [choice], "usage": usage}
    # The ids as they came, so that playing the server does not push the client's data out of the processor's caches.
    begin = body.index(b'"prompt": [') + len(b'"prompt": ')
    echo = body[begin : body.index(b"]", begin) + 1]
    text = json.dumps(answer, separators=(",", ":")).encode()
    return text.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + echo)
