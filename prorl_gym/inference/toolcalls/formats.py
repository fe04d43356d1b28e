"""The registry of tool-call formats: to add one, write a ``ToolParser``, and add its name and the parser below."""

from typing import Literal

from prorl_gym.inference.toolcalls.json_formats import HermesParser, LlamaParser, NemotronParser
from prorl_gym.inference.toolcalls.protocol import ToolParser
from prorl_gym.inference.toolcalls.qwen3_coder import Qwen3CoderParser
from prorl_gym.inference.toolcalls.response_template import ParseResponse, ResponseTemplateParser

ToolFormat = Literal["auto", "hermes", "qwen3_coder", "llama", "nemotron", "declared"]


def known_parsers(parse_response: ParseResponse | None = None) -> dict[str, ToolParser]:
    """Return every parser by its name, in the order in which ``auto`` tries them.

    Args:
        parse_response: of a tokenizer that declares its own format.
    """
    known: list[ToolParser] = [HermesParser(), Qwen3CoderParser(), NemotronParser(), LlamaParser()]
    if parse_response is not None:
        known.insert(0, ResponseTemplateParser(parse_response))
    return {parser.name: parser for parser in known}
