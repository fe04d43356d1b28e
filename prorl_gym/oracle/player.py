"""What the oracle says next: a pure function of the prompt ids, the call's seed and its own seed.

Whether a rollout is solved is decided at its first turn. Later turns need no memory, and so survive a change of
engines: the first turn in the ids tells which plan is being played, since a wrong plan never opens like the gold one.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

from prorl_gym.environments.protocol import GoldStep
from prorl_gym.environments.script import fill_step
from prorl_gym.inference.chat import Codec
from prorl_gym.inference.untrusted import Veil
from prorl_gym.oracle.reading import Conversation, Reader
from prorl_gym.oracle.rows import KnownRow, RowIndex

_VARIANTS = 4
"""How many wrong plans of a row are told apart."""

_AT_A_LOSS = GoldStep("I do not know this task.")
_FINISHED = GoldStep("I have nothing to add.")
_HESITATION = "Let me think. "


class Player:
    """Plays rows.

    Args:
        codec: a ChatML tokenizer and template.
        rows: what it knows.
        solve_rate: share of rollouts that it solves, from 0 to 1.
        seed: together with a call's own seed it decides which.
    """

    def __init__(self, codec: Codec, rows: RowIndex, *, solve_rate: float = 1.0, seed: int = 0) -> None:
        self._codec = codec
        self._reader = Reader(codec)
        self._rows = rows
        self._solve_rate = solve_rate
        self._seed = seed

    def answer(self, prompt_ids: Sequence[int], *, seed: int | None, session: str) -> list[int]:
        """Return the rest of the assistant's turn, terminator included.

        Args:
            prompt_ids: the conversation so far.
            seed: of the call; without one the session decides.
            session: the rollout's id.
        """
        conversation = self._reader.read(prompt_ids)
        planned = [*self._encode(self._step(conversation, seed, session)), self._codec.terminator_id]
        begun = list(conversation.begun)
        return planned[len(begun) :] if planned[: len(begun)] == begun and len(begun) < len(planned) else planned

    def logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Invent a log-prob for each token: negative, and the same for the same token after the same two."""
        context = [*prompt_ids[-2:], *ids]
        offset = len(context) - len(ids)
        return [-1.5 * _unit(f"{context[max(0, n - 2) : n + 1]}") ** 3 - 1e-4 for n in range(offset, len(context))]

    def _step(self, conversation: Conversation, seed: int | None, session: str) -> GoldStep:
        row = self._rows.find(conversation.task)
        if row is None:
            return _AT_A_LOSS
        plan = self._plan(row, conversation, session if seed is None else str(seed))
        played = len(conversation.said)
        return fill_step(plan[played], conversation.observation) if played < len(plan) else _FINISHED

    def _plan(self, row: KnownRow, conversation: Conversation, choice: str) -> list[GoldStep]:
        plans = self._plans(row)
        if conversation.said:
            opening = conversation.said[0].ids
            # At its end: a template may have put a stub of thoughts before it.
            played = next((plan for plan in plans if _ends_with(opening, self._encode(plan[0]))), None)
            if played is not None:
                return played
        if _unit(f"{self._seed}/{row.name}/{choice}/solve") < self._solve_rate:
            return plans[0]
        return plans[1 + int(_unit(f"{self._seed}/{row.name}/{choice}/variant") * _VARIANTS)]

    def _plans(self, row: KnownRow) -> list[list[GoldStep]]:
        """The gold plan, then wrong ones whose first turn differs from it."""
        gold = row.gold()
        return [gold, *(_unlike(row.wrong(self._seed + n), gold) for n in range(_VARIANTS))]

    def _encode(self, step: GoldStep) -> list[int]:
        """Spell a turn as a model would: control tokens around the call, none inside of what it quotes."""
        veil = Veil(self._codec.tokenizer)
        parts = [veil.hide(step.text)] if step.text else []
        if step.tool is not None:
            call = json.dumps({"name": step.tool, "arguments": veil.hide_all(step.arguments or {})}, ensure_ascii=False)
            parts.append(f"<tool_call>\n{call}\n</tool_call>")
        return veil.encode("\n".join(parts))


def _ends_with(ids: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(ids[len(ids) - len(end) :]) == tuple(end)


def _unlike(plan: list[GoldStep], gold: list[GoldStep]) -> list[GoldStep]:
    first = plan[0]
    if first != gold[0]:
        return plan
    return [GoldStep(_HESITATION + first.text, first.tool, first.arguments), *plan[1:]]


def _unit(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
