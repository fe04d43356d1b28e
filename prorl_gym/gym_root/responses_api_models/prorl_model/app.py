"""NeMo Gym model server: token ids in, token ids and log-probs out, over one or more vLLM engines.

For agents and harnesses other than ours. It always answers with an HTTP status, within the bounds of its own client:
Gym's client would post again for ever to a server that drops the connection.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Request
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from pydantic import Field, PrivateAttr

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError, EngineError, FailureKind, LimitReached
from prorl_gym.gym_root.responses_api_models.prorl_model.continuity import chat_items, next_prompt
from prorl_gym.gym_root.responses_api_models.prorl_model.turns import Sampling, Turns
from prorl_gym.gym_root.starting import run
from prorl_gym.inference.chat import Codec, load_codec
from prorl_gym.inference.config import InferenceConfig, build_pool
from prorl_gym.inference.toolcalls import ParsedCall, parse_hermes
from prorl_gym.logs import configure, redact, register_secret

_STATUS = {FailureKind.ENGINE_OVERLOADED: 503, FailureKind.ENGINE_TIMEOUT: 504}


class ProrlModelConfig(BaseResponsesAPIModelConfig):
    """Configuration of the model server."""

    base_url: str | list[str]
    model: str
    api_key: str | None = None
    """Accepted, since every Gym model has one; engines that need a key get it through ``inference.api_key_env``."""
    tokenizer: str | None = None
    return_token_id_information: bool = True
    max_output_tokens: int = 4096
    """For calls that do not bound themselves."""
    inference: dict[str, Any] = Field(default_factory=dict)
    """Other keys of the engine pool's configuration."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one call gave."""

    text: str
    calls: Sequence[ParsedCall]
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]

    def triple(self) -> dict[str, Any]:
        """The token fields; nothing when nothing was sampled, since trainers refuse empty ones."""
        if not self.token_ids:
            return {}
        return {
            "prompt_token_ids": self.prompt_ids,
            "generation_token_ids": self.token_ids,
            "generation_log_probs": self.logprobs,
        }


class ProrlModel(SimpleResponsesAPIModel):
    """Serves Responses and chat completions from a pool of engines."""

    ray_enabled = False
    config: ProrlModelConfig
    _turns: Turns = PrivateAttr()
    _codec: Codec = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Load the tokenizer now, so that a bad template refuses to start; open the pool with the server."""
        app = super().setup_webserver()
        urls = [self.config.base_url] if isinstance(self.config.base_url, str) else self.config.base_url
        tokenizer = self.config.tokenizer or self.config.model
        fields = {"engines": list(urls), "model": self.config.model, "tokenizer": tokenizer, **self.config.inference}
        inference = load_config(InferenceConfig, fields, "prorl_model.inference")
        self._codec = load_codec(inference.tokenizer, inference.chat_template, inference.template_options)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            configure()  # so that what is logged is redacted, too
            register_secret(self.config.api_key or "")
            pool = build_pool("policy", inference, vocab_size=self._codec.vocab_size)
            async with inner(app) as state, pool:
                self._turns = Turns(pool, self._codec.terminator_id)
                yield state

        app.router.lifespan_context = lifespan
        return app

    async def responses(self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Answer one Responses call."""
        params = body.model_dump(mode="json", exclude_none=True)
        given = params["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if params.get("instructions"):
            items = [{"role": "system", "content": params["instructions"]}, *items]
        sampling = self._sampling(params, params.get("max_output_tokens"))
        turn = await self._sample(request, items, params.get("tools") or [], sampling)
        output = _items_of(turn)
        if self.config.return_token_id_information:
            output[-1] |= turn.triple()
        return NeMoGymResponse.model_validate(
            {
                "id": f"resp-{uuid4().hex}",
                "object": "response",
                "created_at": time.time(),
                "model": self.config.model,
                "output": output,
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": params.get("tools") or [],
                "incomplete_details": {"reason": "max_output_tokens"} if turn.finish == "length" else None,
                "usage": {
                    "input_tokens": len(turn.prompt_ids),
                    "output_tokens": len(turn.token_ids),
                    "total_tokens": len(turn.prompt_ids) + len(turn.token_ids),
                    "input_tokens_details": {"cached_tokens": 0},
                    "output_tokens_details": {"reasoning_tokens": 0},
                },
            }
        )

    async def chat_completions(
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer one chat completion."""
        params = body.model_dump(mode="json", exclude_none=True)
        sampling = self._sampling(params, params.get("max_completion_tokens") or params.get("max_tokens"))
        turn = await self._sample(request, chat_items(params["messages"]), params.get("tools") or [], sampling)
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
        if turn.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in _numbered(turn.calls)
            ]
        if self.config.return_token_id_information:
            message |= turn.triple()
        finish = "length" if turn.finish == "length" else "tool_calls" if turn.calls else "stop"
        sampled, prompt = len(turn.token_ids), len(turn.prompt_ids)
        return NeMoGymChatCompletion.model_validate(
            {
                "id": f"chatcmpl-{uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.config.model,
                "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": None}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
            }
        )

    def _sampling(self, params: dict[str, Any], max_tokens: int | None) -> Sampling:
        return Sampling(
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            max_tokens=max_tokens or self.config.max_output_tokens,
            seed=params.get("seed"),
        )

    async def _sample(
        self, request: Request, items: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> _Turn:
        """Make one model call; every failure becomes an HTTP status."""
        try:
            prompt = next_prompt(self._codec, items, tools)
            sampled = await self._turns.sample(request.session[SESSION_ID_KEY], prompt, sampling)
        except ConfigError as error:
            raise HTTPException(400, redact(str(error))) from None
        except LimitReached:  # the context is full: agents end the episode on an empty, incomplete answer
            return _Turn("", (), prompt, [], [], "length")
        except EngineError as error:
            raise HTTPException(_STATUS.get(error.kind, 502), redact(str(error))) from None
        ids = sampled.token_ids
        ends = self._codec.tokenizer.eos_ids | {self._codec.terminator_id}
        text = self._codec.decode(ids[:-1] if ids and ids[-1] in ends else ids)
        said = parse_hermes(text)
        shown = text if said.complaints else said.text  # a call that cannot be read stays visible as text
        return _Turn(shown, said.calls, prompt, ids, sampled.logprobs, sampled.finish)


def _items_of(turn: _Turn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.text or not turn.calls:
        items.append(
            {
                "type": "message",
                "id": f"msg-{uuid4().hex}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": turn.text, "annotations": []}],
            }
        )
    for call_id, call in _numbered(turn.calls):
        items.append({"type": "function_call", "call_id": call_id, "name": call.name, "arguments": call.arguments})
    return items


def _numbered(calls: Sequence[ParsedCall]) -> list[tuple[str, ParsedCall]]:
    return [(f"call_{uuid4().hex[:16]}", call) for call in calls]


if __name__ == "__main__":
    run(ProrlModel.run_webserver)
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run(ProrlModel.run_webserver)
