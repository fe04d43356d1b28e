"""Bodies and answers of the routes between nodes and the head, the messages inside them, and their ordered channel.

A message travels as JSON text that is encoded once, when it enters the ``Outbox``.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from prorl_gym.errors import CancelReason, EngineError, FailureKind, LimitReached
from prorl_gym.inference.protocol import CallTimedOut, ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.records import Identifier, Record
from prorl_gym.rollout.protocol import Job, ParkingChanged, StageEntered, TurnEnded

# --- node to head ---------------------------------------------------------------------------------------------------


class AttemptFinished(Record):
    """An attempt ended. Repeated in every session until the head has settled it in the ledger."""

    type: Literal["finished"] = "finished"
    rollout_id: str
    attempt: int
    record: str
    """The ``Rollout`` as JSON text."""


class NodeDraining(Record):
    """The node takes no more attempts, and leaves when those that it runs are settled."""

    type: Literal["draining"] = "draining"


class SessionFreed(Record):
    """See ``EnginePool.release_slot``, or ``EnginePool.forget_session``."""

    type: Literal["freed"] = "freed"
    pool: str
    session: str
    forget: bool


class RoomQuery(Record):
    """A rollout that has not begun to run waits for room on the engines. See ``EnginePool.wait_for_room``."""

    type: Literal["room"] = "room"
    query: str
    """Its id, unique over all nodes; ``QueryAnswered`` has it."""
    pool: str
    session: str


class SamplingQuery(Record):
    """See ``EnginePool.may_have_sampled``."""

    type: Literal["sampling"] = "sampling"
    query: str
    """As in ``RoomQuery``."""
    pool: str
    engine: str
    max_tokens: int
    seconds: float


class CallRequest(Record):
    """A model call to place. The node answers the head's ``CallPlaced`` by ``CallEnded`` or ``CallWithdrawn``."""

    type: Literal["call"] = "call"
    call: str
    """Its id, unique over all nodes."""
    pool: str
    session: str
    group: str = ""
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None


class CallFailure(Record):
    """A failed model call, with what distinguishes its exception."""

    error: Literal["context", "timed_out", "model_missing", "overloaded", "other"]
    kind: FailureKind | None = None
    what: str = ""
    fix: str = ""
    retry_after: float | None = None
    max_model_len: int | None = None
    in_progress: bool = False

    @classmethod
    def of(cls, error: EngineError | LimitReached) -> "CallFailure":
        """Return the failure of an exception that ``EnginePool.generate`` or an engine raised."""
        if not isinstance(error, EngineError):
            return cls(
                error="context", max_model_len=error.max_model_len if isinstance(error, ContextExceeded) else None
            )
        name = next((name for name, one in _ERRORS.items() if isinstance(error, one)), "other")
        return cls.model_validate(
            {
                "error": name,
                "kind": error.kind,
                "what": error.what,
                "fix": error.fix,
                "retry_after": getattr(error, "retry_after", None),
                "in_progress": getattr(error, "in_progress", False),
            }
        )

    def to_error(self) -> EngineError | ContextExceeded:
        if self.error == "context":
            return ContextExceeded(self.max_model_len)
        known = _ERRORS.get(self.error, EngineError)
        error = known.__new__(known)  # each builds its text from arguments of its own; here the text is given
        EngineError.__init__(error, self.kind or FailureKind.INTERNAL, self.what, self.fix)
        if isinstance(error, EngineOverloaded):
            error.retry_after = self.retry_after
        if isinstance(error, CallTimedOut):
            error.in_progress = self.in_progress
        return error


_ERRORS: dict[str, type[EngineError]] = {
    "timed_out": CallTimedOut,
    "model_missing": ModelMissing,
    "overloaded": EngineOverloaded,
}


class CallEnded(Record):
    """The outcome of one try of a call: figures for the balancer and admission, or the failure."""

    type: Literal["ended"] = "ended"
    call: str
    attempt: str
    """As in ``CallPlaced``."""
    sampled_tokens: int = 0
    cached_tokens: int | None = None
    seconds: float = 0.0
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    versions_reported: bool = False
    failure: CallFailure | None = None


class CallWithdrawn(Record):
    """Nothing waits for this call or query any more."""

    type: Literal["withdrawn"] = "withdrawn"
    call: str
    """Id of either."""


PoolMessage = CallRequest | SessionFreed | RoomQuery | SamplingQuery
CallMessage = PoolMessage | CallEnded | CallWithdrawn
"""Messages about model calls: a head that was restarted knows nothing of earlier ones."""
UpMessage = Annotated[
    AttemptFinished | StageEntered | ParkingChanged | TurnEnded | NodeDraining | CallMessage,
    Field(discriminator="type"),
]

# --- head to node ---------------------------------------------------------------------------------------------------


class JobSent(Record):
    """An attempt to make."""

    type: Literal["job"] = "job"
    job: str
    """The ``Job`` as JSON in ASCII: its task may hold half a surrogate pair, which UTF-8 cannot carry."""

    @classmethod
    def of(cls, job: Job) -> "JobSent":
        return cls(job=json.dumps(job.model_dump(), separators=(",", ":")))

    def to_job(self) -> Job:
        return Job.model_validate(json.loads(self.job))


class Settled(Record):
    """The end of this attempt is in the ledger, or of no interest: the node may drop its record."""

    type: Literal["settled"] = "settled"
    rollout_id: str
    attempt: int


class CancelSent(Record):
    """See ``Runner.cancel``."""

    type: Literal["cancel"] = "cancel"
    rollouts: tuple[str, ...]
    reason: CancelReason


class ParkSent(Record):
    """See ``Runner.park`` and ``Runner.unpark``."""

    type: Literal["park"] = "park"
    rollouts: tuple[str, ...]
    park: bool


class CallPlaced(Record):
    """Where to make a call; again after a try that failed."""

    type: Literal["placed"] = "placed"
    call: str
    attempt: str
    """Id of the request at the engine."""
    engine: str
    url: str
    version: int
    cache_salt: str | None
    max_model_len: int | None
    """The pool's, when it is known."""


class CallStopped(Record):
    """Stop the call at its engine and keep what it sampled."""

    type: Literal["stop"] = "stop"
    call: str
    by_pause: bool
    """A pause of the policy caused it."""


class CallRefused(Record):
    """The call failed for good."""

    type: Literal["refused"] = "refused"
    call: str
    failure: CallFailure
    is_refunded: bool
    """Its last try is charged to no deadline."""


class ClockPaused(Record):
    """Pause or resume the deadline of a call in flight: engines hold it back while weights change."""

    type: Literal["clock"] = "clock"
    call: str
    pause: bool


class QueryAnswered(Record):
    """The answer to a ``RoomQuery``, which is always yes, or to a ``SamplingQuery``."""

    type: Literal["answered"] = "answered"
    query: str
    answer: bool = True


CallReply = CallPlaced | CallStopped | CallRefused | ClockPaused | QueryAnswered
DownMessage = Annotated[JobSent | Settled | CancelSent | ParkSent | CallReply, Field(discriminator="type")]

# --- the routes' bodies and answers ---------------------------------------------------------------------------------


class JoinBody(Record):
    """A node joins, or joins again after the head was restarted."""

    incarnation: Identifier
    """Names the node's process."""
    release: str
    """The node's release of prorl-gym."""
    slots: Annotated[int, Field(gt=0)]
    """Most attempts that are not parked."""
    init_slots: Annotated[int, Field(gt=0)]
    """Most attempts in INIT."""
    in_hand: tuple[JobSent, ...] = ()
    """Attempts that it works on, or whose end is not settled, without their tasks. Their moves follow as messages."""


class JoinResponse(Record):
    """The node is joined."""

    epoch: str
    """Names the head's process."""
    cancelled: tuple[str, ...] = ()
    """Rollouts of which the node runs an attempt that is over."""
    max_model_lens: dict[str, int | None] = Field(default_factory=dict[str, int | None])
    """Context in tokens by pool, where it is known."""


class ExchangeBody(Record):
    """Messages of a node, and the number of the head's that it has processed."""

    incarnation: Identifier
    epoch: str
    acknowledged: Annotated[int, Field(ge=0)]
    """Number of the last message of the head that the node has processed."""
    first: Annotated[int, Field(ge=1)]
    """Number of the first message."""
    hold_seconds: Annotated[float, Field(ge=0, le=60)] = 0.0
    """0: the answer comes at once, with no messages. Otherwise it comes with the next messages, or after this time."""
    messages: tuple[UpMessage, ...] = ()


class ExchangeAnswer(Record):
    """Messages of the head, and the number of the node's that it has processed."""

    must_join: bool = False
    """The head does not know this incarnation (it declared it lost, or was restarted)."""
    acknowledged: int = 0
    first: int = 1
    messages: tuple[DownMessage, ...] = ()


class LeaveBody(Record):
    """The node leaves: whatever it runs is lost."""

    incarnation: Identifier


def encode_page(page: ExchangeBody | ExchangeAnswer, messages: Sequence[str]) -> str:
    """Return the JSON of a page with these messages, which are encoded already."""
    return f'{page.model_dump_json(exclude={"messages"})[:-1]},"messages":[{",".join(messages)}]}}'


MUST_JOIN = encode_page(ExchangeAnswer(must_join=True), ())
"""The answer to a node that the head does not know."""

MessageT = TypeVar("MessageT")

PAGE_CHARS = 16 << 20
"""Characters of messages after which a page ends."""


class Outbox:
    """Encoded messages that the other end has not acknowledged, numbered from 1. No I/O, no clock.

    Requests may be lost, repeated or late. Each direction has its own, one at a time: the sender repeats everything
    from the first message that is not acknowledged, the receiver (``Inbox``) drops what it has. So every message is
    processed once and in order.
    """

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._acknowledged = 0
        self.not_empty = asyncio.Event()
        """Set while there are messages."""

    def send(self, message: BaseModel) -> None:
        """Add a message, for the next exchange."""
        self._messages.append(message.model_dump_json())
        self.not_empty.set()

    def restart(self) -> None:
        """Begin again at 1, with no messages: for another session."""
        self._messages.clear()
        self._acknowledged = 0
        self.not_empty.clear()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this one. Older acknowledgements than the last are ignored."""
        while self._acknowledged < number and self._messages:
            self._messages.popleft()
            self._acknowledged += 1
        if not self._messages:
            self.not_empty.clear()

    def page(self) -> tuple[int, list[str]]:
        """Return the first messages and the number of the first of them."""
        texts: list[str] = []
        size = 0
        for text in self._messages:
            if texts and size + len(text) > PAGE_CHARS:
                break
            texts.append(text)
            size += len(text)
        return self._acknowledged + 1, texts


class Inbox(Generic[MessageT]):
    """Counts the processed messages of the other end."""

    def __init__(self) -> None:
        self.acknowledged = 0
        """Number of the last one."""

    def accept(self, first: int, messages: Sequence[MessageT]) -> Sequence[MessageT]:
        """Return what is new in a page, in order; nothing while a message before its ``first`` number is missing."""
        new = messages[max(0, self.acknowledged + 1 - first) :] if first <= self.acknowledged + 1 else ()
        self.acknowledged += len(new)
        return new
