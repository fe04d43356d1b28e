"""What must not change a verdict does not: a remark in a program, the order of its tests, white space at the end."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.environments.code.grader import outputs_match, results_match
from prorl_gym.environments.grader_corpus import CodeExample, is_rewarded, read_corpus
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend

FOLDER = Path(__file__).parents[1] / "corpora"
SLOW = ("never ends", "too slow", "for ever", "infinite", "time")

LINES = st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=12), min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(LINES, st.sampled_from(["", " ", "\t", "  "]), st.integers(0, 3), st.booleans())
def test_white_space_at_the_end_does_not_count(lines: list[str], space: str, empty: int, windows: bool) -> None:
    end = "\r\n" if windows else "\n"
    printed = end.join(line + space for line in lines) + end * empty
    assert outputs_match("\n".join(lines), printed.encode())


@given(LINES, st.data())
def test_another_character_does(lines: list[str], data: st.DataObject) -> None:
    wanted = "\n".join(["first", *lines])
    at = data.draw(st.integers(0, len("first") - 1))
    assert not outputs_match(wanted, (wanted[:at] + "#" + wanted[at:]).encode())


@given(JSON)
def test_a_result_is_the_same_as_itself_and_in_whatever_order_its_keys_come(value: Any) -> None:
    def turned(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: turned(part[key]) for key in reversed(part)}
        return [turned(each) for each in part] if isinstance(part, list) else part

    assert results_match(value, turned(value))
    assert not results_match(value, [value, "more"])


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
async def test_verdicts_stay(
    backend: SandboxBackend, change: Callable[[CodeExample, random.Random], CodeExample]
) -> None:
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
    pairs = [pair for pair in read_corpus(FOLDER / "code_seen.jsonl", CodeExample) if not _special(pair)][::9]
    assert len({pair.correct for pair in pairs}) == 2 and len(pairs) >= 20
    dice = random.Random(7)
    turns = asyncio.Semaphore(3)

    async def verdict(pair: CodeExample) -> bool:
        leases = SandboxLeases(backend)
        async with turns:
            try:
                return await is_rewarded(change(pair, dice), leases)
            finally:
                await leases.close()

    verdicts = await asyncio.gather(*map(verdict, pairs))
    assert [pair.id for pair, found in zip(pairs, verdicts, strict=True) if found is not pair.correct] == []


def _special(pair: CodeExample) -> bool:
    """Programs that look at their own source or the clock, or hold text over several lines: a remark changes these."""
    text = pair.program
    return (
        '"""' in text or "'''" in text or "__file__" in text or any(word in pair.why for word in SLOW) or "\\\n" in text
    )
