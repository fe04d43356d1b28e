"""What the adapter relies on, asked of a real server: what the fakes claim, and what they cannot know."""

import asyncio
import math

import pytest
from real_fleet import Figures, Fleet
from real_server import CONTEXT, MODEL, VOCAB
from real_workload import SAME, begin, call, farthest, words

from prorl_gym.errors import FailureKind
from prorl_gym.inference.protocol import ContextExceeded
from prorl_gym.left_out import left_out_counts
from prorl_gym.testing.inference.engine_conformance import expect_engine_error

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_log_probs_are_those_of_the_ids_on_either_engine(fleet: Fleet, figures: Figures):
    first, second = fleet.engines()
    prompt = words("agreement", 300)
    sampled = await first.generate(call(prompt, max_tokens=64, seed=1))
    assert len(sampled.token_ids) == 64
    probed = [(await engine.probe_logprobs([*prompt, *sampled.token_ids]))[-64:] for engine in (first, second)]
    differences = [farthest(sampled.logprobs, one) for one in probed]
    assert max(differences) < SAME
    figures["sampled log-probs / the same ids as a prompt"] = (
        f"{differences[0]:.1e}",
        "nats",
        "largest difference over 64 sampled tokens, on the engine that sampled them",
    )
    figures["the same on the other engine"] = (f"{differences[1]:.1e}", "nats", "as above")


async def test_a_turn_continues_on_the_other_engine_as_if_nothing_happened(fleet: Fleet, figures: Figures):
    first, second = fleet.engines()
    prompt = words("continued", 300)
    whole = await first.generate(call(prompt, max_tokens=48, temperature=0.0))
    half = await first.generate(call(prompt, max_tokens=24, temperature=0.0))
    rest = await second.generate(call([*prompt, *half.token_ids], max_tokens=24, temperature=0.0))
    assert half.token_ids + rest.token_ids == whole.token_ids
    difference = farthest(half.logprobs + rest.logprobs, whole.logprobs)
    assert difference < SAME
    figures["a turn continued on the other engine / not moved"] = (
        f"{difference:.1e}",
        "nats",
        "largest difference of log-probs; the 48 ids are the same",
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_processed_log_probs_are_of_what_is_sampled_from(fleet: Fleet, temperature):
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1, "logprobs": VOCAB, "return_tokens_as_token_ids": True}
    plain, asked = [await _distribution(fleet.servers[0], {**body, "temperature": each}) for each in (1.0, temperature)]
    scaled = {token: value / temperature for token, value in plain.items()}
    total = math.log(sum(map(math.exp, scaled.values())))
    assert len(asked) == VOCAB and math.isclose(sum(map(math.exp, asked.values())), 1.0, rel_tol=1e-4)
    assert max(abs(asked[token] - (value - total)) for token, value in scaled.items()) < 1e-3


async def _distribution(server, body):
    answer = await asyncio.to_thread(server.post, "/v1/completions", body)
    return answer["choices"][0]["logprobs"]["top_logprobs"][0]


async def test_a_seed_is_a_turn_alone_or_in_a_batch_on_either_engine(fleet: Fleet):
    first, second = fleet.engines()
    prompt = words("seeds", 200)
    alone = await first.generate(call(prompt, seed=7))
    other = await first.generate(call(prompt, seed=8))
    crowd = await asyncio.gather(*(second.generate(call(prompt, seed=seed)) for seed in range(16)))
    assert crowd[7].token_ids == alone.token_ids
    assert crowd[8].token_ids == other.token_ids != alone.token_ids


async def test_a_stop_id_ends_the_turn_and_is_in_it(fleet: Fleet):
    fleet.servers[0].reload(fleet.checkpoints.chain(10, 11, 12, again=True))
    unknown = left_out_counts()["engine"]
    result = await fleet.engine().generate(call([5, 6, 7], stop_token_ids=(2, 12)))
    assert result.token_ids == [10, 11, 12]
    assert result.finish_reason == "stop"
    assert left_out_counts()["engine"] == unknown, "a field of this release is unknown: the log names it"


async def test_the_tokenizers_end_of_turn_ends_it_unasked(fleet: Fleet):
    fleet.servers[0].reload(fleet.checkpoints.chain(10, 11, 2))
    result = await fleet.engine().generate(call([5, 6, 7], stop_token_ids=()))
    assert (result.token_ids, result.finish_reason) == ([10, 11, 2], "stop")


@pytest.mark.parametrize(
    ("prompt", "asked", "max_model_len"),
    [(CONTEXT + 10, 8, CONTEXT), (CONTEXT, 8, None), (8, CONTEXT + 1, CONTEXT)],
    ids=["prompt", "brim", "answer"],
)
async def test_what_does_not_fit_is_a_limit(fleet: Fleet, prompt, asked, max_model_len):
    with pytest.raises(ContextExceeded) as found:
        await fleet.engine().generate(call(words("long", prompt), max_tokens=asked))
    assert found.value.max_model_len == max_model_len  # at the brim it does not say how long its context is


async def test_an_answer_is_cut_at_the_context(fleet: Fleet):
    result = await fleet.engine().generate(call(words("cut", CONTEXT - 5), max_tokens=64))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")


@pytest.mark.parametrize("ids", [[5, VOCAB], [5, -1]], ids=["beyond", "below"])
async def test_ids_outside_of_the_vocabulary_are_refused(fleet: Fleet, ids):
    assert (await expect_engine_error(fleet.engine().generate(call(ids)))).kind is FailureKind.ENGINE_REFUSED


async def test_a_model_that_it_does_not_serve_is_refused(fleet: Fleet):
    error = await expect_engine_error(fleet.engine(model="another").generate(call([5, 6, 7])))
    assert error.kind is FailureKind.ENGINE_REFUSED
    assert "served-model-name" in error.fix


async def test_it_reports_what_it_found_in_its_cache_and_a_salt_hides_it(fleet: Fleet):
    engine, prompt = fleet.engine(), words("cached", 300)
    found = [(await engine.generate(call(prompt, cache_salt=salt))).cached_tokens for salt in ("a", "a", "b")]
    assert found == [0, 256, 0]


async def test_its_figures_are_read(fleet: Fleet):
    engine = fleet.engine()
    before = await engine.read_load()
    prompt = words("figures", 300)
    for _ in range(2):
        await engine.generate(call(prompt))
    after = await engine.read_load()
    assert before is not None and after is not None
    assert after.kv_capacity == 2048 * 128  # 1 GiB at 4 KiB per token: keys and values of 8 layers, 2 heads of 32
    assert (after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits) == (600, 256)
    assert (after.running, after.waiting, after.kv_usage) == (0, 0, 0.0)


async def test_an_aborted_turn_gives_its_tokens_and_goes_on_elsewhere(fleet: Fleet, figures: Figures):
    first, second = fleet.engines()
    prompt = words("aborted", 300)
    request = call(prompt, max_tokens=7000, seed=3, stop_token_ids=())
    running = await begin(first, request)
    await first.cancel(request.request_id)
    partial = await running
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) == len(partial.logprobs) < 7000
    whole = await second.generate(call(prompt, max_tokens=len(partial.token_ids), seed=3, stop_token_ids=()))
    assert partial.token_ids == whole.token_ids
    rest = await second.generate(call([*prompt, *partial.token_ids], max_tokens=8, seed=4))
    assert rest.token_ids
    figures["tokens salvaged from an aborted turn"] = (
        len(partial.token_ids),
        "tokens",
        "all that were sampled before the abort, the same as another engine samples from that seed",
    )
