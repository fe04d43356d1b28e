"""Every history that a wire's own types allow, and broken ones: answered on each template, or refused by name."""

import asyncio
import json
import types
import typing
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import gym_needed  # noqa: F401
import pytest
from harness_histories import BODIES, WIRES, Conversation
from pydantic import BaseModel
from token_codecs import ALL, OURS, QWEN, TEMPLATES

pytestmark = pytest.mark.gym

from anthropic.types import MessageParam, ToolUnionParam  # noqa: E402
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam  # noqa: E402
from openai.types.responses import ResponseInputItemParam, ToolParam  # noqa: E402

from prorl_gym.errors import ConfigError  # noqa: E402
from prorl_gym.inference.tokens.prompt_builder import PromptOrigin  # noqa: E402

NAMES = [*OURS, *(TEMPLATES if QWEN.is_dir() else ())]
TYPES: dict[str, Any] = {
    "chat": (ChatCompletionMessageParam, ChatCompletionToolUnionParam),
    "responses": (ResponseInputItemParam, ToolParam),
    "messages": (MessageParam, ToolUnionParam),
}
WORDS = ("", "x", "edit", "{}", '{"old": "a"', "<think>", "</tool_call>", "é\n")
VALUES = (None, "", "x", "{", 1, 2.5, True, [], [[]], [1], ["x"], {}, {"type": "text", "text": 1}, {"ok": [1]})


def published(rng: Random, kind: str) -> dict[str, Any]:
    """Return a body that the owner's types allow."""
    message, tool = TYPES[kind]
    messages = [make(rng, message) for _ in range(rng.randint(1, 4))]
    return {WIRES[kind].history_key: messages, "tools": [make(rng, tool) for _ in range(rng.choice([0, 0, 1, 2]))]}


def make(rng: Random, kind: Any) -> Any:
    """Return a value of a type, as JSON has it."""
    inner = get_args(kind)
    if hasattr(kind, "__required_keys__"):
        fields = get_type_hints(kind, include_extras=True)
        wanted = [key for key in fields if get_origin(fields[key]) is typing.Required or rng.random() < 0.3]
        return {key: make(rng, fields[key]) for key in wanted}
    match get_origin(kind):
        case typing.Union | types.UnionType:
            return make(rng, rng.choice([each for each in inner if not _is_answer(each)]))
        case typing.Literal:
            return rng.choice(inner)
        case typing.Required | typing.NotRequired | typing.Annotated:
            return make(rng, inner[0])
        case origin if origin is dict:
            return {rng.choice(WORDS): make(rng, inner[1])}
        case origin if origin is not None:  # a list of some kind
            return [make(rng, inner[0]) for _ in range(rng.randint(0, 2))]
        case _:
            simple = {str: rng.choice(WORDS), int: 3, float: 0.5, bool: rng.random() < 0.5, type(None): None}
            return simple.get(kind, rng.choice(VALUES))


def _is_answer(kind: Any) -> bool:
    """Whether it is the class of what a client was answered, of which the types of requests have a copy."""
    parts = [each for one in (kind, *get_args(kind)) for each in (one, *get_args(one))]
    return any(isinstance(each, type) and issubclass(each, BaseModel) for each in parts)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, each in inner for deeper in places(each, (*path, key)))]


def broken(rng: Random, kind: str) -> dict[str, Any]:
    """Return a body in which a value or two are any others, or missing."""
    body = json.loads(json.dumps(BODIES[kind]))
    for _ in range(rng.randint(1, 2)):
        *path, last = rng.choice(places(body)[1:])
        holder = body
        for key in path:
            holder = holder[key]
        if rng.random() < 0.7:
            holder[last] = json.loads(json.dumps(rng.choice(VALUES)))
        else:
            del holder[last]
    return body


async def play(kind: str, name: str, given: dict[str, Any]) -> None:
    talk, body = Conversation(WIRES[kind], name), given
    try:
        call = talk.read(body)
    except ConfigError as refused:
        assert refused.what
        assert refused.fix
        return
    before = (await talk.prompt(body)).ids
    answer = await talk.answer(body, "Done.")
    if call.entries[-1].is_assistant:
        return  # the answer continues that turn: read again, both are one
    turn = {
        "chat": lambda: [answer["choices"][0]["message"]],
        "responses": lambda: answer["output"],
        "messages": lambda: [{"role": "assistant", "content": answer["content"]}],
    }[kind]()
    key = WIRES[kind].history_key
    history = body[key] if isinstance(body[key], list) else [{"role": "user", "content": body[key]}]
    later = [*history, *turn, {"role": "system", "content": "Note."}, {"role": "user", "content": "Go on."}]
    prompt = await talk.prompt(body | {key: later})
    assert prompt.origin is PromptOrigin.EXTENDED
    assert prompt.ids[: len(before)] == before
    assert "Go on." in talk.codec.decode(prompt.ids)


@pytest.mark.parametrize("source", [published, broken])
@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 5000), marks=pytest.mark.release)], ids=len)
def test_a_history_is_answered_or_refused_by_name(kind: str, source: Any, seeds: range):
    for seed in seeds:
        rng = Random(seed)
        asyncio.run(play(kind, rng.choice(NAMES), source(rng, kind)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", WIRES)
async def test_nothing_of_a_right_history_is_lost(kind: str, name: str):
    talk = Conversation(WIRES[kind], name)
    shown = talk.codec.decode((await talk.prompt(BODIES[kind])).ids)
    assert all(text in shown for text in ("You edit.", "Rename it.", "edit", "Be short.", "ok"))
    assert talk.omitted == {}
    await play(kind, name, BODIES[kind])
