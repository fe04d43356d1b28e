"""NeMo Gym agent: one ``POST /run`` is one rollout of the prorl_rollout server.

The answer is always a complete Gym result: a rollout that failed for reasons the model did not cause is masked, not an
HTTP error (``on_failure: mask``). ``on_failure: raise`` answers 503 instead, for trainers that re-dispatch rows.
"""

import asyncio
import time
from typing import Any, Literal
from uuid import uuid4

import orjson
from fastapi import HTTPException, Request, Response
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, is_nemo_gym_fastapi_entrypoint, raise_for_status
from pydantic import PrivateAttr

from prorl_gym.errors import Cause, FailureKind, TaskError
from prorl_gym.gym_root.responses_api_agents.prorl_agent.posts import Posts
from prorl_gym.records import Outcome, Rollout, RolloutRequest
from prorl_gym.settings import RolloutSettings
from prorl_gym.trainers.gym import Placeholder, to_gym_result
from prorl_gym.trainers.gym_rows import Groups, RowDefaults


class ProrlAgentConfig(BaseResponsesAPIAgentConfig):
    """Configuration of one agent instance."""

    resources_server: ResourcesServerRef
    environment: str | None = None
    """For rows that do not name their environment."""
    on_failure: Literal["mask", "raise"] = "mask"
    mask_truncated: bool = False
    """Also mask rollouts that a limit cut short."""
    num_generations: int | None = None
    """Rollouts per prompt, when known: then rows are put into groups."""
    evaluation: bool = False
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits for rows that do not set them."""
    repost_seconds: float = 30.0
    """How long a rollout whose caller vanished is kept going for the same row posted again."""


class ProrlAgent(SimpleResponsesAPIAgent):
    """Relays rows to the rollout service and turns records into Gym results."""

    ray_enabled = False
    config: ProrlAgentConfig
    _posts: Posts = PrivateAttr()
    _cancels: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)

    def model_post_init(self, context: Any, /) -> None:
        """Draw this process's nonce."""
        super().model_post_init(context)
        nonce = uuid4().hex[:8]
        run_id = f"gym-{nonce}"
        self._posts = Posts(
            nonce=nonce,
            defaults=RowDefaults(
                environment=self.config.environment,
                run_id=run_id,
                settings=self.config.settings,
                evaluation=self.config.evaluation,
            ),
            groups=Groups(run_id, size=self.config.num_generations),
            patience=self.config.repost_seconds,
            on_abandoned=self._cancel_later,
        )

    async def run(self, request: Request, body: dict[str, Any]) -> Response:
        """Make one rollout of the row in the body and answer with its Gym result."""
        try:
            posted = self._posts.claim(body)
        except TaskError as error:
            return self._answer(_refused(error), body, Placeholder())
        try:
            rollout = await self._roll_out(posted)
            placeholder = await self._placeholder(rollout, body)
        except asyncio.CancelledError:  # Gym cancels the handler when the caller disconnects
            self._posts.caller_vanished(body, posted)
            raise
        if await request.is_disconnected():  # a Gym that does not: nobody reads this answer
            self._posts.caller_vanished(body, posted)
        return self._answer(rollout, body, placeholder)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Not offered: a rollout needs a task, and only a row posted to ``/run`` has one."""
        raise NotImplementedError(
            "prorl_agent makes whole rollouts: post the row to /run. For single model calls use the prorl_model server."
        )

    async def _roll_out(self, posted: RolloutRequest) -> Rollout:
        # Gym's client posts again without bound when the connection drops; the id makes that harmless.
        response = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/rollouts", json=posted.model_dump(mode="json")
        )
        await raise_for_status(response)
        return Rollout.model_validate_json(await response.read())

    async def _placeholder(self, rollout: Rollout, row: dict[str, Any]) -> Placeholder:
        """Ask for the ids of the first prompt when the rollout never got as far as having one."""
        if any(segment.token_ids for segment in rollout.segments):
            return Placeholder()
        response = await self.server_client.post(
            server_name=self.config.resources_server.name,
            url_path="/prompt_ids",
            json={"responses_create_params": row.get("responses_create_params") or {}},
        )
        if response.status != 200:
            return Placeholder()
        answer = await get_response_json(response)
        return Placeholder(tuple(answer["prompt_token_ids"]), answer["terminator_id"])

    def _answer(self, rollout: Rollout, row: dict[str, Any], placeholder: Placeholder) -> Response:
        blameless = rollout.outcome.status == "failed" and rollout.outcome.cause is not Cause.POLICY
        if blameless and self.config.on_failure == "raise":
            raise HTTPException(503, f"{rollout.outcome.kind}: {rollout.outcome.message}")
        result = to_gym_result(rollout, row, placeholder=placeholder, mask_truncated=self.config.mask_truncated)
        return Response(orjson.dumps(result), media_type="application/json")

    def _cancel_later(self, request: RolloutRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._cancel(request))
        self._cancels.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._cancels.discard)

    async def _cancel(self, request: RolloutRequest) -> None:
        await self.server_client.post(
            server_name=self.config.resources_server.name,
            url_path="/cancel_rollouts",
            json={"rollout_ids": [request.rollout_id], "reason": "disconnected"},
        )


def _refused(error: TaskError) -> Rollout:
    """The record of a row that could not even be submitted."""
    now = time.time()
    return Rollout(
        rollout_id=f"refused-{uuid4().hex}",
        run_id="refused",
        group_id=None,
        group_size=1,
        replica=0,
        environment="unknown",
        outcome=Outcome(status="failed", kind=FailureKind.BAD_ROW, stage="queue", message=str(error)),
        accepted_at=now,
        finished_at=now,
    )


if __name__ == "__main__":
    ProrlAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ProrlAgent.run_webserver()
