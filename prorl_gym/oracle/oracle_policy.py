"""The oracle's answers: a pure function of the prompt ids, the call's seed and its own seed.

Whether a rollout is solved is decided at its first turn. Later turns need no memory, and so survive a change of
engines: the first turn in the ids identifies the plan, since a wrong plan never opens like the gold one. The prompt is
read from its ids, whose control tokens delimit the turns of a ChatML template.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from prorl_gym.environments.playback import fill_step
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.errors import ConfigError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.tokenizer import ControlTokenEscaper
from prorl_gym.oracle.row_index import KnownRow, RowIndex

_WRONG_PLANS = 4
"""Number of distinct wrong plans of a row."""

_UNKNOWN_TASK_STEP = ScriptedStep("I do not know this task.")
_PLAN_DONE_STEP = ScriptedStep("I have nothing to add.")
_HESITATION = "Let me think. "


class OraclePolicy:
    """Plays the gold turns of rows, or wrong ones.

    Args:
        codec: a ChatML tokenizer and template.
        rows: rows with their answers.
        solve_rate: share of rollouts that it solves, from 0 to 1.
        seed: together with a call's own seed, decides which.
    """

    def __init__(self, codec: ChatCodec, rows: RowIndex, *, solve_rate: float = 1.0, seed: int = 0) -> None:
        self._codec = codec
        self._reader = _ChatMLReader(codec)
        self._rows = rows
        self._solve_rate = solve_rate
        self._seed = seed

    def complete_turn(self, prompt_ids: Sequence[int], *, seed: int | None, session: str) -> list[int]:
        """Return the rest of the assistant's turn, terminator included.

        Args:
            prompt_ids: the conversation so far.
            seed: of the call; without one, ``session`` is used.
            session: the rollout's id.
        """
        conversation = self._reader.parse_prompt(prompt_ids)
        planned = [*self._encode_step(self._next_step(conversation, seed, session)), self._codec.terminator_id]
        begun = list(conversation.open_turn_ids)
        return planned[len(begun) :] if planned[: len(begun)] == begun and len(begun) < len(planned) else planned

    def synthetic_logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Invent a log-prob for each token: negative, and the same for the same token after the same two."""
        context = [*prompt_ids[-2:], *ids]
        offset = len(context) - len(ids)
        return [
            -1.5 * _hash_to_unit(f"{context[max(0, n - 2) : n + 1]}") ** 3 - 1e-4 for n in range(offset, len(context))
        ]

    def _next_step(self, conversation: "_Conversation", seed: int | None, session: str) -> ScriptedStep:
        # Agent programs put turns of their own before the task.
        row = next(filter(None, map(self._rows.find, conversation.user_texts)), None)
        if row is None:
            return _UNKNOWN_TASK_STEP
        plan = self._choose_plan(row, conversation, session if seed is None else str(seed))
        played = len(conversation.assistant_turns)
        return fill_step(plan[played], conversation.observation) if played < len(plan) else _PLAN_DONE_STEP

    def _choose_plan(self, row: KnownRow, conversation: "_Conversation", choice: str) -> list[ScriptedStep]:
        plans = self._candidate_plans(row)
        if conversation.assistant_turns:
            opening = conversation.assistant_turns[0].ids
            # Compared at its end: a template may have put a stub of thoughts before it.
            played = next((plan for plan in plans if _ends_with(opening, self._encode_step(plan[0]))), None)
            if played is not None:
                return played
        if _hash_to_unit(f"{self._seed}/{row.name}/{choice}/solve") < self._solve_rate:
            return plans[0]
        return plans[1 + int(_hash_to_unit(f"{self._seed}/{row.name}/{choice}/variant") * _WRONG_PLANS)]

    def _candidate_plans(self, row: KnownRow) -> list[list[ScriptedStep]]:
        """Return the gold plan, then wrong ones whose first turns differ from it."""
        gold = row.gold_steps()
        return [gold, *(_make_distinct(row.wrong_steps(self._seed + n), gold) for n in range(_WRONG_PLANS))]

    def _encode_step(self, step: ScriptedStep) -> list[int]:
        """Encode a turn as a model would: control tokens around the call, none inside what it quotes."""
        escaper = ControlTokenEscaper(self._codec.tokenizer)
        parts = [escaper.escape(step.text)] if step.text else []
        if step.tool is not None:
            call = json.dumps(
                {"name": step.tool, "arguments": escaper.escape_all(step.arguments or {})}, ensure_ascii=False
            )
            parts.append(f"<tool_call>\n{call}\n</tool_call>")
        return escaper.encode("\n".join(parts))


def _ends_with(ids: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(ids[len(ids) - len(end) :]) == tuple(end)


def _make_distinct(plan: list[ScriptedStep], gold: list[ScriptedStep]) -> list[ScriptedStep]:
    first = plan[0]
    if first != gold[0]:
        return plan
    return [ScriptedStep(_HESITATION + first.text, first.tool, first.arguments), *plan[1:]]


def _hash_to_unit(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn, as it is in the ids."""

    role: str
    ids: tuple[int, ...]
    """Content, without the role line and without the terminator."""
    text: str
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The turns of a prompt."""

    turns: tuple[_Turn, ...]
    observation: str
    """Text of the last tool result; empty when there is none."""

    @property
    def user_texts(self) -> tuple[str, ...]:
        """Texts of the user's turns, of which the first that is a task is the task."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")

    @property
    def assistant_turns(self) -> tuple[_Turn, ...]:
        """The assistant's finished turns."""
        return tuple(turn for turn in self.turns if turn.role == "assistant" and turn.is_closed)

    @property
    def open_turn_ids(self) -> tuple[int, ...]:
        """Ids of an unfinished assistant turn at the end, to be continued: normally none."""
        last = self.turns[-1] if self.turns else None
        return last.ids if last is not None and last.role == "assistant" and not last.is_closed else ()


class _ChatMLReader:
    """Reads prompts of one tokenizer.

    Args:
        codec: a ChatML tokenizer and template.

    Raises:
        ConfigError: the tokenizer has no ``<|im_start|>``.
    """

    def __init__(self, codec: ChatCodec) -> None:
        control = codec.tokenizer.control_ids
        if "<|im_start|>" not in control:
            raise ConfigError(
                f"tokenizer {codec.tokenizer.source}: has no <|im_start|>.", "The oracle reads ChatML templates only."
            )
        self._codec = codec
        self._start = control["<|im_start|>"]
        self._end = codec.terminator_id
        self._response = (control.get("<tool_response>"), control.get("</tool_response>"))

    def parse_prompt(self, ids: Sequence[int]) -> _Conversation:
        turns = [self._turn(list(ids[begin:end])) for begin, end in self._spans(ids)]
        return _Conversation(tuple(turns), self._last_observation(turns))

    def _spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        starts = [position + 1 for position, token in enumerate(ids) if token == self._start]
        return [(begin, end - 1) for begin, end in pairwise([*starts, len(ids) + 1])]

    def _turn(self, ids: list[int]) -> _Turn:
        closed = self._end in ids
        if closed:
            ids = ids[: ids.index(self._end)]
        head = next((n for n in range(1, len(ids) + 1) if "\n" in self._codec.decode(ids[:n])), len(ids))
        role, _, first = self._codec.decode(ids[:head]).partition("\n")
        return _Turn(role.strip(), tuple(ids[head:]), first + self._codec.decode(ids[head:]), closed)

    def _last_observation(self, turns: Sequence[_Turn]) -> str:
        opening, closing = self._response
        for turn in reversed(turns):
            if opening is None or closing is None or turn.role == "assistant" or opening not in turn.ids:
                continue
            begin = len(turn.ids) - turn.ids[::-1].index(opening)
            end = turn.ids.index(closing, begin) if closing in turn.ids[begin:] else len(turn.ids)
            return self._codec.decode(turn.ids[begin:end]).strip("\n")
        return ""
