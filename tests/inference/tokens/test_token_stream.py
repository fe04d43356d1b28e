from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOTH, BOUNDED, TOOLS, codec

from prorl_gym.errors import FailureKind, RolloutError
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.inference.tokens.token_stream import DriftCounter, TokenStream
from prorl_gym.records import NOT_SAMPLED, Message

END = 2


def stream(end=END, drift=None):
    return TokenStream(terminator_id=end, temperature=0.7, top_p=0.9, top_k=5, drift=drift or DriftCounter())


def sampled(ids, finish="stop", version=3):
    return GenerationResult(
        token_ids=list(ids),
        logprobs=[-0.1 * (n + 1) for n in range(len(ids))],
        finish_reason=finish,
        logprob_kind="processed",
        engine="e",
        versions=[version] * len(ids),
        seconds=0.5,
        cached_tokens=1,
    )


def test_what_is_exported_is_what_was_sent_and_sampled():
    tokens = stream()
    tokens.append_unsampled([5, 6])
    assert list(tokens.record_sent()) == [5, 6]
    tokens.append_sampled(sampled([7, END]), turn=0, seed=9)
    tokens.append_unsampled([8])
    assert list(tokens.record_sent()) == [5, 6, 7, END, 8]
    tokens.append_sampled(sampled([END], version=4), turn=1)
    (segment,) = tokens.export_segments()
    assert segment.token_ids == [5, 6, 7, END, 8, END]
    assert segment.mask == [0, 0, 1, 1, 0, 1]
    assert segment.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.1]
    assert segment.policy_versions == [NOT_SAMPLED, NOT_SAMPLED, 3, 3, NOT_SAMPLED, 4]
    assert [(g.start, g.end, g.turn, g.seed) for g in segment.generations] == [(2, 4, 0, 9), (5, 6, 1, None)]
    assert (segment.temperature, segment.top_p, segment.top_k, segment.logprob_kind) == (0.7, 0.9, 5, "processed")


def test_another_end_token_is_kept_and_the_turn_is_closed():
    tokens = stream()
    tokens.append_unsampled([5])
    tokens.append_sampled(sampled([7, 99]), turn=0)
    tokens.append_unsampled([8])
    assert tokens.export_segments()[0].token_ids == [5, 7, 99, END, 8]


def test_what_was_sampled_after_the_end_is_cut():
    tokens = stream()
    tokens.append_unsampled([5])
    assert tokens.append_sampled(sampled([7, END, 9, END]), turn=0) == [7, END]
    assert tokens.export_segments()[0].token_ids == [5, 7, END]


def test_a_result_with_unequal_lists_is_a_defect():
    tokens = stream()
    with pytest.raises(ValueError, match="differ in length"):
        tokens.append_sampled(replace(sampled([7]), logprobs=[]), turn=0)


@pytest.mark.parametrize("position", [0, 2, 3])
def test_drift_is_found_counted_and_refused(position):
    drift = DriftCounter()
    tokens = stream(drift=drift)
    tokens.append_unsampled([5, 6])
    tokens.record_sent()
    tokens.append_sampled(sampled([7, END]), turn=0)
    tokens.append_unsampled([8])
    ids = tokens.record_sent()
    ids[position] += 1  # the history is edited
    with pytest.raises(RolloutError) as caught:
        tokens.export_segments()
    assert caught.value.kind is FailureKind.INTERNAL
    assert (drift.checked, drift.drifted) == (1, 1)


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3000), min_size=0, max_size=6),  # sampled, any ids
        st.sampled_from(["stop", "length", "abort"]),
        st.text(max_size=10),  # the tool's answer
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", BOTH)
@BOUNDED
@given(steps=steps, prompt=st.text(max_size=20))
def test_every_turn_sends_an_extension_of_the_one_before(name, steps, prompt):
    """Whatever the policy samples, decodable or not, and whatever tools answer."""
    chat, drift = codec(name), DriftCounter()
    tokens = stream(chat.terminator_id, drift)
    tokens.append_unsampled(chat.encode_prompt([Message(role="user", content=prompt)], TOOLS))
    sent, kept = [], []
    for turn, (ids, finish, answer) in enumerate(steps):
        sent.append(list(tokens.record_sent()))
        kept += tokens.append_sampled(sampled(ids, finish), turn=turn)
        tokens.append_unsampled(chat.encode_delta([Message(role="tool", content=answer)], TOOLS))
    sent.append(list(tokens.record_sent()))
    (segment,) = tokens.export_segments()
    for shorter, longer in pairwise(sent):
        assert longer[: len(shorter)] == shorter
    assert segment.token_ids == sent[-1]
    assert [t for t, bit in zip(segment.token_ids, segment.mask, strict=True) if bit] == kept
    for generation, prompt_ids in zip(segment.generations, sent, strict=False):
        assert segment.token_ids[: generation.start] == prompt_ids
    assert (drift.checked, drift.drifted) == (1, 0)
