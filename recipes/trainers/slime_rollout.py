"""A rollout function for slime.

Start slime with this file on ``PYTHONPATH`` and these options:

    --rollout-function-path slime_rollout.generate_rollout
    --custom-reward-post-process-path prorl_gym.trainers.slime.normalize_rewards

The label of each row of the data set is the JSON text of ``{"environment": ..., "task": ...}``.
"""

import json
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample

from prorl_gym import RolloutRequest, RolloutSettings, SyncClient
from prorl_gym.trainers.slime import to_slime


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Return the samples of one step: by prompt, by rollout, by segment."""
    if evaluation:
        raise ValueError("evaluate with `prorl-gym evaluate`; leave --eval-interval unset")
    groups = data_source.get_samples(args.rollout_batch_size)
    settings = RolloutSettings(temperature=args.rollout_temperature, top_p=args.rollout_top_p)
    requests = [
        RolloutRequest(
            rollout_id=f"step-{rollout_id}-{place}-{replica}",
            group_id=f"step-{rollout_id}-{place}",
            group_size=len(group),
            replica=replica,
            settings=settings,
            **json.loads(sample.label),
        )
        for place, group in enumerate(groups)
        for replica, sample in enumerate(group)
    ]
    samples: list[list[list[Sample]]] = [[] for _ in groups]
    experts = (args.num_layers, args.moe_router_topk) if args.use_rollout_routing_replay else None
    with SyncClient() as client:
        client.submit(requests)
        for index, request in enumerate(requests):
            rollout, place = client.result(request.rollout_id), index // args.n_samples_per_prompt
            rows = to_slime(rollout, group_index=place, rollout_index=index, placeholder_id=0, expert_shape=experts)
            samples[place].append([Sample.from_dict(row) for row in rows])
    return RolloutFnTrainOutput(samples=samples)
