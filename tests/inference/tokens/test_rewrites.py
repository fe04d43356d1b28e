"""What harnesses change in their history: the tables, row by row, and what is no row of them."""

import json
import time
from typing import get_args

import pytest
from harness_play import SYSTEM, TASK, Play, assistant, result, said, shown, tool_call, user
from token_codecs import ROOT

from prorl_gym.inference.tokens.rewrites import CALL_REWRITES, EQUAL_FORMS, VOLATILE_TEXT, HistoryReader, stable_text
from prorl_gym.inference.tokens.template_rewrites import TEMPLATE_REWRITES
from prorl_gym.records import BranchCause, Message, ToolCall

START = (SYSTEM, TASK)
THOUGHT = "<think>\nHm.\n</think>\n\nI look."


async def placed(sampled, change, *, then="4"):
    play = Play([said(sampled), said("On.")])
    one = await play.ask(*START)
    results = [result(call, then) for call in one.parsed.calls] or [user("on")]
    await play.ask(*START, change(shown(one)), *results)
    return play.segments


def with_call(**changes):
    def change(turn):
        (call,) = turn.tool_calls
        return turn.model_copy(update={"tool_calls": (call.model_copy(update=changes),)})

    return change


EDIT_CALL = tool_call("edit", old="a", new="b\u00e9/")


@pytest.mark.parametrize(
    ("sampled", "change", "name"),
    [
        (EDIT_CALL, with_call(arguments='{"new":"b\\u00e9\\/",\n"old":"a"}'), "reserialized_arguments"),
        (EDIT_CALL, with_call(arguments='{"replace_all":false,"old":"a","new":"b\u00e9/"}'), "default_arguments"),
        (EDIT_CALL, with_call(id="another"), "call_ids"),
        (tool_call("edit", old="a", replace_all=False), with_call(arguments='{"old": "a"}'), "default_arguments"),
        (
            tool_call("nothing", a=1),
            with_call(name="invalid", arguments='{"tool": "nothing", "error": "There is no such tool."}'),
            "invalid_call",
        ),
        (THOUGHT, lambda turn: turn.model_copy(update={"content": "I look."}), "dropped_thinking"),
        ("I look.", lambda turn: turn.model_copy(update={"content": "  I look.\n"}), "trimmed_text"),
    ],
)
async def test_a_declared_change_extends_and_is_recorded(sampled, change, name):
    (segment,) = await placed(sampled, change)
    assert segment.rewrites == (name,)


@pytest.mark.parametrize(
    ("sampled", "change"),
    [
        (EDIT_CALL, with_call(arguments='{"old":"a","new":"c"}')),
        (EDIT_CALL, with_call(arguments='{"replace_all":true,"old":"a","new":"b\u00e9/"}')),
        (EDIT_CALL, with_call(arguments='{"replace_all":0,"old":"a","new":"b\u00e9/"}')),
        (EDIT_CALL, with_call(arguments='{"old":"a","new":"b\u00e9/","other":false}')),
        (EDIT_CALL, with_call(name="calc")),
        (EDIT_CALL, with_call(name="invalid", arguments='{"tool": "calc", "error": "no"}')),
        (EDIT_CALL, with_call(id="another", name="invalid", arguments='{"tool": "edit", "error": "no"}')),
        (EDIT_CALL, with_call(arguments='{"__unparsedToolInput": {"raw": "other"}}')),
        (THOUGHT, lambda turn: turn.model_copy(update={"content": turn.content.replace("Hm", "No")})),
        ("I look.", lambda turn: turn.model_copy(update={"content": "I looked."})),
    ],
)
async def test_any_other_change_is_a_branch(sampled, change):
    first, branch = await placed(sampled, change)
    assert branch.cause in ("edit", "cut_turn")
    assert first.rewrites == ()


@pytest.mark.parametrize(
    ("arguments", "shown_arguments", "name"),
    [
        ('{"a": 1,}', json.dumps({"__unparsedToolInput": {"raw": '{"a": 1,}'}}), "unparsed_input"),
        ('{"a": 1,}', '{"a": 1}', "repaired_arguments"),
        ('{"a": 1}', json.dumps({"input": '{"a": 1}'}), "custom_input"),
    ],
)
def test_arguments_that_are_no_json_are_known_by_the_id_of_their_call(arguments, shown_arguments, name):
    """Our own parsers give only JSON; an engine that answers in text may give anything."""
    reader = HistoryReader()
    sampled = ToolCall(id="call_0_0", name="edit", arguments=arguments)
    reader.add_calls([sampled])
    turn = Message(
        role="assistant", content="", tool_calls=(sampled.model_copy(update={"arguments": shown_arguments}),)
    )
    ((restored,), names) = reader.restore([turn])
    assert (restored.tool_calls, names) == ((sampled,), frozenset({name}))
    other = turn.model_copy(update={"tool_calls": (sampled.model_copy(update={"name": "calc", "arguments": "{}"}),)})
    assert reader.restore([other]) == ([other], frozenset())


BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{};\n"


@pytest.mark.parametrize(
    ("first", "later", "name"),
    [
        ("Today's date: 2026-11-22\nYou edit.", "Today's date: 2026-11-23\nYou edit.", "date"),
        ("Today's date is Sunday, November 22, 2026.", "Today's date is Monday, November 23, 2026.", "date"),
        ("<current_date>2026-11-22</current_date>", "<current_date>2026-11-23</current_date>", "date"),
        ("Today's date: Sun Nov 22 2026", "Today's date: Mon Nov 23 2026", "date"),
        ("Current date and time: 2026-11-22T10:00:00.123456", "Current date and time: 2026-11-22T10:01:02.1", "date"),
        ("You edit.\n<system-reminder>3 left</system-reminder>", "You edit.", "system_reminder"),
        ("You edit.", "You edit.\n\n<system-reminder>\n2 left\n</system-reminder>\n", "system_reminder"),
    ],
)
async def test_volatile_text_of_a_harness_changes_no_history(first, later, name):
    play = Play([said("One."), said("Two.")])
    one = await play.ask(Message(role="system", content=first), TASK)
    await play.ask(Message(role="system", content=later), TASK, shown(one), user("on"))
    (segment,) = play.segments
    assert segment.rewrites == (name,)
    assert first in play.shows(segment), "the policy sees what it saw"


async def test_a_billing_header_is_not_shown_to_the_policy():
    play = Play([said("One."), said("Two.")])
    one = await play.ask(Message(role="system", content=BILLING.format("332") + "You edit."), TASK)
    await play.ask(Message(role="system", content=BILLING.format("2eb") + "You edit."), TASK, shown(one), user("on"))
    (segment,) = play.segments
    assert segment.rewrites == ("billing_header",)
    assert "billing" not in play.shows(segment)
    assert play.shows(segment).count("You edit.") == 1


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("It was due on 2026-11-22.", "It was due on 2026-11-23."),
        ("Date: 2026-11-22", "Date: 2026-11-23"),
        ("Today's date: 2026-11-22. Do A.", "Today's date: 2026-11-22. Do B."),
        ("<system-reminder>a</system-reminder>b", "<system-reminder>a</system-reminder>c"),
        ("<system-reminder>a", "<system-reminder>b"),
    ],
)
async def test_other_text_of_a_harness_is_an_edit(first, later):
    play = Play([said("One."), said("Two.")])
    one = await play.ask(SYSTEM, user(first))
    await play.ask(SYSTEM, user(later), shown(one), user("on"))
    assert play.causes == ["first", "edit"]


async def test_what_the_model_wrote_is_never_volatile():
    play = Play([said("The date is 2026-11-22."), said("Two.")])
    await play.ask(*START)
    await play.ask(*START, assistant("The date is 2026-11-23."), user("on"))
    assert play.causes == ["first", "edit"]


@pytest.mark.parametrize("piece", ["<system-reminder>", "Today's date: 2026-", "date is", "</system-reminder>", "\n"])
def test_hostile_text_takes_time_in_its_length_only(piece):
    text = piece * (400_000 // len(piece))
    began = time.process_time()
    stable_text("user", text)
    assert time.process_time() - began < 2.0


def test_the_page_has_every_row_and_every_cause():
    page = (ROOT / "docs" / "tokens.md").read_text()
    rows = [*(row.name for row in (*VOLATILE_TEXT, *CALL_REWRITES)), *EQUAL_FORMS, *get_args(BranchCause)]
    assert [name for name in rows if f"\n| `{name}` |" not in page] == []
    rules = [rule.name for rule in TEMPLATE_REWRITES]
    assert [name for name in rules if f"(`{name}`)" not in page] == []
    assert len({*rows, *rules}) == len(rows) + len(rules)
