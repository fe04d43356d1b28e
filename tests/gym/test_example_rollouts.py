"""Example rollouts are what this tree makes of the example rows: the prompts, and what the oracle samples behind them.

What needs Gym, the fields that it adds to a result, `.ci/gym-versions` compares.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_samples import rollout as sample_rollout

from prorl_gym.cli.installation import gym_root
from prorl_gym.inference.tokens.prompt_builder import function_schema
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy
from prorl_gym.oracle.row_index import example_files, load_rows
from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.nemo_rl import check_result
from prorl_gym.trainers.responses_items import messages_from_items

CODEC = load_codec("small")
FILES = sorted(gym_root().glob("*/prorl_*/data/example_rollouts.jsonl"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parents[1].name)
def test_rollouts_are_those_of_the_rows(file: Path):
    policy = OraclePolicy(CODEC, load_rows(example_files()))
    rows, rollouts = rows_of(file.with_name("example.jsonl")), rows_of(file)
    for row, rollout in zip(rows, rollouts, strict=True):
        check_result(rollout)
        ours = {key for key in rollout if not key.startswith("_ng_")}
        assert ours == {key for key in to_gym_result(sample_rollout(), row) if not key.startswith("_ng_")}
        assert {key: rollout[key] for key in row} == row
        params = row["responses_create_params"]
        calls = [item for item in rollout["response"]["output"] if "prompt_token_ids" in item]
        tools = [function_schema(tool) for tool in params["tools"]]
        assert calls[0]["prompt_token_ids"] == CODEC.encode_prompt(messages_from_items(params["input"]), tools)
        for call in calls:
            sampled = policy.complete_turn(call["prompt_token_ids"], seed=None, session="")
            assert call["generation_token_ids"] == sampled
            assert call["generation_log_probs"] == policy.synthetic_logprobs(call["prompt_token_ids"], sampled)
