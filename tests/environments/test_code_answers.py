"""The code environment's host side: finding the program, comparing output and results."""

import math
from typing import Any

import pytest

from prorl_gym.environments.code.environment import MAX_PROGRAM, NoProgramError, find_program
from prorl_gym.environments.code.grader import outputs_match, parse_result, results_match


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
    ("expected", "actual"),
    [
        ("1\n", b"1"),
        ("1", b"1\n\n\n"),
        ("1 2\n3", b"1 2  \r\n3\r\n"),
        ("", b""),
        ("", b"\n"),
        ("0.5", b"0.50"),
        ("0.5", b".5000004"),
        ("2.0", b"2"),
        ("1e-9", b"0"),
        ("x 1.5 y", b"x 1.4999999 y"),
        ("π", "π".encode()),
    ],
)
def test_same_output(expected: str, actual: bytes):
    assert outputs_match(expected, actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("1", b""),
        ("1", b"2"),
        ("1", b"1.0"),
        ("1", b"01"),
        ("1", b"\n1"),
        ("1 2", b"1  2"),
        ("1 2", b"1\n2"),
        (" 1", b"1"),
        ("0.5", b"0.501"),
        ("0.5", b"nan"),
        ("0.5", b"inf"),
        ("0.5", b"0_0.5"),
        ("0.5", b"one half"),
        ("nan", b"0.0"),
        ("a", b"\xff"),
        ("1000000", b"1000001"),
    ],
)
def test_other_output(expected: str, actual: bytes):
    assert not outputs_match(expected, actual)


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
