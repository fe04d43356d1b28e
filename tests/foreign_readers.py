"""Answers for the owners of foreign formats: run by the interpreter of ``.ci/oracles``, one JSON object a line.

Harbor plays a task with its own model, oracle agent and verifier on an environment that only notes what it should do;
SWE-bench's registry of parsers reads a log.
"""

import asyncio
import importlib
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import swebench
from harbor.agents.oracle import OracleAgent
from harbor.models.task.config import TaskConfig, TaskOS
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier

# `swebench.harness` itself imports docker, datasets and modal, its parsers do not.
harness = types.ModuleType("swebench.harness")
harness.__path__ = [f"{swebench.__path__[0]}/harness"]
sys.modules["swebench.harness"] = harness
PARSERS = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY

warnings.simplefilter("ignore")
for variable in set(os.environ) - {"PATH"}:
    del os.environ[variable]  # templates of a task must not find the tests' own


def read_tree(folder: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


class Environment:
    """Notes uploads and commands; its logs are mounted, so that what is in the trial's directory counts."""

    os = TaskOS.LINUX

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.commands: list[str] = []
        self.env: dict[str, str] = {}

    async def upload_dir(self, source_dir: Path, target_dir: str) -> None:
        self.files |= {f"{target_dir}/{name}": data.hex() for name, data in read_tree(Path(source_dir))}

    async def exec(self, command: str, env: dict[str, str] | None = None, **_: Any) -> types.SimpleNamespace:
        self.commands.append(command)
        self.env |= env or {}
        return types.SimpleNamespace(return_code=0, stdout="", stderr="")

    def is_path_mounted(self, *_: Any) -> bool:
        return True

    @contextmanager
    def scoped_exec_env(self, env: dict[str, str]) -> Any:
        self.env |= env
        yield

    def noted(self) -> dict[str, Any]:
        ran = [command for command in self.commands if not re.match("rm|chmod", command)]
        return {"files": self.files, "commands": ran, "env": self.env}


async def play(folder: str, logs: str) -> dict[str, Any]:
    """Return how Harbor reads a task, and what it would do; ``logs`` is the directory of its trial."""
    task, paths = Task(folder), TrialPaths(Path(logs))
    config = task.config
    answer: dict[str, Any] = {"instruction": task.instruction, "config": config.model_dump(mode="json")}
    answer["env"] = resolve_env_vars(config.environment.env)
    solution = Environment()
    if task.paths.solve_path.exists():
        agent = OracleAgent(paths.agent_dir, Path(folder), paths)
        await agent.run(task.instruction, solution, None)  # type: ignore[arg-type]
        answer["solution"] = solution.noted()
    tests = Environment()
    with suppress(FileNotFoundError):  # it has left no reward
        await Verifier(task, paths, tests).verify()  # type: ignore[arg-type]
    return {**answer, "tests": tests.noted()}


async def reward(folder: str, logs: str) -> dict[str, Any]:
    """Return the rewards that Harbor finds in the logs of a trial."""
    verifier = Verifier(Task(folder), TrialPaths(Path(logs)), Environment())  # type: ignore[arg-type]
    return {"rewards": (await verifier.verify()).rewards}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "schema" in request:
        return TaskConfig.model_json_schema()
    if "log" in request:
        return PARSERS[request["parser"]](request["log"], None)
    ask = reward if request["ask"] == "reward" else play
    return asyncio.run(ask(request["task"], request["logs"]))


for line in sys.stdin:
    try:
        said = {"answer": answer(json.loads(line))}
    except Exception as error:  # whatever it refuses a file with
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), flush=True)
