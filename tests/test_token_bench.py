"""What ``bench tokens`` counts must be what it says: drift that exists is found, and the client's work is all there."""

from pathlib import Path

import pytest
from tokens import count_drift, load_models

from prorl_gym.inference.tokens import transcript

TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text()
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def known():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PRORL_GYM_QWEN", raising=False)
        return {model.name: model for model in load_models()}


@pytest.mark.parametrize("name", ["small", "llama style"])
def test_nothing_drifts_and_rendering_again_does(known, name):
    count = count_drift(known[name], 40, WORDS, seed=1)
    assert (count.conversations, count.random, count.canonical) == (40, 20, 20)
    assert count.drifted == 0
    assert count.random_again > 10
    assert count.canonical_again == 0


def test_a_stream_that_rewrites_is_counted(known, monkeypatch):
    """A copy whose export leaves out one sampled id."""

    class Forgetful(transcript.Transcript):
        def export_segments(self):
            (segment,) = super().export_segments()
            place = segment.generations[0].start
            cut = {key: getattr(segment, key) for key in ("token_ids", "mask", "logprobs", "policy_versions")}
            return [segment.model_copy(update={key: [*v[:place], *v[place + 1 :]] for key, v in cut.items()})]

    monkeypatch.setattr("tokens.Transcript", Forgetful)
    assert count_drift(known["small"], 4, WORDS, seed=1).drifted == 4
