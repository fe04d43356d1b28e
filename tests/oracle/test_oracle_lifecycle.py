"""What a weight update asks of an engine, asked of the oracle through the adapter for vLLM."""

import asyncio
from contextlib import asynccontextmanager

from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle
from prorl_gym.oracle.row_index import RowIndex
from prorl_gym.testing.inference.engine_conformance import request

CODEC = load_codec("small")
PROMPT = CODEC.tokenizer.encode_trusted("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")


@asynccontextmanager
async def engine(**options):
    server = OracleServer(CODEC, OraclePolicy(CODEC, RowIndex([])), OracleOptions(**options))
    async with serve_oracle(server, "127.0.0.1", 0) as base:
        adapter = VllmEngine("oracle", base, VllmOptions(model="oracle", vocab_size=CODEC.vocab_size))
        yield adapter
        await adapter.close()


def ask(prompt=PROMPT):
    return request(prompt_ids=prompt, max_tokens=64, stop_token_ids=(CODEC.terminator_id,))


async def test_a_probe_returns_the_prompt():
    async with engine() as oracle:
        logprobs = await oracle.probe_logprobs(PROMPT)
        assert len(logprobs) == len(PROMPT) - 1
        assert logprobs == await oracle.probe_logprobs(PROMPT)
        assert logprobs[:3] != (await oracle.probe_logprobs(PROMPT[1:]))[:3]


async def test_ids_that_are_no_conversation_are_probed_too():
    """A service proves new weights with ids of its own choice."""
    ids = CODEC.tokenizer.encode_untrusted("no turn begins here")
    async with engine() as oracle:
        assert len(await oracle.probe_logprobs(ids)) == len(ids) - 1


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
