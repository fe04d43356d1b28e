"""What an agent may change about a history, and what makes it another one: the table of docs/tokens.md."""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import gym_needed  # noqa: F401
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nemo_gym.openai_utils import NeMoGymChatCompletion, NeMoGymResponse
from served_model import without_tokens
from token_codecs import ALL, BOUNDED, codec
from token_codecs import TOOLS as CALC_TOOLS

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.gateway import responses
from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.chat_completions import normalize_body, read_messages, write_answer
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.history_equality import HistoryDigests
from prorl_gym.inference.tokens.prompt_builder import PromptBuilder, PromptOrigin
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.turn import SampledTurn, parse_sampled
from prorl_gym.records import Message, ToolCall

pytestmark = pytest.mark.gym

Messages = list[dict[str, Any]]
Edit = Callable[[Messages, int], None]
"""Changes messages in place; the number picks the place."""

ROUNDED = {"type": "boolean", "default": False}
SCHEMA = {"term": {"type": "string"}, "exact": {"type": "boolean"}, "digits": {"type": "number"}, "rounded": ROUNDED}
CALC = {"name": "calc", "description": "Work out a term.", "parameters": {"type": "object", "properties": SCHEMA}}
TOOLS = [{"type": "function", "function": CALC}]
SAMPLING = SamplingParams(1.0, 1.0, 9)
PATHS = ["text", "text without a cookie", "token fields", "token fields on another server"]
SAID = "I see</think> it.\nWait."
FIRST, SECOND = {"term": "4*5", "exact": True, "digits": 1.0}, {"term": "é", "exact": False, "digits": 20}


def spelled(chat: ChatCodec, arguments: dict[str, Any]) -> str:
    if chat.parser.name == "qwen3_coder":
        written = {key: json.dumps(value).strip('"') for key, value in arguments.items()}
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
        return f"<tool_call>\n<function=calc>\n{values}</function>\n</tool_call>"
    key = "parameters" if chat.parser.name == "llama" else "arguments"
    call = json.dumps({"name": "calc", key: arguments})
    return call if chat.parser.name == "llama" else f"<tool_call>\n{call}\n</tool_call>"


async def complete(
    chat: ChatCodec, memory: SegmentCache, call: ModelCall, session: str, ids: list[int]
) -> CompletedTurn:
    """Make a call as the server does; the model samples these ids."""
    builder = PromptBuilder(chat, memory)
    prompt = await builder.build_prompt(call.entries, call.tools, session)
    spoken = parse_sampled(chat, prompt.ids, ids, call.tools)
    builder.remember_turn(prompt, session, spoken.as_message(), ids)
    return CompletedTurn(call, prompt, SampledTurn(ids, [-1.0] * len(ids)), spoken)


class Agent:
    """Makes two turns, then sends the history back in one of the ways that agents have."""

    def __init__(self, chat: ChatCodec, *, with_thoughts: bool = False) -> None:
        self._chat = chat
        self._memory = SegmentCache()
        self._shape = AnswerFormat("m", chat, True, with_thoughts)
        self.messages: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do it."}]

    async def turn(self, text: str) -> dict[str, Any]:
        entries = read_messages(normalize_body({"messages": self.messages})["messages"])
        ids = [*self._chat.tokenizer.encode_untrusted(text), self._chat.terminator_id]
        turn = await complete(self._chat, self._memory, ModelCall(entries, TOOLS, SAMPLING), "own", ids)
        assert turn.prompt.origin in (PromptOrigin.FIRST, PromptOrigin.EXTENDED)
        answer = NeMoGymChatCompletion.model_validate(write_answer(turn, {}, self._shape))
        message = json.loads(answer.model_dump_json())["choices"][0]["message"]
        calls = message["tool_calls"] or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {n}"} for n, call in enumerate(calls)
        ]
        self.messages += [message, *(results or [{"role": "user", "content": "Go on."}])]
        return message

    async def sent(self, path: str, messages: Messages, tools: Any = TOOLS) -> PromptOrigin | None:
        """Return where the prompt comes from that these messages give; ``None``: the template refuses them."""
        if path.startswith("text"):
            messages = list(map(without_tokens, messages))
        memory = SegmentCache() if path.endswith("another server") else self._memory
        session = "own" if path in ("text", "token fields") else "other"
        entries = read_messages(normalize_body({"messages": messages})["messages"])
        try:
            return (await PromptBuilder(self._chat, memory).build_prompt(entries, tools, session)).origin
        except EngineError:
            return None


@cache
def _agent(name: str) -> Agent:
    return Agent(codec(name))


async def agent(name: str) -> Agent:
    """Return an agent after a turn with calls and one with visible tags."""
    made = _agent(name)
    if len(made.messages) == 2:
        chat = codec(name)
        opening = "" if chat.generation_prompt.endswith("<think>\n") else "<think>\n"
        calls = [spelled(chat, FIRST)] if chat.parser.name == "llama" else [spelled(chat, FIRST), spelled(chat, SECOND)]
        said = "" if chat.parser.name == "llama" else f"{SAID}\n"
        await made.turn(f"{opening}Let me think.\n</think>\n\n{said}" + "\n".join(calls))
        await made.turn(f"{opening}\n</think>\n\n{SAID}")
    return made


def of(messages: Messages, *roles: str) -> Messages:
    """Return the messages of these roles, those after the last turn left out."""
    return [message for message in messages[:-1] if message["role"] in roles]


def picked(messages: Messages, pick: int, *roles: str) -> dict[str, Any]:
    found = of(messages, *roles)
    return found[pick % len(found)]


def calls(messages: Messages) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or []]


def inserted(character: str, *roles: str) -> Edit:
    def edit(messages: Messages, pick: int) -> None:
        message = picked(messages, pick, *roles)
        place = pick % (len(message["content"]) + 1)
        message["content"] = message["content"][:place] + character + message["content"][place:]

    return edit


def replaced(old: str, new: str) -> Edit:
    def edit(messages: Messages, pick: int) -> None:
        found = [message for message in messages[:-1] if old in (message["content"] or "")]
        message = found[pick % len(found)]
        message["content"] = message["content"].replace(old, new, 1)

    return edit


def rewritten(rewrite: Callable[[Any], str]) -> Edit:
    """Write the arguments of a call in another way, if there are any."""

    def edit(messages: Messages, pick: int) -> None:
        found = [call for call in calls(messages) if call["arguments"].startswith("{")]
        if found:
            function = found[pick % len(found)]
            function["arguments"] = rewrite(json.loads(function["arguments"]))

    return edit


def invalid_arguments(messages: Messages, pick: int) -> None:
    calls(messages)[0]["arguments"] = "not " + calls(messages)[0]["arguments"]


def argument(key: str, value: str) -> Edit:
    """Give an argument of the first call another value, as JSON text."""

    def edit(messages: Messages, pick: int) -> None:
        function = calls(messages)[0]
        arguments = json.loads(function["arguments"])
        spelt = [f"{json.dumps(k)}: {value if k == key else json.dumps(v)}" for k, v in arguments.items()]
        function["arguments"] = "{" + ", ".join(spelt) + "}"

    return edit


def changed_item(change: Callable[[Messages, int], None]) -> Edit:
    """Change the list itself, somewhere before the last turn."""

    def edit(messages: Messages, pick: int) -> None:
        change(messages, pick % (len(messages) - 2))

    return edit


def without_second_call(messages: Messages, pick: int) -> None:
    calling = of(messages, "assistant")[0]
    calling["tool_calls"] = calling["tool_calls"][:1]
    dropped = [message for message in messages if message["role"] == "tool"][1:]
    messages[:] = [message for message in messages if message not in dropped]


def without_second_result(messages: Messages, pick: int) -> None:
    messages.remove([message for message in messages if message["role"] == "tool"][1])


def with_another_call(messages: Messages, pick: int) -> None:
    calling = of(messages, "assistant")[0]
    calling["tool_calls"] = [*calling["tool_calls"], deepcopy(calling["tool_calls"][0])]


def swapped_calls(messages: Messages, pick: int) -> None:
    of(messages, "assistant")[0]["tool_calls"].reverse()


def renamed_function(messages: Messages, pick: int) -> None:
    calls(messages)[0]["name"] = "calculate"


def thoughts_added(messages: Messages, pick: int) -> None:
    message = of(messages, "assistant")[1]
    message["content"] = message["content"].replace("</think>", "I know.\n</think>", 1)


def another_role(messages: Messages, pick: int) -> None:
    picked(messages, pick, "system")["role"] = "user"


def changed_id(messages: Messages, pick: int) -> None:
    """Replace an id in the thoughts of the first turn, and in the prompt of the second, which repeats it."""
    first, second = of(messages, "assistant")
    place = 3
    ids = first["generation_token_ids"]
    second["prompt_token_ids"] = list(second["prompt_token_ids"])
    second["prompt_token_ids"][len(first["prompt_token_ids"]) + place] = ids[place + 1]
    first["generation_token_ids"] = [*ids[:place], ids[place + 1], *ids[place + 1 :]]


OTHER: dict[str, Edit] = {
    "another value than the default": rewritten(lambda value: json.dumps({"rounded": True} | value)),
    "a value that only equals the default": rewritten(lambda value: json.dumps({"rounded": 0} | value)),
    "text of the user": inserted("x", "user"),
    "text of the system": inserted("x", "system"),
    "result of a tool": inserted("x", "tool"),
    "text or thoughts of the assistant": inserted("x", "assistant"),
    "text before a spelled tag": replaced("I see</think>", "I saw</think>"),
    "text after a spelled tag": replaced("Wait.", "Go."),
    "other thoughts": replaced("Let me think.", "Let us guess."),
    "thoughts where there were none": thoughts_added,
    "1 for true": argument("exact", "1"),
    "a string for true": argument("exact", '"true"'),
    "1 for 1.0": argument("digits", "1"),
    "a string for 1.0": argument("digits", '"1.0"'),
    "a number for a string": argument("term", "20"),
    "arguments that are no JSON": invalid_arguments,
    "arguments as a string": rewritten(lambda arguments: json.dumps(json.dumps(arguments))),
    "another function": renamed_function,
    "one more call": with_another_call,
    "another role": another_role,
    "dropped message": changed_item(lambda messages, place: messages.pop(place)),
    "repeated message": changed_item(lambda messages, place: messages.insert(place, deepcopy(messages[place]))),
}
PARALLEL: dict[str, Edit] = {
    "dropped second call and its result": without_second_call,
    "dropped second result": without_second_result,
    "calls in another order": swapped_calls,
}
BLANKS: dict[str, Edit] = {
    "blank around a text": replaced("Do it.", "\n\n  Do it.  "),
    "blank around the system's": replaced("Be brief.", "Be brief. "),
    "blank around a result": replaced("result 0", " result 0\n"),
}


def parts(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "system", "user", "assistant", "tool")
    if isinstance(message["content"], str):
        half = len(message["content"]) // 2
        texts = [message["content"][:half], message["content"][half:]]
        message["content"] = [{"type": "text", "text": text, "cache_control": {}} for text in texts]


def without_thoughts(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "assistant")
    if isinstance(message["content"], str) and message["content"].startswith("<think>"):
        message["content"] = message["content"].partition("</think>")[2]


def thoughts_apart(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "assistant")
    if isinstance(message["content"], str) and message["content"].startswith("<think>"):
        thoughts, _, message["content"] = message["content"].removeprefix("<think>").partition("</think>")
        message["reasoning" if pick % 2 else "reasoning_content"] = thoughts


def thoughts_twice(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "assistant")
    if isinstance(message["content"], str) and message["content"].startswith("<think>"):
        message["reasoning_content"] = message["content"].removeprefix("<think>").partition("</think>")[0]


def blanks_of_the_assistant(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "assistant")
    if isinstance(message["content"], str):
        message["content"] = f"{message['content']} \n"


def renamed_ids(messages: Messages, pick: int) -> None:
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["id"] = f"{pick}-{call['id']}"
        if "tool_call_id" in message:
            message["tool_call_id"] = f"{pick}-{message['tool_call_id']}"


def developer(messages: Messages, pick: int) -> None:
    for message in of(messages, "system"):
        message["role"] = "developer"


def fields_of_a_client(messages: Messages, pick: int) -> None:
    message = picked(messages, pick, "system", "user", "assistant", "tool")
    message |= {"name": None, "annotations": [], "provider_specific_fields": {"pick": pick}, "audio": None}


def without_null_fields(messages: Messages, pick: int) -> None:
    messages[:] = [{key: value for key, value in message.items() if value is not None} for message in messages]


SAME: dict[str, Edit] = {
    "a default of the schema": rewritten(lambda value: json.dumps({"rounded": False} | value)),
    "as it came": lambda messages, pick: None,
    "order of arguments": rewritten(lambda arguments: json.dumps(dict(reversed(arguments.items())))),
    "blanks in arguments": rewritten(lambda arguments: json.dumps(arguments, indent=3)),
    "escapes in arguments": rewritten(lambda arguments: json.dumps(arguments).replace("*", "\\u002a")),
    "ids of calls": renamed_ids,
    "thoughts left out": without_thoughts,
    "thoughts in a field": thoughts_apart,
    "thoughts in a field, too": thoughts_twice,
    "blanks around the assistant's text": blanks_of_the_assistant,
    "parts": parts,
    "developer": developer,
    "fields of a client": fields_of_a_client,
    "no null fields": without_null_fields,
}


def edited(messages: Messages, edit: Edit, pick: int = 0) -> Messages:
    changed = deepcopy(messages)
    edit(changed, pick)
    return changed


def called_with(arguments: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="", name="calc", arguments=arguments),))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": "\\u00e9"}', '{"b":"é","a":1}', True),
        ('{"a": 1e2}', '{"a": 100.0}', True),
        ("not JSON", "not JSON", True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": 1.0}', '{"a": 1}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": 1e999}', '{"a": 1e998}', False),
        ('{"a": NaN}', '{"a": Infinity}', False),
        ('"x"', "x", False),
        ("[" * 2000, "[" * 2001, False),
    ],
)
def test_arguments_are_compared_by_value(one: str, other: str, same: bool):
    assert HistoryDigests(()).is_same_turn(called_with(one), called_with(other)) is same


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_what_the_table_names_extends(name: str, path: str):
    made = await agent(name)
    found = {what: await made.sent(path, edited(made.messages, edit)) for what, edit in SAME.items()}
    assert found == dict.fromkeys(SAME, PromptOrigin.EXTENDED)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_what_the_table_does_not_name_is_a_new_segment(name: str, path: str):
    made, chat = await agent(name), codec(name)
    edits = OTHER if chat.parser.name == "llama" else OTHER | PARALLEL
    if path != "token fields on another server":
        edits = edits | BLANKS
    extended = [
        what
        for what, edit in edits.items()
        if await made.sent(path, edited(made.messages, edit)) is PromptOrigin.EXTENDED
    ]
    assert extended == []


@pytest.mark.parametrize("path", PATHS[2:])
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_a_changed_id_in_the_thoughts_is_a_new_segment(name: str, path: str):
    made = await agent(name)
    assert await made.sent(path, edited(made.messages, changed_id)) is PromptOrigin.CHANGED


@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_a_changed_id_in_thoughts_that_are_left_out_is_seen_by_the_session(name: str):
    made = await agent(name)
    assert (
        await made.sent("token fields", edited(edited(made.messages, changed_id), without_thoughts))
        is PromptOrigin.CHANGED
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_other_tools_are_a_new_segment(name: str, path: str):
    made = await agent(name)
    tools = [{"type": "function", "function": CALC | {"description": "Work out any term."}}]
    assert await made.sent(path, made.messages, tools) is not PromptOrigin.EXTENDED


@settings(BOUNDED, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(PATHS),
    same=st.lists(st.sampled_from(sorted(SAME)), max_size=4, unique=True),
    other=st.sampled_from([None, *OTHER]),
    pick=st.integers(0, 200),
)
@pytest.mark.parametrize("name", [*ALL, "small-opens"])
async def test_any_edits_of_a_history(name: str, path: str, same: list[str], other: str | None, pick: int):
    made = await agent(name)
    plain = made.messages
    messages = plain if other is None else edited(plain, OTHER[other], pick)
    for what in same:
        messages, plain = edited(messages, SAME[what], pick), edited(plain, SAME[what], pick)
    # Thoughts that were changed and then left out are as if they had not been changed.
    assert (await made.sent(path, messages) is PromptOrigin.EXTENDED) == (messages == plain)


# --- whatever a model samples and an agent keeps

FEW = settings(BOUNDED, max_examples=15, suppress_health_check=[HealthCheck.too_slow])

OPENING = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}]
NASTY = st.sampled_from(
    ["4", "", " x ", "<|im_end|>", "<tool_call>", "</think>", "<think>", "a\n\n", "é\u200b", "\ufffd"]
)
SPOKEN = st.sampled_from(
    [
        '<tool_call>\n{"name": "calc", "arguments": {"term":   "1"}}\n</tool_call>',
        "<tool_call>\n<function=calc>\n<parameter=term>\n1\n</parameter>\n</function>\n</tool_call>",
        '{"name": "calc", "parameters": {"term": "1"}}',
        '<tool_call>{"name": "calc", oops}</tool_call>',
        "<think>\nHm.\n</think>\n\nFour.",
        "Hm.\n</think>\n\nFour.",
        "<think>\nand on and on",
    ]
)
WORDS = st.lists(st.one_of(SPOKEN, NASTY), max_size=3).map("\n".join)
IDS = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8)
TURNS = st.lists(st.tuples(st.one_of(WORDS, IDS), st.booleans(), st.booleans(), NASTY), min_size=1, max_size=4)


def sampled_by(chat: Any, drawn: str | list[float], closed: bool) -> list[int]:
    """Turn what was drawn into ids: of a text, or any of the vocabulary."""
    if isinstance(drawn, str):
        ids = chat.tokenizer.encode_untrusted(drawn)
    else:
        ids = [int(share * chat.vocab_size) for share in drawn]
        ids = [token for token in ids if token not in chat.end_ids]
    return [*ids, chat.terminator_id] if closed or not ids else ids


def news(output: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    if not calls:
        return [{"role": "user", "content": text}]
    return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id in calls]


async def answered(chat: Any, memory: SegmentCache, shape: AnswerFormat, items: list[Any], ids: list[int]) -> Any:
    """Make a call; return its prompt, and the items as Gym's own models pass them on."""
    turn = await complete(chat, memory, ModelCall(responses.read_items(items), CALC_TOOLS, SAMPLING), "s", ids)
    response = NeMoGymResponse.model_validate(responses.write_answer(turn, {}, shape))
    return turn.prompt, json.loads(response.model_dump_json())["output"]


@pytest.mark.parametrize("name", [*ALL, "small-opens"])
@FEW
@example(turns=[("</think>\n<think>\nHm.\n</think>\n\nFour.", False, False, "4")] * 2, with_thoughts=True)
@given(turns=TURNS, with_thoughts=st.booleans())
async def test_history_that_comes_back_unchanged_goes_on_exactly(name: str, turns: Any, with_thoughts: bool):
    """Also on another server, while all of its turns have their token fields."""
    chat = codec(name)
    shape, memory, items, seen = AnswerFormat("m", chat, True, with_thoughts), SegmentCache(), list(OPENING), []
    has_text = False
    for drawn, closed, as_text, text in turns:
        prompt, output = await answered(chat, memory, shape, items, sampled_by(chat, drawn, closed))
        assert prompt.origin is (PromptOrigin.EXTENDED if seen else PromptOrigin.FIRST)
        assert prompt.ids[: len(seen)] == seen
        if not has_text and items != OPENING:
            entries = responses.read_items(items)
            elsewhere = await PromptBuilder(chat, SegmentCache()).build_prompt(entries, CALC_TOOLS, "t")
            assert (elsewhere.origin, elsewhere.ids) == (PromptOrigin.EXTENDED, prompt.ids)
        has_text = has_text or as_text
        seen = output[-1]["prompt_token_ids"] + output[-1]["generation_token_ids"]
        if as_text:
            output = list(map(without_tokens, output))
        items += [*output, *news(output, text)]


@pytest.mark.parametrize("name", [*ALL, "small-opens"])
@FEW
@given(turns=TURNS, data=st.data())
async def test_history_that_was_changed_is_a_prompt_all_the_same(name: str, turns: Any, data: Any):
    chat = codec(name)
    shape, memory, items = AnswerFormat("m", chat, True, False), SegmentCache(), list(OPENING)
    for drawn, closed, _, text in turns:
        try:
            prompt, output = await answered(chat, memory, shape, items, sampled_by(chat, drawn, closed))
        except EngineError as error:  # some templates want a question of the user's, and say so
            assert error.kind is FailureKind.TEMPLATE_UNSAFE
            return
        assert prompt.ids
        items += [*output, *news(output, text)]
        dropped = data.draw(st.integers(1, len(items)))
        items = items[:dropped] + items[dropped + 1 :]
