"""Experts of a sequence, put together from what the calls that sampled it returned."""

import base64
import struct
from typing import Any

import pytest

from prorl_gym.routed_experts import RoutedExperts, join_routed_experts, parse_routed_experts, to_nemo_rl

LAYERS, TOP_K = 2, 2


def rows(*firsts: int) -> list[list[list[int]]]:
    """One row per token: expert ``first`` and the next one, in each layer."""
    return [[[first, first + 1] for _ in range(LAYERS)] for first in firsts]


def flat(table: list[list[list[int]]]) -> list[int]:
    return [expert for row in table for layer in row for expert in layer]


def npy(table: list[list[list[int]]], descr: str = "|u1", code: str = "B", fortran: bool = False) -> str:
    """As vLLM returns it: the file that ``numpy.save`` writes, in base64."""
    values = flat(table)
    declared = {"descr": descr, "fortran_order": fortran, "shape": (len(table), LAYERS, TOP_K)}
    header = f"{declared}\n".encode()
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    return base64.b64encode(start + struct.pack(f"<{len(values)}{code}", *values)).decode()


def envelope(table: list[list[list[int]]]) -> str:
    """As NeMo-RL's server returns it."""
    values = flat(table)
    data = base64.b64encode(struct.pack(f"<{len(values)}h", *values)).decode()
    return f"nrlre1:int16:{len(table)}x{LAYERS}x{TOP_K}:{data}"


def int32(table: list[list[list[int]]]) -> str:
    """As SGLang returns it: the values alone."""
    values = flat(table)
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode()


FORMS = {
    "nested lists": lambda table: table,
    "vLLM": npy,
    "vLLM, many experts": lambda table: npy(table, "<u2", "H"),
    "NeMo-RL": envelope,
    "SGLang": int32,
}


def table_of(found: RoutedExperts) -> list[int]:
    """The first expert of each token."""
    numbers = struct.unpack(f"<{len(found.data) // found.item_bytes}{found.code}", found.data)
    return list(numbers[:: LAYERS * TOP_K])


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_experts_of_the_call_that_ran_it_first(form: str):
    # The first call ended at token 4, whose own experts only the second call, which continues from it, can know.
    first, second = FORMS[form](rows(1, 2, 3)), FORMS[form](rows(91, 92, 93, 4, 5))
    found = join_routed_experts([(4, first), (6, second)])
    assert found is not None
    assert table_of(found) == [1, 2, 3, 4, 5]


def test_rows_for_a_last_token_that_no_call_has_run_are_not_used():
    padded = join_routed_experts([(4, envelope(rows(1, 2, 3, 0))), (6, envelope(rows(91, 92, 93, 4, 5, 0)))])
    assert padded is not None
    assert table_of(padded) == [1, 2, 3, 4, 5, 0]


def test_tokens_that_were_cut_have_no_rows():
    found = join_routed_experts([(3, rows(1, 2, 3, 4, 5))])
    assert found is not None
    assert table_of(found) == [1, 2, 3]


BROKEN: dict[str, Any] = {
    "nothing": None,
    "another form": {"shape": [1, 2], "data": "AA=="},
    "no base64": "%%%",
    "no table": [1, 2],
    "ragged": [[[1, 2], [3, 4]], [[1, 2]], [[1, 2], [3, 4]]],
    "negative": [[[-1, 2], [3, 4]]] * 3,
    "empty": [],
    "a short file": npy(rows(1, 2, 3))[:-8],
    "another order": npy(rows(1, 2, 3), fortran=True),
    "floats": npy(rows(1, 2, 3), "<f4", "f"),
    "a header that lies": "nrlre1:int16:9x2x2:AAAA",
    "values that do not divide": base64.b64encode(b"\0" * 20).decode(),
    "too few rows": rows(1, 2),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_or_is_incomplete_is_left_out(kind: str):
    assert join_routed_experts([(4, BROKEN[kind])]) is None
    assert join_routed_experts([(4, rows(1, 2, 3)), (6, BROKEN[kind])]) is None


def test_calls_of_two_engines_that_differ_in_layers_are_left_out():
    other = [[[1, 2]]] * 5
    assert join_routed_experts([(4, rows(1, 2, 3)), (6, other)]) is None


def test_nemo_rl_gets_a_row_for_each_token():
    found = to_nemo_rl([(4, npy(rows(1, 2, 3)))], tokens=4)
    assert found == envelope([*rows(1, 2, 3), [[0, 1], [0, 1]]])


def test_nemo_rls_own_form_passes_unchanged():
    given = envelope(rows(1, 2, 3, 0))
    assert to_nemo_rl([(4, given)], tokens=4) == given


def test_many_experts_do_not_fit_into_int16():
    found = to_nemo_rl([(3, npy(rows(40000, 2), "<u2", "H"))], tokens=2)
    assert isinstance(found, str) and found.startswith("nrlre1:int32:2x2x2:")
    again = parse_routed_experts(found, tokens=2)
    assert again is not None and table_of(again) == [40000, 2]


def test_a_single_call_in_an_unknown_form_passes_unchanged():
    given = {"shape": [1, 2], "data": "AA=="}
    assert to_nemo_rl([(4, given)], tokens=4) == given
    assert to_nemo_rl([(4, given), (6, given)], tokens=6) is None


def test_numpy_sees_tokens_layers_and_choices():
    numpy = pytest.importorskip("numpy")
    found = join_routed_experts([(4, npy(rows(1, 2, 3)))])
    assert found is not None
    assert numpy.array_equal(found.to_numpy(), numpy.array(rows(1, 2, 3), dtype="uint8"))
    sglang = join_routed_experts([(4, int32(rows(1, 2, 3)))])
    assert sglang is not None
    assert numpy.array_equal(sglang.to_numpy((LAYERS, TOP_K)), numpy.array(rows(1, 2, 3)))
