"""A workflow for AReaL, which makes a whole group as one episode.

Start it with this file on ``PYTHONPATH``, and with ``gconfig.n_samples: 1`` and ``reward_norm.group_size: 8``::

    trainer.train(workflow="areal_workflow.ProrlWorkflow", workflow_kwargs={"group_size": 8})

Each row of the data set has ``environment`` and ``task``.
"""

from typing import Any
from uuid import uuid4

import torch
from areal.api.workflow_api import RolloutWorkflow

from prorl_gym import Client, RolloutRequest
from prorl_gym.trainers.areal import to_areal


class ProrlWorkflow(RolloutWorkflow):
    """Makes each group in the service.

    Args:
        group_size: rollouts of a prompt.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the tensors of a group; ``None`` rejects it."""
        group = uuid4().hex
        requests = [
            RolloutRequest(
                environment=data["environment"],
                task=data["task"],
                group_id=group,
                group_size=self._group_size,
                replica=replica,
            )
            for replica in range(self._group_size)
        ]
        async with Client() as client:
            await client.submit(requests)
            rollouts = [await client.result(request.rollout_id) for request in requests]
        rows = to_areal(rollouts, placeholder_id=0)
        return rows and {key: torch.tensor(values) for key, values in rows.items()}
