"""The tokenizers and templates of these tests, loaded once."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from prorl_gym.inference.chat import load_codec

QWEN = Path(__file__).parents[2].parent / "shared" / "tokenizers" / "qwen"
TEMPLATES = {
    "qwen3": "chat_template.jinja",
    "qwen2.5": "chat_template.qwen2.5.jinja",
    "qwen3-coder": "chat_template.qwen3-coder.jinja",
    "qwen3.5": "chat_template.qwen3.5.jinja",
}
BOUNDED = settings(derandomize=True, max_examples=60, deadline=None, database=None)

needs_qwen = pytest.mark.skipif(not QWEN.is_dir(), reason="the Qwen tokenizer is not beside the checkout")
ALL = ["small", *(pytest.param(name, marks=needs_qwen) for name in TEMPLATES)]
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
    options = {} if thinking is None else {"enable_thinking": thinking}
    if name == "small":
        return load_codec("small", template_options=options)
    return load_codec(str(QWEN), QWEN / TEMPLATES[name], options)
