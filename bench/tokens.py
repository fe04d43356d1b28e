"""What token continuity costs the client, and how often tokens would drift without it.

CPU: rollouts of 100 turns and 64,000 tokens through the real session and vLLM's wire, in process, beside rendering and
encoding the whole history again in every turn. Counted: encoding the new messages, the digest, writing the request,
reading and checking the answer, finding tool calls, and the export. Not counted: the server, which is played here, and
the socket. Drift: 10,000 random conversations for each template, whose sampled ids are either random (uniform over the
ordinary vocabulary: the worst case) or canonical (what the tokenizer itself would write for the turn: the best case).
The real tokenizer is named by the environment variable ``PRORL_GYM_QWEN`` or by ``--tokenizer``; without it the small
one of this package is measured, which the report says. Texts are made of the licence's words.
"""

import asyncio
import json
import os
import random
import runpy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from _report import Figure, Report, figure, peer, report

from prorl_gym.inference.balance.call_gate import InFlightCall
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.engines.response_validator import AnsweredCall
from prorl_gym.inference.engines.vllm import VllmDialect, VllmOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.tokens.transcript import Transcript
from prorl_gym.inference.toolcalls.turn_parsing import parse_turn
from prorl_gym.records import Message, ToolCall
from prorl_gym.settings import RolloutSettings, resolve_settings

DIRECTORY = "PRORL_GYM_QWEN"
"""Environment variable: a directory with Qwen's ``tokenizer.json`` and its templates as ``chat_template*.jinja``."""

_LLAMA = Path(__file__).parent.parent / "scripts" / "llama_style.py"

_PARAMETERS = {
    "command": {"type": "string", "description": "What to run."},
    "seconds": {"type": "integer", "description": "How long it may take."},
}
_SCHEMA = {"type": "object", "properties": _PARAMETERS, "required": ["command"]}
_BASH = {"name": "bash", "description": "Run a command.", "parameters": _SCHEMA}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _BASH}]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    codec: ChatCodec
    thinks: bool
    """A model of this family writes its thoughts down before it speaks."""

    def render_turn(self, text: str, arguments: Mapping[str, Any] | None = None, thoughts: str = "") -> str:
        opening = "" if self.codec.generation_prompt.endswith("<think>\n") else "<think>\n"
        thought = f"{opening}{thoughts}\n</think>\n\n" if self.thinks and thoughts else ""
        if arguments is None:
            return thought + text
        match self.codec.parser.name:
            case "llama":
                return f'{{"name": "bash", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
            case "qwen3_coder":
                values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
                blank = "\n\n" if text else ""
                return f"{thought}{text}{blank}<tool_call>\n<function=bash>\n{values}</function>\n</tool_call>"
            case _:
                call = f'{{"name": "bash", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
                return thought + text + ("\n" if text else "") + f"<tool_call>\n{call}\n</tool_call>"


def tokenizer_directory() -> Path | None:
    """Return the directory of the real tokenizer; ``None``: only the small one is there."""
    named = os.environ.get(DIRECTORY)
    return Path(named).expanduser() if named else None


def load_models() -> list[Model]:
    """Load every template there is: of the real tokenizer when it is named, of the small one otherwise."""
    real = tokenizer_directory()
    if real is None:
        found = [Model("small", load_codec("small"), thinks=False)]
    else:
        found: list[Model] = []
        for file in sorted(real.glob("chat_template*.jinja")):
            name = file.name.removeprefix("chat_template.").removesuffix("jinja").removesuffix(".")
            found.append(_model(name or "qwen3", load_codec(str(real), file)))
    with TemporaryDirectory() as directory:
        make = runpy.run_path(str(_LLAMA))["make"]
        make(Path(directory), *([real] if real else []))
        return [*found, _model("llama style", load_codec(directory))]


def _model(name: str, codec: ChatCodec) -> Model:
    return Model(name, codec, thinks="</think>" in codec.tokenizer.chat_template)


_SETTINGS = resolve_settings(RolloutSettings())
_TURNS = (2, 4)


@dataclass(slots=True)
class Count:
    conversations: int = 0
    drifted: int = 0
    """Ours: a prompt that did not begin with the one before it, or an export that is not what was sent and sampled."""
    random: int = 0
    random_again: int = 0
    """Of those with random ids, how many differ from the same history rendered and encoded again."""
    canonical: int = 0
    canonical_again: int = 0


def count_drift(model: Model, conversations: int, words: Sequence[str], seed: int) -> Count:
    chance = random.Random(f"{seed}/{model.name}")
    control = set(model.codec.tokenizer.control_ids.values())
    ordinary = [token for token in range(model.codec.vocab_size) if token not in control]
    count = Count()
    for number in range(conversations):
        _play(model, count, chance, words, ordinary, canonical=bool(number % 2))
    return count


def _play(
    model: Model, count: Count, chance: random.Random, words: Sequence[str], ordinary: Sequence[int], *, canonical: bool
) -> None:
    codec = model.codec
    first = [Message(role="user", content=_text(chance, words))]
    transcript = Transcript(codec, _SETTINGS)
    transcript.begin_conversation(codec.encode_prompt(first, TOOLS), first, TOOLS)
    sent = [list(transcript.next_prompt().ids)]
    places: list[tuple[int, list[int]]] = []
    history = list(first)
    for turn in range(chance.randint(*_TURNS)):
        ids = _canonical(model, chance, words) if canonical else chance.choices(ordinary, k=chance.randint(4, 24))
        ids.append(codec.terminator_id)
        places.append((len(sent[-1]), ids))
        transcript.append_sampled(_result(ids), turn=turn, seed=None)
        parsed = parse_turn(codec.parser, codec.decode_turn(sent[-1], ids), TOOLS)
        calls = tuple(
            ToolCall(id=f"c{n}", name=call.name, arguments=call.arguments) for n, call in enumerate(parsed.calls)
        )
        transcript.append_assistant(parsed.text, calls)
        news = _news(chance, words)
        history += [Message(role="assistant", content=parsed.text, tool_calls=calls), *news]
        transcript.append_extension(transcript.encode_extension(news))
        sent.append(list(transcript.next_prompt().ids))
    (segment,) = transcript.export_segments()
    kept = all(segment.token_ids[start : start + len(ids)] == ids for start, ids in places)
    grown = all(segment.token_ids[: len(prompt)] == prompt for prompt in sent) and segment.token_ids == sent[-1]
    masked = sum(segment.mask) == sum(len(ids) for _, ids in places)
    again = codec.encode_prompt(history, TOOLS) != sent[-1]
    count.conversations += 1
    count.drifted += not (kept and grown and masked)
    if canonical:
        count.canonical, count.canonical_again = count.canonical + 1, count.canonical_again + again
    else:
        count.random, count.random_again = count.random + 1, count.random_again + again


def _canonical(model: Model, chance: random.Random, words: Sequence[str]) -> list[int]:
    arguments = {"command": _text(chance, words)} if chance.random() < 0.7 else None
    spelt = model.render_turn(_text(chance, words), arguments, _text(chance, words))
    return model.codec.tokenizer.encode_trusted(spelt)


def _news(chance: random.Random, words: Sequence[str]) -> list[Message]:
    if chance.random() < 1 / 3:
        return [Message(role="user", content=_text(chance, words))]
    results = (json.dumps({"out": _text(chance, words)}) for _ in range(chance.randint(1, 2)))
    return [Message(role="tool", content=result, tool_call_id="c0", name="bash") for result in results]


def _text(chance: random.Random, words: Sequence[str]) -> str:
    return " ".join(chance.choices(words, k=chance.randint(1, 12)))


def _result(ids: list[int]) -> GenerationResult:
    return GenerationResult(
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        logprob_kind="processed",
        engine="e",
        versions=[0] * len(ids),
        seconds=0.0,
    )


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
        return sum(self.turns) + self.export


class ScriptedServer:
    """A vLLM with scripted answers, whose own time is measured apart."""

    max_model_len = None

    def __init__(self, model: Model, script: Sequence[list[int]]) -> None:
        options = VllmOptions(model="m", vocab_size=model.codec.vocab_size, logprob_kind="processed")
        self._dialect = VllmDialect("http://127.0.0.1:1/v1", options)
        self._script = iter(script)
        self.seconds = 0.0
        """CPU time of the server's part."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        body = self._dialect.sample_request(request).encode_body()
        began = time.process_time()
        payload = _answer(next(self._script), request, body or b"")
        self.seconds += time.process_time() - began
        return self._dialect.read_sample(payload, request, AnsweredCall(engine="e", version=0, seconds=0.0))

    async def cancel(self, request_id: str) -> bool:
        return False

    def find_call(self, request_id: str) -> InFlightCall | None:
        return None

    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool:
        return True

    def forget_session(self, session_id: str) -> None: ...


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
        opened = model.codec.tokenizer.encode_trusted(model.codec.generation_prompt)
        parsed = parse_turn(model.codec.parser, model.codec.decode_turn(opened, ids), TOOLS)
        history += [Message(role="assistant", content=parsed.text), news]
    return costs


async def rollout(model: Model, text: str, seed: int) -> Cost:
    """Play a rollout of ``TURNS`` turns and about ``TOKENS`` tokens; return what it cost."""
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


ROLLOUTS = 7
CONVERSATIONS = 10_000
EARLY, LATE = range(5, 15), range(90, 100)
"""Turns around the 10th and the 100th, counted from 0."""
_SEED = 20261120
_ROOT = Path(__file__).parent.parent


def run() -> Report:
    text = (_ROOT / "LICENSE").read_text(encoding="utf-8")  # English that never changes and spells no control token
    known = load_models()
    figures = [row for model in known for row in _cpu(model, text)]
    words = text.split()
    figures += [_drift(model, count_drift(model, CONVERSATIONS, words, _SEED)) for model in known]
    name = (
        "the small one of this package"
        if tokenizer_directory() is None
        else "Qwen's; for the llama style with other control tokens"
    )
    return report("tokens", figures, "transformers", "tokenizers", also={"tokenizer": name})


def _cpu(model: Model, text: str) -> list[Figure]:
    asyncio.run(rollout(model, text, _SEED))  # the first one pays for imports and caches
    costs = [asyncio.run(rollout(model, text, _SEED + number)) for number in range(ROLLOUTS)]
    again = rendered_again(model, text, _SEED, range(TURNS))
    early, late = _middle(again, EARLY), _middle(again, LATE)
    growth = peer("rendering again", [late / early])
    return [
        figure(
            f"{model.name}: turn 100 against turn 10",
            [_around(cost, LATE) / _around(cost, EARLY) for cost in costs],
            "x",
            target=1.3,
            peers=[growth],
        ),
        figure(
            f"{model.name}: client CPU of turn 100",
            [_around(cost, LATE) * 1000 for cost in costs],
            "ms",
            peers=[peer("rendering again", [late * 1000])],
        ),
        figure(
            f"{model.name}: client CPU of a rollout, 100 turns, 64 k tokens",
            [cost.total * 1000 for cost in costs],
            "ms",
            target=300.0,
            peers=[peer("rendering again", [sum(again.values()) * 1000])],
        ),
    ]


def _drift(model: Model, count: Count) -> Figure:
    return figure(
        f"{model.name}: drifted, of {count.conversations} conversations",
        [100 * count.drifted / count.conversations],
        "%",
        target=0.0,
        peers=[
            peer("rendering again, random ids", [100 * count.random_again / count.random]),
            peer("rendering again, canonical ids", [100 * count.canonical_again / count.canonical]),
        ],
    )


def _around(cost: Cost, turns: range) -> float:
    return median(cost.turns[turn] for turn in turns)


def _middle(costs: dict[int, float], turns: range) -> float:
    return median(costs[turn] for turn in turns)
