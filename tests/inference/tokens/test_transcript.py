"""What a session keeps beside the tokens: messages for engines that want them, segments, text engines, experts."""

import pytest
from harness_play import said
from model_talk import CALL, RESULT, Talk
from token_codecs import TOOLS, codec, needs_qwen

from prorl_gym.errors import Limit, LimitReached
from prorl_gym.inference.protocol import TextTurn
from prorl_gym.records import NOT_SAMPLED, Message, ToolCall
from prorl_gym.testing.inference.fake_engine import Reply

TASK = [Message(role="system", content="s"), Message(role="user", content="What is 2 + 2?")]
AGAIN = [Message(role="user", content="And 3 + 3?")]
THOUGHT = "<think>\nEasy.\n</think>\n\nIt is 4."


async def test_requests_carry_the_group_the_messages_and_where_the_last_turn_lies():
    talk = Talk([f"I look.\n{CALL}", "It is 4."], group_id="g")
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(RESULT)
    first, second = talk.engine.requests
    assert (first.group_id, second.group_id) == ("g", "g")
    assert list(first.conversation.messages) == TASK
    assert first.conversation.tools == TOOLS
    assert first.conversation.last_turn_span is None
    call = ToolCall(id="call_0_0", name="calc", arguments='{"term": "2 + 2"}')
    turn = Message(role="assistant", content="I look.", tool_calls=(call,))
    assert list(second.conversation.messages) == [*TASK, turn, *RESULT]
    start, end = second.conversation.last_turn_span
    assert codec("small").decode(second.prompt_ids[start:end]) == f"I look.\n{CALL}<|im_end|>"


async def test_an_aborted_turn_is_one_generation_to_the_next_call():
    whole = said("one two three").token_ids
    talk = Talk([Reply(whole[:2], "abort"), Reply(whole[2:]), "x"])
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(AGAIN)
    start, end = talk.engine.requests[-1].conversation.last_turn_span
    assert tuple(talk.engine.requests[-1].prompt_ids[start:end]) == whole


async def test_a_call_that_cannot_be_read_stays_in_the_messages_as_it_was_written():
    talk = Talk([f"a {CALL} <tool_call>oops</tool_call>", "x"])
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert len(turn.tool_calls) == len(turn.parse_errors) == 1
    assert turn.raw_text == f"a {CALL} <tool_call>oops</tool_call>"
    await talk.session.respond([*RESULT, Message(role="user", content=turn.parse_errors[0])])
    noted = talk.engine.requests[1].conversation.messages[2]
    assert (noted.content, noted.tool_calls) == (f"a {CALL} <tool_call>oops</tool_call>", ())


async def test_text_of_an_engine_is_taken_over_and_never_trained_on():
    call = ToolCall(id="theirs", name="calc", arguments="{}")
    talk = Talk(["whatever"], changes={"text_turn": TextTurn(CALL, (call,))})
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert (turn.text, turn.parse_errors) == (CALL, ())  # their text is not looked into once more
    assert [(each.id, each.name) for each in turn.tool_calls] == [("call_0_0", "calc")]
    (segment,) = talk.session.segments()
    assert set(segment.mask) == {0}
    assert set(segment.policy_versions) == {NOT_SAMPLED}
    assert set(segment.logprobs) == {0.0}
    assert segment.token_ids[segment.generations[0].start :] == list(said("whatever").token_ids)


async def test_routed_experts_are_kept_with_their_generation():
    experts = {"shape": [1, 2], "data": "AA=="}
    talk = Talk(["x"], changes={"routed_experts": experts})
    await talk.session.start_conversation(TASK, TOOLS)
    assert talk.session.segments()[0].generations[0].routed_experts == experts


@needs_qwen
async def test_the_templates_way_opens_a_segment_whose_prompt_has_no_old_thoughts():
    talk = Talk([THOUGHT, f"<think>\nHm.\n</think>\n\n{CALL}", "It is 6."], "qwen3", thinking="template")
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(AGAIN)
    await talk.session.respond(RESULT)
    first, second = talk.session.segments()
    one, two, three = (list(request.prompt_ids) for request in talk.engine.requests)
    assert first.token_ids == [*one, *said(THOUGHT, name="qwen3").token_ids]
    answer = Message(role="assistant", content=THOUGHT)
    assert two == codec("qwen3").encode_prompt([*TASK, answer, *AGAIN], TOOLS)
    shown = codec("qwen3").decode(two)
    assert "Easy." not in shown
    assert "It is 4.<|im_end|>" in shown
    assert second.token_ids[: len(two)] == two
    assert not any(second.mask[: len(two)])
    assert second.token_ids[: len(three)] == three  # tool results are appended in both ways
    assert [each.turn for each in first.generations + second.generations] == [0, 1, 2]
    assert talk.engine.requests[1].conversation.last_turn_span is None
    assert len(talk.engine.requests[1].conversation.messages) == 4


async def test_a_template_that_rewrites_nothing_needs_no_new_segment():
    talk = Talk(["It is 4.", "x"], thinking="template")
    await talk.session.start_conversation(TASK, TOOLS)
    await talk.session.respond(AGAIN)
    assert len(talk.session.segments()) == 1
    first, second = talk.engine.requests
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


async def test_a_new_segment_that_does_not_fit_ends_the_rollout_and_changes_nothing():
    split = codec("small").tokenizer.encode_trusted("4") * 2  # no template writes what was sampled like this
    prompt = len(codec("small").encode_prompt(TASK, TOOLS))
    talk = Talk([Reply((*split, 0)), "x"], thinking="template", max_tokens=prompt + 8)
    await talk.session.start_conversation(TASK, TOOLS)
    before = talk.session.segments()
    with pytest.raises(LimitReached) as caught:
        await talk.session.respond(AGAIN)
    assert caught.value.limit is Limit.TOKENS
    assert talk.session.segments() == before


async def test_llamas_end_of_a_call_stands_in_place_of_the_terminator():
    chat = codec("llama")
    control = chat.tokenizer.control_ids
    call = '<|python_tag|>{"name": "calc", "parameters": {"term": "2 + 2"}}'
    ids = (*chat.tokenizer.encode_trusted(call), control["<|eom_id|>"])
    talk = Talk([Reply(ids), "It is 4."], "llama")
    turn = await talk.session.start_conversation(TASK, TOOLS)
    assert [(each.name, each.arguments) for each in turn.tool_calls] == [("calc", '{"term": "2 + 2"}')]
    await talk.session.respond(RESULT)
    first, second = talk.engine.requests
    news = chat.decode(second.prompt_ids[len(first.prompt_ids) + len(ids) :])
    assert news == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    assert control["<|eom_id|>"] in first.stop_token_ids
