"""The oracle's routes as a client of vLLM sees them, and as a weight update does."""

import asyncio
import math
from contextlib import asynccontextmanager

import aiohttp
import pytest
from closing import closing

from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, RowIndex
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle
from prorl_gym.testing.inference.engine_conformance import request

CODEC = load_codec("small")
PROMPT = CODEC.tokenizer.encode_trusted("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
BODY = {"model": "oracle", "prompt": PROMPT, "max_tokens": 64, "logprobs": 0, "return_token_ids": True}


class Client:
    def __init__(self, http, base):
        self._http, self.base, self.root = http, base, base.removesuffix("/v1")

    async def post(self, url, body, **headers):
        async with self._http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, session="", **changes):
        return await self.post(f"{self.base}/completions", {**BODY, **changes}, **{"X-Session-ID": session})

    async def metric(self, name):
        async with self._http.get(f"{self.root}/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def serving(**options):
    server = OracleServer(CODEC, OraclePolicy(CODEC, RowIndex([])), OracleOptions(**options))
    return serve_oracle(server, "127.0.0.1", 0)


@asynccontextmanager
async def client(**options):
    async with serving(**options) as base, aiohttp.ClientSession() as http:
        yield Client(http, base)


async def test_an_answer_has_vllms_shape():
    async with client() as oracle:
        status, answer = await oracle.complete()
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert status == 200
    assert CODEC.decode(ids) == "I do not know this task.<|im_end|>"
    assert choice["text"] == "I do not know this task."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(math.isfinite(value) and value < 0 for value in choice["logprobs"]["token_logprobs"])
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_ids_and_logprobs_come_only_when_asked():
    async with client() as oracle:
        _, answer = await oracle.complete(return_token_ids=False, logprobs=None)
    assert answer["choices"][0]["token_ids"] is None
    assert answer["choices"][0]["logprobs"] is None


async def test_max_tokens_and_stop_ids_end_a_turn():
    async with client() as oracle:
        _, whole = await oracle.complete()
        ids = whole["choices"][0]["token_ids"]
        _, cut = await oracle.complete(max_tokens=2)
        _, stopped = await oracle.complete(stop_token_ids=[ids[1]])
    assert (cut["choices"][0]["token_ids"], cut["choices"][0]["finish_reason"]) == (ids[:2], "length")
    assert stopped["choices"][0]["token_ids"] == ids[:2]
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]) == ("stop", ids[1])


async def test_a_turn_that_was_cut_goes_on():
    async with client() as oracle:
        _, whole = await oracle.complete()
        ids = whole["choices"][0]["token_ids"]
        _, rest = await oracle.complete(prompt=PROMPT + ids[:3])
    assert rest["choices"][0]["token_ids"] == ids[3:]


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"prompt": [10**6]}, 400, "Token id 1000000 is out of vocabulary"),
        ({"prompt": [-1]}, 400, "Token id -1 is out of vocabulary"),
        ({"prompt": "text"}, 400, "prompt must be a list of token ids."),
        ({"prompt": [True]}, 400, "prompt must be a list of token ids."),
        ({"prompt": []}, 400, "The prompt is empty."),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": "5"}, 400, "max_tokens must be an integer."),
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"max_tokens": 500}, 400, "This model's maximum context length is 100 tokens. However, you requested"),
    ],
)
async def test_a_wrong_request_is_refused_in_vllms_words(changes, status, message):
    async with client(max_model_len=100) as oracle:
        got, answer = await oracle.complete(**changes)
    assert got == status
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["code"] == status


async def running(oracle, count):
    async with asyncio.timeout(5):
        while await oracle.metric("vllm:num_requests_running") != count:
            pass


async def test_a_closed_connection_stops_the_call():
    async with client(tokens_per_second=0.001) as oracle:
        call = asyncio.create_task(oracle.complete())
        await running(oracle, 1)
        call.cancel()
        await running(oracle, 0)


async def test_tokenize():
    async with client() as oracle:
        assert (await oracle.post(f"{oracle.root}/tokenize", {"prompt": "hello"}))[1]["tokens"] == (
            CODEC.tokenizer.encode_trusted("hello")
        )
        messages = [{"role": "user", "content": "Who are you?"}]
        assert (await oracle.post(f"{oracle.root}/tokenize", {"messages": messages}))[1]["tokens"] == PROMPT
        assert (await oracle.post(f"{oracle.root}/tokenize", {"messages": [{"role": "nobody"}]}))[0] == 400
        assert (await oracle.post(f"{oracle.root}/tokenize", {}))[0] == 400


# --- what a weight update asks of an engine, through the adapter for vLLM ---------------------------------------------


@asynccontextmanager
async def engine(**options):
    made = VllmOptions(model="oracle", vocab_size=CODEC.vocab_size)
    async with serving(**options) as base, closing(VllmEngine("oracle", base, made)) as adapter:
        yield adapter


def ask(prompt=PROMPT):
    return request(prompt_ids=prompt, max_tokens=64, stop_token_ids=(CODEC.terminator_id,))


@pytest.mark.parametrize("ids", [PROMPT, CODEC.tokenizer.encode_untrusted("no turn begins here")])
async def test_a_probe_returns_the_prompt(ids):
    async with engine() as oracle:
        logprobs = await oracle.probe_logprobs(ids)
        assert len(logprobs) == len(ids) - 1
        assert logprobs == await oracle.probe_logprobs(ids)
        assert logprobs[:3] != (await oracle.probe_logprobs(ids[1:]))[:3]


async def test_a_reset_empties_the_cache():
    async with engine() as oracle:
        first = await oracle.generate(ask())
        longer = [*PROMPT, *first.token_ids, *PROMPT]
        assert (await oracle.generate(ask(longer))).cached_tokens > 0
        assert await oracle.reset_prefix_cache()
        assert (await oracle.generate(ask([*longer, *PROMPT]))).cached_tokens == 0


async def test_a_call_that_runs_holds_the_cache():
    async with engine(tokens_per_second=1.0) as oracle:
        one = ask()
        call = asyncio.create_task(oracle.generate(one))
        async with asyncio.timeout(5):
            while (await oracle.read_load()).running == 0:
                pass
        assert not await oracle.reset_prefix_cache()
        await oracle.cancel(one.request_id)
        assert (await call).finish_reason == "abort"
        assert await oracle.reset_prefix_cache()
