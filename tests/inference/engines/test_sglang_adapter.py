"""SGLang's native route: the rules in which it differs from vLLM's."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from closing import closing
from fake_sglang import FakeSglang

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.sglang import SglangEngine, SglangOptions
from prorl_gym.inference.protocol import EngineOverloaded
from prorl_gym.testing.inference.engine_conformance import request


@asynccontextmanager
async def served(server=None, **options):
    made = SglangOptions(**{"model": "m", "vocab_size": 100, "request_seconds": 5.0, **options})
    async with server or FakeSglang() as sglang, closing(SglangEngine("e", sglang.url, made)) as engine:
        yield sglang, engine


def in_meta(**fields):
    return lambda answer: answer["meta_info"].update(fields)


async def test_the_answer_is_read():
    async with served() as (_, engine):
        result = await engine.generate(request())
    assert (result.token_ids, result.logprobs) == ([10, 11, 2], [-0.25, -0.5, -0.75])
    assert (result.cached_tokens, result.logprob_kind, result.finish_reason) == (1, "processed", "stop")


async def test_an_id_that_others_may_begin_with_is_never_sent():
    async with served() as (server, engine):
        with pytest.raises(EngineError, match="aborts by the beginning of an id"):
            await engine.generate(request(request_id="r1"))
    assert server.bodies == []


async def test_an_abort_salvages_one_call_and_leaves_the_other():
    async with served(FakeSglang(mode="hang", ids=[10, 11, 12, 2])) as (server, engine):
        one, other = request(request_id="a" * 32), request(request_id="a" * 31 + "b")
        calls = [asyncio.create_task(engine.generate(each)) for each in (one, other)]
        await server.running_is(2)
        await engine.cancel(one.request_id)
        result = await calls[0]
        assert (result.token_ids, result.finish_reason) == ([10, 11], "abort")
        assert not calls[1].done()
        calls[1].cancel()
        await asyncio.wait(calls)


STATUS = {400: FailureKind.ENGINE_REFUSED, 500: FailureKind.ENGINE_UNREACHABLE, 503: FailureKind.ENGINE_OVERLOADED}


@pytest.mark.parametrize("status", STATUS)
async def test_an_abort_with_a_status_is_a_failure(status):
    reason = {"type": "abort", "message": "gone wrong", "status_code": status, "err_type": "X"}
    async with served(FakeSglang(mutate=in_meta(finish_reason=reason))) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(request())
    assert caught.value.kind is STATUS[status]


SPANS = [{"version": "step-4", "start": 0, "end": 1}, {"version": "step-5", "start": 1, "end": 3}]


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({}, [9, 9, 9]),
        ({"weight_version": "step-4"}, [4, 4, 4]),
        ({"weight_version": "step-5", "weight_versions": SPANS}, [4, 5, 5]),
    ],
    ids=["default", "one", "an update in the middle"],
)
async def test_versions_are_the_labels_of_the_weights(fields, versions):
    async with served(FakeSglang(mutate=in_meta(**fields))) as (_, engine):
        engine.version = 9
        assert (await engine.generate(request())).versions == versions


async def test_a_paused_server_is_overloaded_once_the_wait_is_over_and_not_well():
    async with served(FakeSglang(paused=True), request_seconds=0.1) as (server, engine):
        with pytest.raises(EngineOverloaded, match="is paused and answers nothing"):
            await engine.generate(request())
        await server.running_is(0)
        assert not (await engine.health()).ok


async def test_a_probe_asks_from_the_start_of_the_prompt():
    async with served() as (server, engine):
        assert await engine.probe_logprobs([5, 6, 7]) == [-3.0, -3.5]
    assert server.bodies[0]["logprob_start_len"] == 0
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 1


PAGE = Path(__file__).with_name("sglang.prom").read_text()


async def test_load_adds_replicas_up_and_counts_each_once():
    async with served(FakeSglang(metrics=PAGE)) as (_, engine):
        load = await engine.read_load()
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage, load.kv_capacity) == (5, 1, 0.375, 2000)
    assert (load.preemptions, load.prefix_queries, load.prefix_hits) == (7, 100, 40)
