"""SGLang's native route: the rules in which it differs from vLLM's."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from closing import closing
from fake_sglang import FakeSglang

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.sglang import SglangEngine, SglangOptions
from prorl_gym.inference.protocol import EngineOverloaded
from prorl_gym.testing.inference.engine_conformance import request

RID = "a" * 32


@asynccontextmanager
async def served(server=None, **options):
    made = SglangOptions(**{"model": "m", "vocab_size": 100, "request_seconds": 5.0, **options})
    async with server or FakeSglang() as sglang, closing(SglangEngine("e", sglang.url, made)) as engine:
        yield sglang, engine


def in_meta(**fields):
    return lambda answer: answer["meta_info"].update(fields)


async def test_the_request_is_what_sglang_needs():
    async with served(priority_scheduling=True, record_routed_experts=True) as (server, engine):
        await engine.generate(request(request_id=RID, top_k=20, seed=3, cache_salt="v1", priority=2))
    assert server.bodies == [
        {
            "rid": RID,
            "input_ids": [5, 6, 7],
            "sampling_params": {
                "max_new_tokens": 8,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 20,
                "sampling_seed": 3,
                "stop_token_ids": [2],
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_prompt_token_ids": True,
            "return_routed_experts": True,
            "stream": False,
            "extra_key": "v1",
            "priority": 2,
        }
    ]


async def test_keys_that_are_off_are_not_sent():
    async with served() as (server, engine):
        await engine.generate(request(priority=2))
    assert not {"extra_key", "priority", "return_routed_experts"} & set(server.bodies[0])
    assert not {"top_k", "sampling_seed"} & set(server.bodies[0]["sampling_params"])


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


CONTRACT = {
    "log-probs of other tokens": (
        in_meta(output_token_logprobs=[[-1.0, 9, None], [-1.0, 11, None], [-1.0, 2, None]]),
        "returned log-probs of other tokens than it sampled",
    ),
    "vLLM's order of the tuple": (
        in_meta(output_token_logprobs=[[10, -1.0, None], [11, -1.0, None], [2, -1.0, None]]),
        "returned a positive log-prob (10)",
    ),
    "short tuple": (in_meta(output_token_logprobs=[[-1.0], [-1.0], [-1.0]]), "without its token"),
    "no tuple": (in_meta(output_token_logprobs=[-1.0, -1.0, -1.0]), "is not a list"),
    "another length of the prompt": (in_meta(prompt_tokens=2), "a prompt of another length"),
    "no reason": (in_meta(finish_reason=None), "finish_reason is not an object"),
    "unknown reason": (in_meta(finish_reason={"type": "bored"}), "finish_reason 'bored', which is not known"),
    "a batch": (lambda answer: [answer], "the answer is not an object"),
    "no meta": (lambda answer: answer.update(meta_info=7), "meta_info is not an object"),
    "no ids": (lambda answer: answer.update(output_ids=None), "does not return token ids (output_ids)"),
}


@pytest.mark.parametrize("case", CONTRACT)
async def test_a_broken_answer_is_refused(case):
    mutate, message = CONTRACT[case]
    async with served(FakeSglang(mutate=mutate)) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(request())
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT
    assert message in caught.value.what


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


PAGE = """# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{model_name="m",dp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",dp_rank="0",tp_rank="1"} 3.0
sglang:num_running_reqs{model_name="m",dp_rank="1",tp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",dp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",tp_rank="0"} 0.25
sglang:max_total_num_tokens{dp_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="1"} 1000.0
sglang:num_retracted_requests_total{dp_rank="0"} 7.0
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 30.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 10.0
"""


async def test_load_adds_replicas_up_and_counts_each_once():
    async with served(FakeSglang(metrics=PAGE)) as (_, engine):
        load = await engine.read_load()
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage, load.kv_capacity) == (5, 1, 0.375, 2000)
    assert (load.preemptions, load.prefix_queries, load.prefix_hits) == (7, 100, 40)
