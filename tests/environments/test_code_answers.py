"""The code environment's host side: finding the program, comparing output and results."""

import math
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

LINES = st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=12), min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("Here:\n```py\nprint(1)\n```\nor better\n```python\nprint(2)\n```\nDone.", "print(2)\n"),
        ("```python\nprint(1)\n```\nRun it:\n```bash\npython3 x.py\n```", "print(1)\n"),
        ("x = '```'", "x = '```'"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("```python\nprint(1)\n```\n```python\nprint(2)", "print(1)\n"),
        ("Use ```x``` here.\n```x``` too\n```python title=a\nprint(1)\n```", "print(1)\n"),
        ("  ```Python\n  x = 1\n  ```", "  x = 1\n"),
    ],
)
def test_program_is_found(answer: str, program: str):
    assert find_program(answer) == program


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


@pytest.mark.parametrize(
    ("compare", "expected", "actual", "same"),
    [
        ("lines", "1\n", b"1", True),
        ("lines", "1", b"1\n\n\n", True),
        ("lines", "1 2\n3", b"1 2  \r\n3\r\n", True),
        ("lines", "", b"", True),
        ("lines", "", b"\n", True),
        ("lines", "0.5", b"0.50", True),
        ("lines", "0.5", b".5000004", True),
        ("lines", "2.0", b"2", True),
        ("lines", "1e-9", b"0", True),
        ("lines", "x 1.5 y", b"x 1.4999999 y", True),
        ("lines", "π", "π".encode(), True),
        ("tokens", "1 2\n3\n", b"1\n2 3\n", True),
        ("tokens", "0.5 x", b"0.5000001 x", True),
        ("exact", "1 2\n", b"1 2", True),
        ("lines", "1", b"", False),
        ("lines", "1", b"2", False),
        ("lines", "1", b"1.0", False),
        ("lines", "1", b"01", False),
        ("lines", "1", b"\n1", False),
        ("lines", "1 2", b"1  2", False),
        ("lines", "1 2", b"1\n2", False),
        ("lines", " 1", b"1", False),
        ("lines", "0.5", b"0.501", False),
        ("lines", "0.5", b"nan", False),
        ("lines", "0.5", b"inf", False),
        ("lines", "0.5", b"0_0.5", False),
        ("lines", "0.5", b"one half", False),
        ("lines", "nan", b"0.0", False),
        ("lines", "a", b"\xff", False),
        ("lines", "1000000", b"1000001", False),
        ("tokens", "1 2\n3\n", b"1 2\n", False),
        ("tokens", "0.5 x", b"0.5000001 y", False),
        ("exact", "1 2\n", b"1 2 \n", False),
        ("exact", "0.5\n", b"0.50\n", False),
    ],
)
def test_which_outputs_match(compare: str, expected: str, actual: bytes, same: bool):
    assert outputs_match(expected, actual, compare) is same


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (3, 3),
        (3, 3.0),
        (0.1 + 0.2, 0.3),
        (2.0, 2),
        ([1, [2.0]], [1, [2.0000001]]),
        ({"a": [1]}, {"a": [1]}),
        (None, None),
        (True, True),
        (math.nan, math.nan),
        ("é", "é"),
    ],
)
def test_same_result(expected: Any, actual: Any):
    assert results_match(expected, actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (3, 4),
        (3, 3.0000001),
        (3, "3"),
        (1, True),
        (True, 1),
        (False, 0),
        (False, None),
        (0, None),
        (1.0, math.nan),
        (1.0, math.inf),
        (1.0, 10**400),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([1], {"0": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ("a", ["a"]),
    ],
)
def test_other_result(expected: Any, actual: Any):
    assert not results_match(expected, actual)


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
