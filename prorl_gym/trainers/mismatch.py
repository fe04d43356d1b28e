"""How far a trainer's log-probs are from those that engines served, by policy version.

A trainer computes the log-prob of each token that it trains on with the weights that sampled it, and compares. Nothing
but numerics may differ: some 1e-5 nats in float32, some hundredths in bfloat16. A mask that lets observations through,
log-probs of another version or another tokenisation show here at the first batch, while such a policy may still learn,
so that no curve shows them. The largest difference separates these faults from a clean run; the mean KL does not.

Needs numpy.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prorl_gym.errors import ProrlError
from prorl_gym.records import NOT_SAMPLED, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MismatchError(ProrlError):
    """What a trainer computes is not what the engines sampled from."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences over the tokens of one policy version, ``d`` being the trainer's log-prob minus the served one."""

    tokens: int
    max_abs_diff: float
    """Largest ``|d|`` in nats; NaN when one of the log-probs is NaN."""
    kl: float
    """Mean of ``exp(d) - d - 1``: an estimate, never negative, of the KL divergence of the served policy from the
    trainer's (Schulman, "Approximating KL divergence")."""
    mult_prob_error: float
    """Mean of ``exp(|d|)``: by which factor probabilities differ; 1 when they are equal."""


def mismatch_by_version(
    segments: Sequence[Segment],
    logprobs: "Sequence[Sequence[float] | NDArray[Any]]",
    masks: "Sequence[Sequence[float] | NDArray[Any]] | None" = None,
) -> dict[int, Mismatch]:
    """Compare the tokens that carry loss, grouped by the policy version that sampled them.

    Args:
        segments: of one rollout, or of all rollouts of a batch.
        logprobs: the trainer's, for each segment one value per token of it; those of tokens without loss are not read.
        masks: what the trainer trains on, likewise; the segments' own masks by default. Give the trainer's, so that a
            wrong mask is found: tokens that were not sampled are returned under ``NOT_SAMPLED``.

    Raises:
        ValueError: a list has another length than its segment.
    """
    import numpy as np

    given = [segment.mask for segment in segments] if masks is None else masks
    served, trained, versions = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
    for place, (segment, own, mask) in enumerate(zip(segments, logprobs, given, strict=True)):
        values, chosen = np.asarray(own, dtype=np.float64), np.asarray(mask) != 0
        if not values.shape == chosen.shape == (len(segment.token_ids),):
            raise ValueError(
                f"segment {place} has {len(segment.token_ids)} tokens, the log-probs have the shape {values.shape} and "
                f"the mask has {chosen.shape}"
            )
        served.append(np.asarray(segment.logprobs, dtype=np.float64)[chosen])
        trained.append(values[chosen])
        versions.append(np.asarray(segment.policy_versions, dtype=np.int64)[chosen])
    version = np.concatenate(versions)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.concatenate(trained) - np.concatenate(served)
        found: dict[int, Mismatch] = {}
        for one in sorted({int(value) for value in version}):
            d = difference[version == one]
            kl = np.mean(np.expm1(d) - d)
            found[one] = Mismatch(d.size, float(np.abs(d).max()), float(kl), float(np.mean(np.exp(np.abs(d)))))
    return found


def require_match(mismatches: Mapping[int, Mismatch], max_abs_diff: float) -> None:
    """Refuse a batch whose log-probs do not match.

    Args:
        mismatches: see ``mismatch_by_version``.
        max_abs_diff: largest difference that numerics explain, in nats.

    Raises:
        MismatchError: tokens that no policy sampled carry loss, or a difference is above the bound or NaN.
    """
    if (foreign := mismatches.get(NOT_SAMPLED)) is not None:
        raise MismatchError(
            f"mismatch: {foreign.tokens} tokens that carry loss were not sampled (version {NOT_SAMPLED}).",
            "Train on the tokens whose mask is 1 in the record, at the same positions.",
        )
    for version, one in mismatches.items():
        if not one.max_abs_diff <= max_abs_diff:
            raise MismatchError(
                f"mismatch: log-probs of version {version} differ by up to {one.max_abs_diff:.3g} nats from the "
                f"served ones "
                f"(bound {max_abs_diff:g}, mean KL {one.kl:.3g}, {one.tokens} tokens).",
                "Compute them with the weights of that version, on the record's own token ids.",
            )
