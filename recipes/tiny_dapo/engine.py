"""An inference engine behind vLLM's completions route, as a process of its own.

Weights come over HTTP, with a version.
"""

import argparse
import asyncio
import io
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import torch
from aiohttp import web
from model import CONTEXT, Decoder
from sampler import Call, Sampler
from tasks import TurnEncoder
from tokenizers import Tokenizer

MODEL = "tiny"


class Engine:
    """The HTTP routes.

    Args:
        sampler: answers the calls.
        vocab_size: ids at or above it are refused.
        end: the token that always ends a turn.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, end: int) -> None:
        self._sampler, self._vocab_size, self._end = sampler, vocab_size, end
        self._calls: dict[str, Call] = {}

    def app(self) -> web.Application:
        """Return the routes: those of vLLM that the service uses, and the trainer's ``/load_weights``."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/abort_requests", self._abort),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/load_weights", self._load),
            ]
        )
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "object": "model", "max_model_len": CONTEXT}]})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        problem = ""
        if body["model"] != MODEL:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if not prompt or not all(type(token) is int and 0 <= token < self._vocab_size for token in prompt):
            problem = "prompt must be token ids of the vocabulary"
        elif len(prompt) + max_tokens > CONTEXT:
            problem = f"This model's maximum context length is {CONTEXT} tokens, {len(prompt) + max_tokens} requested."
        elif body.get("top_p", 1.0) != 1.0 or body.get("top_k", -1) > 0:
            problem = "top_p and top_k are not supported"
        if problem:
            return _error(400, problem)
        scores = await asyncio.wrap_future(self._sampler.score(prompt)) if body.get("prompt_logprobs") else None
        call = Call(
            ids=list(prompt),
            max_tokens=max_tokens,
            stops=frozenset({self._end, *body.get("stop_token_ids", ())}),
            temperature=body["temperature"],
            random=Random(body.get("seed")),
            salt=body.get("cache_salt"),
        )
        request_id = request.headers.get("X-Request-Id") or uuid4().hex
        self._calls[f"cmpl-{request_id}-0"] = call
        try:
            self._sampler.submit(call)
            await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:  # the client has gone
            self._sampler.abort(call)
            raise
        finally:
            del self._calls[f"cmpl-{request_id}-0"]
        return web.json_response(_completion(request_id, prompt, call, scores))

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if name in self._calls:
                self._sampler.abort(self._calls[name])
        return web.json_response({"status": "aborted"})

    async def _reset(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._sampler.reset())
        return web.json_response({"success": True})

    async def _load(self, request: web.Request) -> web.Response:
        weights = torch.load(io.BytesIO(await request.read()), weights_only=True)
        await asyncio.wrap_future(self._sampler.load(weights, int(request.query["version"])))
        return web.json_response({"version": int(request.query["version"])})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _completion(request_id: str, prompt: list[int], call: Call, scores: list[float] | None) -> dict[str, Any]:
    """Return an answer in vLLM's shape."""
    ends = [0]
    for _, same in groupby(call.versions):
        ends.append(ends[-1] + len(list(same)))
    spans = pairwise(ends)
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "finish_reason": call.finish,
        "token_ids": call.sampled,
        "prompt_token_ids": prompt,
        "logprobs": {"tokens": [f"token_id:{token}" for token in call.sampled], "token_logprobs": call.logprobs},
        "weight_versions": [{"version": str(call.versions[a]), "start": a, "end": b} for a, b in spans],
    }
    if scores is not None:
        pairs = zip(prompt[1:], scores, strict=True)
        choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": call.cached}}
    return {"id": f"cmpl-{request_id}", "model": MODEL, "choices": [choice], "usage": usage}


async def serve(tokenizer: Path, port: int = 0, checkpoint: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        tokenizer: its directory.
        port: 0: any free one.
        checkpoint: a file with ``model`` and ``version``, whose weights are served from the start.
    """
    language = TurnEncoder(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    sampler = Sampler(Decoder(language.vocab_size).double())
    if checkpoint is not None:
        saved = torch.load(checkpoint, weights_only=True)
        sampler.load(saved["model"], saved["version"]).result()
    engine = Engine(sampler, language.vocab_size, language.end)
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"serving on http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="weights to serve from the start")
    torch.set_num_threads(1)
    asyncio.run(serve(**vars(parser.parse_args())))
