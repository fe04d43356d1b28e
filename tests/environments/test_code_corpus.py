"""The labelled corpora of programs: nothing wrong is rewarded, and next to nothing right is refused.

``code_seen`` was written beside the grader, ``code_unseen`` without sight of it. A remark in a program, the order of
its tests, line ends and repeated tests do not change a verdict.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from code_support import verdicts
from grader_corpus import CodeExample, count_confusion, read_corpus

from prorl_gym.sandbox.protocol import SandboxBackend

pytestmark = pytest.mark.usefixtures("isolated")

FOLDER = Path(__file__).parents[1] / "corpora"
SLOW = ("never ends", "too slow", "for ever", "infinite", "time")


def names(pairs: Sequence[CodeExample]) -> list[str]:
    return [f"{pair.id} ({pair.why})" for pair in pairs]


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["seen", "unseen"])
async def test_a_whole_corpus(backend: SandboxBackend, name: str):
    pairs = read_corpus(FOLDER / f"code_{name}.jsonl", CodeExample)
    assert len(pairs) >= 260
    found = count_confusion(pairs, await verdicts(backend, pairs))
    assert names(found.false_positives) == []
    assert found.false_negative_rate <= 0.01, names(found.false_negatives)


def remarked(pair: CodeExample, dice: random.Random) -> CodeExample:
    program = "# A remark.\n\n" + pair.program.replace("\n", "\n" + "\n" * dice.randrange(2)) + "\n\n# The end.\n"
    return pair.model_copy(update={"program": program})


def reordered(pair: CodeExample, dice: random.Random) -> CodeExample:
    cases = list(pair.tests["cases"])
    dice.shuffle(cases)
    return pair.model_copy(update={"tests": {**pair.tests, "cases": cases}})


def repeated(pair: CodeExample, dice: random.Random) -> CodeExample:
    return pair.model_copy(update={"tests": {**pair.tests, "cases": [*pair.tests["cases"], *pair.tests["cases"]]}})


def fenced(pair: CodeExample, dice: random.Random) -> CodeExample:
    """With Windows' line ends, as some models write."""
    return pair.model_copy(update={"program": pair.program.replace("\n", "\r\n")})


@pytest.mark.product
@pytest.mark.parametrize("change", [remarked, reordered, repeated, fenced])
async def test_verdicts_stay(backend: SandboxBackend, change: Callable[[CodeExample, random.Random], CodeExample]):
    pairs = [pair for pair in read_corpus(FOLDER / "code_seen.jsonl", CodeExample) if not is_special(pair)][::9]
    assert len({pair.correct for pair in pairs}) == 2 and len(pairs) >= 20
    dice = random.Random(7)
    found = await verdicts(backend, [change(pair, dice) for pair in pairs])
    assert [pair.id for pair, verdict in zip(pairs, found, strict=True) if verdict is not pair.correct] == []


def is_special(pair: CodeExample) -> bool:
    """Programs that look at their own source or the clock, or hold text over several lines: a remark changes these."""
    text = pair.program
    return (
        '"""' in text or "'''" in text or "__file__" in text or any(word in pair.why for word in SLOW) or "\\\n" in text
    )
