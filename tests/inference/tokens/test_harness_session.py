"""Where the calls of a harness are placed, and what is recorded of them."""

import asyncio
import json

import pytest
from harness_play import ALL_TOOLS, EDIT, SYSTEM, TASK, Play, assistant, result, said, shown, tool_call, user
from token_codecs import ALL, BOTH, needs_qwen

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, TaskError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_call import HarnessCall
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.records import NOT_SAMPLED, Message
from prorl_gym.testing.inference.fake_engine import Reply

START = (SYSTEM, TASK)


@pytest.mark.parametrize("name", BOTH)
async def test_a_harness_that_only_appends_has_one_segment(name):
    play = Play([said(f"I look.\n{tool_call()}", name=name), said("Done.", name=name)], name)
    one = await play.ask(*START)
    two = await play.ask(*START, shown(one), result(one.parsed.calls[0]))
    (segment,) = play.segments
    assert (segment.cause, segment.parent, segment.shared_tokens, segment.rewrites) == ("first", None, 0, ())
    assert (one.placement.cause, two.placement.cause) == ("first", None)
    assert segment.token_ids[: len(two.prompt.ids)] == two.prompt.ids == list(play.engine.requests[1].prompt_ids)
    assert two.prompt.ids[: len(one.prompt.ids) + len(one.sampled.token_ids)] == [
        *one.prompt.ids,
        *one.sampled.token_ids,
    ]
    assert json.loads(b"[" + play.engine.requests[1].prompt_ids_json + b"]") == two.prompt.ids


NOTE = Message(role="system", content="Be short.")


@pytest.mark.parametrize(
    ("opening", "later", "rewrites"),
    [
        ((SYSTEM, NOTE, TASK), (user("on"),), {"joined_system"}),
        ((SYSTEM, TASK), (NOTE, user("on")), {"late_system"}),
        ((SYSTEM, TASK, NOTE), (NOTE,), {"late_system"}),
        ((SYSTEM,), (user("on"),), {"added_user"}),
        ((NOTE, SYSTEM, assistant("Lost."), TASK), (NOTE,), {"joined_system", "added_user", "late_system"}),
    ],
)
@pytest.mark.parametrize("name", ALL)
async def test_a_history_that_the_template_refuses_is_extended_as_it_was_rewritten(name, opening, later, rewrites):
    play = Play([said("One.", name=name), said("Two.", name=name)], name)
    one = await play.ask(*opening)
    two = await play.ask(*opening, shown(one), *later)
    (segment,) = play.segments
    assert set(segment.rewrites) == rewrites & {rule.name for rule in play.codec.rewrites}
    assert two.prompt.ids[: len(one.prompt.ids)] == one.prompt.ids
    assert all(message.content in play.shows(segment) for message in (*opening, *later))


async def test_a_branch_begins_with_the_ids_of_the_longest_history_and_does_not_train_them_again():
    play = Play([said("One."), said("Two."), said("Three.")])
    one = await play.ask(*START)
    two = await play.ask(*START, shown(one), user("on"))
    edited = await play.ask(*START, shown(one), user("on"), assistant("Not two."), user("and on"))
    first, branch = play.segments
    end = len(one.prompt.ids) + len(one.sampled.token_ids)
    assert (branch.parent, branch.cause, branch.shared_tokens) == (0, "edit", end)
    assert branch.token_ids[:end] == first.token_ids[:end]
    assert edited.placement.shared_tokens == end
    assert not any(branch.mask[: len(edited.prompt.ids)])
    assert branch.policy_versions[:end] == [NOT_SAMPLED] * end
    assert "Not two." in play.shows(branch)
    assert two.sampled.token_ids == first.token_ids[-len(two.sampled.token_ids) :]


async def test_interleaved_conversations_have_a_segment_each():
    play = Play([said(text) for text in ("A1", "B1", "A2", "B2")])
    other = (Message(role="system", content="You review."), user("Review it."))
    a1 = await play.ask(*START)
    b1 = await play.ask(*other)
    a2 = await play.ask(*START, shown(a1), user("on"))
    b2 = await play.ask(*other, shown(b1), user("on"))
    assert play.causes == ["first", "conversation"]
    for segment, (one, two) in zip(play.segments, [(a1, a2), (b1, b2)], strict=True):
        assert segment.token_ids == [*two.prompt.ids, *two.sampled.token_ids]
        assert sum(segment.mask) == len(one.sampled.token_ids) + len(two.sampled.token_ids)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("hints", [True, False])
async def test_parallel_sub_agents_are_siblings_whatever_their_order(order, hints):
    tasks = ["Look for the callers of it.", "Look for the tests of it.", "Look for its documentation."]
    calls = "\n".join(tool_call("calc", term=task) for task in tasks)
    play = Play([said(calls), *(said(f"Found {place}.") for place in range(6)), said("All done.")])
    main = await play.ask(*START)
    agents = [{"agent": f"agent-{place}", "parent": ""} if hints else {} for place in range(3)]
    sub = [(Message(role="system", content="You search."), user(task)) for task in tasks]
    ones = dict(zip(order, [await play.ask(*sub[place], **agents[place]) for place in order], strict=True))
    await asyncio.gather(*(play.ask(*sub[n], shown(ones[n]), user("more"), **agents[n]) for n in reversed(order)))
    await play.ask(*START, shown(main), *(result(call) for call in main.parsed.calls))
    assert play.causes == ["first", "sub_agent", "sub_agent", "sub_agent"]
    assert [segment.parent for segment in play.segments] == [None, 0, 0, 0]
    assert [len(segment.generations) for segment in play.segments] == [2, 2, 2, 2]


async def test_a_sub_agents_sub_agent_has_it_as_its_parent():
    play = Play([said(text) for text in ("One.", "Two.", "Three.", "Four.")])
    await play.ask(*START)
    for agent, parent in (("a", ""), ("b", "a"), ("c", "unknown")):
        await play.ask(SYSTEM, user(f"Work for {agent}."), agent=agent, parent=parent)
    assert play.causes == ["first", "sub_agent", "sub_agent", "sub_agent"]
    assert [segment.parent for segment in play.segments] == [None, 0, 1, 0]


async def test_sub_agents_that_are_sampled_at_once_do_not_mix():
    holds = [asyncio.Event() for _ in range(2)]
    play = Play([said("Main."), said("Alpha.", hold=holds[0]), said("Beta.", hold=holds[1]), said("More alpha.")])
    await play.ask(*START)
    same = (Message(role="system", content="You search."), user("Search."))
    calls = [asyncio.create_task(play.ask(*same, agent=agent)) for agent in ("a", "b")]
    while play.engine.in_flight < 2:
        play.engine.call_held.clear()
        await play.engine.call_held.wait()
    for hold in reversed(holds):
        hold.set()
    alpha, _ = await asyncio.gather(*calls)
    await play.ask(*same, shown(alpha), user("on"), agent="a")
    assert play.causes == ["first", "sub_agent", "sub_agent"]
    assert sorted(len(segment.generations) for segment in play.segments[1:]) == [1, 2]


async def test_a_call_that_is_made_again_is_a_sibling():
    play = Play([said("Lost."), said("One."), said("Lost."), said("Kept."), said("On.")])
    await play.ask(*START)
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"))
    kept = await play.ask(*START, shown(one), user("on"))
    await play.ask(*START, shown(one), user("on"), shown(kept), user("and on"))
    assert play.causes == ["first", "retry", "retry"]
    assert [segment.parent for segment in play.segments] == [None, None, 1]
    assert [len(segment.generations) for segment in play.segments] == [1, 2, 2]


async def test_a_call_that_failed_leaves_nothing_and_its_repetition_goes_on_in_the_segment():
    broken = EngineError(FailureKind.ENGINE_REFUSED, "no.", "")
    play = Play([broken, said("One."), broken, said("Two.")], max_turns=2)
    with pytest.raises(EngineError):
        await play.ask(*START)
    (unanswered,) = play.segments
    assert (unanswered.token_ids, play.session.turns) == (list(play.engine.requests[0].prompt_ids), 0)
    one = await play.ask(*START)
    with pytest.raises(EngineError):
        await play.ask(*START, shown(one), user("on"))
    await play.ask(*START, shown(one), user("on"))
    assert play.causes == ["first"]
    with pytest.raises(LimitReached) as caught:
        await play.ask(*START, shown(one), user("and on"))
    assert caught.value.limit is play.session.limit is Limit.TURNS


async def test_a_disconnect_stops_the_engines_call_and_keeps_its_tokens():
    play = Play([said("One."), said("a b c d e f g h", hold=asyncio.Event()), said("Again.")])
    one = await play.ask(*START)
    call = asyncio.create_task(play.ask(*START, shown(one), user("on")))
    await play.engine.call_held.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (segment,) = play.segments
    assert segment.generations[-1].finish_reason == "abort"
    assert segment.generations[-1].start < len(segment.token_ids)
    assert play.engine.in_flight == 0
    again = await play.ask(*START, shown(one), user("on"))
    assert (play.causes, again.placement.cause) == (["first", "retry"], "retry")


async def test_the_part_of_a_cut_turn_that_a_harness_keeps_is_an_abandoned_sibling():
    play = Play([said("One."), said(f"I will rename it now.\n{tool_call()}"), said("On.")])
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"))
    part = await play.ask(*START, shown(one), user("on"), assistant("I will rename"), user("continue"))
    assert play.causes == ["first", "cut_turn"]
    assert part.placement.shared_tokens == len(one.prompt.ids) + len(one.sampled.token_ids)


async def test_all_of_what_came_of_a_cut_turn_is_extended():
    play = Play([said("a b c d e f g h", hold=asyncio.Event()), said("On.")])
    call = asyncio.create_task(play.ask(*START))
    await play.engine.call_held.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    ids = play.segments[0].token_ids[play.segments[0].generations[0].start :]
    await play.ask(*START, assistant(play.codec.decode(ids)), user("continue"))
    (segment,) = play.segments
    assert len(segment.generations) == 2


async def test_side_calls_are_labelled_and_not_trained():
    play = Play([said("A title"), said("One."), said("Two.")])
    title = (Message(role="system", content="You are a title generator."), TASK)
    await play.ask(*title, tools=(), kind="side")
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"))
    assert play.causes == ["side_call", "first"]
    assert [segment.trained for segment in play.segments] == [False, True]


async def test_what_extends_an_agents_conversation_is_its_own_whatever_its_words():
    play = Play([said("One."), said("Yes."), said("Two.")])
    one = await play.ask(*START)
    done = await play.ask(*START, shown(one), user("Is it done?"), kind="side")
    await play.ask(*START, shown(one), user("Is it done?"), shown(done), user("on"))
    assert (play.causes, play.segments[0].trained) == (["first"], True)


async def test_what_cannot_fit_into_the_context_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch):
    play = Play([said("One.")], max_tokens=1000)
    monkeypatch.setattr(ChatCodec, "render_plain", lambda *args, **options: pytest.fail("rendered"))
    for history in ([user("blanks" + " " * 16_000)], [user("a")] * 250):
        with pytest.raises(TaskError, match="at least"):
            await play.ask(*history)
        with pytest.raises(TaskError, match="at least"):
            await play.session.count_tokens(HarnessCall([HistoryEntry(one) for one in history], ()))


async def test_calls_that_are_given_up_before_a_token_are_limited_as_turns_are():
    play = Play(lambda request: Reply((5,), hold=asyncio.Event()), max_turns=3)
    for _ in range(3):
        call = asyncio.ensure_future(play.ask(*START))
        await play.engine.call_held.wait()
        call.cancel()
        await asyncio.wait({call})
        play.engine.call_held.clear()
    with pytest.raises(LimitReached):
        await play.ask(*START)
    assert len(play.engine.requests) == 3


async def test_a_summary_is_trained_once_in_its_own_segment():
    summary = "The function was renamed in two of three files."
    play = Play([said("One."), said(summary), said("Two."), said("Three.")])
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"), tools=(), kind="side")
    two = await play.ask(SYSTEM, TASK, assistant(summary), user("Continue."))
    await play.ask(SYSTEM, TASK, assistant(summary), user("Continue."), shown(two), user("on"))
    assert play.causes == ["first", "side_call", "summary"]
    assert play.segments[2].parent == 0
    texts = [play.codec.decode([t for t, bit in zip(s.token_ids, s.mask, strict=True) if bit]) for s in play.segments]
    assert [summary in text for text in texts] == [False, True, False]


async def test_a_summary_that_the_user_repeats_is_one():
    summary = "The function was renamed in two of three files."
    play = Play([said("One."), said(summary), said("Two.")])
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("Summarise."))
    await play.ask(SYSTEM, user(f"This goes on from an earlier conversation.\n{summary}"))
    assert play.causes == ["first", "summary"]
    assert play.segments[1].parent == 0


async def test_other_tools_are_a_branch():
    play = Play([said("One."), said("Two.")])
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"), tools=[EDIT])
    assert play.causes == ["first", "tools"]
    assert play.segments[1].parent == 0


@needs_qwen
async def test_a_template_that_drops_thoughts_begins_a_segment():
    play = Play(
        [said("<think>\nHm.\n</think>\n\nOne.", name="qwen3"), said("Two.", name="qwen3")], "qwen3", thinking="template"
    )
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"))
    assert play.causes == ["first", "template"]
    first, second = play.segments
    assert second.parent == 0
    assert second.token_ids[: second.shared_tokens] == first.token_ids[: second.shared_tokens]
    assert "Hm." not in play.shows(second)


async def test_the_assistant_may_be_asked_to_go_on():
    play = Play([said("One."), said("Two.")])
    one = await play.ask(*START)
    two = await play.ask(*START, shown(one))
    assert play.causes == ["first"]
    assert two.prompt.ids[: len(one.prompt.ids)] == one.prompt.ids


async def test_the_rollouts_sampling_and_limits_hold():
    play = Play([said("x")], temperature=0.5, top_p=0.9, top_k=7, seed=1, max_turn_tokens=33)
    await play.ask(*START, max_tokens=32_000)
    (asked,) = play.engine.requests
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.5, 0.9, 7, 33)
    play = Play([said("x")], max_turn_tokens=33)
    await play.ask(*START, max_tokens=5)
    assert play.engine.requests[0].max_tokens == 5


async def test_a_first_prompt_that_does_not_fit_is_the_tasks_fault_and_a_later_one_the_policys():
    play = Play([], max_tokens=10)
    with pytest.raises(TaskError) as caught:
        await play.ask(*START)
    assert caught.value.kind is FailureKind.PROMPT_TOO_LONG
    play = Play([said("One.")])
    one = await play.ask(*START)
    tight = Play([said("One."), said("Two.")], max_tokens=len(one.prompt.ids) + 4)
    one = await tight.ask(*START)
    with pytest.raises(LimitReached) as reached:
        await tight.ask(*START, shown(one), user("on"))
    assert reached.value.limit is tight.session.limit is Limit.TOKENS
    await tight.ask(user("Rename."), tools=())
    assert tight.session.limit is None, "it went on with less"


async def test_a_harness_that_edits_for_ever_meets_a_limit():
    play = Play(lambda request: said("x"), max_tokens=400)
    with pytest.raises(LimitReached) as caught:
        for number in range(1000):
            await play.ask(SYSTEM, user(f"Task {number}"))
    assert caught.value.limit is Limit.TOKENS


async def test_a_caller_of_single_calls_is_shown_one_and_extends_it():
    play = Play([said(f"{tool_call()}\n{tool_call(term='3')}"), said("Done.")])
    one = await play.ask(*START, single_tool_call=True)
    assert len(one.parsed.calls) == 1
    await play.ask(*START, shown(one), result(one.parsed.calls[0]), single_tool_call=True)
    assert play.causes == ["first"]


async def test_the_main_conversation_is_told():
    play = Play([said("One."), said("Two."), said("Three, at some length, and in more words than both.")])
    one = await play.ask(*START)
    await play.ask(*START, shown(one), user("on"))
    three = await play.ask(*START, shown(one), user("elsewhere"))
    sampled = [sum(segment.mask) for segment in play.segments]
    assert sampled[0] < sampled[1], "the branch is the main segment"
    messages, before = play.session.main_conversation()
    assert (messages[-1].content, before) == (three.parsed.text, 4)


async def test_tools_of_any_shape_do_no_harm():
    odd = [{"type": "function", "function": "edit"}, {"function": {"name": 3, "parameters": {"properties": [1]}}}]
    play = Play([said("One.")], name="small")
    await play.ask(*START, tools=[*ALL_TOOLS, *odd[1:]])
    assert play.causes == ["first"]
