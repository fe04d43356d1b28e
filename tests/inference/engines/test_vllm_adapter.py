"""The vLLM adapter against a server that is right, and against every way of being wrong."""

import logging

import pytest
from closing import closing
from fake_vllm import FakeVllm

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.dialect import LogprobRule, ModelList
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions
from prorl_gym.inference.protocol import EngineHealth, EngineOverloaded
from prorl_gym.testing.inference.engine_conformance import request

BASIC = {"model": "m", "vocab_size": 100}
URL = "http://h/v1"
OPTIONS = {**BASIC, "request_seconds": 5.0}


def opened(server, **options):
    return closing(VllmEngine("e", server.url, VllmOptions(**{**OPTIONS, **options}), version=9))


async def call(server, changes=None, **options):
    async with opened(server, **options) as engine:
        return await engine.generate(request(**(changes or {})))


async def failure(server, changes=None, **options):
    async with opened(server, **options) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.generate(request(**(changes or {})))
    return caught.value


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


def in_choice(key, value):
    return lambda answer: first(answer).__setitem__(key, value)


PROXY_FIX = "Check that 'engines' names a vLLM server and not something before it."
SETTINGS_FIX = "Check 'model' and the sampling settings against the server's."
LOAD_FIX = "Add engines, or lower the number of rollouts in RUN."
KEY_FIX = "Name the variable with its key in 'api_key_env'."
NAME_FIX = "Check 'engines' (they end in /v1), 'engine' (what kind they are), 'model' (their --served-model-name)."
ADDRESS_FIX = "Check that it runs and that 'engines' names it."
HASTE_FIX = "Raise 'request_seconds', or lower 'max_turn_tokens' or the load."
UNREACHABLE, REFUSED, BROKEN = FailureKind.ENGINE_UNREACHABLE, FailureKind.ENGINE_REFUSED, FailureKind.ENGINE_CONTRACT

STATUS = {
    429: (FailureKind.ENGINE_OVERLOADED, "overloaded or paused (HTTP 429).", LOAD_FIX),
    503: (FailureKind.ENGINE_OVERLOADED, "overloaded or paused (HTTP 503).", LOAD_FIX),
    500: (UNREACHABLE, "broke on our request (HTTP 500: it broke).", "Look into the engine's log."),
    400: (REFUSED, "refused our request (HTTP 400: it broke).", SETTINGS_FIX),
    401: (REFUSED, "refused our request (HTTP 401: it broke).", KEY_FIX),
    404: (REFUSED, "refused our request (HTTP 404: it broke).", NAME_FIX),
    302: (REFUSED, "refused our request (HTTP 302: it broke).", SETTINGS_FIX),
    "drop": (UNREACHABLE, "dropped the connection.", ADDRESS_FIX),
    "half": (UNREACHABLE, "the connection broke (ClientPayloadError).", ADDRESS_FIX),
    "garbage": (BROKEN, "the answer is not JSON.", PROXY_FIX),
    "huge": (BROKEN, "the answer is larger than 1056816 bytes.", "Check what listens at that address."),
    "hang": (FailureKind.ENGINE_TIMEOUT, "no answer within 0.1 s.", HASTE_FIX),
    "gone": (UNREACHABLE, "cannot connect (Connection refused).", ADDRESS_FIX),
}


@pytest.mark.parametrize("mode", STATUS)
async def test_a_failing_server_has_its_kind_and_message(mode):
    kind, what, fix = STATUS[mode]
    async with FakeVllm(mode=mode) as server:
        if mode == "gone":
            server.url = "http://127.0.0.1:1/v1"
        error = await failure(server, request_seconds=0.1 if mode == "hang" else 5.0)
        await server.running_is(0)  # the connection was closed
    assert error.kind is kind
    assert (error.what, error.fix) == (f"engine {server.url}: {what}", fix)


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0.5", 0.5), (None, None), ("soon", None), ("-1", None)])
async def test_retry_after_is_read(header, seconds):
    async with FakeVllm(mode=429, retry_after=header) as server:
        error = await failure(server)
    assert isinstance(error, EngineOverloaded)
    assert error.retry_after == seconds


STRANGE_MODELS = ([], {"data": 5}, {"data": [5]}, {"data": [{"id": "m", "max_model_len": "x"}]})


@pytest.mark.parametrize(("models", "context"), [(None, 4096), *((models, None) for models in STRANGE_MODELS)])
async def test_a_strange_model_list_is_only_a_missing_hint(models, context):
    async with FakeVllm(models=models) as server, opened(server) as engine:
        health = await engine.health()
    assert (health.ok, health.max_model_len) == (True, context)


async def test_a_closed_engine_is_out_of_service():
    async with FakeVllm() as server, opened(server) as engine:
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
    models = {"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]}
    async with FakeVllm(models=models) as server, opened(server) as engine:
        for _ in range(2):
            assert await engine.health() == EngineHealth(
                ok=True, unlisted_model=f"engine {server.url}: does not list model 'm' but a, b."
            )
    assert [record.getMessage() for record in caplog.records] == [
        f"engine {server.url} does not serve model 'm'.\nIt serves: a, b. Set 'inference.model' to one of these."
    ]


LABELS = {"default": 9, "7": 7, "v7": 7, "step-7": 7, "step_7": 7, "Qwen2.5": 9, "abc": 9, "": 9, 7: 7, -7: 9, True: 9}
MOST = 10**15 - 1
"""The largest version that a record can hold."""


@pytest.mark.parametrize(("label", "version"), [*LABELS.items(), (MOST, MOST), (MOST + 1, 9)])
def test_which_labels_are_versions(label, version):
    assert VllmDialect(URL, VllmOptions(**BASIC)).validator.token_versions([span(label)], 3, 9) == [version] * 3


async def test_a_paused_0_32_is_overloaded_once_the_wait_is_over_and_not_well():
    async with FakeVllm(release="0.32", paused=True) as server, opened(server, request_seconds=0.1) as engine:
        with pytest.raises(EngineOverloaded) as caught:
            await engine.generate(request())
        await server.running_is(0)
        health = await engine.health()
    assert str(caught.value) == (
        f"engine {server.url}: is paused and answers nothing.\n"
        "Resume it, or take it out of the pool while it is paused."
    )
    assert (health.ok, health.detail) == (False, f"engine {server.url}: is paused or not ready.")


async def test_a_probe_reads_the_prompts_own_tokens():
    async with FakeVllm() as server, opened(server) as engine:
        probed = await engine.probe_logprobs([5, 6, 7])
    assert probed == [-3.0, -3.5]
    body = server.bodies[0]
    assert (body["max_tokens"], body["prompt_logprobs"], body["prompt"]) == (1, 1, [5, 6, 7])


@pytest.mark.parametrize(
    "entries", [None, [], [None], [None, {}, {}], [None, {"6": {}}, {"7": {"logprob": "x"}}], [None, 5, 6], "abc"]
)
async def test_a_broken_probe_is_refused(entries):
    async with FakeVllm(mutate=in_choice("prompt_logprobs", entries)) as server, opened(server) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.probe_logprobs([5, 6, 7])
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT


async def test_a_server_without_development_routes_reports_what_is_missing():
    async with FakeVllm(development=False) as server, opened(server) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.reset_prefix_cache()
    assert str(caught.value) == (
        f"engine {server.url}: has no /reset_prefix_cache.\n"
        "Start vLLM with VLLM_SERVER_DEV_MODE=1, on a private address."
    )


EXPERTS = [[[0, 1]], [[2, 3]], [[1, 0]]]


@pytest.mark.parametrize(("wanted", "kept"), [(True, EXPERTS), (False, None)])
async def test_routed_experts_pass_through_when_they_are_wanted(wanted, kept):
    async with FakeVllm(mutate=in_choice("routed_experts", EXPERTS)) as server:
        assert (await call(server, record_routed_experts=wanted)).routed_experts == kept


async def test_raw_logprobs_away_from_temperature_1_are_refused_where_the_pool_requires_it():
    async with FakeVllm() as server:
        rule = LogprobRule("policy", require_processed_logprobs=True)
        refused = await failure(server, {"temperature": 0.5}, logprob_rule=rule)
        await call(server, {"temperature": 0.5}, logprob_rule=rule, logprob_kind="processed")
    assert refused.kind is FailureKind.ENGINE_REFUSED
    assert len(server.bodies) == 1


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}])
def test_raw_logprobs_of_another_distribution_are_refused_when_asked(changes):
    rule = LogprobRule("policy", require_processed_logprobs=True)
    with pytest.raises(EngineError, match="raw log-probs are not those of sampling at temperature") as caught:
        rule.check(request(**changes), "raw", URL)
    assert caught.value.kind is FailureKind.ENGINE_REFUSED


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "raw"), ({"temperature": 0.7}, "processed"), ({"temperature": 0.0, "priority": 1}, "raw")],
    ids=["plain sampling", "processed", "evaluation"],
)
def test_what_is_right_or_not_learnt_from_passes(changes, kind, caplog):
    LogprobRule("policy", require_processed_logprobs=True).check(request(**changes), kind, URL)
    assert not caplog.records


def test_a_pool_is_warned_once(caplog):
    caplog.set_level(logging.WARNING)
    rule = LogprobRule("policy")
    for address in (URL, "http://other/v1"):
        rule.check(request(temperature=0.5), "raw", address)
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "pool policy, engine http://h/v1: its raw log-probs are not those of sampling at temperature 0.5, top_p 1, "
        "top_k -1.",
        "Start it with --logprobs-mode processed_logprobs and set 'logprob_kind: processed', or sample at "
        "temperature 1.",
    ]


def span(label, start=0, end=3):
    return {"version": label, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "versions", "reported"),
    [
        ([span("step-1", 0, 2), span("step-2", 2)], [1, 1, 2], True),
        ([span("step-4")], [4, 4, 4], True),
        ([span("default")], [9, 9, 9], False),
        (None, [9, 9, 9], False),
        ([], [9, 9, 9], False),
    ],
    ids=["an update in the middle", "one", "default", "none", "no spans"],
)
async def test_versions_are_reported_only_if_the_engine_names_its_weights(spans, versions, reported):
    async with FakeVllm(release="0.33", mutate=in_choice("weight_versions", spans)) as server, opened(server) as engine:
        result = await engine.generate(request())
    assert (result.versions, result.versions_reported) == (versions, reported)


@pytest.mark.parametrize("session", ["a\n", "a\r\nX-Other: 1", "\0", "a" * 9000, "\ud800", "é b"])
async def test_a_session_by_any_name_takes_no_engine_down(session):
    async with FakeVllm() as server:
        assert (await call(server, {"session_id": session})).token_ids
    assert len(server.headers[0]["x-session-id"]) == 32
    assert "x-other" not in server.headers[0]


def test_names_of_models_write_no_lines_of_the_log(caplog):
    ModelList("e", "m").read_health(b'{"data": [{"id": "x\\n12:00:00 error   forged\\u001b[31m"}]}')
    assert "12:00:00 error forged [31m" in caplog.messages[0].splitlines()[1]
