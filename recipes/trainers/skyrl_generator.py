"""A generator for SkyRL: a trainer's entry point gives it to ``RayPPOTrainer`` in place of ``SkyRLGymGenerator``.

Each row of the data set has ``extra_info: {environment: ..., task: ...}``. With ``generator.step_wise_trajectories``
each segment of a rollout is a step of its trajectory.
"""

from uuid import uuid4

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from prorl_gym import Client, RolloutRequest, RolloutSettings
from prorl_gym.trainers.skyrl import to_skyrl


class ProrlGenerator(GeneratorInterface):
    """Makes rollouts in the service.

    Args:
        group_size: ``generator.n_samples_per_prompt``.
        eos_token_id: of the tokenizer.
        step_wise: as configured.
    """

    def __init__(self, group_size: int, eos_token_id: int, *, step_wise: bool = False) -> None:
        self._group_size, self._eos, self._step_wise = group_size, eos_token_id, step_wise

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the trajectories in the order of the input.

        Raises:
            NoRewardError: a whole group failed.
        """
        call, given = uuid4().hex, input_batch["sampling_params"] or {}
        settings = RolloutSettings(**{key: given[key] for key in ("temperature", "top_p", "top_k") if key in given})
        ids = input_batch["trajectory_ids"] or []
        requests = [
            RolloutRequest(
                rollout_id=f"{call}-{place}",
                group_id=f"{call}-{one.instance_id}",
                group_size=self._group_size,
                replica=one.repetition_id,
                settings=settings,
                environment=row["extra_info"]["environment"],
                task=row["extra_info"]["task"],
            )
            for place, (one, row) in enumerate(zip(ids, input_batch["env_extras"] or [], strict=True))
        ]
        async with Client() as client:
            await client.submit(requests)
            rollouts = [await client.result(request.rollout_id) for request in requests]
        return GeneratorOutput(**to_skyrl(rollouts, ids, placeholder_id=self._eos, step_wise=self._step_wise))
