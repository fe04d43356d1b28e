"""Who is to blame, row by row of the table of evidence."""

import pytest

from prorl_gym.errors import Blame, Cause, Evidence, FailureKind, blame

TABLE = {
    Evidence.LIMIT_BREACHED: (Cause.POLICY, False, True),
    Evidence.PAYLOAD_BROKE_SANDBOX: (Cause.POLICY, False, True),
    Evidence.SANDBOX_KILLED_OUTSIDE: (Cause.INFRASTRUCTURE, True, False),
    Evidence.SANDBOX_LOST_UNEXPLAINED: (Cause.INFRASTRUCTURE, True, False),
    Evidence.SERVICE_RESTARTED: (Cause.INFRASTRUCTURE, True, False),
    Evidence.CALL_UNANSWERED: (Cause.INFRASTRUCTURE, True, False),
    Evidence.CALL_IN_PROGRESS: (Cause.POLICY, False, True),
    Evidence.IMPOSSIBLE_ANSWER: (Cause.INFRASTRUCTURE, True, False),
    Evidence.PROGRAM_KILLED_OUTSIDE: (Cause.INFRASTRUCTURE, True, False),
    Evidence.BAD_ROW: (Cause.TASK, False, False),
    Evidence.BAD_IMAGE: (Cause.TASK, False, False),
}


@pytest.mark.parametrize("evidence", Evidence)
def test_row(evidence: Evidence) -> None:
    cause, retry, has_reward = TABLE[evidence]
    verdict = blame(evidence)
    assert (verdict.cause, verdict.retry, verdict.has_reward) == (cause, retry, has_reward)


def test_an_unexplained_loss_is_retried_alone() -> None:
    assert blame(Evidence.SANDBOX_LOST_UNEXPLAINED) == Blame(FailureKind.SANDBOX_LOST, retry=True, retry_alone=True)


def test_a_second_unexplained_loss_is_the_policys() -> None:
    verdict = blame(Evidence.SANDBOX_LOST_UNEXPLAINED, earlier_losses=1)
    assert (verdict.cause, verdict.retry, verdict.has_reward) == (Cause.POLICY, False, True)
