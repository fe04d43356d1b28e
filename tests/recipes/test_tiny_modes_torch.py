"""Modes, kills and other trainers and engines of ``recipes/tiny_dapo``: what can be seen without servers."""

import random
from copy import deepcopy

import kill
import pytest
import torch
import transformers
import trl_learn
import vllm_learn
from audit import LearnError
from model import LLAMA, TINY, Decoder, Shape, token_logprobs
from sample_records import record
from sampler import Call, Sampler
from tasks import Sum, TurnEncoder, train_tokenizer

from prorl_gym.client import CompletedGroup
from prorl_gym.records import NOT_SAMPLED, Score, Segment

TOLERANCE = 1e-9
PROMPT = [7, 8, 9, 10]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def language() -> TurnEncoder:
    return TurnEncoder(train_tokenizer(Sum))


def decoder(language: TurnEncoder, shape: Shape = TINY) -> Decoder:
    return Decoder(language.vocab_size, 1, shape).double()


def group_of(model: Decoder) -> CompletedGroup:
    ids = [*PROMPT, 20, 21, 22]
    own = token_logprobs(model, torch.tensor([ids]))[0].tolist()
    segment = Segment(
        token_ids=ids,
        mask=[0, 0, 0, 0, 1, 1, 1],
        logprobs=[0.0] * 4 + [value + 1e-12 for value in own[4:]],
        policy_versions=[NOT_SAMPLED] * 4 + [1] * 3,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        logprob_kind="raw",
    )
    rollout = record("r", run_id="learn", group_id="g", segments=[segment])
    return CompletedGroup(group_id="g", rollouts=(rollout,), cursor=1, resume_cursor=1)


@pytest.mark.parametrize("shape", [TINY, LLAMA])
def test_each_shape_samples_what_the_training_forward_computes(language: TurnEncoder, shape: Shape):
    model = decoder(language, shape)
    sampler = Sampler(deepcopy(model))
    call = Call(list(PROMPT), 12, frozenset(), 1.0, random.Random(0))
    sampler.submit(call)
    call.result.result(timeout=60)
    sampler.close()
    own = token_logprobs(model, torch.tensor([call.ids]))[0, len(PROMPT) :].tolist()
    assert call.logprobs == pytest.approx(own, abs=TOLERANCE)


def test_the_checkpoint_is_the_same_llama(language: TurnEncoder):
    model = decoder(language, LLAMA)
    config = transformers.LlamaConfig(**vllm_learn.config(model, language.end))
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict(vllm_learn.llama_weights(model))
    ids = torch.tensor([language.encode("12+34-56")])
    with torch.inference_mode():
        assert torch.allclose(llama.double()(ids).logits, model(ids), atol=1e-5)


def test_padding_on_both_sides_changes_no_logit_that_trl_reads(language: TurnEncoder):
    model = decoder(language)
    wrapped = trl_learn.TinyModel(trl_learn.TinyConfig(vocab_size=language.vocab_size), model)
    rows = [[7, 8, 9, 10, 11, 12], [20, 21, 22]]
    ids = torch.tensor([rows[0] + [0], [0, 0, *rows[1], 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0]])
    with torch.inference_mode():
        logits = wrapped(ids, mask).logits
        kept = wrapped(ids, mask, logits_to_keep=5).logits
        assert torch.equal(kept, logits[:, -5:])
        assert torch.allclose(logits[0, :6], model(torch.tensor([rows[0]]))[0], atol=TOLERANCE)
        assert torch.allclose(logits[1, 2:5], model(torch.tensor([rows[1]]))[0], atol=TOLERANCE)


def test_last_bits_of_served_log_probs_are_not_learnt_from(language: TurnEncoder):
    model = decoder(language)
    learner = kill.OrderedLearner(None, "", model, Sum, 0)  # type: ignore[arg-type]
    learner.weights, learner.version = {1: model}, 1
    group = group_of(model)
    (segment,) = learner.with_own_logprobs(group).rollouts[0].segments
    own = token_logprobs(model, torch.tensor([segment.token_ids]))[0].tolist()
    assert segment.logprobs == [0.0] * 4 + own[4:]
    learner.weights = {1: Decoder(language.vocab_size, 2).double()}
    with pytest.raises(LearnError, match="mismatch: r differs by"):
        learner.with_own_logprobs(group)


def test_a_digest_sees_tokens_rewards_and_versions(language: TurnEncoder):
    group = group_of(decoder(language))
    rollout, digest = group.rollouts[0], kill.digest_of([group])
    (segment,) = rollout.segments
    assert digest == kill.digest_of([group_of(decoder(language))])
    for change in (
        {"score": Score(reward=0.0)},
        {"segments": [segment.model_copy(update={"token_ids": [*segment.token_ids[:-1], 23]})]},
        {"segments": [segment.model_copy(update={"policy_versions": [NOT_SAMPLED] * 4 + [2] * 3})]},
    ):
        other = CompletedGroup("g", (rollout.model_copy(update=change),), 1, 1)
        assert kill.digest_of([other]) != digest


def test_weights_are_compared_bit_by_bit(language: TurnEncoder):
    model, other = decoder(language), decoder(language)
    assert kill.weights_of(model) == kill.weights_of(other)
    with torch.no_grad():
        other.head.weight[0, 0] = torch.nextafter(other.head.weight[0, 0], torch.tensor(9.0).double())
    assert kill.weights_of(model) != kill.weights_of(other)
