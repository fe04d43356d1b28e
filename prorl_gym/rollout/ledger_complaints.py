"""When a ledger refuses a call, and what it says then: the same, wherever it remembers."""

from prorl_gym.errors import ConflictError, GoneError, NotFoundError
from prorl_gym.rollout.ledger_file import LedgerFullError, UnreadableRecordError


def conflict(rollout_id: str) -> ConflictError:
    """Return the complaint about an id that is taken by another body."""
    return ConflictError(
        f"rollout {rollout_id} was submitted before with another body.",
        "Send the same body again, or use a fresh rollout_id.",
    )


def not_found(rollout_id: str) -> NotFoundError:
    """Return the complaint about an id that nobody submitted."""
    return NotFoundError(f"rollout {rollout_id} was never accepted.", "Check the rollout_id and the service's address.")


def gone(rollout_id: str) -> GoneError:
    """Return the complaint about a record that was released."""
    return GoneError(
        f"rollout {rollout_id} is finished; its record was acknowledged or expired, and is not kept any more.",
        "Acknowledge records only once they are used; ledger.keep_days says how long others are kept.",
    )


def finished(rollout_id: str) -> ConflictError:
    """Return the complaint about another attempt at what has ended."""
    return ConflictError(f"rollout {rollout_id} is finished: no attempt at it can begin.")


def is_over(attempt: int, begun: int | None, following: int) -> bool:
    """Tell whether an attempt cannot end its rollout any more: it failed or was lost, or a later one has begun.

    Args:
        attempt: whose end comes.
        begun: the attempt that runs, if one does.
        following: number of the next attempt. An end without an attempt (a cancel before the first) bears it.
    """
    return attempt < following and attempt != begun


def over(rollout_id: str, attempt: int) -> ConflictError:
    """Return the complaint about the end of an attempt that is over."""
    return ConflictError(
        f"rollout {rollout_id}: attempt {attempt} is over, and its end comes too late.",
        "Only the attempt that runs can end the rollout.",
    )


def full() -> LedgerFullError:
    """Return the complaint about a disk budget that is used up."""
    return LedgerFullError(
        "The ledger's disk budget (ledger.budget_bytes) is used up; what was accepted goes on.",
        "Acknowledge records that were used, run 'prorl-gym gc' on a stopped service's ledger, or raise the budget.",
    )


def not_readable(rollout_id: str, what: str, why: str) -> UnreadableRecordError:
    """Return the complaint about a text that makes no sense to this release."""
    return UnreadableRecordError(
        f"rollout {rollout_id}: its {what} is in the ledger and cannot be read ({why}).",
        "Upgrade prorl-gym if a newer release wrote it; otherwise the file is damaged. The stream hands records on.",
    )
