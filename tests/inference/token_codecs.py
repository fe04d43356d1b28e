"""The tokenizers and templates of these tests, loaded once."""

import os
import runpy
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.template_check import check_template, load_codec
from prorl_gym.inference.tokens.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
QWEN = Path(os.environ.get("PRORL_GYM_QWEN", ROOT.parent / "shared" / "tokenizers" / "qwen"))
NO_QWEN = f"normal outside CI: name a directory with Qwen's tokenizer and templates in PRORL_GYM_QWEN (or fill {QWEN})"
TEMPLATES = {
    "qwen3": "chat_template.jinja",
    "qwen2.5": "chat_template.qwen2.5.jinja",
    "qwen3-coder": "chat_template.qwen3-coder.jinja",
    "qwen3.5": "chat_template.qwen3.5.jinja",
}
BOUNDED = settings(derandomize=True, max_examples=60, deadline=None, database=None)

needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason=NO_QWEN)
OURS = ["small", "llama"]
ALL = [*OURS, *(pytest.param(name, marks=needs_qwen) for name in TEMPLATES)]
WITHOUT_THOUGHTS = [pytest.param(name, marks=needs_qwen) for name in ("qwen3-off", "qwen3.5-off")]
"""Templates that write an empty thought before the model speaks."""
OPENS_THOUGHTS = "assistant\\n<think>\\n' + ('</think>' if '/no_think' in messages[0].content else '') -}}"
"""The end of a template that opens the thoughts of a turn unless its first message forbids them (as Nemotron's do)."""
BOTH = ["small", pytest.param("qwen3", marks=needs_qwen)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Work out a term.",
            "parameters": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]},
        },
    }
]


@cache
def codec(name, thinking=None):
    if name.endswith("-off"):
        return codec(name.removesuffix("-off"), False)
    options = {} if thinking is None else {"enable_thinking": thinking}
    if name == "small":
        return load_codec("small", template_options=options)
    if name == "small-opens":
        tokenizer = load_tokenizer("small")
        tokenizer.raw.chat_template = tokenizer.chat_template.replace("assistant\\n' -}}", OPENS_THOUGHTS)
        check_template(ChatCodec(tokenizer))
        return ChatCodec(tokenizer)
    if name == "llama":
        with TemporaryDirectory() as directory:
            runpy.run_path(str(ROOT / "scripts" / "llama_style.py"))["make"](Path(directory))
            return load_codec(directory, template_options=options)
    chat = ChatCodec(_with_template((QWEN / TEMPLATES[name]).read_text()), options)
    check_template(chat)
    return chat


@cache
def _qwen():
    return load_tokenizer(str(QWEN))


def _with_template(template):
    """The Qwen tokenizer with another template; its 11 MB are read once."""
    raw = copy(_qwen().raw)
    raw.chat_template = template
    tokenizer = Tokenizer(raw, "qwen")
    tokenizer.__dict__["_without_control_tokens"] = _qwen()._without_control_tokens  # noqa: SLF001
    return tokenizer
