"""How far a trainer's log-probs are from those that engines served, by policy version, position and engine.

A trainer computes the log-prob of each token that it trains on with the weights that sampled it, and compares. Nothing
but numerics may differ: some 1e-5 nats in float32, some hundredths in bfloat16. A mask that lets observations through,
log-probs of another version or another tokenisation show here at the first batch, while such a policy may still learn,
so that no curve shows them. The largest difference separates these faults from a clean run; the mean KL does not.

Needs numpy.
"""

# pyright: reportUnknownMemberType=false

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from prorl_gym.records import NOT_SAMPLED, BatchMismatch, Mismatch, MismatchPosition, Segment
from prorl_gym.trainers.checks import CheckError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POSITIONS: tuple[MismatchPosition, ...] = get_args(MismatchPosition)
_TURNS = (1, 2, 3, 4, 8, 16)
"""First turn of each of the positions that are turns, which come first."""

_FILLED_IN = -1e-3
"""A served log-prob of exactly 0.0 stands for a probability within 1e-7 of 1, where no numerics make a trainer's own
smaller than this, in nats."""


class MismatchError(CheckError):
    """A trainer computes other log-probs than the engines sampled from."""


def measure_mismatch(
    segments: Sequence[Segment],
    logprobs: "Sequence[Sequence[float] | NDArray[Any]]",
    masks: "Sequence[Sequence[float] | NDArray[Any]] | None" = None,
) -> BatchMismatch:
    """Compare the tokens that carry loss, of one rollout or of all rollouts of a batch.

    ``logprobs`` are the trainer's, for each segment one value per token of it; those of tokens without loss are not
    read. ``masks`` say what the trainer trains on, likewise; by default they are the segments' own. Give the trainer's,
    so that a wrong mask is found: tokens that were not sampled are returned under ``NOT_SAMPLED``.
    """
    import numpy as np

    given = [segment.mask for segment in segments] if masks is None else masks
    served, trained, versions = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
    positions = [np.zeros((0, len(_POSITIONS)), dtype=bool)]
    engines: list[str] = []
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
        positions.append(_positions(segment)[chosen])
        names = [""] * len(segment.token_ids)
        for call in segment.generations:
            names[call.start : call.end] = [call.engine] * (call.end - call.start)
        engines += [names[token] for token in np.flatnonzero(chosen)]
    version, at, engine = np.concatenate(versions), np.concatenate(positions), np.asarray(engines, dtype=np.str_)
    own, theirs = np.concatenate(trained), np.concatenate(served)
    with np.errstate(invalid="ignore"):
        difference, zero = own - theirs, (theirs == 0) & (own < _FILLED_IN)

    def of(part: "NDArray[Any]") -> Mismatch:
        return _figures(difference[part], int(zero[part].sum()))

    return BatchMismatch(
        total=_figures(difference, int(zero.sum())),
        by_version={one: of(version == one) for one in sorted({int(value) for value in version})},
        by_position={one: of(at[:, n]) for n, one in enumerate(_POSITIONS) if at[:, n].any()},
        by_engine={one: of(engine == one) for one in sorted({*engines} - {""})},
    )


def require_match(
    found: BatchMismatch,
    max_abs_diff: float = math.inf,
    *,
    max_kl: float = math.inf,
    max_mult_prob_error: float = math.inf,
) -> None:
    """Refuse a batch whose log-probs do not match: each bound holds for each policy version.

    Raises ``MismatchError``: ``mask``, tokens that no policy sampled carry loss; ``zero log-prob``, a served log-prob
    was filled in; ``mismatch``, a figure is above its bound or NaN.
    """
    if (foreign := found.by_version.get(NOT_SAMPLED)) is not None:
        raise MismatchError(
            "mask",
            f"{foreign.tokens} tokens that carry loss were not sampled (version {NOT_SAMPLED}).",
            "Train on the tokens whose mask is 1 in the record, at the same positions.",
        )
    if found.total.zeros:
        raise MismatchError(
            "zero log-prob",
            f"{found.total.zeros} of {found.total.tokens} served log-probs are exactly 0.0, and the trainer's are not.",
            "Look for code that fills log-probs in.",
        )
    for name, bound in (("max_abs_diff", max_abs_diff), ("kl", max_kl), ("mult_prob_error", max_mult_prob_error)):
        if any(not getattr(one, name) <= bound for one in found.by_version.values()):
            total = found.total
            raise MismatchError(
                "mismatch",
                f"log-probs differ by up to {total.max_abs_diff:.3g} nats from the served ones ({total.tokens} tokens, "
                f"mean KL {total.kl:.3g}; {name} is above {bound:g} in {_outliers(found, name, bound)}).",
                "Compute them with the weights of the token's version, on the record's own token ids.",
            )


def _outliers(found: BatchMismatch, name: str, bound: float) -> str:
    """Return which parts of a batch are above a bound and which are not."""
    parts: list[str] = []
    groups: tuple[tuple[str, Mapping[Any, Mismatch]], ...] = (
        ("version ", found.by_version),
        ("", found.by_position),
        ("engine ", found.by_engine),
    )
    for kind, group in groups:
        above = [str(label) for label, one in group.items() if not getattr(one, name) <= bound]
        below = [str(label) for label in group if str(label) not in above]
        if above and (below or kind == "version "):
            parts.append(f"{kind}{', '.join(above)}{', not in ' if below else ''}{', '.join(below)}")
    return "; ".join(parts)


def _positions(segment: Segment) -> "NDArray[Any]":
    """Return which of ``_POSITIONS`` each token has, ``[token, position]``; one that was not sampled has none."""
    import numpy as np

    sampled = np.asarray(segment.mask, dtype=np.int64)
    begins, ends = np.diff(sampled, prepend=0) == 1, np.diff(sampled, append=0) == -1
    turn = np.searchsorted(_TURNS, np.cumsum(begins), side="right")
    quarter = (np.cumsum(sampled) - 1) * 4 // max(1, int(sampled.sum()))
    turns, quarters = [turn == n + 1 for n in range(len(_TURNS))], [quarter == n for n in range(4)]
    return np.stack([*turns, begins, ends, *quarters], axis=1) & (sampled == 1)[:, None]


def _figures(difference: "NDArray[Any]", zeros: int) -> Mismatch:
    import numpy as np

    if not difference.size:
        return Mismatch(0, 0.0, 0.0, 0.0, 1.0, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(difference)
        return Mismatch(
            tokens=difference.size,
            max_abs_diff=float(size.max()),
            mean_abs_diff=float(size.mean()),
            kl=float(np.mean(np.expm1(difference) - difference)),
            mult_prob_error=float(np.mean(np.exp(size))),
            zeros=zeros,
        )
