"""One ``EngineCase`` per adapter, for the conformance kit and for tests that need an engine with a server behind it."""

import asyncio
import json
from contextlib import asynccontextmanager

from closing import closing
from fake_nemo_rl import FakeNemoRl, chat_completion
from fake_openai import FakeOpenAI, read_numbers
from fake_sglang import FakeSglang, generation
from fake_vllm import FakeVllm, completion

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.chat_prefix import ChatPrefixDialect, ChatPrefixEngine, ChatPrefixOptions
from prorl_gym.inference.engines.openai import OpenAIDialect, OpenAIEngine, OpenAIOptions
from prorl_gym.inference.engines.sglang import SglangDialect, SglangEngine, SglangOptions
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions
from prorl_gym.inference.protocol import ContextExceeded, EngineOverloaded
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.engine_conformance import STOP_ID, Capabilities, Fault, request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

BASIC = {"model": "m", "vocab_size": 100}
NOWHERE = "http://127.0.0.1:1/v1"
VLLM_PAGE = 'vllm:num_requests_running{engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
SGLANG_PAGE = 'sglang:num_running_reqs{dp_rank="0"} 1.0\nsglang:token_usage{dp_rank="0"} 0.5\n'

TRANSPORT_FAULTS = {
    Fault.OVERLOADED: 429,
    Fault.PAUSED: 503,
    Fault.BROKEN: 500,
    Fault.REFUSING: 400,
    Fault.REDIRECTING: 302,
    Fault.TOO_LONG: 400,
    Fault.DROPPING: "drop",
    Fault.TRUNCATED: "half",
    Fault.ENDLESS: "huge",
    Fault.NOT_JSON: "garbage",
}


def within(*path):
    """Return how to change what lies at a path: the last key is set, or cut by one when the value is ``CUT``."""
    *way, last = path

    def change(value):
        def mutate(answer):
            place = answer
            for key in way:
                place = place[key]
            place[last] = place[last][:-1] if value is CUT else value

        return mutate

    return change


CUT = object()
OPENAI_CHOICE = ("choices", 0)


class HttpCase:
    def __init__(self, server, engine_type, options_type, capabilities, spoilt, **own):
        self.server = server
        self.capabilities = capabilities
        self._spoilt = spoilt
        self._make = lambda url, **changes: engine_type("e", url, options_type(**{**BASIC, **own, **changes}))
        self.engine = self._make(server.url)

    def set_reply(self, ids):
        self.server.mode, self.server.ids, self.server.mutate = "ok", ids, None

    def hold_calls(self):
        self.server.mode, self.server.ids = "hang", [10, 11, 12, STOP_ID]

    def shut_down_server(self):
        self.engine = self._make(NOWHERE)

    def reopen(self, **options):
        self.engine = self._make(self.server.url, **options)

    def shorten_timeouts(self):
        self.reopen(request_seconds=0.2)

    def block_cache_reset(self):
        self.server.busy = True

    def inject_fault(self, fault):
        self.server.retry_after = "7"
        if fault in TRANSPORT_FAULTS:
            self.server.mode = TRANSPORT_FAULTS[fault]
            too_long = "This model's maximum context length is 64 tokens. However, ..."
            self.server.error = too_long if fault is Fault.TOO_LONG else "it broke"
        else:
            self.server.mutate = self._spoilt[fault]

    async def wait_for_held_calls(self, count):
        await self.server.running_is(count)


class FakeCase:
    """The scripted engine: it has no wire, so a fault is what an adapter would make of it."""

    def __init__(self):
        self._reply = Reply((STOP_ID,))
        self._error = None
        self.capabilities = Capabilities()
        self.engine = FakeEngine("fake", lambda request: self._error or self._reply)
        self.engine.reported_load = EngineLoad(running=0, waiting=0, kv_usage=0.0)

    def set_reply(self, ids):
        self._reply, self._error = Reply(tuple(ids)), None

    def hold_calls(self):
        self._reply = Reply((10, 11, 12, STOP_ID), hold=asyncio.Event())

    def shut_down_server(self):
        self.engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "fake is down")

    def shorten_timeouts(self):
        self._error = EngineError(FailureKind.ENGINE_TIMEOUT, "fake is slow")

    def block_cache_reset(self):
        self.engine.refuses_cache_reset = True

    def inject_fault(self, fault):
        status = TRANSPORT_FAULTS.get(fault)
        if fault is Fault.TOO_LONG:
            self._error = ContextExceeded(64)
        elif status in (429, 503):
            self._error = EngineOverloaded("fake", status, 7.0)
        else:
            refused = {400: FailureKind.ENGINE_REFUSED, 302: FailureKind.ENGINE_REFUSED}
            gone = dict.fromkeys((500, "drop", "half"), FailureKind.ENGINE_UNREACHABLE)
            self._error = EngineError({**refused, **gone}.get(status, FailureKind.ENGINE_CONTRACT), fault.value)

    async def wait_for_held_calls(self, count):
        for _ in range(10):  # the fake needs a few turns of the event loop, no time
            await asyncio.sleep(0)
        if self.engine.in_flight != count:
            raise TimeoutError


VLLM_SPOILT = {
    Fault.NAN: within(*OPENAI_CHOICE, "logprobs", "token_logprobs")([float("nan"), -1.0]),
    Fault.FOREIGN_ID: within(*OPENAI_CHOICE, "token_ids")([100, STOP_ID]),
    Fault.NO_LOGPROBS: within(*OPENAI_CHOICE, "logprobs")(None),
    Fault.WRONG_LENGTHS: within(*OPENAI_CHOICE, "logprobs", "token_logprobs")(CUT),
    Fault.WRONG_PROMPT: within(*OPENAI_CHOICE, "prompt_token_ids")([5, 9, 7]),
}
SGLANG_SPOILT = {
    Fault.NAN: within("meta_info", "output_token_logprobs", 0)([float("nan"), 10, None]),
    Fault.FOREIGN_ID: within("output_ids")([100, STOP_ID]),
    Fault.NO_LOGPROBS: within("meta_info", "output_token_logprobs")(None),
    Fault.WRONG_LENGTHS: within("meta_info", "output_token_logprobs")(CUT),
    Fault.WRONG_PROMPT: within("prompt_token_ids")([5, 9, 7]),
}
MESSAGE = (*OPENAI_CHOICE, "message")
CHAT_SPOILT = {
    Fault.NAN: within(*MESSAGE, "generation_log_probs")([float("nan"), -1.0]),
    Fault.FOREIGN_ID: within(*MESSAGE, "generation_token_ids")([100, STOP_ID]),
    Fault.NO_LOGPROBS: lambda answer: answer["choices"][0].update(
        logprobs=None, message=answer["choices"][0]["message"] | {"generation_log_probs": None}
    ),
    Fault.WRONG_LENGTHS: within(*MESSAGE, "generation_log_probs")(CUT),
    Fault.WRONG_PROMPT: within(*MESSAGE, "prompt_token_ids")([5, 9, 7]),
}
TEXT_SPOILT = {
    Fault.NAN: within("usage", "total_tokens")(float("nan")),
    **dict.fromkeys((Fault.FOREIGN_ID, Fault.NO_LOGPROBS, Fault.WRONG_LENGTHS, Fault.WRONG_PROMPT)),
}


ASKED = request(request_id="a" * 32)
DIALECTS = {
    "vllm": VllmDialect(NOWHERE, VllmOptions(**BASIC, record_routed_experts=True)),
    "sglang": SglangDialect(NOWHERE, SglangOptions(**BASIC)),
    "chat_prefix": ChatPrefixDialect(NOWHERE, ChatPrefixOptions(**BASIC)),
    "openai": OpenAIDialect(NOWHERE, OpenAIOptions(**BASIC, encode=read_numbers)),
}


def right_answer(name):
    """Return what a well server of a dialect answers to ``ASKED``: three tokens, with a call where it is text."""
    body, ids = json.loads(DIALECTS[name].sample_request(ASKED).encode_body()), [10, 11, STOP_ID]
    match name:
        case "vllm":
            return completion(body, ids, "r", label="step-3")
        case "sglang":
            return generation(body, ids)
        case "chat_prefix":
            return chat_completion(body, [5, 6, 7], ids)
    calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    return FakeOpenAI(ids=ids, tool_calls=calls).completion(body, None)


@asynccontextmanager
async def fake():
    yield FakeCase()


@asynccontextmanager
async def http_case(server, *args, **own):
    async with server:
        case = HttpCase(server, *args, **own)
        async with closing(case.engine):
            try:
                yield case
            finally:
                await case.engine.close()  # another one, where a test has opened it again


def vllm(release="0.33", can_abort=True):
    server = FakeVllm(release=release, can_abort=can_abort, metrics=VLLM_PAGE)
    return http_case(server, VllmEngine, VllmOptions, Capabilities(salvages_aborted=can_abort), VLLM_SPOILT)


def bare_vllm():
    """Started without its development routes."""
    server = FakeVllm(development=False, metrics=VLLM_PAGE)
    return http_case(server, VllmEngine, VllmOptions, Capabilities(has_cache_reset=False), VLLM_SPOILT)


def sglang():
    return http_case(FakeSglang(metrics=SGLANG_PAGE), SglangEngine, SglangOptions, Capabilities(), SGLANG_SPOILT)


def chat_prefix():
    abilities = Capabilities(salvages_aborted=False, has_probe=False, has_cache_reset=False, has_metrics=False)
    return http_case(FakeNemoRl(), ChatPrefixEngine, ChatPrefixOptions, abilities, CHAT_SPOILT)


def openai():
    abilities = Capabilities(
        returns_tokens=False,
        salvages_aborted=False,
        has_probe=False,
        has_cache_reset=False,
        has_metrics=False,
    )
    return http_case(FakeOpenAI(), OpenAIEngine, OpenAIOptions, abilities, TEXT_SPOILT, encode=read_numbers)


CASES = {
    "fake": fake,
    "vllm-0.33": vllm,
    "vllm-0.32": lambda: vllm("0.32"),
    "vllm-without-abort": lambda: vllm(can_abort=False),
    "vllm-without-development-routes": bare_vllm,
    "sglang": sglang,
    "chat_prefix": chat_prefix,
    "openai": openai,
}
