"""One example for every body and answer of the API. Tests hold them against the models, and the app uses them."""

from typing import Any

_IDENTITY: dict[str, Any] = {
    "rollout_id": "a7",
    "run_id": "step-7",
    "group_id": "prompt-3",
    "group_size": 8,
    "replica": 0,
    "environment": "math",
}
SUBMISSION: dict[str, Any] = {
    **_IDENTITY,
    "task": {"question": "What is 6 times 7?", "answer": "42"},
    "settings": {"temperature": 1.0, "max_turns": 4},
}
SUBMISSIONS: Any = [SUBMISSION, {**SUBMISSION, "rollout_id": "a8", "replica": 1}]
ACCEPTED: Any = {
    "accepted": [{"rollout_id": "a7", "duplicate": False}, {"rollout_id": "a8", "duplicate": False}],
}

ROLLOUT: dict[str, Any] = {
    "schema_version": 1,
    "rollout_id": "a7",
    "attempt": 0,
    "run_id": "step-7",
    "group_id": "prompt-3",
    "group_size": 8,
    "replica": 0,
    "environment": "math",
    "row_id": "products-12",
    "row_source": "products.jsonl:12",
    "outcome": {"status": "completed", "message": ""},
    "submission": {"kind": "answer", "text": "42"},
    "score": {"reward": 1.0, "components": {}, "detail": {}, "expected": "42", "report": ""},
    "segments": [
        {
            "token_ids": [101, 102, 7, 8],
            "mask": [0, 0, 1, 1],
            "logprobs": [0.0, 0.0, -0.11, -0.02],
            "policy_versions": [-1, -1, 7, 7],
            "generations": [
                {"start": 2, "end": 4, "turn": 0, "finish_reason": "stop", "engine": "policy-0", "seconds": 0.4}
            ],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprob_kind": "raw",
        }
    ],
    "messages": [
        {"role": "user", "content": "What is 6 times 7?"},
        {"role": "assistant", "content": "\\boxed{42}"},
    ],
    "prompt_messages": 1,
    "stages": {
        "init": {"queued": 0.01, "seconds": 0.02},
        "run": {"queued": 0.0, "seconds": 0.5},
        "eval": {"queued": 0.0, "seconds": 0.01},
    },
    "accepted_at": 1760000000.0,
    "begun_at": 1760000000.05,
    "finished_at": 1760000000.6,
}
ROLLOUT_RESPONSE: Any = {"rollout": ROLLOUT}
ROLLOUT_LIST: Any = {
    "rollouts": [
        {
            "cursor": 41,
            **_IDENTITY,
            "evaluation": False,
            "stands_in_for": None,
            "status": "completed",
            "detail": "",
            "cause": None,
            "reward": 1.0,
            "masked": False,
            "oldest_version": 7,
            "turns": 1,
            "sampled_tokens": 2,
            "accepted_at": 1760000000.0,
            "finished_at": 1760000000.6,
            "released": False,
            "begun_at": 1760000000.05,
            "row_id": "products-12",
            "why": "",
        }
    ],
    "before": None,
    "pending": [],
    "counts": {"waiting": 12, "running": 4, "finished": 1},
}
ANALYSIS: Any = {
    "finished": 16,
    "rewards": [
        {
            "run_id": "step-7",
            "environment": "math",
            "evaluation": False,
            "version": 7,
            "count": 15,
            "mean": 0.6,
            "deviation": 0.49,
            "solved": 9,
        }
    ],
    "ends": [
        {
            "environment": "math",
            "status": "completed",
            "detail": "",
            "cause": None,
            "why": "the answer differs",
            "zero": True,
            "count": 6,
            "rollout_id": "a9",
        }
    ],
    "spreads": {"waited": {"p50": 0.1, "p90": 0.5, "max": 2.2}, "took": {"p50": 0.6, "p90": 1.4, "max": 3.1}},
    "runs": ["step-7"],
    "environments": ["math"],
}
PROBLEMS: Any = {
    "problems": [
        {
            "run_id": "step-7",
            "environment": "math",
            "problem": "products-12",
            "count": 8,
            "rewarded": 8,
            "solved": 1,
            "mean": 0.125,
            "members": [
                {
                    "rollout_id": "a7",
                    "group_id": "prompt-3",
                    "group_size": 8,
                    "replica": 0,
                    "version": 7,
                    "status": "completed",
                    "detail": "",
                    "why": "",
                    "reward": 1.0,
                    "masked": False,
                }
            ],
        }
    ],
    "total": 2,
    "never_solved": 1,
    "always_solved": 0,
}
STREAM = (
    '{"cursor": 41, "stale": false, "rollout": {"rollout_id": "a7", "...": "..."}}\n'
    '{"paused": "policy", "since": 1760000000.0, "expires_at": 1760000600.0}\n'
)

CANCEL: Any = {"runs": ["step-7"], "groups": ["prompt-3"]}
CANCELLED: Any = {"cancelled": ["a8"]}
ACK: Any = {"run": "step-7", "cursor": 41}
RELEASED: Any = {"released": 40}
UNACKNOWLEDGED: Any = {"cursor": 41, "rollouts": [{"rollout_id": "a8", "run_id": "step-7", "finished": False}]}

_ENGINE_STATE: dict[str, Any] = {
    "name": "policy-0",
    "url": "http://10.0.0.1:8000/v1",
    "serves": True,
    "unhealthy_reason": "",
    "unhealthy_since": None,
    "quarantine": "",
    "draining": False,
    "version": 7,
    "in_flight": 12,
    "calls": 3400,
    "failures": 0,
    "sampled_tokens": 812000,
    "hit_rate": 0.91,
    "load": {
        "running": 12,
        "waiting": 0,
        "kv_usage": 0.4,
        "kv_capacity": 400000,
        "preemptions": 0,
        "prefix_queries": 900000,
        "prefix_hits": 819000,
    },
}
_POOL: dict[str, Any] = {
    "name": "policy",
    "version": 7,
    "paused": False,
    "pause_expires_at": None,
    "failovers": 0,
    "unavailable_reason": "",
    "waiting_rollouts": 0,
    "admission": {"budget": 380000.0, "in_tokens": True, "filled": 150000, "live": 40, "waiting": 0},
    "engines": [_ENGINE_STATE],
}
POLICY: Any = {"pool": _POOL, "probe_ids": [17, 4242, 99]}
UPDATE: Any = {"version": 8, "require_pause": True, "engines": ["http://10.0.0.1:8000/v1", "http://10.0.0.3:8000/v1"]}
UPDATED: Any = {
    "version": 8,
    "serving": ["policy-0", "policy-2"],
    "quarantined": {},
    "unverified": [],
    "draining": ["policy-1"],
}
PAUSE: Any = {"mode": "abort", "expire_seconds": 600}
PAUSED: Any = {"pool": "policy", "paused": True, "expires_at": 1760000600.0}
DISPATCH_PAUSED: Any = {"held": True}
DISPATCH_RESUMED: Any = {"held": False}
FIRST_PROMPT_BODY: Any = {"input": [{"role": "user", "content": "What is 2+2?"}]}
FIRST_PROMPT: Any = {"prompt_token_ids": [9, 14, 3], "terminator_id": 2}
RESUME: Any = {}
RESUMED: Any = {"pool": "policy", "paused": False, "expires_at": None}
ENGINE_BODY: Any = {"url": "http://10.0.0.3:8000/v1"}
ENGINE: Any = {"name": "policy-2", "url": "http://10.0.0.3:8000/v1", "draining": False}
DRAINING_ENGINE: Any = {"name": "policy-1", "url": "http://10.0.0.2:8000/v1", "draining": True}

DEMAND: Any = {"groups": 64, "after": 41, "version": 8, "max_staleness": 1, "redundant": {"run": "park"}}

GROUPS: Any = {
    "run_id": "step-7",
    "demand": DEMAND,
    "version": 8,
    "satisfied": False,
    "wanted": 64,
    "ready": 12,
    "ready_stale": 1,
    "begun": 80,
    "waiting": 40,
    "kept": 0,
    "held": 320,
    "parked": 0,
    "states": {"open": 60, "informative": 20},
    "replaced": 1,
    "extras": 0,
    "wasted_tokens": 900,
    "reclaimed_seconds": 310.5,
    "ready_groups": [{"group_id": "prompt-3", "cursor": 41, "oldest_version": 7, "stale": False}],
}


def _mismatch(tokens: int, max_abs_diff: float) -> dict[str, Any]:
    figures = {"mean_abs_diff": 0.0031, "kl": 0.00002, "mult_prob_error": 1.0031}
    return {"tokens": tokens, "max_abs_diff": max_abs_diff, **figures, "zeros": 0}


MISMATCH: Any = {
    "version": 8,
    "mismatch": {
        "total": _mismatch(8000, 0.041),
        "by_version": {"7": _mismatch(2000, 0.041), "8": _mismatch(6000, 0.038)},
        "by_position": {"turn 1": _mismatch(3000, 0.038), "turn 2": _mismatch(5000, 0.041)},
        "by_engine": {"policy-0": _mismatch(8000, 0.041)},
    },
}
MISMATCH_REPORT: Any = {"run_id": "step-7", "reported_at": 1760000000.0, **MISMATCH}

STATUS: Any = {
    "ready": True,
    "problem": "",
    "queued": 120,
    "running": 64,
    "finished": 4000,
    "places": {"queue": 120, "slot": 3, "init": 4, "run": 56, "eval": 1},
    "capacity": {"queued": 3, "init": 4, "run": 56, "eval": 1, "parked": 0, "free": 12},
    "version": "0.1.0",
    "uptime_seconds": 3600.0,
    "pools": [_POOL],
    "ended": [
        {"environment": "math", "status": "completed", "cause": "", "detail": "", "count": 3990},
        {"environment": "math", "status": "failed", "cause": "infrastructure", "detail": "engine_timeout", "count": 10},
    ],
    "rewards": [{"environment": "math", "count": 3990, "mean": 0.42}],
    "sampled_tokens": 812000,
    "wasted_tokens": 900,
    "mismatches": [MISMATCH_REPORT],
    "sandboxes": 60,
    "ledger": {"bytes": 81920000, "pending": 184, "kept": 3960, "released": 40, "full": False},
    "event_loop_lag_seconds": 0.004,
}
HISTORY: Any = {
    "interval_seconds": 5.0,
    "times": [1760000000.0, 1760000005.0],
    "columns": {"queued": [120, 118], "finished_per_second": [4.2, 4.0], "mean_reward": [None, 0.4]},
}
METRICS = "# TYPE prorl_ready gauge\nprorl_ready 1.0\n"
