"""Random conversations: how often what is exported differs from what was sent, and how often re-rendering would.

Of each conversation the sampled ids are either random (uniform over the ordinary vocabulary: the worst case) or
canonical (what the tokenizer itself would write for the turn: the best case). One turn in three is followed by a new
user turn, the others by one or two tool results.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from _token_models import TOOLS, Model

from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.inference.tokens.transcript import Transcript
from prorl_gym.records import Message, ToolCall
from prorl_gym.settings import RolloutSettings, resolve_settings

_SETTINGS = resolve_settings(RolloutSettings())
_TURNS = (2, 4)


@dataclass(slots=True)
class Count:
    """Of many conversations."""

    conversations: int = 0
    drifted: int = 0
    """Ours: a prompt that did not begin with the one before it, or an export that is not what was sent and sampled."""
    random: int = 0
    random_again: int = 0
    """Of those with random ids, how many differ from the same history rendered and encoded again."""
    canonical: int = 0
    canonical_again: int = 0


def count_drift(model: Model, conversations: int, words: Sequence[str], seed: int) -> Count:
    """Play conversations."""
    chance = random.Random(f"{seed}/{model.name}")
    control = set(model.codec.tokenizer.control_ids.values())
    ordinary = [token for token in range(model.codec.vocab_size) if token not in control]
    count = Count()
    for number in range(conversations):
        _play(model, count, chance, words, ordinary, canonical=bool(number % 2))
    return count


def _play(
    model: Model, count: Count, chance: random.Random, words: Sequence[str], ordinary: Sequence[int], *, canonical: bool
) -> None:
    codec = model.codec
    first = [Message(role="user", content=_text(chance, words))]
    transcript = Transcript(codec, _SETTINGS)
    transcript.begin_conversation(codec.encode_prompt(first, TOOLS), first, TOOLS)
    sent = [list(transcript.next_prompt().ids)]
    places: list[tuple[int, list[int]]] = []
    history = list(first)
    for turn in range(chance.randint(*_TURNS)):
        ids = _canonical(model, chance, words) if canonical else chance.choices(ordinary, k=chance.randint(4, 24))
        ids.append(codec.terminator_id)
        places.append((len(sent[-1]), ids))
        transcript.append_sampled(_result(ids), turn=turn, seed=None)
        parsed = codec.parse_turn(codec.decode_turn(ids), TOOLS)
        calls = tuple(
            ToolCall(id=f"c{n}", name=call.name, arguments=call.arguments) for n, call in enumerate(parsed.calls)
        )
        transcript.append_assistant(parsed.text, calls)
        news = _news(chance, words)
        history += [Message(role="assistant", content=parsed.text, tool_calls=calls), *news]
        transcript.append_extension(transcript.encode_extension(news))
        sent.append(list(transcript.next_prompt().ids))
    (segment,) = transcript.export_segments()
    kept = all(segment.token_ids[start : start + len(ids)] == ids for start, ids in places)
    grown = all(segment.token_ids[: len(prompt)] == prompt for prompt in sent) and segment.token_ids == sent[-1]
    masked = sum(segment.mask) == sum(len(ids) for _, ids in places)
    again = codec.encode_prompt(history, TOOLS) != sent[-1]
    count.conversations += 1
    count.drifted += not (kept and grown and masked)
    if canonical:
        count.canonical, count.canonical_again = count.canonical + 1, count.canonical_again + again
    else:
        count.random, count.random_again = count.random + 1, count.random_again + again


def _canonical(model: Model, chance: random.Random, words: Sequence[str]) -> list[int]:
    arguments = {"command": _text(chance, words)} if chance.random() < 0.7 else None
    spelt = model.render_turn(_text(chance, words), arguments, _text(chance, words))
    return model.codec.tokenizer.encode_trusted(spelt)


def _news(chance: random.Random, words: Sequence[str]) -> list[Message]:
    if chance.random() < 1 / 3:
        return [Message(role="user", content=_text(chance, words))]
    results = (json.dumps({"out": _text(chance, words)}) for _ in range(chance.randint(1, 2)))
    return [Message(role="tool", content=result, tool_call_id="c0", name="bash") for result in results]


def _text(chance: random.Random, words: Sequence[str]) -> str:
    return " ".join(chance.choices(words, k=chance.randint(1, 12)))


def _result(ids: list[int]) -> GenerationResult:
    return GenerationResult(
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        logprob_kind="processed",
        engine="e",
        versions=[0] * len(ids),
        seconds=0.0,
    )
