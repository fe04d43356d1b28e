"""False positives and false negatives of the code grader on the labelled programs, both halves apart."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from _grade_corpora import FALSE_NEGATIVES_PERCENT, FALSE_POSITIVES, HALVES, half_name
from _report import SHORT, Figure, figure

from prorl_gym.environments.grader_corpus import CodeExample, ConfusionCounts, count_confusion, is_rewarded, read_corpus
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend

FOLDER = Path(__file__).parents[1] / "tests" / "corpora"


async def run() -> list[Figure]:
    """Grade every program of both halves in sandboxes, two at a time."""
    backend = await open_backend(SandboxConfig(backend="userns"))
    try:
        return [each for half in HALVES for each in _figures(half, await _graded(half, backend))]
    finally:
        await backend.close()


async def _graded(half: str, backend: SandboxBackend) -> ConfusionCounts[CodeExample]:
    pairs: Sequence[CodeExample] = read_corpus(FOLDER / f"code_{half}.jsonl", CodeExample)
    pairs = pairs[:: 10 if SHORT else 1]
    turns = asyncio.Semaphore(2)

    async def one(pair: CodeExample) -> bool:
        leases = SandboxLeases(backend)
        async with turns:
            try:
                return await is_rewarded(pair, leases)
            finally:
                await leases.close()

    return count_confusion(pairs, await asyncio.gather(*map(one, pairs)))


def _figures(half: str, found: ConfusionCounts[CodeExample]) -> list[Figure]:
    size = f"{found.positives} right and {found.negatives} wrong programs"
    return [
        figure(
            *(f"code, {half_name(half, 'code')} ({size}): false positives", [len(found.false_positives)], ""),
            better="lower",
            target=FALSE_POSITIVES,
        ),
        figure(
            *(f"code, {half_name(half, 'code')}: false negatives", [100 * found.false_negative_rate], "%"),
            better="lower",
            target=FALSE_NEGATIVES_PERCENT,
        ),
    ]
