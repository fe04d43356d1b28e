"""Records of an evaluation as figures: pass@k over a file of rows, without counting what infrastructure broke.

``pass@k`` is the chance that at least one of k samples of a row solves it. From n samples of which c solve the row,
``1 - C(n - c, k) / C(n, k)`` is its unbiased estimate (Chen et al. 2021, "Evaluating Large Language Models Trained on
Code"); drawing k samples once would have the same mean and more noise, ``1 - (1 - c/n)^k`` is biased.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_gym.records import Rollout


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k over rows."""

    k: int
    value: float
    low: float
    high: float
    """Bounds of 95 %: Wilson's interval over the rows. A row's estimate lies in [0, 1], so that its variance is at most
    that of a coin: the interval is too wide rather than too narrow. It covers the choice of rows of the same kind,
    not the variation between runs."""
    rows: int
    """Rows with at least k samples that have a reward; the others are not counted."""


@dataclass(slots=True)
class RowResult:
    rewards: list[float] = field(default_factory=list[float])
    excluded: int = 0
    """Samples without a reward."""

    def count_solved(self, threshold: float) -> int:
        return sum(reward >= threshold for reward in self.rewards)


@dataclass(slots=True)
class Evaluation:
    """Figures of an evaluation, row by row. A sample counts as solved from the reward ``threshold`` on."""

    threshold: float = 1.0
    rows: dict[str, RowResult] = field(default_factory=dict[str, RowResult])
    excluded: Counter[str] = field(default_factory=Counter[str])
    """Samples without a reward, by outcome: they are no measurement of the policy."""
    first_messages: dict[str, str] = field(default_factory=dict[str, str])
    """For each of these, the message of the first such sample; it may quote engines and models."""
    turns: int = 0
    tokens: int = 0

    def add_sample(self, row: str, rollout: Rollout) -> None:
        result = self.rows.setdefault(row, RowResult())
        if rollout.reward is None:
            result.excluded += 1
            outcome = rollout.outcome
            detail = outcome.kind or outcome.reason
            how = f"{outcome.status}({detail.value})" if detail else outcome.status
            self.excluded[how] += 1
            self.first_messages.setdefault(how, outcome.message)
            return
        result.rewards.append(rollout.reward)
        self.turns += rollout.turns
        self.tokens += rollout.sampled_tokens

    @property
    def samples(self) -> int:
        """Samples with a reward."""
        return sum(len(row.rewards) for row in self.rows.values())

    @property
    def mean_reward(self) -> float | None:
        """Mean over all samples with a reward; ``None`` when there are none."""
        return math.fsum(r for row in self.rows.values() for r in row.rewards) / self.samples if self.samples else None

    def pass_at(self, k: int) -> PassAtK | None:
        """Return pass@k; ``None`` when no row has k samples with a reward."""
        estimates = [
            pass_at_k(len(row.rewards), row.count_solved(self.threshold), k)
            for row in self.rows.values()
            if len(row.rewards) >= k
        ]
        if not estimates:
            return None
        value = math.fsum(estimates) / len(estimates)
        low, high = wilson_interval(value, len(estimates))
        return PassAtK(k, value, low, high, len(estimates))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the unbiased estimate for one row. Raises ``ValueError``: fewer samples than ``k``."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {solved} solved: not defined")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of 95 % of a mean of ``count`` values in [0, 1]."""
    z = 1.959963984540054  # quantile of the normal distribution
    centre = mean + z * z / (2 * count)
    spread = z * math.sqrt(max(0.0, mean * (1 - mean)) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, min(mean, (centre - spread) / scale)), min(1.0, max(mean, (centre + spread) / scale))


def summarize(evaluation: Evaluation, ks: Sequence[int]) -> dict[str, object]:
    found = [one for k in ks if (one := evaluation.pass_at(k)) is not None]
    return {
        "pass_at": {
            str(one.k): {"value": one.value, "low": one.low, "high": one.high, "rows": one.rows} for one in found
        },
        "rows": len(evaluation.rows),
        "samples": evaluation.samples,
        "excluded": dict(evaluation.excluded),
        "first_excluded": dict(evaluation.first_messages),
        "mean_reward": evaluation.mean_reward,
        "threshold": evaluation.threshold,
        "mean_turns": evaluation.turns / evaluation.samples if evaluation.samples else None,
        "mean_tokens": evaluation.tokens / evaluation.samples if evaluation.samples else None,
        "by_row": {
            name: {
                "samples": len(row.rewards),
                "solved": row.count_solved(evaluation.threshold),
                "excluded": row.excluded,
            }
            for name, row in evaluation.rows.items()
        },
    }
