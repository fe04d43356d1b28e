"""The channel: whatever happens to its requests, every message is processed once and in order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.rollout.nodes import wire
from prorl_gym.rollout.nodes.wire import CallWithdrawn, Inbox, Outbox


def message(number: int) -> CallWithdrawn:
    return CallWithdrawn(call=str(number))


def numbers_of(texts: list[str]) -> list[int]:
    return [int(CallWithdrawn.model_validate_json(text).call) for text in texts]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), page_chars=st.sampled_from([1, 200, 16 << 20]))
def test_every_message_is_processed_once_and_in_order(seed: int, count: int, page_chars: int) -> None:
    """Requests and answers are lost, repeated, late and out of order; messages are added all the time."""
    fate = random.Random(seed)
    outbox, inbox = Outbox(), Inbox[int]()
    requests: list[tuple[int, list[int]]] = []
    answers: list[int] = []
    processed: list[int] = []
    added = 0
    wire.PAGE_CHARS, before = page_chars, wire.PAGE_CHARS
    try:
        for step in range(100_000):
            is_lossy = step < 200
            if added < count and fate.random() < 0.3:
                outbox.send(message(added))
                added += 1
            first, texts = outbox.page()
            if texts:
                requests.append((first, numbers_of(texts)))
            if requests and (not is_lossy or fate.random() < 0.5):
                index = fate.randrange(len(requests))
                request = requests[index] if is_lossy and fate.random() < 0.3 else requests.pop(index)
                processed += inbox.accept(*request)
                answers.append(inbox.acknowledged)
                if is_lossy and fate.random() < 0.3:
                    answers.pop()
            if answers:
                outbox.acknowledge(answers.pop(fate.randrange(len(answers))))
            if added == count and not outbox.not_empty.is_set():
                break
    finally:
        wire.PAGE_CHARS = before
    assert processed == list(range(count))
    assert outbox.page() == (count + 1, [])


def test_an_acknowledgement_of_more_than_was_sent_drops_no_later_message() -> None:
    outbox = Outbox()
    outbox.send(message(0))
    outbox.acknowledge(7)
    outbox.send(message(1))
    assert outbox.page()[0] == 2
