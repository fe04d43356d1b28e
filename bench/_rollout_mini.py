"""mini-swe-agent's own loop and environments as a peer of ``bench peers``; run by the python of its own environment.

``_rollout_mini.py local|bwrap``, the workload as JSON in ``BENCH_WORK``. Its own scripted model answers after the
engine's delay, so that it pays for no HTTP call and no parsing; the loop, the templates and a process per command are
its own. Like its batch runner, one thread per rollout. The hidden tests run in its environment at the end.
"""
# The peer's package is in its own environment, not in this one.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from _rollout_load import answer_loads
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output

WORK: dict[str, Any] = json.loads(os.environ["BENCH_WORK"])
TEMPLATES: dict[str, Any] = yaml.safe_load(files("minisweagent.config").joinpath("mini.yaml").read_text())["agent"]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ""}


class DelayedModel(DeterministicModel):
    """Its scripted model, after the engine's time."""

    def query(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, Any]:
        """Return the next turn."""
        time.sleep(WORK["engine_seconds"])
        return super().query(messages, **kwargs)


def play(environment: Any, folder: Path, tests: Path, model: Any) -> tuple[float, str]:
    """Prepare the project, run the agent, run the hidden tests; return the reward and how the agent ended."""
    for path, text in WORK["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    environment.execute({"command": WORK["prepare"]})
    templates = {name: TEMPLATES[name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, environment, cost_limit=0.0, **templates)
    ended = agent.run(WORK["task"])
    tests.mkdir()
    (tests / "hidden.py").write_text(WORK["tests"])
    command = WORK["test_command"].replace("/tests/", f"{tests}/")
    passed = environment.execute({"command": f"PYTHONPATH=. {command}"})["returncode"] == 0
    return float(passed), ended["exit_status"]


def play_on_host(model: Any) -> tuple[float, str]:
    """Play in its local environment, in a directory of the host."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "app")
        folder.mkdir()
        return play(LocalEnvironment(cwd=str(folder), env=_CLEAN), folder, Path(name, "tests"), model)


def _scripted(play_with: Callable[[Any], tuple[float, str]]) -> float:
    outputs = [make_output("Next.", [{"command": command}]) for command in (*WORK["commands"], SUBMIT)]
    model = DelayedModel(outputs=outputs, cost_per_call=0.0)
    reward, ended = play_with(model)
    return reward * (ended == "Submitted" and model.current_index == len(outputs) - 1)


def _play_in_bubblewrap(model: Any) -> tuple[float, str]:
    """Its bubblewrap environment, with all namespaces unshared: by default it shares network and processes."""
    arguments = [*BubblewrapEnvironmentConfig().wrapper_args, "--unshare-all", "--uid", "61100", "--gid", "61100"]
    environment = BubblewrapEnvironment(wrapper_args=arguments)
    try:
        return play(environment, environment.working_dir, environment.working_dir / ".tests", model)
    finally:
        environment.cleanup()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    play_with = {"local": play_on_host, "bwrap": _play_in_bubblewrap}[sys.argv[1]]
    workers = ThreadPoolExecutor(128)

    async def rollout() -> float:
        """Run one in a thread."""
        return await asyncio.get_running_loop().run_in_executor(workers, _scripted, play_with)

    asyncio.run(answer_loads(rollout))
