"""Classes of programs from outside, and LiveCodeBench's comparison as its own runner made it.

``code_livecodebench``: pairs labelled by ``lcb_runner/evaluation/testing_util.py`` (at 28fef95e), run on each: an
``expected`` output with a ``printed`` one, or an expected value in JSON with the expression that is ``returned``.
"""

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from code_support import function, mark, stdio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import find_program, grade, outputs_match
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import read_json_lines

CORPORA = Path(__file__).parents[1] / "corpora"
CLASSES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for _, line in read_json_lines(CORPORA / "code_classes.jsonl"):
    CLASSES[json.loads(line)["why"]].append(json.loads(line))
PAIRS: list[dict[str, Any]] = [json.loads(line) for _, line in read_json_lines(CORPORA / "code_livecodebench.jsonl")]


@pytest.mark.parametrize("why", CLASSES)
async def test_programs_of_a_class_have_their_reward(leases: Leases, why: str):
    found: dict[str, float] = {}
    for line in CLASSES[why]:
        row = CodeRow.model_validate({"question": "?", "time_limit": 1.0, **line["row"]})
        found[line["id"]] = (await grade(row, find_program(line["answer"]), leases, 60.0)).reward
    assert found == {line["id"]: line["reward"] for line in CLASSES[why]}


def test_outputs_are_equal_as_for_livecodebench():
    pairs = [pair for pair in PAIRS if "printed" in pair]
    said = [outputs_match(pair["expected"], pair["printed"].encode(), "livecodebench") for pair in pairs]
    assert [pair for pair, is_equal in zip(pairs, said, strict=True) if is_equal is not pair["equal"]] == []
    assert {False, True} == set(said)


async def test_results_are_equal_as_for_livecodebench(leases: Leases):
    pairs = [pair for pair in PAIRS if "returned" in pair]
    program = "".join(f"def f{number}(): return {pair['returned']}\n" for number, pair in enumerate(pairs))
    program += "class Solution:\n    def f(self, n): return globals()[f'f{n}']()\n"
    cases = [([number], json.loads(pair["expected"])) for number, pair in enumerate(pairs)]
    score = await mark(
        function(*cases, entry="Solution.f"), program, leases, runner="livecodebench", partial=True, time_limit=6.0
    )
    said = {line for line in score.report.splitlines() if line.startswith("passed")}
    assert said == {f"passed test {number}" for number, pair in enumerate(pairs, 1) if pair["equal"]}


async def test_a_program_does_not_answer_for_the_memory_of_its_driver(leases: Leases):
    tests = stdio(("x" * (60 << 20), "1\n"))
    assert (await mark(tests, "print(1)", leases, memory_limit=64 << 20)).reward == 1.0


NUMBERS = st.lists(st.decimals(-999, 999, places=3), min_size=1, max_size=4)


@given(NUMBERS, st.data())
def test_a_number_in_another_form_is_equal_and_another_number_is_not(numbers: list[Decimal], data: st.DataObject):
    forms = ("{}", "{}0", " {}", "{} ", "{:+}", "{:e}", "{:E}")
    printed = "\n".join(data.draw(st.sampled_from(forms)).format(number) for number in numbers)
    expected = "\n".join(map(str, numbers))
    assert outputs_match(expected, f"\n{printed}\n\n".encode(), "livecodebench")
    assert not outputs_match(expected, printed.replace(" ", "").encode() + b"0001", "livecodebench")


@pytest.mark.parametrize("case", [{"stdin": "\ud83d\n", "stdout": "x"}, {"stdin": "", "stdout": "x\udc00"}])
def test_half_a_surrogate_pair_in_a_row_is_refused_by_its_field(case: dict[str, str]):
    with pytest.raises(ValidationError, match=r"cases\.0\.std(in|out)\n.*surrogates not allowed"):
        CodeRow.model_validate({"question": "?", "tests": {"kind": "stdio", "cases": [case]}})
