"""What NeMo-RL does with answers of ``/run``, restated: from the answers of a step to the rows that it trains on.

Commit 7ea279abf of 22 August 2026. Each function names the one it restates. Lists instead of tensors: what is refused,
which rows share a baseline and what is filtered does not depend on them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A row as the trainer keeps it."""

    prompt_ids: tuple[int, ...]
    """The first prompt, by which rows are grouped for the baseline."""
    reward: float
    is_masked: bool


def to_sample(result: Mapping[str, Any]) -> Sample:
    """Restate ``NemoGym._postprocess_nemo_gym_to_nemo_rl_result``, the NaN check after it, and the fields of a row."""
    seen: list[int] = []
    prompts: list[tuple[int, ...]] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt = item["prompt_token_ids"]
        assert seen == prompt[: len(seen)], "Non-contiguous messages found!"
        assert not any(map(math.isnan, item["generation_log_probs"])), "Generation logprobs contain NaN"
        prompts.append(tuple(prompt))
        seen = [*prompt, *item["generation_token_ids"]]
    assert prompts, "NeMo Gym returned a result with no generation data."
    flagged = (result.get("instance_config") or {}).get("mask_sample", False)
    return Sample(prompts[0], float(result["reward"]), bool(flagged))


def to_groups(results: Sequence[Mapping[str, Any]], size: int) -> list[list[Mapping[str, Any]]]:
    """Restate how ``run_async_nemo_gym_rollout`` puts rows back into groups: by position."""
    ordered = sorted(results, key=lambda result: result["_rowidx"])
    assert [result["_rowidx"] for result in ordered] == list(range(len(ordered))) and len(ordered) % size == 0
    return [list(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def baseline_and_std(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Restate ``calculate_baseline_and_std_per_prompt`` without leave-one-out, as the trainers call it.

    Masked rows count. A prompt with one row has its own reward for a baseline, and a deviation of 0.
    """
    groups: dict[tuple[int, ...], list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt_ids, []).append(sample.reward)
    return [_moments(groups[sample.prompt_ids]) for sample in samples]


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    count, mean = len(rewards), fmean(rewards)
    if count <= 1:
        return mean, 0.0
    variance = (fmean(reward**2 for reward in rewards) - mean**2) * count / (count - 1)
    return mean, math.sqrt(max(variance, 0.0))


def keep_informative(samples: Sequence[Sample]) -> list[Sample]:
    """Restate the filter of ``dynamic_sampling``: rows of prompts whose rewards deviate."""
    return [sample for sample, (_, std) in zip(samples, baseline_and_std(samples), strict=True) if std != 0.0]
