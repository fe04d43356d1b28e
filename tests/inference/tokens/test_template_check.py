import json
import shutil

import pytest
from token_codecs import ALL, codec

from prorl_gym.errors import ConfigError, EngineError, FailureKind
from prorl_gym.inference.tokens.template_check import check_template, load_codec
from prorl_gym.inference.tokens.tokenizer import SMALL_DIRECTORY

RIGHT = (SMALL_DIRECTORY / "chat_template.jinja").read_text()
CHATML = "{{- '<|im_start|>' + message.role + '\n' + message.content "

BROKEN = {
    "no terminator": (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}",
        "an assistant turn does not end in a control token",
    ),
    "drops tool results": (
        RIGHT.replace("+ message.content + '\\n</tool_response>'", "+ '\\n</tool_response>'"),
        "it leaves out tool results",
    ),
    "hides tools": (RIGHT.replace("{%- for tool in tools -%}", "{%- for tool in [] -%}"), "does not show tools"),
    "fails on tools": (
        RIGHT.replace("{%- if message.role == 'tool' -%}", "{%- if message.role == 'tool' -%}{{ 1 / 0 }}"),
        "it fails on the roles system, user, assistant, assistant, tool (ZeroDivisionError",
    ),
    "counts messages": (
        RIGHT.replace("'<|im_start|>user'", "'<|im_start|>user ' + (loop.index | string)"),
        "a tool message is rendered differently after other turns",
    ),
    "thoughts in other tags": (
        RIGHT.replace("+ message.content -}}", "+ '[THINK]' + (message.reasoning_content or '') + message.content -}}"),
        "it writes the thoughts of a turn after '[THINK]', not after <think>",
    ),
    "not jinja": ("{% for %}", "it fails on the roles user, assistant (TemplateSyntaxError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_unsafe_template_is_refused_with_the_reason(case, tmp_path):
    text, reason = BROKEN[case]
    assert text != RIGHT
    template = tmp_path / "template.jinja"
    template.write_text(text)
    with pytest.raises(EngineError) as caught:
        load_codec("small", template)
    assert caught.value.kind is FailureKind.TEMPLATE_UNSAFE
    assert reason in caught.value.what
    assert "chat template of small:" in caught.value.what
    appended = "whose turns are only ever appended, each closed by one control token."
    tagged = "with <think> and </think>."
    assert caught.value.fix == f"Set 'chat_template' to one {tagged if 'thoughts' in case else appended}"


NEEDED = {
    "llama": {"split_turns"},
    "qwen3-coder": {"user_before_result", "wrapped_arguments"},
    "qwen3.5": {"joined_system", "late_system", "added_user", "user_before_result", "wrapped_arguments"},
}


@pytest.mark.parametrize("name", ALL)
def test_the_start_finds_and_names_the_rewrites_that_a_template_needs(name, caplog):
    caplog.set_level("INFO")
    check_template(codec(name))
    assert {rule.name for rule in codec(name).rewrites} == NEEDED.get(name, set())
    assert all(f"{rule} (" in caplog.text for rule in NEEDED.get(name, ()))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_template_that_refuses_a_rewritten_history_is_named_at_the_start(tmp_path, caplog):
    lone = "messages | length == 2 and messages[1].role == 'system'"
    twice = "not loop.first and loop.previtem.role == message.role == 'user'"
    loop = "{%- for message in messages -%}"
    template = tmp_path / "template.jinja"
    template.write_text(
        f"{{{{ 1 / 0 if {lone} else '' }}}}" + RIGHT.replace(loop, f"{loop}{{{{ 1 / 0 if {twice} else '' }}}}")
    )
    load_codec("small", template)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "it fails on the roles user, user (ZeroDivisionError" in warning


def test_control_tokens_that_swallow_blanks_are_refused(tmp_path):
    shutil.copytree(SMALL_DIRECTORY, tmp_path, dirs_exist_ok=True)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in definition["added_tokens"]:
        token["rstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(EngineError, match="tokens merge across the end of a turn"):
        load_codec(str(tmp_path))


def test_a_directory_that_holds_no_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_codec(str(tmp_path))
    assert str(tmp_path) in caught.value.what
    assert "tokenizer.json" in caught.value.fix


def test_a_missing_template_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jinja: cannot be read"):
        load_codec("small", tmp_path / "absent.jinja")


def test_a_template_that_shows_the_date_must_have_it_pinned(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{%- set day = date_string or strftime_now('%d %b %Y') -%}"
        + RIGHT.replace("'You can call tools.", "day + ' You can call tools.")
    )
    with pytest.raises(EngineError, match="shows today's date") as caught:
        load_codec("small", template)
    assert "date_string" in caught.value.fix
    pinned = load_codec("small", template, {"date_string": "26 Jul 2024"})
    assert pinned.template_options["date_string"] == "26 Jul 2024"
