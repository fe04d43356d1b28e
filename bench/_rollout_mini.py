"""mini-swe-agent's own loop and environments as a peer of ``bench peers``; run by the python of its own environment.

``_rollout_mini.py ENGINE_URL local|bwrap``, the workload as JSON in ``BENCH_WORK``. Its own scripted model answers
after the engine's delay, so that it pays for no HTTP call and no parsing; the loop, the templates and a process per
command are its own. Like its batch runner, one thread per rollout. The hidden tests run in its environment at the end.
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
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from _load import answer_loads
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
        time.sleep(WORK["engine_seconds"])
        return super().query(messages, **kwargs)


def _play(kind: str) -> float:
    """Prepare the project, run the agent, run the hidden tests; return the reward."""
    outputs = [make_output("Next.", [{"command": command}]) for command in (*WORK["commands"], SUBMIT)]
    model = DelayedModel(outputs=outputs, cost_per_call=0.0)
    with tempfile.TemporaryDirectory() as name:
        if kind == "local":
            folder, tests = Path(name, "app"), Path(name, "tests")
            folder.mkdir()
            environment: Any = LocalEnvironment(cwd=str(folder), env=_CLEAN)
        else:  # its bubblewrap, with all namespaces unshared: by default it shares network and processes
            unshared = ["--unshare-all", "--uid", "61100", "--gid", "61100"]
            arguments = [*BubblewrapEnvironmentConfig().wrapper_args, *unshared]
            environment = BubblewrapEnvironment(wrapper_args=arguments)
            folder, tests = environment.working_dir, environment.working_dir / ".tests"
        try:
            for path, text in WORK["files"].items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            environment.execute({"command": WORK["prepare"]})
            templates = {name: TEMPLATES[name] for name in ("system_template", "instance_template")}
            ended = DefaultAgent(model, environment, cost_limit=0.0, **templates).run(WORK["task"])
            tests.mkdir()
            (tests / "hidden.py").write_text(WORK["tests"])
            command = WORK["test_command"].replace("/tests/", f"{tests}/")
            passed = environment.execute({"command": f"PYTHONPATH=. {command}"})["returncode"] == 0
        finally:
            if kind != "local":
                environment.cleanup()
    has_played_all = ended["exit_status"] == "Submitted" and model.current_index == len(outputs) - 1
    return float(passed and has_played_all)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    workers = ThreadPoolExecutor(128)

    async def rollout() -> float:
        return await asyncio.get_running_loop().run_in_executor(workers, _play, sys.argv[2])

    asyncio.run(answer_loads(rollout))
