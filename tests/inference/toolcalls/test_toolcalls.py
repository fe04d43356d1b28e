import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.inference.toolcalls.json_formats import HermesParser
from prorl_gym.inference.toolcalls.protocol import MAX_CALLS, ParsedCall
from prorl_gym.inference.toolcalls.turn_parsing import parse_turn

RIGHT = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def parse_hermes(text, **options):
    return parse_turn(HermesParser(), text, (), **options)


CALL = ParsedCall("bash", '{"command": "ls"}')


def test_a_call_and_the_text_around_it():
    parsed = parse_hermes(f"I look.\n{RIGHT}\n")
    assert (parsed.text, parsed.calls, parsed.parse_errors) == ("I look.", (CALL,), ())


def test_several_calls_in_order():
    other = RIGHT.replace("bash", "python")
    assert [call.name for call in parse_hermes(RIGHT + other + RIGHT).calls] == ["bash", "python", "bash"]


def test_text_without_calls():
    assert parse_hermes("The answer is 4.\n") == parse_hermes("The answer is 4.")
    assert parse_hermes("The answer is 4.").text == "The answer is 4."


def test_a_string_may_quote_the_tags():
    command = "echo '</tool_call>' '<tool_call>'"
    text = f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"
    (call,) = parse_hermes(text).calls
    assert json.loads(call.arguments) == {"command": command}


def test_unicode_arguments_stay_readable():
    (call,) = parse_hermes('<tool_call>{"name": "f", "arguments": {"x": "é√"}}</tool_call>').calls
    assert call.arguments == '{"x": "é√"}'


def test_calls_in_thoughts_are_plans():
    parsed = parse_hermes(f"<think>Maybe {RIGHT}?</think>No. {RIGHT}")
    assert parsed.calls == (CALL,)
    assert parse_hermes(f"<think>Maybe {RIGHT}").calls == ()
    assert (
        parse_hermes(f"Maybe {RIGHT}</think>done", thinking_open=True).calls == ()
    )  # the template opened the thoughts


def test_a_broken_call_does_not_hide_its_neighbours():
    parsed = parse_hermes(f"a<tool_call>nonsense</tool_call>b{RIGHT}c<tool_call>more{RIGHT}")
    assert (parsed.text, parsed.calls, len(parsed.parse_errors)) == ("abc", (CALL, CALL), 2)


BROKEN = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>  \n </tool_call>",
    "<tool_call>ls</tool_call>",
    "<tool_call>{</tool_call>",
    "<tool_call>{}</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>null</tool_call>",
    "<tool_call>42</tool_call>",
    '<tool_call>"bash"</tool_call>',
    '<tool_call>{"name": "bash"}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "  ", "arguments": {}}</tool_call>',
    '<tool_call>{"name": null, "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["bash"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": ["ls"]}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": null}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": true}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": 1.5}</tool_call>',
    '<tool_call>{"name": "bash", "parameters": {}}</tool_call>',
    "<tool_call>{'name': 'bash', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "bash", "arguments": {"command": "a\nb"}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"x": Infinity}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"x": 1,}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "\\udfff", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {}}',
    '<tool_call>{"name": "bash", "arguments": {"command": "ls',
    '<tool_call>{"name": "bash", "arguments": {}}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {}} and more</tool_call>',
    '<tool_call>{"name": "a", "arguments": {}}{"name": "b", "arguments": {}}</tool_call>',
    '<tool_call>```json\n{"name": "bash", "arguments": {}}\n```</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"x": ' + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "bash", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
    "<function=bash></tool_call>",
]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[11:60])
def test_a_broken_call_becomes_one_complaint(text):
    parsed = parse_hermes(text)
    assert parsed.calls == ()
    assert len(parsed.parse_errors) == 1
    assert parsed.parse_errors[0].endswith("with valid JSON.")
    assert len(parsed.parse_errors[0]) < 400


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<tool_call>{</tool_call>", "The tool call is not valid JSON (Expecting property name"),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '"arguments" of the tool call must be a JSON object, not a string.',
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', "The tool call was not closed with </tool_call>."),
        ('<tool_call>{"arguments": {}}</tool_call>', 'The tool call has no "name" (a string).'),
    ],
)
def test_complaints_tell_the_model_what_is_wrong(text, complaint):
    assert parse_hermes(text).parse_errors[0].startswith(complaint)


def test_a_flood_of_calls_is_cut():
    parsed = parse_hermes(RIGHT * (MAX_CALLS + 5))
    assert len(parsed.calls) == MAX_CALLS
    assert parsed.parse_errors == (f"More than {MAX_CALLS} tool calls in one turn: the rest was ignored.",)


fragments = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                '{"name": "f", "arguments": ',
                "{}",
                "}",
                "{",
                "[",
                '"',
            ]
        ),
    ),
    max_size=20,
).map("".join)


@BOUNDED
@given(text=fragments)
@example(text="<tool_call>" * 1000)
@example(text="</think>" * 1000)
def test_no_text_raises_and_every_call_is_well_formed(text):
    parsed = parse_hermes(text)
    assert len(parsed.calls) + len(parsed.parse_errors) <= MAX_CALLS + 1
    for call in parsed.calls:
        assert call.name.strip() == call.name != ""
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("depth", [101, 2000, 9000, 50_000])
def test_arguments_that_are_nested_too_deep_are_a_complaint(depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    parsed = parse_hermes(f'<tool_call>{{"name": "bash", "arguments": {deep}}}</tool_call>')
    assert not parsed.calls
    assert "nested too deeply" in parsed.parse_errors[0]


def test_arguments_of_common_depth_are_taken():
    deep = '{"a":' * 99 + "1" + "}" * 99
    assert parse_hermes(f'<tool_call>{{"name": "bash", "arguments": {deep}}}</tool_call>').calls
