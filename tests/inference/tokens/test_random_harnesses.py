"""Random harnesses that append, edit, retry, cut, re-serialise and interleave: what is recorded, and where.

A model of the tree that compares whole histories says for each call whether it goes on in a segment.
"""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from random import Random

import pytest
from harness_play import Play, result, said, shown, user
from token_codecs import needs_qwen

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.records import Message, Segment
from prorl_gym.testing.inference.fake_engine import Reply

FEW, MANY = 200, 10_000
DEFAULT = {"replace_all": False}


def without_thoughts(text):
    return text.split("</think>", 1)[-1].strip() if text.startswith("<think>") else text.strip()


def words(message):
    """What of a message counts, found in another way than the package finds it."""
    text = without_thoughts(message.content) if message.role == "assistant" else message.content
    calls = [
        (
            call.name,
            {key: each for key, each in json.loads(call.arguments).items() if (key, each) not in DEFAULT.items()},
        )
        for call in message.tool_calls
    ]
    return json.dumps([message.role, text, calls], sort_keys=True)


class Harness:
    def __init__(self, seed, name="small"):
        self.random = Random(seed)
        self.name = name
        self.count = 0
        self.replies = {}
        self.next_reply = None
        self.play = Play(self.reply, name)
        self.paths = []
        """The words of each conversation, as the tree should hold them."""
        self.turn_ids = {}
        """The ids of each history that ends in a turn, by its words."""

    def unique(self, text):
        self.count += 1
        return f"{text} {self.count}"

    def reply(self, request):
        """What the engine samples, noted by its call."""
        if isinstance(self.next_reply, Exception):
            error, self.next_reply = self.next_reply, None
            return error
        rng = self.random
        text = self.unique(rng.choice(["I look.", "Done, with \u00e9.", "So"]))
        if rng.random() < 0.3:
            text = f"<think>\n{self.unique('Hm')}\n</think>\n\n{text}"
        if rng.random() < 0.5:
            call = {"name": "edit", "arguments": {"old": self.unique("a/b"), "new": "\u00e9"}}
            text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        reply = said(text, end=rng.random() < 0.9, hold=self.next_reply, name=self.name)
        if self.next_reply is None and rng.random() < 0.1:
            reply = Reply(reply.token_ids[: rng.randint(1, 5)], "abort")
        self.replies[request.request_id] = (tuple(request.prompt_ids), reply.token_ids)
        return reply

    def expects_branch(self, messages):
        """Whether no segment ends in the last turn of a history."""
        last = max((n for n, each in enumerate(messages) if each.role == "assistant"), default=-1)
        known = [words(message) for message in messages[: last + 1]]
        return last < 0 or known not in self.paths, known

    def note(self, messages, turn):
        is_branch, known = self.expects_branch(messages)
        beginnings = (tuple(known[:length]) for length in reversed(range(len(known) + 1)))
        longest = next((self.turn_ids[each] for each in beginnings if each in self.turn_ids), [])
        assert turn.prompt.ids[: len(longest)] == longest
        assert turn.placement.shared_tokens >= len(longest)
        assert (turn.placement.cause is not None) == is_branch, (turn.placement, messages)
        if not is_branch:
            self.paths.remove(known)
        self.paths.append([words(message) for message in [*messages, shown(turn)]])
        self.turn_ids[tuple(self.paths[-1])] = [*turn.prompt.ids, *turn.sampled.token_ids]

    async def ask(self, messages):
        turn = await self.play.ask(*messages)
        self.note(messages, turn)
        return [*messages, self.as_shown(shown(turn))]

    def as_shown(self, message):
        """A turn as a harness keeps it, changed as the tables allow."""
        rng = self.random
        if rng.random() < 0.3:
            message = message.model_copy(update={"content": without_thoughts(message.content)})
        calls = list(message.tool_calls)
        for place, call in enumerate(calls):
            arguments = json.loads(call.arguments)
            if rng.random() < 0.3:
                arguments = DEFAULT | dict(reversed(arguments.items()))
            if rng.random() < 0.5:
                arguments = json.dumps(arguments, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
                calls[place] = call.model_copy(update={"arguments": arguments})
        return message.model_copy(update={"tool_calls": tuple(calls)})

    def news(self, history):
        calls = history[-1].tool_calls if history else ()
        found = [result(call, self.unique("4")) for call in calls] or [user(self.unique("on"))]
        return [*found, user(self.unique("and"))] if self.random.random() < 0.2 else found

    def begin(self):
        role = Message(role="system", content=self.random.choice(["You edit.", self.unique("You")]))
        return [role, user(self.unique("Do it"))]

    def edited(self, history):
        """A history with one change that no table allows."""
        rng, history = self.random, [*history]
        place = rng.randrange(1, len(history))
        what = rng.choice(["text", "delete", "insert", "cut"])
        if what == "text":
            history[place] = history[place].model_copy(update={"content": self.unique("other words")})
        elif what == "delete":
            del history[place]
        elif what == "insert":
            history.insert(place, Message(role=rng.choice(["user", "assistant"]), content=self.unique("inserted")))
        else:
            del history[place:]
        return history

    async def cancelled(self, messages):
        """Cancel a call in its middle; return what the harness goes on with."""
        self.next_reply = asyncio.Event()
        self.play.engine.call_held.clear()
        call = asyncio.create_task(self.play.ask(*messages))
        await self.play.engine.call_held.wait()
        self.next_reply = None
        before = sum(len(segment.generations) for segment in self.play.segments)
        is_branch, known = self.expects_branch(messages)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert sum(len(segment.generations) for segment in self.play.segments) == before + 1
        if not is_branch:
            self.paths.remove(known)
        self.paths.append([*(words(message) for message in messages), "a turn in part"])
        if self.random.random() < 0.5:
            return messages
        return [*messages, Message(role="assistant", content=self.unique("a part of it")), user(self.unique("again"))]

    async def live(self, steps):
        histories = [await self.ask(self.begin())]
        for _ in range(steps):
            place = self.random.randrange(len(histories))
            history = histories[place]
            match self.random.choice(["append"] * 5 + ["begin", "retry", "edit", "fail", "cancel", "both"]):
                case "append":
                    histories[place] = await self.ask([*history, *self.news(history)])
                case "begin":
                    histories.append(await self.ask(self.begin()))
                case "retry":
                    histories[place] = await self.ask(history[:-1])
                case "edit":
                    changed = self.edited(history)
                    changed += self.news(changed)
                    histories[place] = await self.ask(changed)
                case "fail":
                    self.next_reply = EngineError(FailureKind.ENGINE_REFUSED, "no.", "")
                    messages = [*history, *self.news(history)]
                    with pytest.raises(EngineError):
                        await self.play.ask(*messages)
                    histories[place] = await self.ask(messages)
                case "cancel":
                    histories[place] = await self.ask(await self.cancelled([*history, *self.news(history)]))
                case _:
                    calls = [[*each, *self.news(each)] for each in histories]
                    turns = await asyncio.gather(*(self.play.ask(*messages) for messages in calls))
                    for messages, turn in zip(calls, turns, strict=True):
                        self.note(messages, turn)
                    histories = [
                        [*messages, self.as_shown(shown(turn))] for messages, turn in zip(calls, turns, strict=True)
                    ]

    def check(self):
        segments = self.play.segments
        assert len(segments) == len(self.paths)
        recorded, trained = Counter(), 0
        for place, segment in enumerate(segments):
            assert Segment.model_validate_json(segment.model_dump_json()) == segment
            for call in segment.generations:
                assert all(segment.mask[call.start : call.end])
                trained += call.end - call.start
                recorded[tuple(segment.token_ids[: call.start]), tuple(segment.token_ids[call.start : call.end])] += 1
            assert sum(segment.mask) == sum(call.end - call.start for call in segment.generations)
            if segment.parent is not None:
                assert segment.parent < place
                parent = segments[segment.parent]
                assert segment.token_ids[: segment.shared_tokens] == parent.token_ids[: segment.shared_tokens]
                assert segment.prompt_length >= segment.shared_tokens
        for (prompt, ids), times in recorded.items():
            matching = [reply for sent, reply in self.replies.values() if sent == prompt and reply[: len(ids)] == ids]
            assert len(matching) >= times, "a token that no engine sampled on this prompt"
        assert sum(recorded.values()) == len(self.replies)
        assert trained == sum(sum(segment.mask) for segment in segments)


def live(seed, name="small", steps=8):
    async def run():
        harness = Harness(seed, name)
        await harness.live(steps)
        harness.check()

    asyncio.run(run())


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, FEW), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_every_trained_token_was_sampled_once_and_every_edit_is_found(seeds):
    for seed in seeds:
        live(seed)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_qwen) for name in ("qwen2.5", "qwen3")])
def test_templates_that_change_history_change_none_of_it(name):
    for seed in range(FEW, FEW + 20):
        live(seed, name)


@pytest.mark.release
@pytest.mark.parametrize("first", range(FEW, MANY, FEW))
def test_ten_thousand_random_harnesses(first):
    for seed in range(first, first + FEW):
        live(seed)
