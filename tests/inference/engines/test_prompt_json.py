import json
from dataclasses import replace

import pytest
from fake_nemo_rl import chat_completion
from fake_sglang import generation
from fake_vllm import FakeVllm, completion
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.errors import EngineError
from prorl_gym.inference.engines.chat_prefix import ChatPrefixDialect, ChatPrefixOptions
from prorl_gym.inference.engines.dialect import AnsweredCall
from prorl_gym.inference.engines.prompt_json import encode_prompt_ids, strip_prompt_echo
from prorl_gym.inference.engines.sglang import SglangDialect, SglangOptions
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions
from prorl_gym.testing.inference.engine_conformance import request

BASIC = {"model": "m", "vocab_size": 100}
CALL = AnsweredCall("e", 1, 0.1)
WRITTEN = request(request_id="a" * 32, prompt_ids_json=b"5,6,7")
VLLM = VllmDialect("http://h/v1", VllmOptions(**BASIC))
SGLANG = SglangDialect("http://h/v1", SglangOptions(**BASIC))
CHAT = ChatPrefixDialect("http://h/v1", ChatPrefixOptions(**BASIC))
BODY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "stop_token_ids": [2], "logprobs": 0}
RID = {"rid": "a", "sampling_params": {"max_new_tokens": 8, "stop_token_ids": [2]}, "input_ids": [5, 6, 7]}
ANSWERS = {
    "vllm": (VLLM, completion(BODY, [10, 2], "r")),
    "sglang": (SGLANG, generation({**RID, "return_logprob": True, "return_prompt_token_ids": True}, [10, 2])),
    "chat_prefix": (CHAT, chat_completion(BODY, [5, 6, 7], [10, 2])),
}


def compact(answer):
    """As the servers write it."""
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
    answer = completion(BODY, [10, 2], "r")
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
