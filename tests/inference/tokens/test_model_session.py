import asyncio
import threading
from dataclasses import replace

import pytest
from harness_play import said
from model_talk import CALL, RESULT, Talk
from token_codecs import BOTH, TOOLS, codec

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, TaskError
from prorl_gym.inference.protocol import ContextExceeded
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.turn import derive_seed
from prorl_gym.records import Message
from prorl_gym.testing.inference.fake_engine import Reply

TASK = [Message(role="user", content="What is 2 + 2?")]


@pytest.mark.parametrize("name", BOTH)
async def test_a_rollout_of_two_turns(name):
    talk = Talk([f"I calculate.\n{CALL}", "It is 4."], name)
    first = await talk.session.start_conversation(TASK, TOOLS)
    assert (first.text, first.finish_reason, first.parse_errors) == ("I calculate.", "stop", ())
    (call,) = first.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_0_0", "calc", '{"term": "2 + 2"}')
    second = await talk.session.respond(RESULT)
    assert (second.text, second.tool_calls) == ("It is 4.", ())
    one, two = talk.engine.requests
    assert two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
    assert talk.segment.token_ids[: len(two.prompt_ids)] == list(two.prompt_ids)
    assert [(g.start, g.turn) for g in talk.segment.generations] == [(len(one.prompt_ids), 0), (len(two.prompt_ids), 1)]


async def test_the_engine_is_asked_with_the_settings():
    talk = Talk(["x"], temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=(9,), seed=1, max_turn_tokens=33)
    await talk.session.start_conversation(TASK, TOOLS)
    (asked,) = talk.engine.requests
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.5, 0.9, 7, 33)
    assert asked.stop_token_ids == (talk.codec.terminator_id, 0, 9)  # 0: <|endoftext|>
    assert asked.session_id == "r"
    assert asked.seed == derive_seed(1, 1, 0)
    assert talk.segment.generations[0].seed == asked.seed


async def test_turns_are_limited():
    talk = Talk(["a", "b"], max_turns=1)
    await talk.session.start_conversation(TASK, TOOLS)
    with pytest.raises(LimitReached) as caught:
        await talk.session.respond(RESULT)
    assert caught.value.limit is Limit.TURNS
    assert len(talk.engine.requests) == 1


async def test_a_call_never_asks_for_more_than_fits():
    prompt = len(codec("small").encode_prompt(TASK, TOOLS))
    talk = Talk(["x"], max_tokens=prompt + 5)
    await talk.session.start_conversation(TASK, TOOLS)
    assert talk.engine.requests[0].max_tokens == 5
    talk = Talk(["x"], max_model_len=prompt + 3)
    await talk.session.start_conversation(TASK, TOOLS)
    assert talk.engine.requests[0].max_tokens == 3


async def test_the_last_token_that_fits_is_used():
    """Terminator, delta and one more token fit exactly; with one less they do not."""
    chat = codec("small")
    used = len(chat.encode_prompt(TASK, TOOLS)) + 2
    delta = len(chat.encode_delta(RESULT, TOOLS))
    script = [Reply((50, 51), "length"), Reply((52,), "length")]
    talk = Talk(script, max_tokens=used + 1 + delta + 1, max_turn_tokens=2)
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(RESULT)
    assert len(talk.segment.token_ids) == used + 1 + delta + 1
    talk = Talk(script, max_tokens=used + 1 + delta, max_turn_tokens=2)
    await talk.session.start_conversation(TASK, TOOLS)
    before = talk.segment.token_ids
    with pytest.raises(LimitReached) as caught:
        await talk.session.respond(RESULT)
    assert caught.value.limit is Limit.TOKENS
    assert talk.segment.token_ids == before


async def test_a_first_prompt_that_does_not_fit_is_the_tasks_fault():
    talk = Talk([], max_tokens=10)
    with pytest.raises(TaskError) as caught:
        await talk.session.start_conversation(TASK, TOOLS)
    length = len(codec("small").encode_prompt(TASK, TOOLS))
    assert caught.value.kind is FailureKind.PROMPT_TOO_LONG
    assert str(caught.value) == (
        f"the first prompt has {length} tokens and leaves no room in 10.\n"
        "Raise 'max_tokens', serve the model with a longer context, or drop the row."
    )
    assert talk.session.segments() == []


async def test_an_engine_with_a_smaller_context_is_asked_for_less():
    length = len(codec("small").encode_prompt(TASK, TOOLS))
    talk = Talk([ContextExceeded(length + 4), "x"])
    assert (await talk.session.start_conversation(TASK, TOOLS)).text == "x"
    assert [asked.max_tokens for asked in talk.engine.requests] == [4096, 4]


@pytest.mark.parametrize("max_model_len", [1, None])
async def test_an_engine_whose_context_cannot_hold_the_prompt(max_model_len):
    talk = Talk([ContextExceeded(max_model_len)])
    with pytest.raises(TaskError) as caught:
        await talk.session.start_conversation(TASK, TOOLS)
    assert caught.value.kind is FailureKind.PROMPT_TOO_LONG


async def test_a_later_turn_that_the_engine_cannot_hold_is_a_limit():
    talk = Talk(["x", ContextExceeded(None)])
    await talk.session.start_conversation(TASK, TOOLS)
    with pytest.raises(LimitReached) as caught:
        await talk.session.respond(RESULT)
    assert caught.value.limit is Limit.TOKENS


async def test_a_turn_that_an_engine_aborts_goes_on_from_its_tokens():
    whole = said("one two three").token_ids
    talk = Talk([Reply(whole[:2], "abort"), Reply(whole[2:])], seed=4)
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert (turn.text, turn.finish_reason) == ("one two three", "stop")
    first, second = talk.engine.requests
    assert second.prompt_ids == first.prompt_ids + whole[:2]
    assert second.max_tokens == first.max_tokens - 2
    assert second.seed != first.seed
    assert [g.turn for g in talk.segment.generations] == [0, 0]
    assert talk.session.turns == 1


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
async def test_a_turn_that_was_over_when_it_was_aborted_does_not_go_on(end):
    ids = codec("small").tokenizer.encode_trusted("It is 4." + end)
    talk = Talk([Reply(tuple(ids), "abort")])
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert (turn.text, turn.finish_reason) == ("It is 4.", "stop")
    assert len(talk.engine.requests) == 1


async def test_an_engine_that_only_aborts_is_given_up():
    talk = Talk(lambda request: Reply((), "abort"))
    with pytest.raises(EngineError) as caught:
        await talk.session.start_conversation(TASK, TOOLS)
    assert caught.value.kind is FailureKind.ENGINE_OVERLOADED
    assert talk.segment.token_ids == talk.codec.encode_prompt(TASK, TOOLS)
    assert talk.segment.mask == [0] * len(talk.segment.token_ids)


async def test_a_cancelled_rollout_keeps_the_tokens_of_the_call_in_flight():
    talk = Talk([Reply((10, 11, 12, 13), hold=asyncio.Event())])
    turn = asyncio.create_task(talk.session.start_conversation(TASK, TOOLS))
    await talk.engine.call_held.wait()
    turn.cancel()
    await asyncio.wait({turn})
    assert turn.cancelled()
    assert talk.segment.token_ids[-2:] == [10, 11]
    assert talk.segment.mask[-2:] == [1, 1]
    assert talk.segment.generations[0].finish_reason == "abort"
    assert talk.engine.in_flight == 0


async def test_a_cancelled_rollout_that_waits_for_an_engine_ends_at_once():
    talk = Talk([])
    talk.engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "down")
    await talk.pool.check_health()
    turn = asyncio.create_task(talk.session.start_conversation(TASK, TOOLS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    turn.cancel()
    done, _ = await asyncio.wait({turn}, timeout=1)
    assert done
    assert turn.cancelled()
    await talk.pool.close()


async def test_closing_gives_up_the_place_on_the_engine(monkeypatch):
    talk, forgotten = Talk([]), []
    monkeypatch.setattr(talk.pool, "forget_session", forgotten.append)
    talk.session.close()
    assert forgotten == ["r"]


async def test_a_session_starts_once():
    talk = Talk(["x", "y"])
    await talk.session.start_conversation(TASK, TOOLS)
    with pytest.raises(RuntimeError, match="started already"):
        await talk.session.start_conversation(TASK, TOOLS)


def test_seeds_differ_by_replica_turn_and_progress_and_are_reproducible():
    seeds = {derive_seed(1, replica, turn, done) for replica in range(4) for turn in range(4) for done in (0, 5)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 0, 0) == 3381072289616014609
    assert derive_seed(None, 0, 0) is None


async def test_tokens_of_a_call_that_ends_in_the_moment_of_the_cancel_are_kept():
    hold = asyncio.Event()
    talk = Talk([Reply((10, 11, 12, 13), hold=hold)])
    turn = asyncio.create_task(talk.session.start_conversation(TASK, TOOLS))
    await talk.engine.call_held.wait()
    (call,) = (task for task in asyncio.all_tasks() if task.get_name() == "turn 0 of r")
    call.add_done_callback(lambda _: turn.cancel())
    hold.set()
    await asyncio.wait({turn})
    assert turn.cancelled()
    assert talk.segment.token_ids[-4:] == [10, 11, 12, 13]


async def test_long_texts_do_not_hold_the_event_loop(monkeypatch):
    on_main_thread, long = [], "a word " * 10_000

    def watched(encode):
        def watch(*args):
            on_main_thread.append(threading.current_thread() is threading.main_thread())
            return encode(*args)

        return watch

    for name in ("encode_prompt", "encode_delta"):
        monkeypatch.setattr(ChatCodec, name, watched(getattr(ChatCodec, name)))
    talk = Talk(["x", "y", "z"], max_tokens=100_000)
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(RESULT)
    await talk.session.respond([RESULT[0].model_copy(update={"content": long})])
    with pytest.raises(TaskError):
        await Talk([], max_tokens=10).session.start_conversation([Message(role="user", content=long)], TOOLS)
    assert on_main_thread == [True, True, False, False]


async def test_pauses_are_no_faults_of_the_engine(monkeypatch):
    """Far more aborts than an engine would be forgiven, all of them ours."""
    whole = said("one two three four five six seven eight nine ten eleven twelve").token_ids
    talk = Talk([*(Reply(whole[n : n + 1], "abort") for n in range(11)), Reply(whole[11:])])
    generate = talk.pool.generate

    async def cut_by_pause(request):
        result = await generate(request)
        return replace(result, aborted_by_pause=result.finish_reason == "abort")

    monkeypatch.setattr(talk.pool, "generate", cut_by_pause)
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert turn.text == "one two three four five six seven eight nine ten eleven twelve"
    assert talk.segment.token_ids[-len(whole) :] == list(whole)
