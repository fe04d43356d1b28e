"""NeMo-RL's own acceptance rules for a rollout row, so that a violation is found here and not in the trainer.

NeMo-RL turns a row into one strictly prefix-growing token sequence and aborts the whole batch when it cannot. These
functions apply the same rules (source: ``nemo_rl/environments/nemo_gym.py``) and name the row and rule of a violation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class TrainerContractError(ValueError):
    """A result row that NeMo-RL would refuse."""


def check_result(result: Mapping[str, Any]) -> None:
    """Check one ``/run`` answer.

    Raises ``TrainerContractError``: no generation, a partial token triple, unequal lengths, a log-prob or reward that
    is not finite, a prompt that does not extend the tokens seen so far, components that do not add up to the reward, or
    two masks that disagree.
    """
    name = str(result.get("prorl_rollout_id") or result.get("_ng_task_index", "row"))
    output = result.get("response", {}).get("output")
    _require(isinstance(output, Sequence), name, "response.output is not a list")
    seen: list[int] = []
    generations = 0
    for position, item in enumerate(output):
        generations += _check_item(item, f"{name}, output item {position}", seen)
    _require(generations > 0, name, "no item carries generation_token_ids: NeMo-RL has nothing to train on")
    reward = result.get("reward")
    _require(_is_finite(reward), name, f"reward is {reward!r}, not a finite number")
    components = result.get("reward_components")
    if components is not None:
        total = sum(components.values())
        is_sum = math.isclose(total, float(reward or 0.0), abs_tol=1e-6)
        _require(is_sum, name, f"reward_components add up to {total}, not {reward}")
    config: Mapping[str, Any] = result.get("instance_config") or {}
    top, nested = bool(result.get("mask_sample", False)), bool(config.get("mask_sample", False))
    _require(top == nested, name, f"mask_sample is {top} but instance_config.mask_sample is {nested}")


def check_group(results: Sequence[Mapping[str, Any]]) -> None:
    """Check that the rows of one prompt share the first prompt's token ids, which is NeMo-RL's grouping key.

    Raises ``TrainerContractError``, naming the first token that differs.
    """
    first: list[int] | None = None
    for result in results:
        prompt = first_prompt(result)
        if first is None:
            first = prompt
        elif prompt != first:
            shorter = min(len(first), len(prompt))
            place = next((i for i in range(shorter) if first[i] != prompt[i]), shorter)
            name = result.get("prorl_rollout_id") or "a row"
            raise TrainerContractError(f"{name}: its first prompt differs from its group's at token {place}")


def first_prompt(result: Mapping[str, Any]) -> list[int]:
    """Return the token ids of the first prompt of a row. Raises ``TrainerContractError`` when it has none."""
    for item in result.get("response", {}).get("output", ()):
        if item.get("generation_token_ids"):
            return list(item.get("prompt_token_ids") or ())
    raise TrainerContractError(f"{result.get('prorl_rollout_id') or 'a row'}: it carries no prompt_token_ids")


def _check_item(item: Mapping[str, Any], where: str, seen: list[int]) -> int:
    """Check one output item; extend ``seen`` by its tokens. Returns 1 when it is trainable."""
    present = [key for key in _TOKEN_FIELDS if item.get(key) is not None]
    if not present:
        return 0
    missing = sorted(set(_TOKEN_FIELDS) - set(present))
    _require(not missing, where, f"token fields come all three or not at all; {', '.join(missing)} missing")
    prompt, sampled, logprobs = (list(item[key]) for key in _TOKEN_FIELDS)
    _require(len(sampled) == len(logprobs), where, f"{len(sampled)} sampled tokens but {len(logprobs)} log-probs")
    are_ids = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (*prompt, *sampled))
    _require(are_ids, where, "a token id is not a non-negative integer")
    _require(all(map(_is_finite, logprobs)), where, "a log-prob is not a finite number")
    if not sampled:
        return 0
    _require(prompt[: len(seen)] == seen, where, "its prompt does not extend the tokens before it (non-contiguous)")
    seen[:] = prompt + sampled
    return 1


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, where: str, complaint: str) -> None:
    if not condition:
        raise TrainerContractError(f"{where}: {complaint}")
