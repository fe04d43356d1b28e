"""The start-up check of a chat template: refuse at once what would corrupt trajectories silently.

Short synthetic histories are rendered whole and compared with what ``ChatCodec`` builds by appending. History that a
template rewrites (old thoughts that it drops, say) is no fault, since history is never rendered again; a delta that
differs from what the whole rendering ends in is one.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prorl_gym.errors import EngineError
from prorl_gym.inference.tokens.chat_codec import SAMPLE_NAME, SAMPLE_TOOL, ChatCodec, Tools
from prorl_gym.inference.tokens.tokenizer import ControlTokenEscaper, load_tokenizer
from prorl_gym.inference.toolcalls.formats import ToolFormat
from prorl_gym.records import Message, ToolCall
from prorl_gym.thoughts import THINK_CLOSE, THINK_OPEN

log = logging.getLogger(__name__)

_TOOLS: Tools = [SAMPLE_TOOL]
_SYSTEM = Message(role="system", content="You add numbers.")
_TASK = Message(role="user", content="What is 2 + 2, and é, ü, √9?\n\n  {1: [2]}")
_CALL = Message(
    role="assistant",
    content="I look.",
    tool_calls=(ToolCall(id="call00000", name=SAMPLE_NAME, arguments='{"words": "two", "count": 2}'),),
)
_RESULTS = (
    Message(role="tool", content='  4\n"four" <b>&amp;</b> é', tool_call_id="call00000", name=SAMPLE_NAME),
    Message(role="tool", content="second", tool_call_id="call00000", name=SAMPLE_NAME),
)
_ANSWER = Message(role="assistant", content="It is 4.")
_MORE = Message(role="user", content="And 3 + 3?")


def load_codec(
    source: str,
    chat_template: Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    tool_format: ToolFormat = "auto",
) -> ChatCodec:
    """Load a tokenizer (see ``load_tokenizer``) and check that its template can be extended token by token.

    ``template_options`` and ``tool_format``: see ``ChatCodec``. Raises ``ConfigError``: the tokenizer cannot be loaded;
    ``EngineError`` (``TEMPLATE_UNSAFE``).
    """
    codec = ChatCodec(load_tokenizer(source, chat_template), template_options, tool_format)
    check_template(codec)
    return codec


def check_template(codec: ChatCodec) -> None:
    """Check that conversations can be extended by appending ids. Raises ``EngineError`` (``TEMPLATE_UNSAFE``)."""
    _check_delta(codec, [_SYSTEM, _TASK, _CALL], _RESULTS[:1], _TOOLS)
    _check_delta(codec, [_SYSTEM, _TASK, _CALL], _RESULTS, _TOOLS)
    _check_delta(codec, [_TASK, _ANSWER], [_MORE], _TOOLS)
    _check_delta(codec, [_TASK, _ANSWER], [_MORE], ())
    if codec.tokenizer.encode_trusted(codec.terminator) != [codec.terminator_id]:
        raise codec.template_error(f"its terminator {codec.terminator!r} is not one token")
    _check_contents_shown(codec)
    _check_untrusted(codec)
    _check_no_clock(codec)
    _check_thoughts(codec)
    _ = codec.parser  # it must be known how to read calls
    _report_rewrites(codec)


def _check_delta(codec: ChatCodec, history: Sequence[Message], new: Sequence[Message], tools: Tools) -> None:
    escaper = ControlTokenEscaper(codec.tokenizer)
    whole = codec.render(escaper, [*history, *new], tools, add_generation_prompt=True)
    delta = codec.render_delta(escaper, new, tools)
    cut = len(whole) - len(delta)
    if not delta or whole[cut:] != delta or not whole[:cut].endswith(codec.terminator):
        raise codec.template_error(f"a {new[-1].role} message is rendered differently after other turns")
    encode = codec.tokenizer.encode_trusted
    if encode(whole[:cut]) + encode(delta) != encode(whole):
        raise codec.template_error("tokens merge across the end of a turn")
    if escaper.encode_in_pieces(whole) != encode(whole):
        raise codec.template_error("control tokens swallow the text next to them")


def _check_contents_shown(codec: ChatCodec) -> None:
    prompt = codec.decode(codec.encode_prompt([_SYSTEM, _TASK], _TOOLS))
    if _SYSTEM.content not in prompt or "What is 2 + 2" not in prompt:
        raise codec.template_error("it leaves out system or user messages")
    if SAMPLE_NAME not in prompt:
        raise codec.template_error("it does not show tools to the model")
    shown = codec.decode(codec.encode_delta(_RESULTS, _TOOLS))
    if "four" not in shown or "second" not in shown:
        raise codec.template_error("it leaves out tool results")


def _check_untrusted(codec: ChatCodec) -> None:
    """Check that a message that spells every control string adds no control token."""
    hostile = " ".join(codec.tokenizer.control_ids)
    control = set(codec.tokenizer.control_ids.values())
    for role in ("user", "tool"):
        harmless, attack = (
            [token for token in codec.encode_delta([Message(role=role, content=content)], _TOOLS) if token in control]
            for content in ("x", hostile)
        )
        if harmless != attack:
            raise codec.template_error(f"a {role} message can write control tokens")


def _check_no_clock(codec: ChatCodec) -> None:
    """Check that a prompt does not show the date: replicas of a group would differ, and so would a retry."""
    stopped = {"strftime_now": "not a function", **codec.template_options}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    try:
        codec.tokenizer.render(messages, _TOOLS, stopped, add_generation_prompt=True)
    except Exception:  # everything else was rendered before: only the clock can fail here
        fix = "Pin the date with 'template_options', for example date_string: '26 Jul 2024'."
        raise codec.template_error("it shows today's date to the model", fix) from None


def _check_thoughts(codec: ChatCodec) -> None:
    """Check that the template puts thoughts, where it shows any, between the tags by which turns are read."""
    thoughts = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "It is a sum.")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s", **thoughts}]
    before, shown, after = codec.render_plain(turns, (), add_generation_prompt=False).partition("It is a sum.")
    is_read = before.rstrip().endswith(THINK_OPEN) and after.lstrip().startswith(THINK_CLOSE)
    if shown and not is_read and codec.parser.name != "declared":  # a declaration reads its own tags
        what = f"it writes the thoughts of a turn after {before.split()[-1][-40:]!r}, not after {THINK_OPEN}"
        raise codec.template_error(what, f"Set 'chat_template' to one with {THINK_OPEN} and {THINK_CLOSE}.")


def _report_rewrites(codec: ChatCodec) -> None:
    """Log which histories are rewritten for this template, and which it refuses even so: agent programs send them."""
    source, rules = codec.tokenizer.source, codec.rewrites
    for rule in rules:
        try:
            for example in rule.examples:
                codec.encode_prompt(example, _TOOLS)
        except EngineError as error:
            log.warning("%s\nSet 'chat_template' to another one for agents whose histories need it.", error.what)
    if rules:
        names = "; ".join(f"{rule.name} ({rule.what})" for rule in rules)
        log.info("histories that the chat template of %s refuses are rewritten: %s", source, names)
