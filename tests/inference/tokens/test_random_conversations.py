"""Random rollouts through a session, for every template: what continuity promises, as properties."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_codecs import ALL, BOUNDED, TOOLS, WITHOUT_THOUGHTS, codec

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.inference.tokens.token_stream import DRIFT
from prorl_gym.inference.tokens.tokenizer import ControlTokenEscaper
from prorl_gym.inference.toolcalls.turn_parsing import parse_turn
from prorl_gym.records import NOT_SAMPLED, Message, ToolCall
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

FEW = settings(BOUNDED, max_examples=15, suppress_health_check=[HealthCheck.too_slow])

SETTINGS = resolve_settings(RolloutSettings(max_turns=99))

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
hostile = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>system\n",
        "<|eot_id|>",
        "<|start_header_id|>",
        "</tool_response>",
        "<think>",
        "\ue0f00\ue0f1",
    ]
)
contents = st.lists(st.one_of(words, hostile), min_size=1, max_size=4).map("".join)
observations = st.one_of(
    st.lists(contents, min_size=1, max_size=3).map(
        lambda texts: [Message(role="tool", content=text, tool_call_id="c", name="calc") for text in texts]
    ),
    contents.map(lambda text: [Message(role="user", content=text)]),
)
sampled = st.tuples(
    st.lists(st.integers(0, 3000), max_size=12), st.sampled_from(["end", "other end", "length", "beyond", "abort"])
)
rollouts = st.lists(st.tuples(sampled, observations), min_size=1, max_size=4)


def reply(name, ids, how):
    chat = codec(name)
    others = sorted(chat.end_ids - chat.closing_ids)
    tail = {"end": [chat.terminator_id], "other end": others[:1], "beyond": [chat.terminator_id, 5, 6]}.get(how, [])
    ids = [token for token in ids if token not in chat.closing_ids]
    return Reply((*ids, *tail), {"length": "length", "abort": "abort"}.get(how, "stop"))


async def play(name, turns, thinking="keep"):
    script = []
    for (ids, how), _ in turns:
        script.append(reply(name, ids, how))
        if how == "abort":
            script.append(reply(name, [9], "end"))
    script.append(reply(name, [7], "end"))
    pending = iter(script)
    engine = FakeEngine("e", lambda request: next(pending))
    pool = EnginePool("policy")
    pool.add_engine(engine)
    session = ModelSession(pool, codec(name), SETTINGS, rollout_id="r", thinking=thinking)
    await session.start_conversation([Message(role="user", content="q")], TOOLS)
    for _, news in turns:
        await session.respond(news)
    return engine.requests, session.segments()


def kept(name, ids):
    """What of sampled ids belongs to the turn."""
    chat = codec(name)
    end = next((place + 1 for place, token in enumerate(ids) if token in chat.closing_ids), len(ids))
    return list(ids[:end])


@pytest.mark.parametrize("name", [*ALL, *WITHOUT_THOUGHTS])
@FEW
@given(turns=rollouts)
def test_tokens_are_only_appended_and_exported_as_they_were_sent(name, turns):
    drifted = DRIFT.drifted
    requests, (segment,) = asyncio.run(play(name, turns))
    for before, after in pairwise(requests):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    for request in requests:
        assert list(request.prompt_ids) == segment.token_ids[: len(request.prompt_ids)]
        assert json.loads(b"[" + request.prompt_ids_json + b"]") == list(request.prompt_ids)
    assert DRIFT.drifted == drifted
    sampled_places = {place for each in segment.generations for place in range(each.start, each.end)}
    assert [place for place, bit in enumerate(segment.mask) if bit] == sorted(sampled_places)
    labels = zip(segment.policy_versions, segment.mask, strict=True)
    assert all((version == NOT_SAMPLED) != bool(bit) for version, bit in labels)


@pytest.mark.parametrize("name", [*ALL, *WITHOUT_THOUGHTS])
@FEW
@given(turns=rollouts)
def test_what_was_sampled_is_exported_verbatim_and_every_turn_is_closed(name, turns):
    _, (segment,) = asyncio.run(play(name, turns))
    chat = codec(name)
    spoken = [kept(name, reply(name, ids, how).token_ids) for (ids, how), _ in turns]
    firsts = {each.turn: each for each in reversed(segment.generations)}
    for number, ids in enumerate(spoken):
        start = firsts[number].start
        assert segment.token_ids[start : start + len(ids)] == ids
    for earlier, later in pairwise(segment.generations):
        if earlier.turn != later.turn:  # between two turns stands exactly one that closes the first
            between = segment.token_ids[max(earlier.end - 1, earlier.start) : later.start]
            assert chat.closing_ids & set(between)


@pytest.mark.parametrize("name", [*ALL, *WITHOUT_THOUGHTS])
@FEW
@given(turns=rollouts)
def test_thinking_template_opens_segments_and_changes_none(name, turns):
    requests, segments = asyncio.run(play(name, turns, "template"))
    prompts = [list(request.prompt_ids) for request in requests]
    for segment in segments:
        first = segment.generations[0].start
        assert segment.token_ids[:first] in prompts
        assert not any(segment.mask[:first])
    assert all(any(segment.token_ids[: len(ids)] == ids for segment in segments) for ids in prompts)
    assert [each.turn for segment in segments for each in segment.generations] == sorted(
        each.turn for segment in segments for each in segment.generations
    )
    assert len(segments) <= 1 + sum(news[0].role == "user" for _, news in turns)


@pytest.mark.parametrize("name", [*ALL, *WITHOUT_THOUGHTS])
@FEW
@given(text=contents)
def test_what_a_schema_spells_adds_no_control_token(name, text):
    chat = codec(name)
    control = set(chat.tokenizer.control_ids.values())

    def written(description):
        field = {"type": "string", "description": description}
        parameters = {"type": "object", "properties": {"term": field}, "required": ["term"]}
        tool = {"name": "calc", "description": description, "parameters": parameters}
        ids = chat.encode_prompt([Message(role="user", content="q")], [{"type": "function", "function": tool}])
        return [token for token in ids if token in control]

    assert written(text) == written("x")


# Text that trimming templates leave alone, and numbers, since templates print these as they are.
plain_words = st.text("abcé √9.,{}", min_size=1, max_size=20).filter(lambda text: text == text.strip())
steps = st.lists(st.tuples(plain_words, plain_words), min_size=1, max_size=4)


def as_sampled(name, turn):
    """Spell an assistant turn as the template does: what a canonical model would sample, its terminator left out."""
    chat = codec(name)
    asked = [Message(role="user", content="q")]
    veil = ControlTokenEscaper(chat.tokenizer)
    whole = chat.render(veil, [*asked, turn], TOOLS, add_generation_prompt=False)
    start = chat.render(ControlTokenEscaper(chat.tokenizer), asked, TOOLS, add_generation_prompt=True)
    assert whole.startswith(start)
    return veil.encode(whole[len(start) :].rpartition(chat.terminator)[0])


@pytest.mark.parametrize("name", ALL)
@FEW
@given(steps=steps, users=st.booleans())
def test_canonical_histories_are_what_a_whole_rendering_gives(name, steps, users):
    """Where the template does not rewrite: with tool results always, with user turns unless it drops thoughts."""
    chat = codec(name)
    thinks = name in ("qwen3", "qwen3.5")
    if users and thinks:
        return
    history = [Message(role="user", content="q")]
    ids = chat.encode_prompt(history, TOOLS)
    for said, heard in steps:
        text = f"<think>\n{said}\n</think>\n\n" if thinks else "" if name == "llama" and not users else said
        call = ToolCall(id="call00000", name="calc", arguments=json.dumps({"term": said}))
        turn = Message(role="assistant", content=text, tool_calls=() if users else (call,))
        news = [Message(role="user", content=heard)] if users else [_result(heard), _result(said)]
        ids += [*as_sampled(name, turn), chat.terminator_id, *chat.encode_delta(news, TOOLS)]
        history += [turn, *news]
    assert ids == chat.encode_prompt(history, TOOLS)


def _result(text):
    return Message(role="tool", content=text, tool_call_id="call00000", name="calc")


@pytest.mark.parametrize("name", ALL)
@FEW
@given(term=contents)
def test_a_call_is_read_back_from_what_the_template_writes(name, term):
    call = ToolCall(id="call00000", name="calc", arguments=json.dumps({"term": term}))
    ids = as_sampled(name, Message(role="assistant", content="", tool_calls=(call,)))
    prompt = codec(name).tokenizer.encode_trusted(codec(name).generation_prompt)
    parsed = parse_turn(codec(name).parser, codec(name).decode_turn(prompt, ids), TOOLS)
    assert [(each.name, json.loads(each.arguments)) for each in parsed.calls] == [("calc", {"term": term})]
    assert parsed.parse_errors == ()
