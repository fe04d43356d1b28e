"""What vLLM itself makes of a text or a length, in the environment of ``.ci/vllm``: JSON lines in, JSON lines out.

A question is ``{"parser", "text", "tools"}``, answered by the calls of that parser of vLLM's, or
``{"messages": length}``, answered by what vLLM says of a prompt or an answer that does not fit into so long a context.
"""
# ruff: noqa: SLF001 - the refusals are in methods of vLLM's own

import json
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.input_processor import InputProcessor

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.add_tokens(["<|python_tag|>"])


def parse(question: dict[str, Any]) -> list[tuple[str, str]]:
    shown = {"messages": [{"role": "user", "content": "q"}], "tools": question["tools"]}
    request = ChatCompletionRequest.model_validate(shown)
    parser = ToolParserManager.get_tool_parser(question["parser"])(tokenizer, request.tools)
    said = parser.extract_tool_calls(question["text"], request)
    return [(call.function.name, call.function.arguments) for call in said.tool_calls]


def messages(length: int) -> list[str]:
    """Refusals of the completions route (its parameters, its prompt, its limit), and of the responses route."""
    model: Any = SimpleNamespace(max_model_len=length, runner_type="generate")

    def checks(max_tokens: int) -> TokenizeParams:
        asked = {"prompt": [5], "max_tokens": max_tokens}
        return CompletionRequest.model_validate(asked).build_tok_params(model)

    def processor(*, supports_images: bool) -> Any:
        return SimpleNamespace(skip_prompt_length_check=False, model_config=model, supports_mm_inputs=supports_images)

    def check_length(count: int, *, supports_images: bool = False) -> None:
        InputProcessor._validate_prompt_len(processor(supports_images=supports_images), count, "decoder")

    words: Any = SimpleNamespace(max_chars_per_token=9)
    route: Any = SimpleNamespace(model_config=model, _extract_prompt_len=len, create_error_response=lambda **said: said)
    refused: list[Callable[[], object]] = [
        lambda: checks(length + 1),
        lambda: checks(8)._text_len_check(words, "x" * 99 * length),
        lambda: checks(8)._token_len_check(None, [5] * (length + 9)),
        lambda: checks(8)._token_len_check(None, [5] * (length + 1)),
        lambda: get_max_tokens(length, None, length + 1, {}),
        lambda: SamplingParams(max_tokens=0),
        lambda: check_length(length),
        lambda: check_length(length + 1),
        lambda: check_length(length + 1, supports_images=True),
        lambda: OpenAIServingResponses._validate_generator_input(route, [5] * length),
    ]
    return [said_by(one) for one in refused]


def said_by(refuse: Callable[[], Any]) -> str:
    try:
        return refuse()["message"]
    except (ValueError, VLLMValidationError) as error:
        return str(error)


def answer(question: dict[str, Any]) -> object:
    return messages(question["messages"]) if "messages" in question else parse(question)


logging.disable()  # vLLM logs what it cannot read
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
