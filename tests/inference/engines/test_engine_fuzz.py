"""Whatever a server answers, an adapter returns a well-formed result or an error of ours."""

import json
import math

import pytest
from engine_cases import ASKED, DIALECTS, right_answer
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.errors import EngineError
from prorl_gym.inference.engines.response_validator import AnsweredCall

RIGHT = {name: (dialect, right_answer(name)) for name, dialect in DIALECTS.items()}

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


def places(value, path=()):
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def with_value(answer, path, value):
    if not path:
        return value
    changed = json.loads(json.dumps(answer))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def read(dialect, payload):
    """Read an answer; whatever comes out must be something that a trajectory can take."""
    try:
        result = dialect.read_sample(payload, ASKED, AnsweredCall("e", 1, 0.1))
    except EngineError as error:
        assert len(str(error).splitlines()) <= 2
        assert len(error.what) < 600
        return None
    assert len(result.token_ids) == len(result.logprobs) == len(result.versions) <= ASKED.max_tokens
    assert all(type(token) is int and 0 <= token for token in result.token_ids)
    assert all(math.isfinite(value) and value <= 0 for value in result.logprobs)
    assert all(type(version) is int and version >= 0 for version in result.versions)
    return result


@pytest.mark.parametrize("name", RIGHT)
@BOUNDED
@given(data=st.data())
def test_any_value_in_any_place(name, data):
    dialect, answer = RIGHT[name]
    path = data.draw(st.sampled_from(list(places(answer))))
    read(dialect, json.dumps(with_value(answer, path, data.draw(values))).encode())


@pytest.mark.parametrize("name", RIGHT)
@BOUNDED
@given(payload=st.binary(max_size=64))
def test_any_bytes(name, payload):
    read(RIGHT[name][0], payload)


@pytest.mark.parametrize("name", RIGHT)
def test_nesting_beyond_the_stack(name):
    assert read(RIGHT[name][0], b"[" * 200_000) is None


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@BOUNDED
@given(entries=values)
def test_any_answer_to_a_probe(name, entries):
    answer = {"choices": [{"prompt_logprobs": entries}], "meta_info": {"input_token_logprobs": entries}}
    try:
        logprobs = DIALECTS[name].read_probe(json.dumps(answer).encode(), [5, 6, 7])
    except EngineError:
        return
    assert len(logprobs) == 2
    assert all(math.isfinite(value) and value <= 0 for value in logprobs)
