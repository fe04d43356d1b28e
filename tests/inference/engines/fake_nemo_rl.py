"""A server that speaks NeMo-RL's chat route, right or wrong as told.

It renders messages with whatever it is given and puts what the last assistant message carries over the beginning: up
to the N-th end-of-sequence token of its rendering, N being how many there are up to the last assistant turn.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from fake_server import FakeServer, falling, sampled

from prorl_gym.inference.tokens.chat_codec import ChatCodec

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], list[int]]
"""Messages, tools, and whether the assistant is to speak next; to ids."""


def three_ids(messages, tools, add_generation_prompt):
    return [5, 6, 7]


def renderer(chat: ChatCodec, **options: Any) -> Render:
    """Render as a server does that knows only strings: whatever spells a control token becomes one."""

    def as_template(message: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in message.items() if key in ("role", "content", "tool_call_id", "name")}
        if "tool_calls" in message:
            calls = [call["function"] for call in message["tool_calls"]]
            kept["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": json.loads(call["arguments"])}}
                for call in calls
            ]
        return kept

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        shown = [as_template(message) for message in messages]
        text = chat.tokenizer.render(shown, tools, options, add_generation_prompt=add_generation_prompt)
        return chat.tokenizer.encode_trusted(text)

    return render


@dataclass
class FakeNemoRl(FakeServer):
    render: Render = three_ids
    eos: int = 2
    max_model_len: int = 4096
    validation: tuple[float, float] | None = None
    """The temperature and top_p of the trainer's validation; it asserts these or 1 and 1. See ``_refusal``."""

    def routes(self, app: web.Application):
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)

    async def _tokenize(self, request: web.Request):
        return web.json_response({"count": 1, "max_model_len": self.max_model_len, "tokens": [5], "token_strs": None})

    async def _chat(self, request: web.Request):
        body = await self.remember(request)
        problem = self._refusal(body)
        if problem:
            self.error = problem
            return self.refuse(500)
        try:
            prompt = self.prompt(body)
        except ValueError as error:
            self.error = str(error)
            return self.refuse(500)
        if len(prompt) >= self.max_model_len:
            self.error = f"This model's maximum context length is {self.max_model_len} tokens."
            return self.refuse(400)
        body["max_tokens"] = min(body["max_tokens"], self.max_model_len - len(prompt))
        return await self.complete(request, body, prompt)

    async def complete(self, request: web.Request, body: dict[str, Any], prompt: list[int]) -> web.StreamResponse:
        return await self.respond(request, "", lambda finish: chat_completion(body, prompt, self.ids, finish))

    def prompt(self, body: dict[str, Any]) -> list[int]:
        messages, tools = body["messages"], body.get("tools", [])
        rendered = self.render(messages, tools, True)
        carrying = [at for at, message in enumerate(messages) if message.get("prompt_token_ids")]
        if not carrying:
            return rendered
        last = messages[carrying[-1]]
        seen = [*last["prompt_token_ids"], *last["generation_token_ids"]]
        wanted = self.render(messages[: carrying[-1] + 1], tools, False).count(self.eos)
        ends = [at for at, token in enumerate(rendered) if token == self.eos]
        if len(ends) < wanted:
            raise ValueError(f"EOS token #{wanted} not found")
        if seen[-1] == self.eos:
            seen.pop()
        return [*seen, *rendered[ends[wanted - 1] :]]

    def _refusal(self, body: dict[str, Any]) -> str:
        sampling = (body.get("temperature"), body.get("top_p"))
        if sampling not in ((1.0, 1.0), self.validation) or body.get("top_k", -1) not in (-1, None):
            return "AssertionError: sampling parameters are not those of the training"
        if not body.get("logprobs") or body.get("top_logprobs") != 0 or not body.get("return_tokens_as_token_ids"):
            return "log-probs of tokens as ids have to be asked for"
        return ""


def chat_completion(
    body: dict[str, Any], prompt: list[int], ids: list[int], finish: str | None = None
) -> dict[str, Any]:
    ids, end = sampled(ids, body["max_tokens"], body.get("stop_token_ids", []), finish)
    logprobs = falling(len(ids))
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": end,
                "stop_reason": ids[-1] if end == "stop" else None,
                "message": {
                    "role": "assistant",
                    "content": "text",
                    "tool_calls": [],
                    "prompt_token_ids": prompt,
                    "generation_token_ids": ids,
                    "generation_log_probs": logprobs,
                },
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                        for token, value in zip(ids, logprobs, strict=True)
                    ]
                },
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "prompt_tokens_details": None},
    }
