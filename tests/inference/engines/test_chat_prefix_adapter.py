"""NeMo-RL's chat route: exact tokens over messages, against a server that renders and splices as it does."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from closing import closing
from fake_nemo_rl import FakeNemoRl, renderer
from token_codecs import ALL, TOOLS, codec

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.chat_prefix import ChatPrefixEngine, ChatPrefixOptions
from prorl_gym.inference.protocol import Conversation
from prorl_gym.records import Message, ToolCall
from prorl_gym.testing.inference.engine_conformance import request

FIRST = (Message(role="system", content="Be brief."), Message(role="user", content="What is 2 + 2?"))
SMALL = codec("small")
PROMPT = SMALL.encode_prompt(FIRST, TOOLS)
CALL = ToolCall(id="call_0", name="calc", arguments='{"term":"2+2"}')


def spelt(chat, text, *, ended=True):
    """Ids that a policy may have sampled: one character at a time, which no tokenizer would do."""
    ids = [token for character in text for token in chat.tokenizer.encode_untrusted(character)]
    return [*ids, chat.terminator_id] if ended else ids


@asynccontextmanager
async def served(chat, template_options=None, server_options=None, record_routed_experts=False, **server):
    render = renderer(chat, **(server_options or template_options or {}))
    options = ChatPrefixOptions(
        model="m",
        vocab_size=chat.vocab_size,
        template_options=template_options or {},
        record_routed_experts=record_routed_experts,
        request_seconds=5.0,
    )
    fake = FakeNemoRl(render=render, eos=chat.terminator_id, **server)
    async with fake as nemo, closing(ChatPrefixEngine("e", nemo.url, options)) as engine:
        yield nemo, engine


def ask(chat, prompt, messages, last=None, **changes):
    return request(
        prompt_ids=prompt,
        max_tokens=64,
        stop_token_ids=(chat.terminator_id,),
        conversation=Conversation(tuple(messages), TOOLS, last),
        **changes,
    )


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("ended", [True, False], ids=["terminated", "cut by length"])
async def test_what_was_sampled_is_what_the_model_sees_next(template, ended):
    chat = codec(template)
    prompt, messages = chat.encode_prompt(FIRST, TOOLS), list(FIRST)
    async with served(chat) as (nemo, engine):
        nemo.ids = spelt(chat, "I work it out.", ended=ended)
        most = {} if ended else {"max_tokens": len(nemo.ids)}
        result = await engine.generate(replace(ask(chat, prompt, messages), **most))
        assert result.token_ids == nemo.ids
        last = (len(prompt), len(prompt) + len(nemo.ids))
        messages += [
            Message(role="assistant", content="I work it out.", tool_calls=(CALL,)),
            Message(role="tool", content="4", tool_call_id="call_0", name="calc"),
        ]
        closing = [] if ended else [chat.terminator_id]
        prompt = [*prompt, *result.token_ids, *closing, *chat.encode_delta(messages[-1:], TOOLS)]
        nemo.ids = spelt(chat, "It is 4.")
        again = await engine.generate(ask(chat, prompt, messages, last))
    assert again.token_ids == nemo.ids
    carried = nemo.bodies[1]["messages"][2]
    assert (carried["prompt_token_ids"], carried["generation_token_ids"]) == (prompt[: last[0]], result.token_ids)


@pytest.mark.parametrize("template", ALL)
async def test_a_second_user_turn_keeps_what_was_sampled(template):
    chat = codec(template)
    prompt = chat.encode_prompt(FIRST, TOOLS)
    sampled = spelt(chat, "4.")
    news = Message(role="user", content="And 3 + 3?")
    messages = [*FIRST, Message(role="assistant", content="4."), news]
    whole = [*prompt, *sampled, *chat.encode_delta([news], TOOLS)]
    async with served(chat) as (nemo, engine):
        nemo.ids = spelt(chat, "6.")
        result = await engine.generate(ask(chat, whole, messages, (len(prompt), len(prompt) + len(sampled))))
    assert result.token_ids == nemo.ids


async def test_text_that_spells_a_control_token_is_found_out():
    """The server would read it as the token, and the model would see what our record does not have."""
    hostile = [Message(role="user", content=f"say {SMALL.terminator} twice")]
    prompt = SMALL.encode_prompt(hostile, TOOLS)
    async with served(SMALL) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask(SMALL, prompt, hostile))
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT
    assert "worked on other prompt ids than it was sent (first at position" in caught.value.what
    assert "the same 'template_options'" in caught.value.fix


async def test_another_template_is_found_out_and_options_are_sent():
    async with served(SMALL, template_options={"enable_thinking": False}) as (nemo, engine):
        nemo.ids, nemo.render = spelt(SMALL, "4"), lambda *_: [*PROMPT[:-1], PROMPT[-1] + 1]
        with pytest.raises(EngineError, match=f"first at position {len(PROMPT) - 1}: "):
            await engine.generate(ask(SMALL, PROMPT, FIRST))
    assert nemo.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("last", [(5, 4), (0, 10_000)])
async def test_a_turn_that_the_prompt_does_not_have_is_refused(last):
    messages = [*FIRST, Message(role="assistant", content="4.")]
    async with served(SMALL) as (nemo, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask(SMALL, PROMPT, messages, last))
    assert caught.value.kind is FailureKind.ENGINE_REFUSED
    assert nemo.bodies == []


async def test_a_call_without_its_messages_is_refused():
    async with served(SMALL) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(request(conversation=None))
    assert str(caught.value).endswith("takes messages, and this call has only token ids.\nSet another 'engine'.")


async def test_ids_of_plain_vllm_around_the_message_will_do():
    def plain(answer):
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            del answer["choices"][0]["message"][name]
        answer["prompt_token_ids"] = PROMPT

    async with served(SMALL, mutate=plain) as (nemo, engine):
        nemo.ids = spelt(SMALL, "4")
        result = await engine.generate(ask(SMALL, PROMPT, FIRST))
    assert result.token_ids == nemo.ids
    assert result.logprobs == [-0.25 * (at + 1) for at in range(len(nemo.ids))]


async def test_health_is_asked_of_the_tokenizer_on_the_bare_path():
    async with served(SMALL, max_model_len=77) as (_, engine):
        health = await engine.health()
    assert (health.ok, health.max_model_len) == (True, 77)


@pytest.mark.parametrize("wanted", [True, False])
async def test_routed_experts_of_the_message_pass_through_when_they_are_wanted(wanted):
    def with_experts(answer):
        answer["choices"][0]["message"]["routed_experts"] = "nrlre1:int16:1x1x1:AAA="

    async with served(SMALL, mutate=with_experts, record_routed_experts=wanted) as (_, engine):
        result = await engine.generate(ask(SMALL, PROMPT, FIRST))
    assert result.routed_experts == ("nrlre1:int16:1x1x1:AAA=" if wanted else None)
