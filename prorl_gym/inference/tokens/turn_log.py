"""The whole turns of a rollout, logged so that a later attempt can resume after the last of them.

A turn is whole when the policy is asked for the next one, or the agent has ended: the tools that it called have
answered by then. A later attempt replays logged turns: the model's part comes from the log, the tools run again in a
fresh sandbox, and their answers have to be the logged ones. From then on the attempt has the tokens, and as far as the
answers show the sandbox, of the attempt that was lost, and it goes on with a turn that is sampled.
"""

from collections.abc import Callable, Sequence

from prorl_gym.deadlines import current_deadline
from prorl_gym.errors import FailureKind, RolloutError
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.records import Message, Record


class LoggedTurn(Record):
    prompt: str
    """Digest of all token ids before it, with the settings that it was sampled under."""
    calls: tuple[GenerationResult, ...]
    """Outputs of its model calls; more than one where an engine aborted it."""
    answers: tuple[Message, ...] | None = None
    """Answers of its tools, empty where it was a summary; ``None``: the agent ended with it."""
    seconds: float = 0.0
    """Charged to the stage's deadline until it was whole."""


class ReplayDivergedError(RolloutError):
    """A replayed turn went on otherwise than the logged one: the attempt has to start over."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(FailureKind.INTERNAL, f"turn {number}: {what}")


class TurnLog:
    """Replays the turns of earlier attempts in a session, and reports each new one once it is whole.

    ``normalize`` takes out of a tool's answer what may differ. The policy is shown the logged answer, so that the
    tokens are those of the earlier attempt.
    """

    def __init__(
        self,
        turns: Sequence[LoggedTurn],
        on_turn: Callable[[int, LoggedTurn], None],
        normalize: Callable[[str], str] = str,
    ) -> None:
        self.replay_seconds = 0.0
        """Duration of the replay; not charged to the stage's deadline."""
        self._turns = turns
        self._on_turn = on_turn
        self._normalize = normalize
        self._number = 0
        self._prompt: str | None = None
        """Prompt of the turn under way."""
        self._calls: list[GenerationResult] = []
        self._answers: tuple[Message, ...] | None = None

    @property
    def is_replaying(self) -> bool:
        return self._number < len(self._turns)

    @property
    def replayed_count(self) -> int:
        return min(self._number, len(self._turns))

    def begin_turn(self, prompt: str) -> None:
        """Begin a turn; the one before is whole. Raises ``ReplayDivergedError``: it had another prompt before."""
        if self._prompt is not None:
            self._end_turn()
        self._prompt = prompt
        logged = self._logged_turn()
        if logged is not None and logged.prompt != prompt:
            raise ReplayDivergedError(self._number, "its prompt or sampling settings differ from the logged ones.")

    def replay_call(self) -> GenerationResult | None:
        """Return the logged result of the next call; ``None``: it has to be made. Raises ``ReplayDivergedError``."""
        logged = self._logged_turn()
        if logged is None:
            return None
        if len(self._calls) == len(logged.calls):
            raise ReplayDivergedError(self._number, "it needs more model calls than the logged one.")
        self._calls.append(logged.calls[len(self._calls)])
        return self._calls[-1]

    def add_call(self, result: GenerationResult) -> None:
        self._calls.append(result)

    def settle_answers(self, answers: Sequence[Message]) -> Sequence[Message]:
        """Return the answers to show the policy: in a replay, the logged ones. Raises ``ReplayDivergedError``."""
        self._answers = tuple(answers)
        logged = self._logged_turn()
        if logged is None:
            return answers
        if logged.answers is None:
            raise ReplayDivergedError(self._number, "the agent went on, and had ended there before.")
        if self._normalized(answers) != self._normalized(logged.answers):
            raise ReplayDivergedError(self._number, "its tools answered otherwise than before.")
        return logged.answers

    def end(self) -> None:
        """End the last turn: the agent has ended by itself. Raises ``ReplayDivergedError``: it went on before."""
        logged = self._logged_turn()
        if logged is not None and logged.answers is not None:
            raise ReplayDivergedError(self._number, "the agent ended, and had gone on there before.")
        if self._prompt is not None:
            self._end_turn()

    def require_replayed(self) -> None:
        """Check that every logged turn was replayed: otherwise a limit or a failure has struck that none met before."""
        if self.is_replaying:
            raise ReplayDivergedError(self._number, "the agent was stopped before it, and had not been before.")

    def _logged_turn(self) -> LoggedTurn | None:
        return self._turns[self._number] if self.is_replaying else None

    def _end_turn(self) -> None:
        assert self._prompt is not None
        deadline = current_deadline()
        if not self.is_replaying:
            seconds = 0.0 if deadline is None else deadline.charged_seconds
            turn = LoggedTurn(prompt=self._prompt, calls=tuple(self._calls), answers=self._answers, seconds=seconds)
            self._on_turn(self._number, turn)
        elif self._number + 1 == len(self._turns) and deadline is not None:
            self.replay_seconds = deadline.charged_seconds
            deadline.set_charged(self._turns[-1].seconds)
        self._number += 1
        self._prompt, self._calls, self._answers = None, [], None

    def _normalized(self, answers: Sequence[Message]) -> list[Message]:
        return [answer.model_copy(update={"content": self._normalize(answer.content)}) for answer in answers]
