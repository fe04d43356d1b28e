"""The labelled corpora of programs: nothing wrong is rewarded, and next to nothing right is refused.

``code_seen`` was written beside the grader, ``code_unseen`` without sight of it.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from prorl_gym.environments.grader_corpus import CodeExample, ConfusionCounts, count_confusion, is_rewarded, read_corpus
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend

FOLDER = Path(__file__).parents[1] / "corpora"


def corpus(name: str) -> list[CodeExample]:
    return read_corpus(FOLDER / f"code_{name}.jsonl", CodeExample)


async def graded(backend: SandboxBackend, pair: CodeExample) -> bool:
    leases = SandboxLeases(backend)
    try:
        return await is_rewarded(pair, leases)
    finally:
        await leases.close()


async def confusion(backend: SandboxBackend, pairs: Sequence[CodeExample]) -> ConfusionCounts[CodeExample]:
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
    turns = asyncio.Semaphore(3)

    async def one(pair: CodeExample) -> bool:
        async with turns:
            return await graded(backend, pair)

    return count_confusion(pairs, await asyncio.gather(*map(one, pairs)))


def names(pairs: Sequence[CodeExample]) -> list[str]:
    return [f"{pair.id} ({pair.why})" for pair in pairs]


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["seen", "unseen"])
async def test_a_whole_corpus(backend: SandboxBackend, name: str):
    pairs = corpus(name)
    assert len(pairs) >= 260
    found = await confusion(backend, pairs)
    assert names(found.false_positives) == []
    assert found.false_negative_rate <= 0.01, names(found.false_negatives)
