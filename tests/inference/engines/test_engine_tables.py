"""What the dialects send, and what they refuse in an answer that is right but for one value, by tables."""

import json
from pathlib import Path

import pytest
from engine_cases import ASKED, BASIC, DIALECTS, NOWHERE, right_answer
from fake_openai import read_numbers
from test_engine_fuzz import with_value

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.chat_prefix import ChatPrefixOptions
from prorl_gym.inference.engines.openai import OpenAIOptions
from prorl_gym.inference.engines.response_validator import AnsweredCall
from prorl_gym.inference.engines.sglang import SglangOptions
from prorl_gym.inference.engines.vllm import VllmOptions
from prorl_gym.inference.protocol import Conversation
from prorl_gym.records import Message
from prorl_gym.testing.inference.engine_conformance import request

REQUESTS, BROKEN = (
    [json.loads(line) for line in Path(__file__).with_name(name).read_text().splitlines()]
    for name in ("requests.jsonl", "broken_answers.jsonl")
)
OPTIONS = {"vllm": VllmOptions, "sglang": SglangOptions, "chat_prefix": ChatPrefixOptions, "openai": OpenAIOptions}


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: f"{row['engine']}-{len(row['body'])}")
def test_a_request_is_what_its_server_needs(row):
    asked, own = dict(row["asked"]), {"encode": read_numbers} if row["engine"] == "openai" else {}
    if messages := asked.pop("messages", None):
        shown = tuple(Message.model_validate(message) for message in messages)
        asked["conversation"] = Conversation(shown, asked.pop("tools", []))
    options = OPTIONS[row["engine"]](**BASIC, **row["options"], **own)
    sent = type(DIALECTS[row["engine"]])(NOWHERE, options).sample_request(request(**asked))
    assert (json.loads(sent.encode_body()), sent.headers) == (row["body"], row["headers"])


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: f"{row['engine']}-{row['case']}")
def test_a_broken_answer_is_refused(row):
    answer = with_value(right_answer(row["engine"]), row["at"], row["value"])
    with pytest.raises(EngineError) as caught:
        DIALECTS[row["engine"]].read_sample(json.dumps(answer).encode(), ASKED, AnsweredCall("e", 1, 0.1))
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT
    assert (caught.value.what, caught.value.fix) == (f"engine {NOWHERE}: {row['what']}", row["fix"])
