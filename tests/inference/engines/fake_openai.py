"""A text-only chat server in OpenAI's shape. What it says are numbers, so that texts stand for ids."""

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from fake_server import FakeServer, sampled


@dataclass
class FakeOpenAI(FakeServer):
    tool_calls: list[Any] = field(default_factory=list)

    def routes(self, app: web.Application):
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self.model_list)

    async def _chat(self, request: web.Request):
        body = await self.remember(request)
        return await self.respond(request, "", lambda finish: self.completion(body, finish))

    def completion(self, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
        ids, end = sampled(self.ids, body["max_tokens"], [2], finish)
        message: dict[str, Any] = {"role": "assistant", "content": " ".join(map(str, ids)), "refusal": None}
        if self.tool_calls:
            message["tool_calls"], end = self.tool_calls, "tool_calls"
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": end, "message": message, "logprobs": None}],
            "usage": {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)},
        }


def read_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]
