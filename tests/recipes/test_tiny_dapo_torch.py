"""The parts of ``recipes/tiny_dapo`` that need torch: for the recipe's own environment, see its ``environment``."""

import random
import sys
import types
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import warmup
from aiohttp.test_utils import TestClient, TestServer
from audit import LearnError
from controls import CONTROLS, check_controls
from engine import MODEL, Engine
from evaluate import Account
from learn import EASIER, FULL, Report, judge
from model import Decoder, token_logprobs
from sample_records import member
from sampler import Call, Sampler
from tasks import DOMAINS, Question, Sum, TurnEncoder, questions, train_tokenizer

from prorl_gym.client import CompletedGroup
from prorl_gym.errors import FailureKind
from prorl_gym.records import NOT_SAMPLED, Generation, Retry, Segment
from prorl_gym.trainers.checks import CheckError
from prorl_gym.trainers.mismatch import MismatchError

RECIPE = Path(__file__).parents[2] / "recipes/tiny_dapo"
TOLERANCE = 1e-9


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def language() -> TurnEncoder:
    return TurnEncoder(train_tokenizer(Sum))


@pytest.fixture
def model(language: TurnEncoder) -> Decoder:
    return Decoder(language.vocab_size, seed=1).double()


@pytest.fixture
def sampler(model: Decoder):
    running = Sampler(deepcopy(model))
    yield running
    running.close()


def call(ids: list[int], seed: int = 0, tokens: int = 12, stops: frozenset[int] = frozenset(), **more: object) -> Call:
    return Call(list(ids), tokens, stops, 1.0, random.Random(seed), **more)  # type: ignore[arg-type]


def sample(sampler: Sampler, calls: list[Call]) -> list[Call]:
    for one in calls:
        sampler.submit(one)
    return [one.result.result(timeout=60) for one in calls]


def gap(model: Decoder, done: Call) -> float:
    """Largest difference between the log-probs of a call and those of the training forward."""
    own = token_logprobs(model, torch.tensor([done.ids]))[0, -len(done.logprobs) :].tolist()
    return max(abs(a - b) for a, b in zip(own, done.logprobs, strict=True))


def test_sampled_log_probs_are_those_of_the_training_forward(sampler: Sampler, model: Decoder, language: TurnEncoder):
    prompts = [language.prompt(question) for question, _ in zip(questions(Sum, 0), range(60), strict=False)]
    calls = sample(sampler, [call(ids[: 5 + n % 15], seed=n) for n, ids in enumerate(prompts)])
    assert max(gap(model, one) for one in calls) < TOLERANCE


def test_a_prefix_that_was_computed_is_found_under_its_salt_and_changes_nothing(sampler: Sampler, model: Decoder):
    (first,) = sample(sampler, [call([7, 8, 9, 10], salt="1")])
    (second,) = sample(sampler, [call([*first.ids, 11, 12], seed=1, salt="1")])
    assert second.cached == len(first.ids) - 1  # the token sampled last was never fed
    assert gap(model, second) < TOLERANCE
    (other,) = sample(sampler, [call([7, 8, 9, 10], salt="2")])
    assert other.cached == 0


def test_new_weights_drop_the_cache_and_label_what_follows(sampler: Sampler, language: TurnEncoder):
    (before,) = sample(sampler, [call([7, 8, 9, 10])])
    other = Decoder(language.vocab_size, seed=2).double()
    sampler.load(other.state_dict(), 5).result(timeout=60)
    (after,) = sample(sampler, [call(before.ids, seed=1)])
    assert (set(before.versions), set(after.versions), after.cached) == ({0}, {5}, 0)
    assert gap(other, after) < TOLERANCE


def test_a_call_under_way_goes_on_with_new_weights_alone(sampler: Sampler, model: Decoder, language: TurnEncoder):
    """As after a pause in mode ``keep``: what was computed with the old weights is computed again."""
    long, other = call([7, 8, 9, 10], tokens=150), Decoder(language.vocab_size, seed=2).double()
    sampler.submit(long)
    sampler.load(other.state_dict(), 5)  # behind it in the queue
    done = long.result.result(timeout=60)
    assert done.versions == sorted(done.versions)
    for version, weights in ((0, model), (5, other)):
        own = token_logprobs(weights, torch.tensor([done.ids]))[0, 4:].tolist()
        pairs = zip(own, done.logprobs, done.versions, strict=True)
        assert all(abs(a - b) < TOLERANCE for a, b, sampled_by in pairs if sampled_by == version)
    assert 5 in done.versions


def test_an_aborted_call_returns_what_it_has(sampler: Sampler):
    long = call([7, 8, 9, 10], tokens=180)
    sampler.submit(long)
    sampler.abort(long)
    done = long.result.result(timeout=60)
    assert done.finish == "abort"
    assert len(done.sampled) < 180


def test_a_seed_repeats_its_text(sampler: Sampler):
    one, same, other = sample(sampler, [call([7, 8], seed=4), call([7, 8], seed=4), call([7, 8], seed=5)])
    assert one.sampled == same.sampled != other.sampled


def test_a_stop_token_ends_a_call(sampler: Sampler):
    (free,) = sample(sampler, [call([7, 8], seed=4)])
    (stopped,) = sample(sampler, [call([7, 8], seed=4, stops=frozenset({free.sampled[3]}))])
    assert stopped.finish == "stop"
    assert stopped.sampled == free.sampled[: free.sampled.index(free.sampled[3]) + 1]


async def test_the_route_answers_as_vllm_does(sampler: Sampler, model: Decoder, language: TurnEncoder):
    app = Engine(sampler, language.vocab_size, language.end).app()
    async with TestClient(TestServer(app)) as client:
        body = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 4, "temperature": 1.0, "seed": 3}
        body["prompt_logprobs"] = 1
        answer = await (await client.post("/v1/completions", json=body)).json()
        refused = await client.post("/v1/completions", json={**body, "prompt": [language.vocab_size]})
        too_long = await client.post("/v1/completions", json={**body, "max_tokens": 4000})
        unknown = await client.post("/v1/completions", json={**body, "model": "other"})
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == [7, 8, 9]
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    scores = [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], [8, 9], strict=True)]
    assert scores == pytest.approx(token_logprobs(model, torch.tensor([[7, 8, 9]]))[0, 1:].tolist(), abs=TOLERANCE)
    assert [refused.status, too_long.status, unknown.status] == [400, 400, 404]


# --- the gate of the warm-up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "share"), [("right", 1.0), ("mode", 0.0), ("slip", 0.0)])
@pytest.mark.parametrize("domain", DOMAINS.values())
def test_the_gate_follows_each_domains_conversations(
    monkeypatch: pytest.MonkeyPatch, domain: type[Question], kind: str, share: float
):
    language, asked = TurnEncoder(train_tokenizer(domain)), list(islice(questions(domain, 0), 8))
    submitted: list[Call] = []

    class Scripted:
        def __init__(self, model: Decoder) -> None: ...

        def submit(self, call: Call) -> None:
            turn, place = divmod(len(submitted), len(asked))
            submitted.append(call)
            said = language.turn(asked[place].demonstrate(kind)[turn])  # type: ignore[arg-type]
            call.ids += said
            call.logprobs += [0.0] * len(said)
            call.result.set_result(call)

        def close(self) -> None: ...

    monkeypatch.setattr(warmup, "Sampler", Scripted)
    assert warmup.accuracy(None, language, asked, 1.0) == share  # type: ignore[arg-type]
    whole = [warmup.trace(language, question, Always(kind))[0] for question in asked]  # type: ignore[arg-type]
    assert [call.ids for call in submitted[-len(asked) :]] == whole


class Always(random.Random):
    """Chooses one kind of trace."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def choices(self, *_: object) -> list[str]:  # type: ignore[override]
        return [self._kind]


# --- what the learner's own checks find -------------------------------------------------------------------------------


def rollouts_of(sampler: Sampler, language: TurnEncoder, question: Question, group: str) -> CompletedGroup:
    """Eight rollouts of two turns with an observation between them; rewards 0 and 1 in turn."""
    firsts = sample(sampler, [call(language.prompt(question), seed=n) for n in range(8)])
    seconds = sample(sampler, [call([*one.ids, *language.result(46)], seed=n) for n, one in enumerate(firsts)])
    members = []
    for replica, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        prompt, observed = len(first.ids) - len(first.logprobs), len(language.result(46))
        spans = [(prompt, len(first.ids)), (len(first.ids) + observed, len(second.ids))]
        segment = Segment(
            generations=[
                Generation(start=start, end=end, turn=turn, finish_reason="stop", engine="engine-0", seconds=0.0)
                for turn, (start, end) in enumerate(spans)
            ],
            token_ids=second.ids,
            mask=[0] * prompt + [1] * len(first.logprobs) + [0] * observed + [1] * len(second.logprobs),
            logprobs=[0.0] * prompt + first.logprobs + [0.0] * observed + second.logprobs,
            policy_versions=[*[NOT_SAMPLED] * prompt, *first.versions, *[NOT_SAMPLED] * observed, *second.versions],
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            logprob_kind="raw",
        )
        reward, name = float(replica in (1, 2, 6)), f"{group}-{replica}"
        members.append(member(group, replica, 8, name=name, run_id="learn", reward=reward, segments=[segment]))
    return CompletedGroup(group_id=group, rollouts=tuple(members), cursor=8, resume_cursor=8)


@pytest.fixture
def groups(sampler: Sampler, language: TurnEncoder) -> list[CompletedGroup]:
    asked = zip(questions(Sum, 0), range(4), strict=False)
    return [rollouts_of(sampler, language, question, f"g{n}") for question, n in asked]


def learner_of(source: str, model: Decoder):
    """A learner of the recipe's ``train.py``, with its text changed."""
    module = types.ModuleType("train_changed")
    module.__dict__["__file__"] = str(RECIPE / "train.py")
    sys.modules["train_changed"] = module  # where its data classes look their own module up
    exec(compile(source, "train.py", "exec"), module.__dict__)
    learner = module.Learner(client=None, engine="", model=model, domain=Sum, seed=0)
    learner.weights = {0: deepcopy(model)}
    return learner


SOURCE = (RECIPE / "train.py").read_text(encoding="utf-8")


def test_a_clean_update_passes_and_moves_the_policy(model: Decoder, groups: list[CompletedGroup]):
    learner = learner_of(SOURCE, model)
    found, clipped = learner.learn_from(groups)
    assert found.by_version[0].max_abs_diff < TOLERANCE
    assert clipped < 0.2
    assert not torch.equal(model.head.weight, learner.weights[0].head.weight)


CHANGES: dict[str, tuple[str, str, type[Exception], str]] = {
    "learning rate 0": ("LEARNING_RATE = 2e-4", "LEARNING_RATE = 0.0", CheckError, "learning rate: the update"),
    "mask shifted": (
        "mask=padded([segment.mask for segment in segments], torch.float64)",
        "mask=padded([segment.mask for segment in segments], torch.float64).roll(1, 1)",
        MismatchError,
        "tokens that carry loss were not sampled",
    ),
    "mask shifted in the loss alone": (
        "-(gain * batch.mask).sum()",
        "-(gain * batch.mask.roll(1, 1)).sum()",
        CheckError,
        "mask: .* carry loss and were not sampled",
    ),
    "last token of each turn without loss": (
        "mask=padded([segment.mask for segment in segments], torch.float64)",
        "mask=padded([[a * b for a, b in zip(s.mask, [*s.mask[1:], 0])] for s in segments], torch.float64)",
        CheckError,
        "mask: .* sampled tokens of .* carry no loss",
    ),
    "advantages with the wrong sign": (
        "advantages = (rewards - rewards.mean())",
        "advantages = (rewards.mean() - rewards)",
        CheckError,
        "advantages: those of .* do not follow from the rewards",
    ),
    "loss with the wrong sign": ("return -(gain", "return (gain", CheckError, "gradient: that of"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_line_is_found_and_named(model: Decoder, groups: list[CompletedGroup], change: str):
    old, new, error, reason = CHANGES[change]
    assert SOURCE.count(old) == 1
    torch.manual_seed(0)
    learner = learner_of(SOURCE.replace(old, new), model)
    with pytest.raises(error, match=reason):
        learner.learn_from(groups)


def test_rollouts_that_are_not_one_history_are_found(model: Decoder, groups: list[CompletedGroup]):
    first = groups[0].rollouts[0]
    retry = Retry(attempt=0, kind=FailureKind.INTERNAL, stage="run", message="drift")
    for change, error, reason in (
        ({"segments": [*first.segments, *first.segments]}, LearnError, "history: g0-0 has 2 segments"),
        ({"retries": [retry]}, CheckError, "history: the service made g0-0 again"),
    ):
        members = (first.model_copy(update=change), *groups[0].rollouts[1:])
        with pytest.raises(error, match=reason):
            learner_of(SOURCE, model).learn_from([replace(groups[0], rollouts=members)])


@pytest.fixture
def two_versions(model: Decoder, language: TurnEncoder, sampler: Sampler):
    """Rollouts that version 1 sampled, and a learner that has both versions."""
    newer = deepcopy(model)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    sampler.load(newer.state_dict(), 1).result(timeout=60)
    groups = [rollouts_of(sampler, language, next(questions(Sum, 0)), "g0")]
    learner = learner_of(SOURCE, deepcopy(newer))
    learner.weights = {0: model, 1: newer}
    learner.learn_from(groups)
    return learner


def test_each_control_is_found_by_the_check_that_is_there_for_it(two_versions):
    found = {one.control: one for one in check_controls(two_versions)}
    assert {name: one.check for name, one in found.items()} == {name: check for name, (_, _, check) in CONTROLS.items()}
    assert max(one.rollouts for one in found.values()) <= 8
    assert "version 1" in found["log-probs of the previous version"].message
    assert "not in turn 1" in found["history re-tokenised between turns"].message
    assert "engine engine-1, not in engine-0" in found["weights of one engine stale"].message


def test_a_control_that_is_not_found_fails(two_versions):
    two_versions.weights[0] = two_versions.weights[1]
    with pytest.raises(LearnError, match="control: no check finds log-probs of the previous version"):
        check_controls(two_versions)


def report(greedy: float, sampled: float) -> Report:
    return Report(0, greedy=[(0, 0.0), (60, greedy)], sampled=[(0, 0.2), (60, sampled)], mismatch=2e-5, rollouts=4000)


def test_what_was_reached_is_compared_with_the_goal():
    fine = Account(4000, 0, Counter({"completed": 4000}))
    judge(report(0.7, 0.6), FULL, fine)
    for reached, goal, account, reason in (
        (report(0.5, 0.6), FULL, fine, r"greedy: accuracy 0\.00 -> 0\.50 .* wanted \+0\.6"),
        (report(0.7, 0.4), FULL, fine, r"sampled: accuracy 0\.20 -> 0\.40 .* wanted \+0\.3"),
        (report(0.7, 0.6), FULL, Account(4000, 1, Counter()), "rollouts: 1 of 4000 lost"),
        (report(0.79, 0.6), EASIER, fine, r"greedy: accuracy 0\.79 in the end, wanted 0\.8"),
    ):
        with pytest.raises(LearnError, match=reason):
            judge(reached, goal, account)
