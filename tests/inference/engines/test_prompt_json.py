import json
from dataclasses import replace

import pytest
from engine_cases import ASKED, BASIC, DIALECTS, right_answer
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.errors import EngineError
from prorl_gym.inference.engines.dialect import encode_prompt_ids, strip_prompt_echo
from prorl_gym.inference.engines.response_validator import AnsweredCall
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.testing.inference.engine_conformance import request

CALL = AnsweredCall("e", 1, 0.1)
WRITTEN = replace(ASKED, prompt_ids_json=b"5,6,7")
ANSWERS = {name: (DIALECTS[name], right_answer(name)) for name in ("vllm", "sglang", "chat_prefix")}


def compact(answer):
    return json.dumps(answer, separators=(",", ":")).encode()


@given(ids=st.lists(st.integers(0, 10**6), max_size=50))
@BOUNDED
def test_the_text_is_the_ids(ids):
    text = encode_prompt_ids(request(prompt_ids=ids))
    assert json.loads(b"[" + text + b"]") == ids
    assert encode_prompt_ids(request(prompt_ids=ids, prompt_ids_json=text)) == text


@pytest.mark.parametrize("text", [b"", b"5,6", b"5,6,7,8"])
def test_a_text_of_another_length_is_a_defect(text):
    with pytest.raises(ValueError, match="does not belong"):
        encode_prompt_ids(request(prompt_ids_json=text))


@pytest.mark.parametrize("name", ANSWERS)
def test_an_echo_in_the_bytes_that_were_sent_is_cut_out_and_the_rest_is_read(name):
    dialect, answer = ANSWERS[name]
    payload, found = strip_prompt_echo(compact(answer), WRITTEN)
    assert found
    assert b"[5,6,7]" not in payload
    plain = dialect.read_sample(compact(answer), replace(WRITTEN, prompt_ids_json=None), CALL)
    assert dialect.read_sample(compact(answer), WRITTEN, CALL) == plain


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("echo", [[5, 9, 7], [5, 6], [5, 6, 7, 8], []])
def test_another_echo_is_refused(name, echo):
    dialect, answer = ANSWERS[name]
    payload = compact(answer).replace(b'"prompt_token_ids":[5,6,7]', b'"prompt_token_ids":' + compact(echo))
    with pytest.raises(EngineError, match="worked on other prompt ids"):
        dialect.read_sample(payload, WRITTEN, CALL)


def test_a_text_that_looks_like_an_echo_is_none():
    answer = right_answer("vllm")
    answer["choices"][0]["text"] = '"prompt_token_ids":[5,6,7]'
    answer["choices"][0]["prompt_token_ids"] = [5, 9, 7]
    assert not strip_prompt_echo(compact(answer), WRITTEN)[1]


async def test_what_goes_over_the_wire_is_the_same():
    async with FakeVllm() as server:
        engine = VllmEngine("e", server.url, VllmOptions(**BASIC))
        for written in (None, b"5,6,7"):
            await engine.generate(request(prompt_ids_json=written))
        await engine.close()
    assert server.bodies[0] == server.bodies[1]
    assert server.bodies[0]["prompt"] == [5, 6, 7]
    assert server.headers[0]["content-type"] == "application/json"
