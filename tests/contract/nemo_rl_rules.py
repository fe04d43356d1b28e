"""What NeMo-RL does with answers of ``/run``, restated: from the answers of a step to the batch that it trains on.

Commit 7ea279abf of 22 August 2026. Each function names the one it restates. Lists instead of tensors: what is refused,
which rows share a baseline, what is filtered and which tokens carry loss does not depend on them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

COMMIT = "7ea279abf"


@dataclass(frozen=True)
class Message:
    """A piece of a trajectory; only those of the assistant are trained on."""

    is_assistant: bool
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Sample:
    """A row as the trainer keeps it."""

    messages: list[Message]
    reward: float
    is_masked: bool
    is_truncated: bool

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The first prompt, by which rows are grouped for the baseline."""
        return tuple(self.messages[0].token_ids)

    @property
    def length(self) -> int:
        return sum(len(message.token_ids) for message in self.messages)


@dataclass(frozen=True)
class Batch:
    """Rows of equal length: padded on the right with 0."""

    input_ids: list[list[int]]
    input_lengths: list[int]
    token_mask: list[list[int]]
    generation_logprobs: list[list[float]]
    sample_mask: list[int]
    advantages: list[float]

    @property
    def loss_tokens(self) -> list[int]:
        """Tokens of each row that carry loss."""
        return [use * sum(mask) for use, mask in zip(self.sample_mask, self.token_mask, strict=True)]


def to_sample(result: Mapping[str, Any], max_model_len: int) -> Sample:
    """Restate ``NemoGym._postprocess_nemo_gym_to_nemo_rl_result``, the NaN check after it, and the fields of a row.

    Raises:
        AssertionError: a prompt does not begin with all tokens before it.
        ValueError: no item was sampled.
        RuntimeError: a log-prob is not a number.
    """
    seen: list[int] = []
    messages: list[Message] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, sampled, logprobs = (
            item[key] for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        )
        assert seen == prompt[: len(seen)], "Non-contiguous messages found!"
        new = prompt[len(seen) :]
        messages += [Message(False, new, [0.0] * len(new)), Message(True, sampled, logprobs)]
        seen = [*seen, *new, *sampled]
    if not messages:
        raise ValueError("NeMo Gym returned a result with no generation data.")
    if any(math.isnan(value) for message in messages for value in message.logprobs):
        raise RuntimeError("Generation logprobs contain NaN")
    flagged = (result.get("instance_config") or {}).get("mask_sample", False)
    return Sample(messages, float(result["reward"]), bool(flagged), len(seen) == max_model_len)


def to_groups(results: Sequence[Mapping[str, Any]], size: int) -> list[list[Mapping[str, Any]]]:
    """Restate how ``run_async_nemo_gym_rollout`` puts rows back into groups: by position.

    Raises:
        ValueError: a row is missing or came twice.
    """
    ordered = sorted(results, key=lambda result: result["_rowidx"])
    if [result["_rowidx"] for result in ordered] != list(range(len(ordered))) or len(ordered) % size:
        raise ValueError("rows are missing, or came twice")
    return [list(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def reward_columns(group: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Restate ``build_reward_component_columns``: groups of one batch must have the same ones."""
    found = [result["reward_components"] for result in group if result.get("reward_components") is not None]
    return frozenset(f"reward/{name}" for components in found for name in components)


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


def to_batch(samples: Sequence[Sample], *, overlong_filtering: bool = True) -> Batch:
    """Restate how a step builds what it trains on.

    ``add_grpo_token_loss_masks_and_generation_logprobs``, ``batched_message_log_to_flat_message``,
    ``_apply_mask_sample_filter``, overlong filtering, and advantages that are normalized by the deviation.
    """
    longest = max(sample.length for sample in samples)

    def padded(values: list[Any], padding: Any) -> list[Any]:
        return values + [padding] * (longest - len(values))

    moments = baseline_and_std(samples)
    return Batch(
        input_ids=[padded([t for m in s.messages for t in m.token_ids], 0) for s in samples],
        input_lengths=[s.length for s in samples],
        token_mask=[padded([int(m.is_assistant) for m in s.messages for _ in m.token_ids], 0) for s in samples],
        generation_logprobs=[padded([v for m in s.messages for v in m.logprobs], 0.0) for s in samples],
        sample_mask=[int(not s.is_masked and not (overlong_filtering and s.is_truncated)) for s in samples],
        advantages=[
            (s.reward - mean) / (std + 1e-6) if std else 0.0 for s, (mean, std) in zip(samples, moments, strict=True)
        ],
    )
