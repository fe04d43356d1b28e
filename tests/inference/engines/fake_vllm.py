"""A server that speaks vLLM's routes, right or wrong as told. Shapes as received from 0.32, and as 0.33 has them."""

from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from fake_server import FakeServer, falling, sampled


@dataclass
class FakeVllm(FakeServer):
    release: Literal["0.32", "0.33"] = "0.32"
    development: bool = True
    """Started with VLLM_SERVER_DEV_MODE=1."""
    paused: bool = False

    def routes(self, app: web.Application):
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self.model_list)
        if self.can_abort:
            app.router.add_post("/abort_requests", self._abort)
        if self.development:
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_post("/reset_prefix_cache", self._reset)

    async def _is_paused(self, request: web.Request):
        return web.json_response({"is_paused": self.paused})

    async def _reset(self, request: web.Request):
        return web.json_response({"success": not self.busy})

    async def _abort(self, request: web.Request):
        wanted = (await request.json())["request_ids"]
        for name in wanted:
            self.stop(name)
        return web.json_response({"status": "aborted", "aborted": len(wanted)})

    async def _completions(self, request: web.Request):
        body = await self.remember(request)
        request_id = request.headers.get("X-Request-Id", "r")
        if self.paused and self.release == "0.33":
            return self.refuse(503)
        if self.paused:
            await self._hold("paused")  # 0.32 answers nothing before it is resumed
        return await self.respond(
            request,
            f"cmpl-{request_id}-0",
            lambda finish: completion(body, self.ids, request_id, finish, "default" if self.release == "0.33" else ""),
        )


def completion(
    body: dict[str, Any], ids: list[int], request_id: str, finish: str | None = None, label: str = ""
) -> dict[str, Any]:
    ids, finish = sampled(ids, body["max_tokens"], body.get("stop_token_ids", []), finish)
    names, logprobs = [f"token_id:{token}" for token in ids], falling(len(ids))
    choice: dict[str, Any] = {
        "index": 0,
        "text": "text",
        "finish_reason": finish,
        "stop_reason": ids[-1] if finish == "stop" else None,
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "prompt_logprobs": prompt_logprobs(body["prompt"]) if body.get("prompt_logprobs") is not None else None,
        "routed_experts": None,
        "logprobs": {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
            "text_offset": list(range(len(ids))),
        }
        if body.get("logprobs") is not None
        else None,
    }
    if label and body.get("return_weight_versions"):
        choice["weight_versions"] = [{"version": label, "start": 0, "end": len(ids)}]
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def prompt_logprobs(prompt: list[int]) -> list[dict[str, Any] | None]:
    """The prompt's token, and beside it the likeliest where that is another."""
    entries: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(prompt[1:], 1):
        likeliest = {"99": {"logprob": -0.01, "rank": 1, "decoded_token": "x"}} if position % 2 else {}
        entries.append({str(token): {"logprob": -0.5 * token, "rank": 7, "decoded_token": "y"}, **likeliest})
    return entries
