"""The vLLM adapter against a server that is right, and against every way of being wrong."""

import asyncio
import json
import logging

import pytest
from fake_vllm import FakeVllm

from prorl_gym.errors import EngineError, FailureKind, Limit
from prorl_gym.inference.engine_errors import ContextExceeded, EngineOverloaded
from prorl_gym.inference.engines.dialect import ModelList
from prorl_gym.inference.engines.logprob_rule import LogprobRule
from prorl_gym.inference.engines.response_validator import parse_version_label
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions, request_body
from prorl_gym.inference.protocol import EngineHealth
from prorl_gym.testing.inference.engine_conformance import request

BASIC = {"model": "m", "vocab_size": 100}
OPTIONS = {**BASIC, "request_seconds": 5.0}


async def call(server, changes=None, **options):
    engine = VllmEngine("e", server.url, VllmOptions(**{**OPTIONS, **options}))
    try:
        return await engine.generate(request(**(changes or {})))
    finally:
        await engine.close()


async def failure(server, changes=None, **options):
    with pytest.raises(EngineError) as caught:
        await call(server, changes, **options)
    return caught.value


async def test_the_request_is_what_vllm_needs():
    async with FakeVllm() as server:
        await call(server, {"top_k": 20, "seed": 3, "cache_salt": "v1", "request_id": "a" * 32, "session_id": "s"})
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [5, 6, 7],
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 20,
            "seed": 3,
            "cache_salt": "v1",
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
            "stop_token_ids": [2],
        }
    ]
    assert server.headers[0]["x-request-id"] == "a" * 32
    assert server.headers[0]["x-session-id"] == "s"


def test_keys_that_are_off_are_not_sent():
    body = request_body(request(top_k=-1), "m")
    assert not {"top_k", "seed", "cache_salt", "priority"} & set(body)
    assert "priority" not in request_body(request(priority=1), "m")
    assert request_body(request(priority=1), "m", send_priority=True)["priority"] == -1


async def test_the_answer_is_read():
    async with FakeVllm() as server:
        result = await call(server)
    assert (result.token_ids, result.logprobs) == ([10, 11, 2], [-0.25, -0.5, -0.75])
    assert (result.cached_tokens, result.logprob_kind, result.engine) == (1, "raw", "e")


async def test_the_key_travels_and_is_never_shown(caplog):
    caplog.set_level(logging.DEBUG)
    async with FakeVllm() as server:
        await call(server, api_key="hush-hush")
        server.mode, server.error = 401, "wrong key"
        refused = await failure(server, api_key="hush-hush")
    assert server.headers[0]["authorization"] == "Bearer hush-hush"
    assert "hush" not in str(refused) + caplog.text


def first(answer):
    return answer["choices"][0]


def set_in(place, key, value):
    return lambda answer: place(answer).__setitem__(key, value)


def nested():
    value = []
    for _ in range(900):
        value = [value]
    return value


def logprobs_of(answer):
    return first(answer)["logprobs"]


TOKENIZER_FIX = "Check that 'tokenizer' belongs to the model; 'vocab_size' widens the range for padded models."
VLLM_FIX = "Serve the model with vLLM 0.10.2 or newer, unmodified."
LOGPROB_FIX = "Do not start it with --max-logprobs 0; for NeMo-RL's server set 'engine: chat_prefix'."
ECHO_FIX = "Switch off prompt truncation and rewriting before it."
NO_LOGPROBS = f"does not return log-probs of the sampled tokens.\n{LOGPROB_FIX}"

CONTRACT = {
    "id out of range": (
        set_in(first, "token_ids", [10, 100, 2]),
        f"token_ids has the id 100, outside of 0..99.\n{TOKENIZER_FIX}",
    ),
    "negative id": (
        set_in(first, "token_ids", [-1, 11, 2]),
        f"token_ids has the id -1, outside of 0..99.\n{TOKENIZER_FIX}",
    ),
    "bool id": (set_in(first, "token_ids", [True, 11, 2]), f"token_ids has True, which is no token id.\n{VLLM_FIX}"),
    "float id": (set_in(first, "token_ids", [1.0, 11, 2]), f"token_ids has 1.0, which is no token id.\n{VLLM_FIX}"),
    "text id": (set_in(first, "token_ids", ["1", 11, 2]), f"token_ids has '1', which is no token id.\n{VLLM_FIX}"),
    "nested id": (
        set_in(first, "token_ids", [nested(), 11, 2]),
        f"token_ids has a list, which is no token id.\n{VLLM_FIX}",
    ),
    "ids are no list": (set_in(first, "token_ids", "abc"), f"token_ids is not a list.\n{VLLM_FIX}"),
    "no ids": (
        set_in(first, "token_ids", None),
        "does not return token ids.\nServe the model with vLLM 0.10.2 or newer (return_token_ids).",
    ),
    "no tokens": (set_in(first, "token_ids", []), f"sampled no token at all.\n{VLLM_FIX}"),
    "too many": (
        set_in(first, "token_ids", [9] * 9),
        f"sampled 9 tokens, 8 were requested.\n{VLLM_FIX}",
    ),
    "no log-probs": (set_in(first, "logprobs", None), NO_LOGPROBS),
    "no token log-probs": (set_in(logprobs_of, "token_logprobs", None), NO_LOGPROBS),
    "a missing log-prob": (set_in(logprobs_of, "token_logprobs", [-1.0, None, -1.0]), NO_LOGPROBS),
    "too few log-probs": (
        set_in(logprobs_of, "token_logprobs", [-1.0]),
        f"returned 1 log-probs for 3 tokens.\n{VLLM_FIX}",
    ),
    "text log-prob": (
        set_in(logprobs_of, "token_logprobs", ["-1", -1.0, -1.0]),
        f"returned '-1' as a log-prob.\n{VLLM_FIX}",
    ),
    "bool log-prob": (
        set_in(logprobs_of, "token_logprobs", [False, -1.0, -1.0]),
        f"returned False as a log-prob.\n{VLLM_FIX}",
    ),
    "huge log-prob": (
        set_in(logprobs_of, "token_logprobs", [-(10**400), -1.0, -1.0]),
        f"returned {str(-(10**400))[:40]} as a log-prob.\n{VLLM_FIX}",
    ),
    "positive log-prob": (
        set_in(logprobs_of, "token_logprobs", [0.5, -1.0, -1.0]),
        f"returned a positive log-prob (0.5).\n{VLLM_FIX}",
    ),
    "NaN": (
        set_in(logprobs_of, "token_logprobs", [float("nan"), -1.0, -1.0]),
        "the answer is not JSON.\nCheck that 'engines' names a vLLM server and not something before it.",
    ),
    "other tokens": (
        set_in(logprobs_of, "tokens", ["token_id:1", "token_id:11", "token_id:2"]),
        f"returned log-probs of other tokens than it sampled.\n{VLLM_FIX}",
    ),
    "another prompt": (
        set_in(first, "prompt_token_ids", [5, 6]),
        f"worked on other prompt ids than it was sent (2 instead of 3).\n{ECHO_FIX}",
    ),
    "another id in the prompt": (
        set_in(first, "prompt_token_ids", [5, 9, 7]),
        f"worked on other prompt ids than it was sent (first at position 1: 9 instead of 6).\n{ECHO_FIX}",
    ),
    "weight versions with a gap": (
        set_in(first, "weight_versions", [{"version": "1", "start": 1, "end": 3}]),
        f"returned weight_versions that do not follow each other.\n{VLLM_FIX}",
    ),
    "weight versions of too few tokens": (
        set_in(first, "weight_versions", [{"version": "1", "start": 0, "end": 2}]),
        f"returned the weight version of 2 of 3 tokens.\n{VLLM_FIX}",
    ),
    "weight versions that are no objects": (
        set_in(first, "weight_versions", [7]),
        f"a span of weight_versions is not an object.\n{VLLM_FIX}",
    ),
    "unknown end": (
        set_in(first, "finish_reason", "bored"),
        f"ended with finish_reason 'bored', which is not known.\n{VLLM_FIX}",
    ),
    "end is no text": (
        set_in(first, "finish_reason", {"a": 1}),
        f"ended with finish_reason a dict, which is not known.\n{VLLM_FIX}",
    ),
    "no choice": (lambda answer: answer.update(choices=[]), f"did not answer with exactly one choice.\n{VLLM_FIX}"),
    "two choices": (
        lambda answer: answer["choices"].append(first(answer)),
        f"did not answer with exactly one choice.\n{VLLM_FIX}",
    ),
    "choice is no object": (lambda answer: answer.update(choices=[7]), f"its choice is not an object.\n{VLLM_FIX}"),
    "a list": (lambda answer: [answer], f"the answer is not an object.\n{VLLM_FIX}"),
}


@pytest.mark.parametrize("case", CONTRACT)
async def test_a_broken_answer_is_refused(case):
    mutate, message = CONTRACT[case]
    async with FakeVllm(mutate=mutate) as server:
        error = await failure(server)
    assert error.kind is FailureKind.ENGINE_CONTRACT
    assert str(error) == f"engine {server.url}: {message}"


async def test_an_abort_may_come_without_tokens():
    async with FakeVllm(ids=[], mutate=set_in(first, "finish_reason", "abort")) as server:
        result = await call(server)
    assert (result.token_ids, result.finish_reason) == ([], "abort")


SETTINGS_FIX = "Check 'model' and the sampling settings against the server's."
LOAD_FIX = "Add engines, or lower the number of rollouts in RUN."
KEY_FIX = "Name the variable with its key in 'api_key_env'."
NAME_FIX = "Check 'engines' (they end in /v1), 'engine' (what kind they are), 'model' (their --served-model-name)."
ADDRESS_FIX = "Check that it runs and that 'engines' names it."
PROXY_FIX = "Check that 'engines' names a vLLM server and not something before it."
LISTENER_FIX = "Check what listens at that address."
UNREACHABLE, REFUSED = FailureKind.ENGINE_UNREACHABLE, FailureKind.ENGINE_REFUSED

STATUS = {
    429: (FailureKind.ENGINE_OVERLOADED, f"overloaded or paused (HTTP 429).\n{LOAD_FIX}"),
    503: (FailureKind.ENGINE_OVERLOADED, f"overloaded or paused (HTTP 503).\n{LOAD_FIX}"),
    500: (UNREACHABLE, "broke on our request (HTTP 500: it broke).\nLook into the engine's log."),
    400: (REFUSED, f"refused our request (HTTP 400: it broke).\n{SETTINGS_FIX}"),
    401: (REFUSED, f"refused our request (HTTP 401: it broke).\n{KEY_FIX}"),
    404: (REFUSED, f"refused our request (HTTP 404: it broke).\n{NAME_FIX}"),
    302: (REFUSED, f"refused our request (HTTP 302: it broke).\n{SETTINGS_FIX}"),
    "drop": (UNREACHABLE, f"dropped the connection.\n{ADDRESS_FIX}"),
    "half": (UNREACHABLE, f"the connection broke (ClientPayloadError).\n{ADDRESS_FIX}"),
    "garbage": (FailureKind.ENGINE_CONTRACT, f"the answer is not JSON.\n{PROXY_FIX}"),
    "huge": (
        FailureKind.ENGINE_CONTRACT,
        "the answer is larger than 1056816 bytes.\nCheck what listens at that address.",
    ),
}


@pytest.mark.parametrize("mode", STATUS)
async def test_a_failing_server_has_its_kind_and_message(mode):
    kind, message = STATUS[mode]
    async with FakeVllm(mode=mode) as server:
        error = await failure(server)
    assert error.kind is kind
    assert str(error) == f"engine {server.url}: {message}"


async def test_a_server_that_is_not_there():
    engine = VllmEngine("e", "http://127.0.0.1:1/v1", VllmOptions(**OPTIONS))
    with pytest.raises(EngineError) as caught:
        await engine.generate(request())
    await engine.close()
    assert caught.value.kind is FailureKind.ENGINE_UNREACHABLE
    assert str(caught.value) == (
        "engine http://127.0.0.1:1/v1: cannot connect (Connection refused).\n"
        "Check that it runs and that 'engines' names it."
    )


async def test_a_server_that_hangs():
    async with FakeVllm(mode="hang") as server:
        error = await failure(server, request_seconds=0.1)
        await server.running_is(0)  # the connection was closed
    assert error.kind is FailureKind.ENGINE_TIMEOUT
    assert str(error) == (
        f"engine {server.url}: no answer within 0.1 s.\n"
        "Raise 'request_seconds', or lower 'max_turn_tokens' or the load."
    )


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0.5", 0.5), (None, None), ("soon", None), ("-1", None)])
async def test_retry_after_is_read(header, seconds):
    async with FakeVllm(mode=429, retry_after=header) as server:
        error = await failure(server)
    assert isinstance(error, EngineOverloaded)
    assert error.retry_after == seconds


@pytest.mark.parametrize(
    ("words", "context"),
    [
        ("This model's maximum context length is 64 tokens. However, ...", 64),
        ("max_tokens=65 cannot be greater than max_model_len=64. Please request fewer output tokens.", 64),
        ("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", None),
        ("This model's maximum context length is 0 tokens.", None),
    ],
    ids=["prompt", "answer", "brim", "none"],
)
async def test_what_does_not_fit_into_the_context_is_a_limit(words, context):
    async with FakeVllm(mode=400, error=words) as server:
        with pytest.raises(ContextExceeded) as caught:
            await call(server)
    assert (caught.value.limit, caught.value.max_model_len) == (Limit.TOKENS, context)


async def test_the_engines_words_are_cut_and_cleaned():
    async with FakeVllm(mode=400, error="bad\x1b[31m\r\n" + "x" * 5000) as server:
        error = await failure(server)
    assert len(str(error).splitlines()) == 2
    assert "\x1b" not in str(error)
    assert len(error.what) < 320


async def test_an_abort_returns_what_was_sampled():
    async with FakeVllm(mode="hang", ids=[10, 11, 12, 2]) as server:
        engine = VllmEngine("e", server.url, VllmOptions(**OPTIONS))
        one = request()
        running = asyncio.create_task(engine.generate(one))
        await server.running_is(1)
        await engine.cancel(one.request_id)
        result = await running
        await engine.close()
    assert (result.token_ids, result.finish_reason) == ([10, 11], "abort")
    assert server.aborts == [f"cmpl-{one.request_id}-0"]


@pytest.mark.parametrize("models", [[], {"data": 5}, {"data": [5]}, {"data": [{"id": "m", "max_model_len": "x"}]}])
async def test_a_strange_model_list_is_only_a_missing_hint(models):
    async with FakeVllm(models=models) as server:
        engine = VllmEngine("e", server.url, VllmOptions(**OPTIONS))
        health = await engine.health()
        await engine.close()
    assert (health.ok, health.max_model_len) == (True, None)


async def test_health_returns_the_context():
    async with FakeVllm() as server:
        engine = VllmEngine("e", server.url, VllmOptions(**OPTIONS))
        assert (await engine.health()).max_model_len == 4096
        await engine.close()


async def test_a_closed_engine_is_out_of_service():
    async with FakeVllm() as server:
        engine = VllmEngine("e", server.url, VllmOptions(**OPTIONS))
        await engine.close()
        with pytest.raises(EngineError, match="taken out of service"):
            await engine.generate(request())


@pytest.mark.parametrize("count", [10**30, 4, -1, True, "3"])
async def test_an_impossible_count_of_cached_tokens_is_not_believed(count):
    def boast(answer):
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] = count

    async with FakeVllm(mutate=boast) as server:
        assert (await call(server)).cached_tokens is None


async def test_a_model_that_is_not_served_is_logged_once_in_two_lines(caplog):
    async with FakeVllm(models={"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]}) as server:
        engine = VllmEngine("e", server.url, VllmOptions(**OPTIONS))
        for _ in range(2):
            assert await engine.health() == EngineHealth(
                ok=True, unlisted_model=f"engine {server.url}: does not list model 'm' but a, b."
            )
        await engine.close()
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        [
            f"engine {server.url} does not serve model 'm'.",
            "It serves: a, b. Set 'inference.model' to one of these.",
        ]
    ]


async def with_engine(server, doing, **options):
    engine = VllmEngine("e", server.url, VllmOptions(**{**OPTIONS, **options}), version=9)
    try:
        return await doing(engine)
    finally:
        await engine.close()


LABELS = {"default": 9, "7": 7, "v7": 7, "step-7": 7, "step_7": 7, "Qwen2.5": 9, "abc": 9, "": 9, 7: 7, -7: 9, True: 9}


@pytest.mark.parametrize("label", LABELS)
def test_which_labels_are_versions(label):
    span = [{"version": label, "start": 0, "end": 2}]
    assert VllmDialect("http://h/v1", VllmOptions(**BASIC)).validator.token_versions(span, 2, 9) == [LABELS[label]] * 2


async def test_an_update_in_the_middle_of_a_call_is_on_its_tokens():
    spans = [{"version": "step-1", "start": 0, "end": 2}, {"version": "step-2", "start": 2, "end": 3}]
    async with FakeVllm(release="0.33", mutate=set_in(first, "weight_versions", spans)) as server:
        result = await with_engine(server, lambda engine: engine.generate(request()))
    assert result.versions == [1, 1, 2]


async def test_the_pools_version_holds_where_the_server_reports_none():
    async with FakeVllm(release="0.32", label="step-3") as server:
        result = await with_engine(server, lambda engine: engine.generate(request()))
    assert result.versions == [9, 9, 9]


async def test_a_paused_0_33_is_overloaded_at_once():
    async with FakeVllm(release="0.33", paused=True) as server:
        error = await failure(server)
    assert isinstance(error, EngineOverloaded)


async def test_a_paused_0_32_is_overloaded_once_the_wait_is_over():
    async with FakeVllm(release="0.32", paused=True) as server:
        error = await failure(server, request_seconds=0.1)
        await server.running_is(0)
    assert isinstance(error, EngineOverloaded)
    assert str(error) == (
        f"engine {server.url}: is paused and answers nothing.\n"
        "Resume it, or take it out of the pool while it is paused."
    )


async def test_a_paused_server_is_not_well():
    async with FakeVllm(paused=True) as server:
        health = await with_engine(server, lambda engine: engine.health())
    assert (health.ok, health.detail) == (False, f"engine {server.url}: is paused or not ready.")


async def test_a_probe_reads_the_prompts_own_tokens():
    async with FakeVllm() as server:
        probed = await with_engine(server, lambda engine: engine.probe_logprobs([5, 6, 7]))
    assert probed == [-3.0, -3.5]
    body = server.bodies[0]
    assert (body["max_tokens"], body["prompt_logprobs"], body["prompt"]) == (1, 1, [5, 6, 7])


@pytest.mark.parametrize(
    "entries", [None, [], [None], [None, {}, {}], [None, {"6": {}}, {"7": {"logprob": "x"}}], [None, 5, 6], "abc"]
)
async def test_a_broken_probe_is_refused(entries):
    async with FakeVllm(mutate=set_in(first, "prompt_logprobs", entries)) as server:
        with pytest.raises(EngineError) as caught:
            await with_engine(server, lambda engine: engine.probe_logprobs([5, 6, 7]))
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT


async def test_a_server_without_development_routes_reports_what_is_missing():
    async with FakeVllm(development=False) as server:
        with pytest.raises(EngineError) as caught:
            await with_engine(server, lambda engine: engine.reset_prefix_cache())
    assert str(caught.value) == (
        f"engine {server.url}: has no /reset_prefix_cache.\n"
        "Start vLLM with VLLM_SERVER_DEV_MODE=1, on a private address."
    )


EXPERTS = [[[0, 1]], [[2, 3]], [[1, 0]]]


@pytest.mark.parametrize(("wanted", "kept"), [(True, EXPERTS), (False, None)])
async def test_routed_experts_pass_through_when_they_are_wanted(wanted, kept):
    async with FakeVllm(mutate=set_in(first, "routed_experts", EXPERTS)) as server:
        assert (await call(server, record_routed_experts=wanted)).routed_experts == kept


async def test_raw_logprobs_away_from_temperature_1_are_refused_where_the_pool_requires_it():
    async with FakeVllm() as server:
        rule = LogprobRule("policy", require_processed_logprobs=True)
        refused = await failure(server, {"temperature": 0.5}, logprob_rule=rule)
        await call(server, {"temperature": 0.5}, logprob_rule=rule, logprob_kind="processed")
    assert refused.kind is FailureKind.ENGINE_REFUSED
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("spans", "reported"),
    [
        ([{"version": "step-4", "start": 0, "end": 3}], True),
        ([{"version": "default", "start": 0, "end": 3}], False),
        (None, False),
        ([], False),
    ],
)
async def test_versions_are_reported_only_if_the_engine_names_its_weights(spans, reported):
    async with FakeVllm(release="0.33", mutate=set_in(first, "weight_versions", spans)) as server:
        result = await with_engine(server, lambda engine: engine.generate(request()))
    assert result.versions_reported is reported


@pytest.mark.parametrize("session", ["a\n", "a\r\nX-Other: 1", "\0", "a" * 9000, "\ud800", "é b"])
async def test_a_session_by_any_name_takes_no_engine_down(session):
    async with FakeVllm() as server:
        assert (await call(server, {"session_id": session})).token_ids
    assert len(server.headers[0]["x-session-id"]) == 32
    assert "x-other" not in server.headers[0]


def test_a_version_that_no_record_can_hold_is_a_mere_label():
    assert parse_version_label(10**15) is None
    assert parse_version_label(10**15 - 1) == 10**15 - 1


def test_names_of_models_write_no_lines_of_the_log(caplog):
    ModelList("e", "m").read_health(b'{"data": [{"id": "x\\n12:00:00 error   forged\\u001b[31m"}]}')
    assert "12:00:00 error forged [31m" in caplog.messages[0].splitlines()[1]


async def test_experts_that_no_record_can_hold_are_a_broken_contract():
    deep = json.loads("[" * 300 + "]" * 300)
    async with FakeVllm(mutate=set_in(first, "routed_experts", deep)) as server:
        error = await failure(server, record_routed_experts=True)
    assert error.kind is FailureKind.ENGINE_CONTRACT
    assert "nested too deeply" in str(error)
