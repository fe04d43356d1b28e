"""The code environment's host side: finding the program, comparing output and results."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.environments.code.environment import (
    MAX_PROGRAM,
    NoProgramError,
    find_program,
    outputs_match,
    parse_result,
    results_match,
)
from prorl_gym.environments.row_format import read_json_lines

LINES = st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=12), min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)

PAIRS: list[dict[str, Any]] = [
    json.loads(line) for _, line in read_json_lines(Path(__file__).parents[1] / "corpora/code_comparisons.jsonl")
]


def test_program_is_found():
    found = [line for line in PAIRS if "answer" in line]
    assert [find_program(line["answer"]) for line in found] == [line["program"] for line in found]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "no program"),
        (" \n", "no program"),
        ("```python\n\n```", "no program"),
        ("```rust\nfn main() {}\n```", "no block of Python"),
        ("#" * (MAX_PROGRAM + 1), "longer"),
        ("é" * MAX_PROGRAM, "longer"),
        ("#" * (4 * MAX_PROGRAM + 1), "longer"),
    ],
)
def test_missing_program_reports_why(answer: str, why: str):
    with pytest.raises(NoProgramError, match=why):
        find_program(answer)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("line", ["```a\n", "```\n", "`\n", "```a```\n"])
def test_hostile_fences_cost_one_pass(line: str):
    answer = line * (MAX_PROGRAM // len(line))
    try:
        assert len(find_program(answer)) <= len(answer)
    except NoProgramError as complaint:
        assert "no program" in str(complaint) or "no block" in str(complaint)


@pytest.mark.parametrize("kind", ["printed", "returned"])
def test_which_outputs_and_results_match(kind: str):
    for pair in (pair for pair in PAIRS if kind in pair):
        if kind == "printed":
            said = outputs_match(pair["expected"], pair[kind].encode(errors="surrogateescape"), pair["compare"])
        else:
            said = results_match(pair["expected"], pair[kind])
        assert said is pair["equal"], pair


@pytest.mark.parametrize("text", [b"", b"{", b"1 2", b"\xff", b"9" * 5000, b"[" * 100_000])
def test_unreadable_result_is_a_value_error(text: bytes):
    with pytest.raises(ValueError):
        parse_result(text)


@given(LINES, st.sampled_from(["", " ", "\t", "  "]), st.integers(0, 3), st.booleans())
def test_white_space_at_the_end_does_not_count(lines: list[str], space: str, empty: int, windows: bool):
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
