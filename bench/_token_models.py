"""The tokenizers and templates that ``bench tokens`` measures, and how a canonical model of each spells its turns."""

import json
import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.template_check import load_codec

DIRECTORY = "PRORL_GYM_QWEN"
"""Environment variable: a directory with Qwen's ``tokenizer.json`` and its templates as ``chat_template*.jinja``."""

_LLAMA = Path(__file__).parent.parent / "scripts" / "llama_style.py"
_NAMES = {"chat_template.jinja": "qwen3"}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "What to run."},
                    "seconds": {"type": "integer", "description": "How long it may take."},
                },
                "required": ["command"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Model:
    """A template with its tokenizer."""

    name: str
    codec: ChatCodec
    thinks: bool
    """A model of this family writes its thoughts down before it speaks."""

    def render_turn(self, text: str, arguments: Mapping[str, Any] | None = None, thoughts: str = "") -> str:
        """Return a turn the way the template writes it."""
        opening = "" if self.codec.opens_thinking else "<think>\n"
        thought = f"{opening}{thoughts}\n</think>\n\n" if self.thinks and thoughts else ""
        if arguments is None:
            return thought + text
        match self.codec.parser.name:
            case "llama":
                return f'{{"name": "bash", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
            case "qwen3_coder":
                values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
                blank = "\n\n" if text else ""
                return f"{thought}{text}{blank}<tool_call>\n<function=bash>\n{values}</function>\n</tool_call>"
            case _:
                call = f'{{"name": "bash", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
                return thought + text + ("\n" if text else "") + f"<tool_call>\n{call}\n</tool_call>"


def tokenizer_directory() -> Path | None:
    """Return the directory of the real tokenizer; ``None``: only the small one is there."""
    named = os.environ.get(DIRECTORY)
    return Path(named).expanduser() if named else None


def load_models() -> list[Model]:
    """Load every template there is: of the real tokenizer when it is named, of the small one otherwise.

    Raises:
        ConfigError: the directory holds no tokenizer.
    """
    real = tokenizer_directory()
    if real is None:
        found = [Model("small", load_codec("small"), thinks=False)]
    else:
        templates = sorted(real.glob("chat_template*.jinja"))
        found = [_model(_name(file), load_codec(str(real), file)) for file in templates]
    with TemporaryDirectory() as directory:
        make = runpy.run_path(str(_LLAMA))["make"]
        make(Path(directory), *([real] if real else []))
        return [*found, _model("llama style", load_codec(directory))]


def _model(name: str, codec: ChatCodec) -> Model:
    return Model(name, codec, thinks="</think>" in codec.tokenizer.chat_template)


def _name(file: Path) -> str:
    return _NAMES.get(file.name, file.name.removeprefix("chat_template.").removesuffix(".jinja"))
