import json
import time
from pathlib import Path

import pytest
import random_calls
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from token_codecs import ALL, BOUNDED, TOOLS, WITHOUT_THOUGHTS, codec

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.tokens.chat_codec import choose_parser
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.tokens.tokenizer import SMALL_DIRECTORY, load_tokenizer
from prorl_gym.inference.toolcalls.formats import MAX_CHARACTERS, ResponseTemplateParser, known_parsers
from prorl_gym.inference.toolcalls.turn_parsing import MAX_CALLS, ParsedCall, parse_turn

CORPUS, TYPED = (
    [json.loads(line) for line in Path(__file__).with_name(name).read_text().splitlines()]
    for name in ("broken_calls.jsonl", "typed_values.jsonl")
)
KNOWN = known_parsers()

BASH = [json.loads(Path(__file__).with_name("bash_tool.json").read_text())]
DECLARATION = json.loads(Path(__file__).with_name("declaration.json").read_text())

RIGHT = {
    "hermes": '<tool_call>\n{"arguments": {"command": "ls"}, "name": "bash"}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"parameters": {"command": "ls"}, "name": "bash"}',
    "nemotron": '<TOOLCALL>[{"arguments": {"command": "ls"}, "name": "bash"}]</TOOLCALL>',
}
CALL = ParsedCall("bash", '{"command": "ls"}')


def arguments(form, text):
    (call,) = KNOWN[form].parse(text, BASH).calls
    return json.loads(call.arguments)


def hermes(written):
    return f'<tool_call>{{"name": "bash", "arguments": {written}}}</tool_call>'


def xml(tool="bash", /, **values):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


def test_the_corpus_covers_every_form():
    assert len(CORPUS) >= 100
    assert {row["form"] for row in CORPUS} == set(KNOWN)
    assert len({(row["form"], row["text"]) for row in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("row", CORPUS, ids=lambda row: f"{row['form']}: {row['text'][:50]!r}")
def test_a_broken_call_becomes_what_the_model_can_learn_from(row):
    parsed = KNOWN[row["form"]].parse(row["text"], BASH)
    assert (len(parsed.calls), len(parsed.parse_errors)) == (row["calls"], row["complaints"])
    assert row["says"] in parsed.parse_errors[0]
    assert " Write " in parsed.parse_errors[0]
    assert len(parsed.parse_errors[0]) < 400


@pytest.mark.parametrize("form", RIGHT)
def test_members_come_in_any_order(form):
    assert KNOWN[form].parse(RIGHT[form], BASH).calls == (CALL,)


@pytest.mark.parametrize("form", RIGHT)
def test_thoughts_are_not_acts(form):
    planned = parse_turn(KNOWN[form], f"<think>Maybe {RIGHT[form]}</think>\n\n{RIGHT[form]}", BASH)
    assert planned.calls == (CALL,)
    assert planned.text == f"<think>Maybe {RIGHT[form]}</think>"
    for text in (f"<think>{RIGHT[form]}", f"<think>{RIGHT[form]}</think>", f"<think>a</think>\n<think>{RIGHT[form]}"):
        assert parse_turn(KNOWN[form], text, BASH).calls == ()


def test_a_quoted_end_of_thoughts_hides_no_call():
    text = '<tool_call>{"name": "bash", "arguments": {"command": "echo </think>"}}</tool_call>'
    assert len(parse_turn(KNOWN["hermes"], text, BASH).calls) == 1


def test_unicode_arguments_stay_readable():
    (call,) = KNOWN["hermes"].parse(hermes('{"x": "é√"}'), ()).calls
    assert call.arguments == '{"x": "é√"}'


def test_a_broken_call_does_not_hide_its_neighbours():
    right = RIGHT["hermes"]
    parsed = KNOWN["hermes"].parse(f"a<tool_call>nonsense</tool_call>b{right}c<tool_call>more{right}", ())
    assert (parsed.text, parsed.calls, len(parsed.parse_errors)) == ("abc", (CALL, CALL), 2)


@pytest.mark.parametrize("depth", [101, 2000, 9000, 50_000])
def test_arguments_that_are_nested_too_deep_are_a_complaint(depth):
    assert KNOWN["hermes"].parse(hermes('{"a":' * 99 + "1" + "}" * 99), ()).calls
    parsed = KNOWN["hermes"].parse(hermes('{"a":' * depth + "1" + "}" * depth), ())
    assert not parsed.calls
    assert "nested too deeply" in parsed.parse_errors[0]


def test_a_number_of_any_length_is_a_complaint():
    assert len(KNOWN["hermes"].parse(hermes('{"x": ' + "9" * 5000 + "}"), ()).parse_errors) == 1


def test_blanks_between_thoughts_and_speech_stay():
    assert parse_turn(KNOWN["hermes"], "<think>\na\n</think>\n\nb ", ()).text == "<think>\na\n</think>\n\nb"


@pytest.mark.parametrize("row", TYPED, ids=lambda row: f"{row['key']}: {row['written'][:30]!r}")
def test_values_are_read_by_the_schema(row):
    assert arguments("qwen3_coder", xml(**{row["key"]: row["written"]})) == {row["key"]: row["value"]}


@pytest.mark.parametrize(("key", "written"), [("seconds", "1" * 5000), ("files", "[" * 5000)])
def test_values_that_no_json_parser_takes_are_text(key, written):
    assert arguments("qwen3_coder", xml(**{key: written})) == {key: written}


@pytest.mark.parametrize("form", RIGHT)
@settings(BOUNDED, max_examples=400)
@given(sent=random_calls.turns)
def test_an_argument_with_examples_of_calls_is_whole_or_a_complaint(form, sent):
    sent = sent[:1] if form == "llama" else sent
    assume(form != "qwen3_coder" or not random_calls.closes_itself(sent))
    parsed = KNOWN[form].parse(
        "So:\n" * (form != "llama") + "\n".join(write(form, *call) for call in sent), random_calls.TOOLS
    )
    ours, rest = [(call.name, json.loads(call.arguments)) for call in parsed.calls], iter(sent)
    assert all(call in rest for call in ours), "something else is called"
    assert (ours == sent) != bool(parsed.parse_errors)
    assert ours == sent or form == "qwen3_coder"


def write(form, name, given):
    call = json.dumps({"name": name, "parameters" if form == "llama" else "arguments": given}, ensure_ascii=False)
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    written = {"hermes": f"<tool_call>\n{call}\n</tool_call>", "nemotron": f"<TOOLCALL>[{call}]</TOOLCALL>"}
    return written.get(form, call) if form != "qwen3_coder" else xml(name, **shown)


def test_values_without_a_schema_are_text():
    (call,) = KNOWN["qwen3_coder"].parse(xml(command="5"), ()).calls
    assert call.arguments == '{"command": "5"}'


def test_llama_answers_in_json_are_answers():
    for text in ('{"answer": 4}', '{"name": "Ada"}', "{4}", '["a"]', "4", "{"):
        parsed = KNOWN["llama"].parse(text, BASH)
        assert (parsed.text, parsed.calls, parsed.parse_errors) == (text, (), ())


def test_llama_calls_after_the_tag_may_follow_text():
    parsed = KNOWN["llama"].parse("I look. <|python_tag|>" + RIGHT["llama"], BASH)
    assert (parsed.text, parsed.calls) == ("I look.", (CALL,))


@pytest.mark.parametrize("form", RIGHT)
def test_floods_are_cut(form):
    flood = RIGHT[form] * 50 if form != "nemotron" else f"<TOOLCALL>[{', '.join(['{}'] * 50)}]</TOOLCALL>"
    parsed = KNOWN[form].parse(flood, BASH)
    assert len(parsed.calls) + len(parsed.parse_errors) <= MAX_CALLS + 1
    if form == "hermes":
        assert len(parsed.calls) == MAX_CALLS
        assert parsed.parse_errors == (f"More than {MAX_CALLS} tool calls in one turn: the rest was ignored.",)


HOSTILE = [
    "<tool_call>",
    "<tool_call><function=a><parameter=b>",
    "<parameter=b></parameter>",
    "</parameter> ",
    "<TOOLCALL>[",
    "{",
    '{"name":"',
    '{"name": "a", ',
    "<|python_tag|>",
    "<function=",
    "<",
    " ",
    "[",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("form", RIGHT)
def test_the_work_is_linear(form, piece):
    """Four times the text may cost no sixteen times the time: the bound is far above a slow machine's noise."""
    text = "<tool_call><function=a>" * (form == "qwen3_coder") + piece * (400_000 // len(piece))
    began = time.process_time()
    KNOWN[form].parse(text, BASH)
    assert time.process_time() - began < 1.5


pieces = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from([*HOSTILE, *RIGHT.values(), "</tool_call>", "</function>", "</TOOLCALL>", "]", "}", "\n", '"']),
    ),
    max_size=16,
).map("".join)


@pytest.mark.parametrize("form", RIGHT)
@BOUNDED
@given(text=pieces)
def test_nothing_raises_and_every_call_is_well_formed(form, text):
    parsed = parse_turn(KNOWN[form], text, BASH)
    for call in parsed.calls:
        assert call.name.strip() == call.name != ""
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", [*ALL, *WITHOUT_THOUGHTS])
def test_the_form_is_found_in_the_template(name):
    wanted = {
        "llama": "llama",
        "qwen3-coder": "qwen3_coder",
        "qwen3.5": "qwen3_coder",
        "qwen3.5-off": "qwen3_coder",
    }.get(name, "hermes")
    assert codec(name).parser.name == wanted


def test_a_form_without_a_parser_is_refused(tmp_path):
    text, opening = (SMALL_DIRECTORY / "chat_template.jinja").read_text(), '<tool_call>\\n{"name": \' +'
    assert opening in text
    template = tmp_path / "template.jinja"
    template.write_text(text.replace(opening, opening.replace("tool_call", "call")))
    with pytest.raises(EngineError) as caught:
        load_codec("small", template)
    assert caught.value.kind is FailureKind.TEMPLATE_UNSAFE
    assert caught.value.what.endswith("no known form of tool calls reads back the one that it writes.")
    assert "'tool_format'" in caught.value.fix
    assert load_codec("small", template, tool_format="hermes").parser.name == "hermes"


def test_a_declaration_that_is_not_there_is_refused():
    with pytest.raises(EngineError, match="declares no response_template"):
        load_codec("small", tool_format="declared")


@pytest.fixture
def declaring():
    chat = load_codec("small")
    tokenizer = load_tokenizer("small")
    if not hasattr(tokenizer.raw, "response_template"):
        pytest.skip("this transformers knows no response_template")
    tokenizer.raw.response_template = DECLARATION
    chat.tokenizer = tokenizer
    return chat


def test_a_declared_form_comes_first_and_reads_its_template(declaring):
    parser = choose_parser(declaring, "auto")
    assert parser.name == "declared"
    parsed = parser.parse("I look.\n" + RIGHT["hermes"], BASH)
    assert (parsed.text, parsed.calls) == ("I look.", (CALL,))


@pytest.mark.parametrize("text", [row["text"] for row in CORPUS if row["form"] == "hermes"])
def test_a_declared_form_never_raises(declaring, text):
    parsed = choose_parser(declaring, "declared").parse(text, TOOLS)
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.calls)


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {"content": 5},
        {"tool_calls": {}},
        {"tool_calls": [None]},
        {"tool_calls": [{"function": 5}]},
        {"tool_calls": [{"function": {"name": "a", "arguments": "x"}}]},
        {"tool_calls": [{"function": {"name": "a", "arguments": {"x": object()}}}]},
        {"tool_calls": [{"function": {"name": 5, "arguments": {}}}]},
    ],
)
def test_what_a_declaration_gives_is_not_trusted(message):
    parsed = ResponseTemplateParser(lambda text, tools: message).parse("x", ())
    assert parsed.calls == ()
    assert len(parsed.parse_errors) == bool(isinstance(message, dict) and isinstance(message.get("tool_calls"), list))


def test_a_declaration_is_not_shown_more_than_it_can_read():
    parsed = ResponseTemplateParser(lambda text, tools: pytest.fail(text)).parse("x" * (MAX_CHARACTERS + 1), ())
    assert parsed.parse_errors == (
        "The turn is too long to look for tool calls in. Write tool calls exactly as the instructions show them.",
    )


def test_thoughts_of_a_response_template_are_separated():
    message = {"thinking": "hm", "content": "yes"}
    assert ResponseTemplateParser(lambda text, tools: message).parse("x", ()).text == "<think>\nhm\n</think>\n\nyes"


def test_a_form_that_the_template_does_not_show_is_taken_with_a_word(caplog):
    assert load_codec("small", tool_format="llama").parser.name == "llama"
    assert "tool_format: llama does not read back the calls" in caplog.text
    caplog.clear()
    assert load_codec("small", tool_format="hermes").parser.name == "hermes"
    assert not caplog.text
