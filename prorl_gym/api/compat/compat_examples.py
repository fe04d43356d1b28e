"""One example for every body and answer of the published routes."""

from typing import Any

from prorl_gym.api import openapi_examples
from prorl_gym.api.compat.process_result import to_process_result
from prorl_gym.records import Rollout

PROCESS: dict[str, Any] = {
    "instance": {
        "data_source": "deepscaler",
        "instance_id": "algebra-3",
        "trajectory_id": 0,
        "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
    },
    "sampling_params": {"temperature": 1.0, "max_iterations": 8, "token_level_generation": True},
    "job_id": "0b6c9a52-6f0f-4f0e-9a4a-3a1a5a0b7d11",
}
RESULT = to_process_result(Rollout.model_validate(openapi_examples.ROLLOUT), instance_id="algebra-3", trajectory_id=0)

CANCEL: dict[str, Any] = {"job_id": PROCESS["job_id"]}
CANCELLED: dict[str, Any] = {"status": "cancelled"}

STARTED: dict[str, Any] = {"status": "started"}
STOPPED: dict[str, Any] = {"status": "stopped", "cancelled": 3}

ADDRESS: dict[str, Any] = {"address": "http://127.0.0.1:8000"}
ADDED: dict[str, Any] = {"status": "added", "engine": "policy-2"}
CLEARED: dict[str, Any] = {"status": "cleared", "cleared": 2}

STATUS: dict[str, Any] = {
    "status": "running",
    "running": True,
    "pending_jobs": 12,
    "jobs": 12,
    "init": 1,
    "run": 8,
    "eval": 1,
    "init_queue": 2,
    "run_queue": 0,
    "eval_queue": 0,
    "active_init": 1,
    "active_run": 8,
    "active_eval": 1,
    "total": 12,
    "ready": True,
    "llm_servers": 2,
}
