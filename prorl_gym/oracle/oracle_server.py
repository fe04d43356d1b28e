"""The oracle's HTTP server: the part of vLLM's routes that this package uses, refused and answered in vLLM's forms.

Prompts of ids, one choice, no streaming.
"""

import asyncio
import json
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any, Literal, cast
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter, ValidationError

from prorl_gym.errors import EngineError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.oracle.oracle_policy import OraclePolicy
from prorl_gym.records import Message

_MAX_BODY = 64 << 20
_BLOCK_TOKENS = 16
"""Tokens per cache block, as on most GPUs."""
_CACHED_SESSIONS = 4096

_FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """Properties that the server reports of itself."""

    model: str = "oracle"
    max_model_len: int = 32768
    tokens_per_second: float = 0.0
    """Speed of each call; 0 answers at once."""


class OracleServer:
    """Answers HTTP calls from an ``OraclePolicy``."""

    def __init__(self, codec: ChatCodec, policy: OraclePolicy, options: OracleOptions | None = None) -> None:
        self._codec = codec
        self._policy = policy
        self._options = options or OracleOptions()
        self._cache = _PrefixCache()
        self._aborts: dict[str, asyncio.Event] = {}
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_answer_refusals])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/abort_requests", self._abort)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "max_model_len": self._options.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        label = f'{{model_name="{self._options.model}"}}'
        figures = {
            "vllm:num_requests_running": len(self._aborts),
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:prefix_cache_queries_total": self._prompt_tokens,
            "vllm:prefix_cache_hits_total": self._cached_tokens,
            "vllm:generation_tokens_total": self._sampled_tokens,
        }
        return web.Response(text="".join(f"{name}{label} {value}\n" for name, value in figures.items()))

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._encode(await _json_object(request))
        return web.json_response({"count": len(ids), "max_model_len": self._options.max_model_len, "tokens": ids})

    async def _abort(self, request: web.Request) -> web.Response:
        wanted = (await _json_object(request)).get("request_ids")
        names = cast("list[object]", wanted) if isinstance(wanted, list) else []
        running = [self._aborts[name] for name in names if isinstance(name, str) and name in self._aborts]
        for stop in running:
            stop.set()
        return web.json_response({"status": "aborted", "aborted": len(running)})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        free = not self._aborts  # as in vLLM, running calls hold blocks
        if free:
            self._cache = _PrefixCache()
        return web.json_response({"success": free})

    async def _completions(self, request: web.Request) -> web.Response:
        request_id = request.headers.get("X-Request-Id") or uuid4().hex
        session = request.headers.get("X-Session-ID", "")
        call = _parse_request(await _json_object(request), self._options, self._codec.vocab_size)
        ids = self._policy.complete_turn(call.prompt, seed=call.seed, session=session)
        stops = call.stop | {self._codec.terminator_id}
        end = next((n for n, token in enumerate(ids, 1) if token in stops), len(ids))
        finish: _FinishReason = "stop" if end <= call.max_tokens else "length"
        ids, finish = await self._simulate_sampling(f"cmpl-{request_id}-0", ids[: min(end, call.max_tokens)], finish)
        cached = self._cache.count_hits(session, call.prompt)
        self._cache.store(session, [*call.prompt, *ids])
        self._prompt_tokens += len(call.prompt)
        self._cached_tokens += cached
        self._sampled_tokens += len(ids)
        choice = {
            "index": 0,
            "text": self._codec.decode(ids[:-1] if finish == "stop" else ids),
            "finish_reason": finish,
            "stop_reason": ids[-1] if finish == "stop" and ids[-1] in call.stop else None,
            "token_ids": ids if call.with_ids else None,
            "prompt_token_ids": call.prompt if call.with_ids else None,
            "prompt_logprobs": self._prompt_logprobs(call.prompt) if call.with_prompt_logprobs else None,
            "logprobs": self._sampled_logprobs(call.prompt, ids) if call.with_logprobs else None,
        }
        usage = {
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(call.prompt) + len(ids),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return web.json_response(
            {
                "id": f"cmpl-{request_id}",
                "object": "text_completion",
                "created": 0,
                "model": self._options.model,
                "choices": [choice],
                "usage": usage,
                "system_fingerprint": "prorl-gym-oracle",
            }
        )

    def _sampled_logprobs(self, prompt: list[int], ids: list[int]) -> dict[str, Any]:
        names = [f"token_id:{token}" for token in ids]
        logprobs = self._policy.synthetic_logprobs(prompt, ids)
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
            "text_offset": [0] * len(names),
        }

    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        """Return log-probs of the prompt in vLLM's shape: by token id, ``None`` for the first."""
        invented = zip(prompt[1:], self._policy.synthetic_logprobs(prompt[:1], prompt[1:]), strict=True)
        return [
            None,
            *({str(token): {"logprob": value, "rank": 1, "decoded_token": None}} for token, value in invented),
        ]

    async def _simulate_sampling(
        self, name: str, ids: list[int], finish: _FinishReason
    ) -> tuple[list[int], _FinishReason]:
        """Wait as long as sampling would take; an abort leaves the tokens that were sampled until then."""
        speed = self._options.tokens_per_second
        if not speed:
            return ids, finish
        stop = self._aborts[name] = asyncio.Event()
        started = monotonic()
        try:
            await asyncio.wait_for(stop.wait(), len(ids) / speed)
        except TimeoutError:
            return ids, finish
        finally:
            del self._aborts[name]
        return ids[: int((monotonic() - started) * speed)], "abort"

    def _encode(self, body: dict[str, Any]) -> list[int]:
        if isinstance(body.get("prompt"), str):
            return self._codec.tokenizer.encode_trusted(body["prompt"])
        try:
            messages = TypeAdapter(list[Message]).validate_python(body.get("messages"))
            return self._codec.encode_prompt(messages, body.get("tools") or [])
        except (ValidationError, EngineError) as error:
            raise _RefusedError(400, f"messages cannot be rendered: {str(error)[:200]}") from None


@asynccontextmanager
async def serve_oracle(server: OracleServer, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serve while the context is open; yields the base URL (with the chosen port for port 0)."""
    # A closed connection cancels its call, as in vLLM.
    runner = web.AppRunner(server.build_app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1"
    finally:
        await runner.cleanup()


class _RefusedError(Exception):
    """A request that vLLM would refuse too, with its message where clients depend on it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _CompletionRequest:
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    seed: int | None
    with_logprobs: bool
    with_ids: bool
    with_prompt_logprobs: bool


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        value: object = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise _RefusedError(400, "The body is not JSON.") from None
    if not isinstance(value, dict):
        raise _RefusedError(400, "The body must be a JSON object.")
    return cast("dict[str, Any]", value)


@web.middleware
async def _answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _RefusedError as refusal:
        kind = "NotFoundError" if refusal.status == 404 else "BadRequestError"
        error = {"message": str(refusal), "type": kind, "param": None, "code": refusal.status}
        return web.json_response({"error": error}, status=refusal.status)


def _parse_request(body: Mapping[str, object], options: OracleOptions, vocab_size: int) -> _CompletionRequest:
    """Read the body of ``POST /v1/completions``; raise ``_RefusedError`` for what vLLM would refuse."""
    if body.get("model", options.model) != options.model:
        raise _RefusedError(404, f"The model `{str(body['model'])[:80]}` does not exist.")
    prompt = _parse_ids(body.get("prompt"), "prompt")
    if not prompt:
        raise _RefusedError(400, "The prompt is empty.")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise _RefusedError(400, f"Token id {wrong} is out of vocabulary")
    max_tokens = _parse_integer(body.get("max_tokens"), "max_tokens", default=16)
    if max_tokens < 1:
        raise _RefusedError(400, f"max_tokens must be at least 1, got {max_tokens}.")
    if len(prompt) + max_tokens > options.max_model_len:
        raise _RefusedError(
            400,
            f"This model's maximum context length is {options.max_model_len} tokens. However, you requested "
            f"{len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, {max_tokens} for the completion).",
        )
    seed = body.get("seed")
    return _CompletionRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        stop=frozenset(_parse_ids(body.get("stop_token_ids") or [], "stop_token_ids")),
        seed=None if seed is None else _parse_integer(seed, "seed", default=0),
        with_logprobs=body.get("logprobs") is not None,
        with_ids=body.get("return_token_ids") is True,
        with_prompt_logprobs=body.get("prompt_logprobs") is not None,
    )


def _parse_ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in cast("list[object]", value)):
        raise _RefusedError(400, f"{name} must be a list of token ids.")
    return cast("list[int]", value)


def _parse_integer(value: object, name: str, *, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int:
        raise _RefusedError(400, f"{name} must be an integer.")
    return value


class _PrefixCache:
    """Counts the prompt tokens that a real engine would find in its prefix cache.

    Holds a digest of the last state of each rollout, never the tokens.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[int, bytes]] = OrderedDict()

    def count_hits(self, session: str, prompt: Sequence[int]) -> int:
        """Return the tokens of ``prompt`` that were computed for this rollout before, in whole blocks."""
        length, digest = self._last.get(session, (0, b""))
        if length > len(prompt) or _digest(prompt[:length]) != digest:
            return 0
        return length - length % _BLOCK_TOKENS

    def store(self, session: str, ids: Sequence[int]) -> None:
        self._last[session] = (len(ids), _digest(ids))
        self._last.move_to_end(session)
        if len(self._last) > _CACHED_SESSIONS:
            self._last.popitem(last=False)


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("q", ids).tobytes(), digest_size=16).digest()
