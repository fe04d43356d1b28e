# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""NeMo Gym model server over the gateway: token ids in, token ids and log-probs out, over one or more engines.

It serves agents and harnesses other than ours. Every call gets an HTTP answer within the time that its client waits,
since Gym's client repeats a call without end when the connection drops.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until freeze_imports

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from prorl_gym._gym_compat import current_rollout_id
from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError
from prorl_gym.gateway import chat_completions as chat_wire
from prorl_gym.gateway import responses as responses_wire
from prorl_gym.gateway.gateway import Gateway, Wire
from prorl_gym.gateway.model_call import GatewayOptions
from prorl_gym.gym_root.server_start import freeze_imports, run_server
from prorl_gym.inference.config import InferenceConfig, build_pool
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.logs import configure_logging, register_secret

_CONVERSATION_FIELDS = ("input", "instructions", "messages", "tools")


class ProrlModelConfig(GatewayOptions, BaseResponsesAPIModelConfig):
    """Configuration of the model server: the gateway's options, and where the engines are."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    base_url: str | list[str]
    """Address of the engine, or of each of them; ends in ``/v1``."""
    api_key: str | None = None
    """Accepted, since every Gym model has one; engines that need a key get it through ``inference.api_key_env``."""
    tokenizer: str | None = None
    """See ``inference.tokenizer``; the model's name by default."""
    inference: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the engine pool's configuration: ``engine``, ``chat_template``, ``attempts``, ..."""


class ProrlModel(SimpleResponsesAPIModel):
    """Serves Responses and chat completions from a pool of engines."""

    ray_enabled: ClassVar[bool] = False
    non_generating_model_routes: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {("POST", "/tokenize"), ("GET", "/metrics")}
    )
    config: ProrlModelConfig
    _gateway: Gateway = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Return the app. The tokenizer loads now, so that a bad template fails the start; the pool opens later."""
        app = super().setup_webserver()
        config = self.config
        pool_config = {
            "engines": [config.base_url] if isinstance(config.base_url, str) else list(config.base_url),
            "model": config.model,
            "tokenizer": config.tokenizer or config.model,
            "admission": "fixed",  # callers do not report the end of a rollout, and clients do not wait for admission
            **config.inference,
        }
        inference = load_config(InferenceConfig, pool_config, "prorl_model.inference")
        codec = load_codec(
            inference.tokenizer, inference.chat_template, inference.template_options, inference.tool_format
        )
        app.post("/tokenize")(self.tokenize)
        app.get("/metrics")(self.metrics)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            configure_logging()
            register_secret(config.api_key or "")
            tokenizer = codec.tokenizer
            pool = build_pool(
                "policy",
                inference,
                vocab_size=codec.vocab_size,
                encode=tokenizer.encode_untrusted,
                control_ids=tokenizer.control_ids.values(),
            )
            self._gateway = Gateway(pool, codec, config, inference.thinking)
            async with inner(app) as state, self._gateway.running():
                freeze_imports()
                yield state

        app.router.lifespan_context = lifespan
        return app

    async def responses_dispatch(self, request: Request, body: dict[str, Any]) -> Any:
        return await super().responses_dispatch(request, self._normalize_body(responses_wire, "responses", body))

    async def chat_completions_dispatch(self, request: Request, body: dict[str, Any]) -> Any:
        body = self._normalize_body(chat_wire, "chat_completions", body)
        return await super().chat_completions_dispatch(request, body)

    async def messages(self, request: Request, body: dict[str, Any]) -> Any:
        """Answer a messages call through Gym's converter. Raises ``ConfigError`` for content that it does not know."""
        try:
            return await super().messages(request, body)
        except NotImplementedError as error:
            with self._gateway.answering("messages"):
                raise ConfigError(f"messages: {error}.", "Send text, calls and their results.") from None

    async def responses(self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        params = body.model_dump(mode="json", exclude_none=True)
        with self._gateway.answering("responses"):
            answer = await self._gateway.answer(responses_wire, params, _session_of(request))
            return NeMoGymResponse.model_validate(answer)

    async def chat_completions(
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        params = body.model_dump(mode="json", exclude_none=True)
        with self._gateway.answering("chat_completions"):
            answer = await self._gateway.answer(chat_wire, params, _session_of(request))
            return NeMoGymChatCompletion.model_validate(answer)

    async def tokenize(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Return the ids that the next call with this body would send, so that agents can measure the context."""
        with self._gateway.answering("tokenize"):
            if isinstance(body.get("prompt"), str):
                return self._gateway.tokenize_text(body["prompt"])
            wire, kind = responses_wire, NeMoGymResponseCreateParamsNonStreaming
            if "messages" in body:
                wire, kind = chat_wire, NeMoGymChatCompletionCreateParamsNonStreaming
            conversation = wire.normalize_body({key: body[key] for key in _CONVERSATION_FIELDS if key in body})
            try:
                params = kind.model_validate(conversation).model_dump(mode="json", exclude_none=True)
            except ValidationError as error:
                raise RequestValidationError(error.errors()) from None
            return await self._gateway.tokenize(wire, params, _session_of(request))

    def _normalize_body(self, wire: Wire, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body without fields that agents return and Gym's models refuse."""
        body = {name: value for name, value in body.items() if name not in self.config.ignore_parameters}
        try:
            return wire.normalize_body(body)
        except ConfigError as error:  # counted as a call, although Gym's dispatcher does not see it
            with self._gateway.answering(route):
                raise error from None

    async def metrics(self) -> Response:
        return Response(self._gateway.metrics_page(), media_type=CONTENT_TYPE_LATEST)


def _session_of(request: Request) -> str:
    """Return the session of a call: the rollout in its address, or the session of its cookie."""
    return current_rollout_id() or request.session[SESSION_ID_KEY]


if __name__ == "__main__":
    run_server(ProrlModel.run_webserver)
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run_server(ProrlModel.run_webserver)
