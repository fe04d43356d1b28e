"""Rows of every environment, each made to end in a given way, and what a trainer gets for it."""

import json
from enum import StrEnum
from functools import cache
from typing import Any

from gym_servers import GYM_ROOT
from policy_server import Fault, Script

from prorl_gym.environments.playback import gold_steps, wrong_steps
from prorl_gym.environments.protocol import ScriptedStep

ENVIRONMENTS = ("code", "math", "stem", "swe", "taskdir")
_ROWS = {"code": 0, "math": 0, "stem": 2, "swe": 0, "taskdir": 0}
"""Which example row; graded by another process or sandbox, since no deadline ends a comparison of letters."""
SHELL = ("code", "swe", "taskdir")
"""Environments whose agents have a shell; the others have Python."""
_AT_ONCE = 1e-6
"""Seconds that no stage keeps to."""


class Ending(StrEnum):
    """How a rollout ends."""

    SOLVED = "solved"
    WRONG = "wrong"
    RUN_TIMEOUT = "RUN timeout"
    CONTEXT_FULL = "context overflow"
    CANCELLED = "cancelled"
    INIT_FAILED = "INIT failure"
    EVAL_FAILED = "EVAL failure"
    ENGINE_OUTAGE = "engine outage"
    ENGINE_SILENT = "engine timeout"


MEASURED = (Ending.SOLVED, Ending.WRONG, Ending.RUN_TIMEOUT, Ending.CONTEXT_FULL)
"""Endings that measure the policy: they have a reward and no mask."""
UNMEASURED = tuple(ending for ending in Ending if ending not in MEASURED)
NEVER_SAMPLED = (Ending.INIT_FAILED, Ending.ENGINE_SILENT)


@cache
def _example(environment: str) -> str:
    rows = GYM_ROOT / f"environments/prorl_{environment}/data/example.jsonl"
    return rows.read_text("utf-8").splitlines()[_ROWS[environment]]


def example(environment: str) -> dict[str, Any]:
    """Return an example row of an environment, as NeMo-RL posts it to ``/run``, without indices."""
    row = json.loads(_example(environment))
    row["responses_create_params"] |= {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 4096}
    return row | {"agent_ref": {"type": "responses_api_agents", "name": "masking_agent"}}


def gold(environment: str) -> list[ScriptedStep]:
    """Return the turns that solve the example."""
    return gold_steps(environment, example(environment)["task"])


def run_in_sandbox(environment: str, shell: str, python: str) -> ScriptedStep:
    """Return a turn that runs a command in the sandbox, with the tool that the environment has."""
    if environment in SHELL:
        return ScriptedStep("I run it.", "bash", {"command": shell})
    return ScriptedStep("I run it.", "python", {"code": python})


def finish(answer: str = "done") -> ScriptedStep:
    return ScriptedStep("That is all.", "finish", {"answer": answer})


def row_that_ends(environment: str, ending: Ending, agent: str) -> dict[str, Any]:
    """Return the row of a group that has a member for each ending."""
    row = example(environment)
    place = list(Ending).index(ending)
    # The replica that breaks is another task of the same prompt, so only its row can say which group it belongs to.
    row["prorl"] = {"group_id": f"{agent}-{environment}", "group_size": len(Ending), "replica": place}
    limits = {
        Ending.RUN_TIMEOUT: {"run_seconds": 5.0},
        Ending.ENGINE_SILENT: {"run_seconds": 1.0},
        Ending.EVAL_FAILED: {"eval_seconds": _AT_ONCE},
    }.get(ending, {})
    if ending is Ending.INIT_FAILED:
        if environment in ("swe", "taskdir"):  # they start a sandbox there
            limits = {"init_seconds": _AT_ONCE}
        else:
            row["task"] = {"question": row["task"]["question"]}
    row["prorl"]["settings"] = limits
    return row | {"_ng_task_index": 0, "_ng_rollout_index": place, "_rowidx": place}


def script_of(environment: str, ending: Ending, gate: Any) -> Script:
    """Return what the policy and the server do in that rollout; the gate stays closed."""
    task = example(environment)["task"]
    sleeping = run_in_sandbox(environment, "sleep 600", "import time; time.sleep(600)")
    match ending:
        case Ending.WRONG:
            return Script(wrong_steps(environment, task, 0))
        case Ending.RUN_TIMEOUT:
            return Script([sleeping])
        case Ending.CONTEXT_FULL:
            return Script([run_in_sandbox(environment, "true", "1"), finish()], Fault.CONTEXT_FULL)
        case Ending.CANCELLED:
            return Script([run_in_sandbox(environment, "true", "1"), finish()], gate=gate)
        case Ending.ENGINE_SILENT:
            return Script([finish()], at=0, gate=gate)
        case Ending.ENGINE_OUTAGE:
            return Script([run_in_sandbox(environment, "true", "1"), finish()], Fault.OUTAGE)
        case _:
            return Script(gold(environment))
