"""Rollouts to look at: long ones, and ones in which every text wants to run."""

import random
from collections.abc import Sequence

from prorl_gym.errors import FailureKind
from prorl_gym.records import Generation, Message, Outcome, Retry, Rollout, Score, Segment, StageTime, ToolCall
from prorl_gym.settings import RolloutSettings, resolve_settings

WORDS = " the ledger forgets nothing and every rollout ends in exactly one record\n".split(" ")
ATTACK = '</script></title></style><img src=x onerror="window.ran=1"><script>window.ran=1</script><svg onload=ran=1>'


def decode(ids: Sequence[int]) -> str:
    return "".join(f" {WORDS[token % len(WORDS)]}" for token in ids)


def hostile_decode(ids: Sequence[int]) -> str:
    return ATTACK * len(ids)


def long_segment(turns: int, length: int, *, first_turn: int = 0) -> Segment:
    rng = random.Random(turns)
    mask: list[int] = []
    calls: list[Generation] = []
    each = length // turns
    for turn in range(turns):
        start = len(mask) + each // 2
        mask += [0] * (each // 2) + [1] * (each - each // 2)
        facts = {"engine": "policy-1", "seconds": 1.5, "cached_tokens": start, "finish_reason": "stop"}
        calls.append(Generation.model_validate({"start": start, "end": len(mask), "turn": first_turn + turn, **facts}))
    return Segment.model_validate(
        {
            "token_ids": [min(int(rng.paretovariate(0.4)), 150_000) for _ in mask],
            "mask": mask,
            "logprobs": [-rng.expovariate(1.2) if bit else 0.0 for bit in mask],
            "policy_versions": [7 + 3 * i // len(mask) if bit else -1 for i, bit in enumerate(mask)],
            "generations": calls,
            **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprob_kind": "processed"},
        }
    )


def long_rollout(turns: int = 100, length: int = 64_000, *, text: str = "", segments: int = 1) -> Rollout:
    """A rollout of several turns; ``text`` stands wherever a text may stand."""
    messages = [
        Message(role="system", content=text or "You have a shell."),
        Message(role="user", content=text or "Mend it."),
    ]
    for turn in range(turns):
        call = ToolCall(id=f"c{turn}", name=text or "shell", arguments=text or '{"command": "ls -la\\nmake test"}')
        messages += [
            Message(role="assistant", content=text or f"I look at it.\n{decode(range(90))}", tool_calls=(call,)),
            Message(role="tool", content=text or decode(range(200)), name=text or "shell", tool_call_id=call.id),
        ]
    return Rollout(
        **{"rollout_id": "code-0031-4", "attempt": 1, "run_id": "grpo-7b", "group_id": "code-0031", "group_size": 8},
        **{"replica": 4, "environment": text or "code", "metadata": {text or "step": text or "112"}},
        outcome=Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT, message=text or "Memory ran out."),
        score=Score(reward=0.75, components={text or "tests": 0.75}, detail={text or "passed": text or 31}),
        segments=[long_segment(turns, length, first_turn=turns * number) for number in range(segments)],
        messages=messages,
        prompt_messages=2,
        settings=resolve_settings(RolloutSettings()),
        stages={
            "init": StageTime(queued=2, seconds=1.5),
            "run": StageTime(queued=8, seconds=61),
            "eval": StageTime(seconds=8),
        },
        retries=[Retry(attempt=0, kind=FailureKind.SANDBOX_LOST, stage=text or "run", message=text or "It died.")],
        accepted_at=1.7e9,
        finished_at=1.7e9 + 81,
    )
