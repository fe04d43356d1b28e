"""NeMo Gym model server: token ids in, token ids and log-probs out, over one or more engines.

For agents and harnesses other than ours. It always answers with an HTTP status, within the bounds of its own client:
Gym's client would post again for ever to a server that drops the connection.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import PrivateAttr, ValidationError

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError, EngineError, LimitReached
from prorl_gym.gym_root.responses_api_models.prorl_model import asks, statuses
from prorl_gym.gym_root.responses_api_models.prorl_model.answers import Shape, Turn
from prorl_gym.gym_root.responses_api_models.prorl_model.asks import Ask
from prorl_gym.gym_root.responses_api_models.prorl_model.config import ProrlModelConfig
from prorl_gym.gym_root.responses_api_models.prorl_model.continuity import Continuity, Prompt
from prorl_gym.gym_root.responses_api_models.prorl_model.conversation import plain_call
from prorl_gym.gym_root.responses_api_models.prorl_model.figures import Figures
from prorl_gym.gym_root.responses_api_models.prorl_model.memory import TurnMemory
from prorl_gym.gym_root.responses_api_models.prorl_model.reading import Spoken, read_plain, read_said, read_turn
from prorl_gym.gym_root.responses_api_models.prorl_model.sessions import Sessions
from prorl_gym.gym_root.responses_api_models.prorl_model.turns import Sampled, Turns
from prorl_gym.gym_root.starting import run
from prorl_gym.inference.chat import Codec, load_codec
from prorl_gym.inference.config import InferenceConfig, build_pool
from prorl_gym.inference.pool import EnginePool
from prorl_gym.logs import configure, register_secret

log = logging.getLogger(__name__)

_CONVERSATION = ("input", "instructions", "messages", "tools")

try:
    from nemo_gym.rollout_correlation import current_rollout_id
except ImportError:  # before Gym 0.7 the address of a call does not name its rollout

    def current_rollout_id() -> str | None:
        """Tell no rollout."""
        return None


class ProrlModel(SimpleResponsesAPIModel):
    """Serves Responses and chat completions from a pool of engines."""

    ray_enabled = False
    non_generating_model_routes: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {("POST", "/tokenize"), ("GET", "/metrics")}
    )
    config: ProrlModelConfig
    _codec: Codec = PrivateAttr()
    _shape: Shape = PrivateAttr()
    _memory: TurnMemory = PrivateAttr()
    _continuity: Continuity = PrivateAttr()
    _figures: Figures = PrivateAttr()
    _pool: EnginePool = PrivateAttr()
    _sessions: Sessions = PrivateAttr()
    _turns: Turns = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Load the tokenizer now, so that a bad template refuses to start; open the pool with the server."""
        app = super().setup_webserver()
        config = self.config
        inference = load_config(InferenceConfig, _inference(config), "prorl_model.inference")
        self._codec = load_codec(
            inference.tokenizer, inference.chat_template, inference.template_options, inference.tool_format
        )
        self._memory = TurnMemory(config.memory_tokens)
        self._continuity = Continuity(self._codec, self._memory, inference.thinking)
        self._shape = Shape(config.model, self._codec, config.return_token_id_information, config.uses_reasoning_parser)
        self._figures = Figures()
        app.post("/tokenize")(self.tokenize)
        app.get("/metrics")(self.metrics)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            configure()  # so that what is logged is redacted, too
            register_secret(config.api_key or "")
            tokenizer = self._codec.tokenizer
            pool = build_pool(
                "policy",
                inference,
                vocab_size=self._codec.vocab_size,
                encode=tokenizer.encode_plain,
                control_ids=tokenizer.control_ids.values(),
            )
            async with inner(app) as state, pool, asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(pool.check())  # engines may still be loading: nobody waits for them here
                self._pool, self._sessions = pool, Sessions(pool.forget, config.session_idle_seconds)
                self._turns = Turns(pool, self._sessions, tuple(sorted(self._codec.end_ids)))
                yield state
                looking.cancel()
                self._sessions.close()

        app.router.lifespan_context = lifespan
        return app

    async def responses_dispatch(self, request: Request, body: dict[str, Any]) -> Any:
        """See Gym, which reads less than agents send back."""
        return await super().responses_dispatch(request, self._plain("responses", body))

    async def chat_completions_dispatch(self, request: Request, body: dict[str, Any]) -> Any:
        """See Gym, which reads less than agents send back."""
        return await super().chat_completions_dispatch(request, self._plain("chat_completions", body))

    async def responses(self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Answer one Responses call."""
        params = body.model_dump(mode="json", exclude_none=True)
        with self._figures.call("responses"):
            turn = await self._answer(request, asks.read_responses, params)
            return NeMoGymResponse.model_validate(self._shape.response(turn, params))

    async def chat_completions(
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming
    ) -> NeMoGymChatCompletion:
        """Answer one chat completion."""
        params = body.model_dump(mode="json", exclude_none=True)
        with self._figures.call("chat_completions"):
            turn = await self._answer(request, asks.read_completion, params)
            return NeMoGymChatCompletion.model_validate(self._shape.completion(turn))

    async def tokenize(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Tell the ids that the next call with this body would send. Agents ask to see how full the context is."""
        with self._figures.call("tokenize"):
            if isinstance(body.get("prompt"), str):
                ids = self._codec.tokenizer.encode_plain(body["prompt"])
            else:
                ids = (await self._prompt(request, self._to_tokenize(body))).ids
            return {"count": len(ids), "max_model_len": self._pool.max_model_len, "tokens": ids}

    def _plain(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return plain_call(body)
        except ConfigError as error:
            with self._figures.call(route):
                raise statuses.refusal(error) from None

    def _to_tokenize(self, body: Mapping[str, Any]) -> Ask:
        """Read the conversation of either route; what else is in the body does not matter to the ids."""
        kind, read = NeMoGymResponseCreateParamsNonStreaming, asks.read_responses
        if "messages" in body:
            kind, read = NeMoGymChatCompletionCreateParamsNonStreaming, asks.read_completion
        try:
            conversation = plain_call({key: body[key] for key in _CONVERSATION if key in body})
            params = kind.model_validate(conversation)
        except ConfigError as error:
            raise statuses.refusal(error) from None
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        return self._read(read, params.model_dump(mode="json", exclude_none=True))

    async def metrics(self) -> Response:
        """Show the figures."""
        pool = self._pool
        self._figures.look(
            sessions=len(self._sessions),
            memory=self._memory.tokens,
            healthy=len(pool.healthy),
            engines=len(pool.engines),
            failovers=pool.failovers,
        )
        return Response(self._figures.page(), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, read: asks.Read, params: Mapping[str, Any]) -> Turn:
        """Make one model call; every failure becomes an HTTP status."""
        ask = self._read(read, params)
        try:
            async with asyncio.timeout(self.config.call_seconds):
                return await self._sample(request, ask)
        except TimeoutError:
            raise statuses.too_slow(self.config.call_seconds) from None

    def _read(self, read: asks.Read, params: Mapping[str, Any]) -> Ask:
        try:
            return read(params, self.config, self._codec.template_options)
        except ConfigError as error:
            raise statuses.refusal(error) from None

    async def _prompt(self, request: Request, ask: Ask) -> Prompt:
        try:
            session_id = _session_of(request)
            return await self._continuity.prompt(ask.entries, ask.tools, session_id, one_call=ask.one_call)
        except (ConfigError, EngineError) as error:
            raise statuses.refusal(error) from None

    async def _sample(self, request: Request, ask: Ask) -> Turn:
        prompt = await self._prompt(request, ask)
        self._figures.prompt(prompt.origin)
        if prompt.origin.new_segment:
            log.warning(
                "a conversation of %d messages is rendered anew (%s): trainers see a new segment.\n"
                "Send items back as they came, with their token fields.",
                *(len(ask.entries), prompt.origin.value),
            )
        session_id = prompt.session_id or _session_of(request)
        try:
            sampled = await self._turns.sample(session_id, prompt, ask.sampling)
        except LimitReached:
            if self.config.propagate_context_overflow_errors:
                raise statuses.too_long(len(prompt.ids), self._pool.max_model_len) from None
            return Turn(ask, prompt, Sampled(), Spoken("", ""))  # agents end on an empty answer that says "length"
        except EngineError as error:
            raise statuses.refusal(error) from None
        turn = Turn(ask, prompt, sampled, self._spoken(ask, sampled))
        self._figures.tokens(prompt=len(prompt.ids), cached=sampled.cached_tokens, sampled=len(sampled.token_ids))
        self._continuity.remember(prompt, session_id, turn.spoken.as_message(), sampled.token_ids)
        return turn

    def _spoken(self, ask: Ask, sampled: Sampled) -> Spoken:
        if sampled.said is not None:
            spoken = read_said(sampled.said)
        elif ask.call_tools:
            spoken = read_turn(self._codec, sampled.token_ids, ask.tools)
        else:
            spoken = read_plain(self._codec, sampled.token_ids)
        return spoken.with_one_call() if ask.one_call else spoken


def _inference(config: ProrlModelConfig) -> dict[str, Any]:
    """Return the pool's configuration: Gym's keys, and all others."""
    urls = [config.base_url] if isinstance(config.base_url, str) else list(config.base_url)
    return {
        "engines": urls,
        "model": config.model,
        "tokenizer": config.tokenizer or config.model,
        "admission": "fixed",  # nobody says when a rollout is over, and a call that waited would outlast its client
        **config.inference,
    }


def _session_of(request: Request) -> str:
    """Return whose call this is: the rollout in its address, or the session of its cookie."""
    return current_rollout_id() or request.session[SESSION_ID_KEY]


if __name__ == "__main__":
    run(ProrlModel.run_webserver)
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run(ProrlModel.run_webserver)
