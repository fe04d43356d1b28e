"""A workflow for AReaL: ``trainer.train(workflow="areal_workflow.ProrlWorkflow")`` with this file on ``PYTHONPATH``.

Each row of the data set has ``environment`` and ``task``. AReaL makes the rollouts of a group one by one and normalises
their rewards itself.
"""

from typing import Any

import torch
from areal.api.workflow_api import RolloutWorkflow

from prorl_gym import Client, RolloutRequest
from prorl_gym.trainers.areal import to_areal


class ProrlWorkflow(RolloutWorkflow):
    """Makes each episode in the service."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the tensors of one rollout; ``None`` rejects it."""
        request = RolloutRequest(environment=data["environment"], task=data["task"])
        async with Client() as client:
            await client.submit(request)
            rows = to_areal(await client.result(request.rollout_id))
        return rows and {key: torch.tensor(values) for key, values in rows.items()}
