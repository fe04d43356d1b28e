"""GRPO with TRL: ``python trl_grpo.py MODEL ROWS.jsonl`` trains a model that the service samples from.

The service serves this model's engine, and needs the new weights after each step: see the guide.
"""

import json
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from prorl_gym import Rollout, RolloutRequest, SyncClient
from prorl_gym.trainers.trl import served_reward, to_trl


def roll_out(rows: dict[str, dict[str, Any]], prompts: list[str], group_size: int) -> list[Rollout]:
    """Return a rollout for each prompt, in their order; TRL repeats a prompt ``group_size`` times in a row."""
    step = uuid4().hex
    requests = [
        RolloutRequest(
            rollout_id=f"{step}-{place}",
            group_id=f"{step}-{place // group_size}",
            group_size=group_size,
            replica=place % group_size,
            **rows[prompt],
        )
        for place, prompt in enumerate(prompts)
    ]
    with SyncClient() as client:
        client.submit(requests)
        return [client.result(request.rollout_id) for request in requests]


def main() -> None:
    """Train. Each line of the file has ``environment`` and ``task``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, lines = sys.argv[1], Path(sys.argv[2]).read_text().splitlines()
    rows = {str(number): json.loads(line) for number, line in enumerate(lines)}  # TRL hands over prompts, not rows

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        rollouts = roll_out(rows, prompts, trainer.num_generations)
        return to_trl(rollouts, placeholder_id=trainer.processing_class.eos_token_id)

    GRPOTrainer(
        model=model,
        args=GRPOConfig(loss_type="dapo", beta=0.0, epsilon_high=0.28),
        train_dataset=Dataset.from_list([{"prompt": number} for number in rows]),
        rollout_func=rollout_func,
        reward_funcs=served_reward,
    ).train()


if __name__ == "__main__":
    main()
