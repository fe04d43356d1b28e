"""vLLM's own parsers of tool calls and its own refusals, against ours: equal, or by the table of departures."""

import json
import os
import re
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_calls import TOOLS, closes_itself, turns
from token_codecs import BOUNDED, codec, needs_qwen

from prorl_gym.inference.engines.dialect import error_from_response
from prorl_gym.inference.engines.http_exchange import HttpResponse
from prorl_gym.inference.protocol import ContextExceeded
from prorl_gym.inference.tokens.tokenizer import SMALL_DIRECTORY

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def oracle(vllm_python):
    """Ask vLLM a question; one process answers all."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    program = __file__.replace("test_real_oracle", "vllm_oracle")
    with subprocess.Popen(
        [vllm_python, program, str(SMALL_DIRECTORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=keep | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ) as process:

        def ask(**question):
            print(json.dumps(question), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def test_every_way_in_which_vllm_says_that_the_context_is_full_is_known(oracle):
    for said in oracle(messages=64):
        error = error_from_response("e", HttpResponse(400, json.dumps({"error": {"message": said}}).encode()))
        assert isinstance(error, ContextExceeded), said
        assert error.max_model_len == (None if "got 0" in said else 64), said


FORMS = {
    "qwen3": "hermes",
    "qwen2.5": "hermes",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_xml",
    "llama": "llama3_json",
}
"""Templates, and vLLM's parser of what they write."""

of_every_template = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama" else needs_qwen) for name in FORMS]
)

DEPARTURES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "hermes": (
        "vLLM cuts a call at a closing tag in its strings, then reads no call of the turn",
        lambda sent: "</tool_call>" in json.dumps(sent),
    ),
    "qwen3_coder": (
        "vLLM takes tags in a value for the call's own: ours are the value's where that is certain, or alone in it",
        lambda sent: any(tag in json.dumps(sent) for tag in ("<parameter=", "</parameter>", "</function>")),
    ),
    "llama": ("none", lambda sent: False),
}
"""By our parser: what vLLM reads otherwise than the template wrote it, and when it may."""


@of_every_template
def test_calls_are_those_that_vllm_reads(name, oracle):
    """Also where a piece of the turn is gone or doubled: we make calls that vLLM makes, or one of both makes none."""
    parser = codec(name).parser
    reason, may_depart = DEPARTURES[parser.name]

    @settings(BOUNDED, max_examples=400)
    @given(sent=turns, times=st.sampled_from([1, 0, 2]), where=st.integers(0, 10**6))
    def check(sent, times, where):
        sent = sent[:1] if name == "llama" else sent
        assume(parser.name != "qwen3_coder" or not closes_itself(sent))
        pieces = re.split(r"(<[^<>]*>|[{}\",:])", render(name, sent))
        pieces[where % len(pieces)] *= times
        text = "".join(pieces)
        theirs = [(of, json.loads(on)) for of, on in oracle(parser=FORMS[name], text=text, tools=TOOLS)]
        ours = [(call.name, json.loads(call.arguments)) for call in parser.parse(text, TOOLS).calls]
        departs = may_depart([*sent, *ours])
        assert times != 1 or theirs == sent or departs, reason
        assert not theirs or all(call in theirs for call in ours) or departs, reason

    check()


def render(name, sent):
    """What a model writes that makes these calls, as its template shows a turn of that kind."""
    chat, question = codec(name), {"role": "user", "content": "q"}
    made = [{"type": "function", "id": "call00000", "function": {"name": of, "arguments": on}} for of, on in sent]
    turns = [question, {"role": "assistant", "content": "", "tool_calls": made}]
    before, whole = (chat.render_plain(shown, TOOLS, add_generation_prompt=False) for shown in ([question], turns))
    written = whole.removeprefix(before).removeprefix(chat.turn_opening)
    return re.sub(r"<\|(im_end|eot_id|eom_id)\|>\s*$", "", written)
