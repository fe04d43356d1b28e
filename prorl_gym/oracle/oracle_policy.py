"""The oracle's answers: a pure function of the prompt ids, the call's seed and its own seed.

Whether a rollout is solved is decided at its first turn. Later turns need no memory, and so survive a change of
engines: the first turn in the ids identifies the plan, since a wrong plan never opens like the gold one. The prompt is
read from its ids, whose control tokens delimit the turns of a ChatML template.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import prorl_gym
from prorl_gym.environments import registry
from prorl_gym.environments.playback import fill_step, gold_steps, task_text, wrong_steps
from prorl_gym.environments.protocol import Environment, ScriptedStep
from prorl_gym.environments.row_format import read_rows
from prorl_gym.errors import ConfigError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.tokenizer import ControlTokenEscaper

_WRONG_PLANS = 4
"""Number of distinct wrong plans of a row."""

_UNKNOWN_TASK_STEP = ScriptedStep("I do not know this task.")
_PLAN_DONE_STEP = ScriptedStep("I have nothing to add.")
_HESITATION = "Let me think. "


@dataclass(frozen=True, slots=True)
class KnownRow:
    name: str
    task_text: str
    environment: Environment[Any]
    task: dict[str, Any]


class RowIndex:
    """Rows by task text."""

    def __init__(self, rows: Sequence[KnownRow]) -> None:
        self._rows = sorted(rows, key=lambda row: len(row.task_text), reverse=True)
        self.find = lru_cache(maxsize=4096)(self._find)
        """Return the row whose text a user turn contains, or ``None``; the longest text wins."""

    def __len__(self) -> int:
        return len(self._rows)

    def _find(self, user_text: str) -> KnownRow | None:
        return next((row for row in self._rows if row.task_text in user_text), None)


def load_rows(files: Sequence[Path]) -> RowIndex:
    """Read files of rows. Raises ``ConfigError`` and ``TaskError``."""
    known: list[KnownRow] = []
    for row in (row for file in files for row in read_rows(file)):
        if row.environment is None:
            raise ConfigError(f"{row.where}: 'environment' is missing.", "Give rows in NeMo Gym's form.")
        text = task_text(row.task)
        if not text:
            fix = "The oracle needs rows with a 'question'."
            raise ConfigError(f"{row.where}: no task text to find the row by.", fix)
        known.append(KnownRow(row.name, text, registry.get(row.environment), dict(row.task)))
        gold_steps(known[-1].environment, known[-1].task)  # refuse a row without gold now, not in the middle of a demo
    return RowIndex(known)


def example_files() -> list[Path]:
    """Return the example rows that ship with the package."""
    root = Path(prorl_gym.__file__).parent / "gym_root" / "environments"
    return sorted(root.glob("*/data/example.jsonl"))


class OraclePolicy:
    """Plays the gold turns of rows in a share of rollouts (``solve_rate``), and wrong ones in the others."""

    def __init__(self, codec: ChatCodec, rows: RowIndex, *, solve_rate: float = 1.0, seed: int = 0) -> None:
        self._codec = codec
        self._reader = _ChatMLReader(codec)
        self._rows = rows
        self._solve_rate = solve_rate
        self._seed = seed

    def complete_turn(self, prompt_ids: Sequence[int], *, seed: int | None, session: str) -> list[int]:
        """Return the rest of the assistant's turn, terminator included. Without a seed, the session is the seed."""
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
        said = (turn.text for turn in conversation.turns if turn.role == "user")
        row = next(filter(None, map(self._rows.find, said)), None)
        if row is None:
            return _UNKNOWN_TASK_STEP
        plan = self._choose_plan(row, conversation, session if seed is None else str(seed))
        played = len(conversation.assistant_turns)
        return fill_step(plan[played], conversation.observation) if played < len(plan) else _PLAN_DONE_STEP

    def _choose_plan(self, row: KnownRow, conversation: "_Conversation", choice: str) -> list[ScriptedStep]:
        plans = self._candidate_plans(row)
        if conversation.assistant_turns:
            opening = conversation.assistant_turns[0].ids
            for plan in plans:
                # Compared at its end: a template may have put a stub of thoughts before it.
                encoded = self._encode_step(plan[0])
                if list(opening[len(opening) - len(encoded) :]) == encoded:
                    return plan
        if _hash_to_unit(f"{self._seed}/{row.name}/{choice}/solve") < self._solve_rate:
            return plans[0]
        return plans[1 + int(_hash_to_unit(f"{self._seed}/{row.name}/{choice}/variant") * _WRONG_PLANS)]

    def _candidate_plans(self, row: KnownRow) -> list[list[ScriptedStep]]:
        """Return the gold plan, then wrong ones whose first turns differ from it."""
        wrong = [wrong_steps(row.environment, row.task, self._seed + n) for n in range(_WRONG_PLANS)]
        plans = [gold_steps(row.environment, row.task), *wrong]
        for plan in plans[1:]:
            if (first := plan[0]) == plans[0][0]:
                plan[0] = ScriptedStep(_HESITATION + first.text, first.tool, first.arguments)
        return plans

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


def _hash_to_unit(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, slots=True)
class _Turn:
    role: str
    ids: tuple[int, ...]
    """Content, without the role line and without the terminator."""
    text: str
    is_closed: bool


@dataclass(frozen=True, slots=True)
class _Conversation:
    turns: tuple[_Turn, ...]
    observation: str
    """Text of the last tool result; empty when there is none."""

    @property
    def assistant_turns(self) -> tuple[_Turn, ...]:
        return tuple(turn for turn in self.turns if turn.role == "assistant" and turn.is_closed)

    @property
    def open_turn_ids(self) -> tuple[int, ...]:
        """Ids of an unfinished assistant turn at the end, to be continued: normally none."""
        last = self.turns[-1] if self.turns else None
        return last.ids if last is not None and last.role == "assistant" and not last.is_closed else ()


class _ChatMLReader:
    """Reads prompts of one tokenizer. Raises ``ConfigError``: it has no ``<|im_start|>``."""

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
        starts = [position + 1 for position, token in enumerate(ids) if token == self._start]
        turns = [self._turn(list(ids[begin : end - 1])) for begin, end in pairwise([*starts, len(ids) + 1])]
        return _Conversation(tuple(turns), self._last_observation(turns))

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
