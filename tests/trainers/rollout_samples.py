"""Rollouts to convert: built the way the service builds them, small enough to read."""

from typing import Any

from sample_records import record

from prorl_gym.errors import CancelReason, FailureKind, Limit
from prorl_gym.records import (
    NOT_SAMPLED,
    Generation,
    Message,
    Outcome,
    Rollout,
    Score,
    Segment,
    StageTime,
    ToolCall,
)

PROMPT = [1, 2, 3]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "prorl_math_agent"},
    "environment": "math",
    "task": {"question": "2+2?", "answer": "4"},
    "_ng_task_index": 3,
}


def segment(turns: int = 2, prompt: list[int] | None = None) -> Segment:
    """A segment of ``turns`` calls of two tokens each, with one observation token between them."""
    ids, mask, logprobs, generations = list(prompt or PROMPT), [0] * 3, [0.0] * 3, []
    for turn in range(turns):
        if turn:
            ids, mask, logprobs = [*ids, 50 + turn], [*mask, 0], [*logprobs, 0.0]
        start = len(ids)
        ids, mask, logprobs = [*ids, 100 + turn, 9], [*mask, 1, 1], [*logprobs, -0.5, -0.25]
        generations.append(
            Generation(start=start, end=len(ids), turn=turn, finish_reason="stop", engine="e0", seconds=0.1)
        )
    return Segment(
        token_ids=ids,
        mask=mask,
        logprobs=logprobs,
        policy_versions=[0 if sampled else NOT_SAMPLED for sampled in mask],
        generations=generations,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        logprob_kind="raw",
    )


MESSAGES = [
    Message(role="system", content="Solve."),
    Message(role="user", content="2+2?"),
    Message(role="assistant", content="", tool_calls=(ToolCall(id="c0", name="python", arguments='{"code": "2+2"}'),)),
    Message(role="tool", content="4", tool_call_id="c0", name="python"),
    Message(role="assistant", content="\\boxed{4}"),
]


def rollout(**changes: object) -> Rollout:
    """A completed two-turn rollout with reward 1.0, changed as asked."""
    fields: dict[str, Any] = {
        "rollout_id": "r1",
        "run_id": "run",
        "environment": "math",
        "segments": [segment()],
        "messages": MESSAGES,
        "stages": {"run": StageTime(queued=0.5, seconds=2.0)},
        "accepted_at": 1.0,
        "finished_at": 4.0,
        **changes,
    }
    return record(fields.pop("rollout_id"), **fields)


def failed(kind: FailureKind = FailureKind.ENGINE_UNREACHABLE, **changes: object) -> Rollout:
    return rollout(outcome=Outcome(status="failed", kind=kind, message="engine e0 is down"), score=None, **changes)


def cancelled(reason: CancelReason = CancelReason.REDUNDANT) -> Rollout:
    return rollout(outcome=Outcome(status="cancelled", reason=reason), score=None)


def truncated(limit: Limit = Limit.TOKENS) -> Rollout:
    return rollout(outcome=Outcome(status="truncated", limit=limit), score=Score(reward=0.0))
