"""A server that speaks SGLang's native routes, right or wrong as told. Shapes of 0.5.23."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from fake_server import FakeServer, falling, sampled


@dataclass
class FakeSglang(FakeServer):
    paused: bool = False

    def routes(self, app: web.Application):
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self.model_list)
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/abort_request", self._abort)

    async def _ready(self, request: web.Request):
        return web.Response(status=503 if self.paused else 200)

    async def _flush(self, request: web.Request):
        if self.busy:
            return web.Response(status=400, text="Cache not flushed: there are pending requests.")
        return web.Response(text="Cache flushed.\n")

    async def _abort(self, request: web.Request):
        beginning = (await request.json())["rid"]
        for rid in list(self._stops):
            if beginning and rid.startswith(beginning):  # the scheduler's own rule
                self.stop(rid)
        return web.Response()

    async def _generate(self, request: web.Request):
        body = await self.remember(request)
        if self.paused:
            await self._hold("paused")  # nothing is answered before it goes on
        return await self.respond(request, body["rid"], lambda finish: generation(body, self.ids, finish))


def generation(body: dict[str, Any], ids: list[int], finish: str | None = None) -> dict[str, Any]:
    settings, prompt = body["sampling_params"], body["input_ids"]
    ids, end = sampled(ids, settings["max_new_tokens"], settings.get("stop_token_ids", []), finish)
    reasons = {
        "stop": {"type": "stop", "matched": ids[-1] if ids else None},
        "length": {"type": "length", "length": len(ids)},
        "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    }
    meta: dict[str, Any] = {
        "id": body["rid"],
        "finish_reason": reasons[end],
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "weight_version": "default",
        "e2e_latency": 0.01,
    }
    if body.get("return_logprob"):
        entries = zip(falling(len(ids)), ids, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in entries]
        meta["output_token_logprobs_length"] = len(ids)
        start = body.get("logprob_start_len", -1)
        if start >= 0:
            asked = prompt[start:]
            meta["input_token_logprobs"] = [
                [None if at + start == 0 else -0.5 * token, token, None] for at, token in enumerate(asked)
            ]
    answer = {"text": "text", "output_ids": ids, "meta_info": meta}
    if body.get("return_prompt_token_ids"):
        answer["prompt_token_ids"] = prompt
    return answer
