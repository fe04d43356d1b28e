# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""NeMo Gym agent: one ``POST /run`` is one rollout of the prorl_rollout server.

``row_handler`` turns a row into a rollout and its record into a Gym result; ``service_connection`` submits, streams and
acknowledges.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until freeze_imports

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from pydantic import PrivateAttr, model_validator
from starlette.types import Receive, Scope, Send

from prorl_gym._gym_compat import has_trajectories, headline_pass_metrics, pass_metrics, server_url
from prorl_gym.client import read_token
from prorl_gym.errors import ConfigError, Limit
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_handler import (
    AgentOptions,
    AgentProfile,
    RowAnswer,
    RowHandler,
)
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.service_connection import SERVICE_PATH
from prorl_gym.gym_root.server_start import freeze_imports, run_server

ROW_BYTES = 64 << 20
"""Largest row in bytes."""


class ProrlRolloutAgentConfig(AgentOptions, BaseResponsesAPIAgentConfig):
    """Configuration of one agent instance."""

    resources_server: ResourcesServerRef | None = None
    """The prorl_rollout server whose service makes the rollouts."""
    service_url: str | None = None
    """A service that runs by itself (``prorl-gym serve``) and makes the rollouts, in the place of ``resources_server``:
    the shards of a trainer's run then share its groups and its engines."""
    token_file: Path | None = None
    """File with the token of ``service_url``; by default found as the client finds it."""
    mask_truncated: bool = False
    """Also mask rollouts that a limit cut short, unless ``settings.mask_overlong`` names the limits."""

    @model_validator(mode="after")
    def _check(self) -> "ProrlRolloutAgentConfig":
        if (self.resources_server is None) == (self.service_url is None):
            raise ConfigError(
                f"{self.name}: exactly one of resources_server and service_url makes the rollouts.",
                "Use configs/remote.yaml for a service that runs by itself.",
            )
        if self.early_stop is not None and (self.num_generations or 0) < 2:
            raise ConfigError(
                f"{self.name}: early_stop needs num_generations, since it stops groups.",
                "Set num_generations to the recipe's num_generations_per_prompt, or remove early_stop.",
            )
        return self

    def profile(self, *, is_observed: bool = False) -> AgentProfile:
        """Return the configuration of the rows' handler; ``is_observed``: see ``AgentProfile``."""
        options = {name: getattr(self, name) for name in AgentOptions.model_fields}
        if self.mask_truncated and self.settings.mask_overlong is None:
            options["settings"] = self.settings.model_copy(update={"mask_overlong": tuple(Limit)})
        # Shards have agents of the same name: each has runs of its own, so that it is sent its own records only.
        agent = self.name if self.service_url is None else f"{self.name}:{self.host}:{self.port}"
        return AgentProfile(**options, agent=agent, is_observed=is_observed)


class ProrlRolloutAgent(SimpleResponsesAPIAgent):
    """Answers ``/run`` by a ``RowHandler``."""

    ray_enabled: ClassVar[bool] = False
    config: ProrlRolloutAgentConfig
    _rows: RowHandler | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.config.early_stop is not None:
            print(
                f"{self.config.name}: early_stop is on. The recipe must set use_dynamic_sampling: true, or the rows of "
                "stopped groups (reward 0, masked) enter training; it is for synchronous GRPO only.",
                flush=True,
            )

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as state:
                freeze_imports()
                yield state
                if self._rows is not None:
                    await self._rows.close()

        app.router.lifespan_context = lifespan
        return app

    async def run(self, request: Request) -> Response:
        body = await request.body()
        if len(body) > ROW_BYTES:
            raise HTTPException(413, f"The row is larger than {ROW_BYTES} bytes.")
        try:
            row = orjson.loads(body)
            orjson.dumps(row)  # the result echoes the row
        except orjson.JSONDecodeError as error:
            raise HTTPException(422, f"The row is not JSON: {error}.") from None
        except TypeError:
            raise HTTPException(422, "The row is nested too deeply.") from None
        if not isinstance(row, dict):
            raise HTTPException(422, "The row is not a JSON object.")
        if self._rows is None:
            self._rows = self.make_row_handler()
        return TrackedResponse(await self._rows.answer_row(row), self._rows)

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return pass@k of an evaluation, over the results that measure the policy."""
        if not self.config.evaluation:
            return {}
        return pass_metrics([[result for result in results if not result.get("mask_sample")] for results in tasks])

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the means, and of an evaluation what holds for all samples."""
        return super().get_key_metrics(agent_metrics) | headline_pass_metrics(agent_metrics)

    def make_row_handler(self) -> RowHandler:
        """Return a new row handler; it connects to the rollout service at its first row.

        Raises ``ConfigError`` if there is no token for ``service_url``.
        """
        config, shared = self.config, self.server_client.global_config_dict
        profile = config.profile(is_observed=bool(shared.get("observability_enabled")) and has_trajectories())
        if config.service_url is not None:
            return RowHandler(profile, config.service_url, read_token(config.token_file))
        assert config.resources_server is not None
        return RowHandler(profile, server_url(shared, config.resources_server.name) + SERVICE_PATH)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Refuse: a rollout needs a task, and only a row posted to ``/run`` has one."""
        raise NotImplementedError(
            "prorl_rollout_agent makes whole rollouts: post the row to /run. "
            "For single model calls use the prorl_model server."
        )


class TrackedResponse(Response):
    """An answer that reports to the row handler whether Gym received it."""

    def __init__(self, answer: RowAnswer, rows: RowHandler) -> None:
        super().__init__(answer.body, answer.status, media_type="application/json")
        self._answer = answer
        self._rows = rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Gym before 0.7 does not cancel the handler of a caller that left.
        arrived = False
        try:
            arrived = not await Request(scope, receive).is_disconnected()
            await super().__call__(scope, receive, send)
        except BaseException:
            arrived = False
            raise
        finally:
            (self._rows.mark_delivered if arrived else self._rows.mark_disconnected)(self._answer)


if __name__ == "__main__":
    run_server(lambda: ProrlRolloutAgent.run_webserver())  # Gym's validation looks for this very call
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = run_server(lambda: ProrlRolloutAgent.run_webserver())
