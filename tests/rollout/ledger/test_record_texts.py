"""A record is encoded once, and its text goes when it goes."""

from prorl_gym.records import Outcome, Rollout, Score
from prorl_gym.rollout.ledger import encoding
from prorl_gym.rollout.ledger.encoding import decode_rollout, encode_rollout


def record(rollout_id: str) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        run_id="run",
        group_id=None,
        group_size=1,
        replica=0,
        environment="noop",
        outcome=Outcome(status="completed"),
        score=Score(reward=1.0),
        accepted_at=1.0,
        finished_at=2.0,
    )


def test_a_record_is_encoded_once_and_a_changed_copy_anew() -> None:
    first = record("a")
    text = encode_rollout(first)
    assert encode_rollout(first) is text
    assert decode_rollout(encode_rollout(first.model_copy(update={"attempt": 7}))).attempt == 7
    assert encode_rollout(record("b")) != text
    assert decode_rollout(text) == first


def test_texts_of_records_that_are_gone_are_not_kept() -> None:
    before = len(encoding._encoded)
    kept = [record(f"r{number}") for number in range(50)]
    for one in kept:
        encode_rollout(one)
    assert len(encoding._encoded) == before + 50
    del kept, one
    assert len(encoding._encoded) == before
