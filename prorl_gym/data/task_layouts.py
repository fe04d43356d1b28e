"""Task directories as Harbor 0.26.0 and Terminal-Bench 0.2.18 lay them out, read as rows.

Harbor: ``task.toml``, ``instruction.md``, ``environment/Dockerfile``, ``tests/test.sh``, ``solution/solve.sh``; the
verifier writes ``/logs/verifier/reward.txt`` or ``reward.json``. Terminal-Bench: ``task.yaml``, ``Dockerfile``,
``run-tests.sh``, ``tests/``, ``solution.sh``; the verifier prints pytest's short summary.
"""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from prorl_gym.environments.taskdir.container import (
    Container,
    FileBudget,
    ImportOptions,
    read_container,
    read_text,
    read_tree,
    resolve_within,
)
from prorl_gym.environments.taskdir.task_dir_row import Solution, TaskDirRow, TaskFile, Verifier
from prorl_gym.errors import ConfigError
from prorl_gym.settings import RolloutSettings

_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024}


def _check_plain(value: str) -> str:
    if "${" in value:
        raise ValueError("${...} is a variable of the host, write its value out")
    return value


_Plain = Annotated[str, AfterValidator(_check_plain)]
"""A value without a variable of the host that a harness would fill in."""
_VERIFIER_SECONDS = 600.0
"""Harbor's default."""
_LEAST_EVAL_SECONDS = 900.0
_EVAL_FACTOR = 2.5
"""Deadline of EVAL per second of the verifier: it may have to run a second time, on the starting state."""


@dataclass(frozen=True, slots=True)
class ImportedTask:
    """A task as a row, and the limits from its directory."""

    row: TaskDirRow
    settings: RolloutSettings
    notes: tuple[str, ...]
    """Parts of the directory without a meaning here."""


class _Table(BaseModel):
    """Fields of Harbor 0.26.0, schema 1.4 (its ``TaskConfig``), and the values that a sandbox can honour."""

    model_config = ConfigDict(extra="forbid")


class _Agent(_Table):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: Literal["root", 0] = "root"
    network_mode: Literal["no-network", "public"] = "public"


class _Solution(_Table):
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], _Plain] = {}


class _Limits(_Agent, _Solution):
    environment_mode: Literal["shared"] = "shared"


class _Environment(_Solution):
    docker_image: str = ""
    os: Literal["linux"] = "linux"
    memory: str = Field(default="", pattern=r"^\d+(\.\d+)?[KMGkmg]$")
    memory_mb: int | None = None
    gpus: Literal[0] = 0
    workdir: str = ""
    allow_internet: bool | None = None
    network_mode: Literal["no-network", "public"] = "public"

    @model_validator(mode="after")
    def _read_memory(self) -> Self:
        if self.memory:
            size = int(float(self.memory[:-1]) * _MEGABYTES[self.memory[-1].upper()])
            if self.memory_mb not in (None, size):
                raise ValueError("'memory' and 'memory_mb' are different")
            self.memory_mb = size
        return self


class _HarborTask(_Table):
    version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    agent: _Agent = _Agent()
    verifier: _Limits = _Limits()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: list[Any] = []


_LEFT_OUT = {"task", "metadata", "source", "artifacts"}
_LEFT_OUT_OF_ENVIRONMENT = {"build_timeout_sec", "cpus", "storage", "storage_mb"}
"""What describes a task, and limits that change no result."""


_HARBOR_ENTRIES = {"task.toml", "instruction.md", "environment", "tests", "solution", "README.md", ".gitignore"}
_NETWORK = re.compile(r"(?m)^[^#\n]*?\b(apt|apt-get|apk|conda|curl|npm|pip|pip3|uv|uvx|wget)\s")
"""A line of a verifier's script that probably needs a network."""


class _TerminalBenchTask(BaseModel):
    """Fields of Terminal-Bench 0.2.18 (its ``Task``), and ``descriptions`` of its first tasks."""

    model_config = ConfigDict(extra="forbid")
    instruction: str = ""
    descriptions: list[dict[str, Any]] = []
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = Field(default=60.0, gt=0)
    run_tests_in_same_shell: Literal[False] = False


_LEFT_OUT_OF_BENCH = {
    *("author_name", "author_email", "difficulty", "category", "tags", "disable_asciinema"),
    *("estimated_duration_sec", "expert_time_estimate_min", "junior_time_estimate_min"),
}
"""What describes a task, and its recording."""


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def read_task(folder: Path, options: ImportOptions) -> ImportedTask:
    """Read a task directory. Raises ``ConfigError`` if it is none, or needs something that a sandbox cannot do."""
    try:
        if (folder / "task.toml").is_file():
            return _read_harbor(folder, options)
        if (folder / "task.yaml").is_file():
            return _read_terminal_bench(folder, options)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        why = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{folder}: '{where}' is wrong: {why}.", "Mend it in the task's directory.") from None
    raise ConfigError(f"{folder}: has neither task.toml nor task.yaml.", "Give directories of tasks.")


def _read_harbor(folder: Path, options: ImportOptions) -> ImportedTask:
    try:
        table = tomllib.loads(read_text(folder / "task.toml"))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        raise ConfigError(f"{folder}/task.toml: not valid TOML ({error}).", "Mend it.") from None
    left_out = sorted(_LEFT_OUT & table.keys())
    environment: Any = table.get("environment")
    if isinstance(environment, dict):
        environment = cast(dict[str, Any], environment)
        limits = sorted(_LEFT_OUT_OF_ENVIRONMENT & environment.keys())
        table["environment"] = {name: value for name, value in environment.items() if name not in limits}
        left_out += limits
    task = _HarborTask.model_validate({name: value for name, value in table.items() if name not in _LEFT_OUT})
    if task.steps or (folder / "steps").is_dir():
        raise ConfigError(f"{folder}: a task of several steps.", "Only tasks with one instruction can be imported.")
    for found in (folder / "trajectory.json", *folder.rglob(".harborignore")):
        if found.exists():
            raise ConfigError(f"{found}: is not understood.", "Only tasks without it can be imported.")
    budget = FileBudget()
    container = read_container(
        resolve_within(folder, "environment"),
        options,
        budget,
        prebuilt=task.environment.docker_image,
        workdir=task.environment.workdir,
        env=task.environment.env,
        service="main",
    )
    container.notes += [f"'{name}' of task.toml is left out" for name in left_out]
    others = {entry.name for entry in folder.iterdir()} - _HARBOR_ENTRIES
    container.notes += [f"'{name}' of the directory is left out" for name in sorted(others)]
    parts = (task.agent, task.verifier, task.environment)
    modes = {part.network_mode for part in parts if "network_mode" in part.model_fields_set}
    if task.environment.allow_internet or "public" in modes:
        container.notes.append("the task may use the internet, a sandbox has none")
    files = _tests(folder, budget)
    verifier = _verifier(files, "/tests/test.sh", "file", task.verifier, options, container.notes)
    solution = None
    if (folder / "solution" / "solve.sh").is_file():
        placed = _with_script(read_tree(resolve_within(folder, "solution"), "/solution", budget), "/solution/solve.sh")
        given = [f"export {name}={shlex.quote(value)}; " for name, value in task.solution.env.items()]
        solution = Solution(files=placed, command="".join([*given, "/solution/solve.sh"]))
    size = (task.environment.memory_mb or 0) << 20 or None
    lines = re.sub(r"\r\n?", "\n", read_text(folder / "instruction.md")).split("\n")
    while lines and _is_canary(lines[0].strip().lower()):
        lines.pop(0)
    question = "\n".join(lines)
    return _build_imported_task(folder, question, container, verifier, solution, size, task.agent.timeout_sec, options)


def _is_canary(line: str) -> bool:
    """Whether a line only marks the text as part of a benchmark, as Harbor's ``strip_canary`` has it."""
    return "canary" in line and (line[0] == "#" or (line.startswith("<!--") and line.endswith("-->")))


def _read_terminal_bench(folder: Path, options: ImportOptions) -> ImportedTask:
    import yaml

    try:
        given: Any = yaml.safe_load(read_text(folder / "task.yaml"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}/task.yaml: not valid YAML ({str(error)[:300]}).", "Mend it.") from None
    table = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    task = _TerminalBenchTask.model_validate({k: v for k, v in table.items() if k not in _LEFT_OUT_OF_BENCH})
    if task.parser_name != "pytest" and not options.test_command:
        fix = "Only pytest's summary is read; or give --test-command, whose exit code counts."
        raise ConfigError(f"{folder}/task.yaml: parser_name '{task.parser_name[:40]}' is not known.", fix)
    budget = FileBudget()
    # The Dockerfile is next to files that the agent must not see, so COPY is checked against these names.
    hidden = {"tests", "run-tests.sh", "task.yaml", "solution.sh", "solution.yaml", "solution"}
    container = read_container(folder, options, budget, hidden=hidden)
    container.notes += [f"'{name}' of task.yaml is left out" for name in sorted(table.keys() & _LEFT_OUT_OF_BENCH)]
    if len(task.descriptions) > 1 or (folder / "solution.yaml").exists():
        container.notes.append("other descriptions than 'base', and solution.yaml, are left out")
    files = _tests(folder, budget)
    if (folder / "run-tests.sh").is_file():
        script = read_text(folder / "run-tests.sh").encode()
        files = [*files, TaskFile(path="/tests/run-tests.sh", data=script, executable=True)]
    limits = _Limits(timeout_sec=task.max_test_timeout_sec, env={"TEST_DIR": "/tests"})
    verifier = _verifier(files, "bash /tests/run-tests.sh", "pytest", limits, options, container.notes)
    solution = None
    if (folder / "solution.sh").is_file():
        placed = TaskFile(path="/solution/solution.sh", data=read_text(folder / "solution.sh").encode())
        solution = Solution(files=(placed,), command="bash /solution/solution.sh")
    question = task.instruction or next(
        (str(one.get("description", "")) for one in task.descriptions if one.get("key") == "base"), ""
    )
    return _build_imported_task(
        folder, question, container, verifier, solution, None, task.max_agent_timeout_sec, options
    )


def _tests(folder: Path, budget: FileBudget) -> list[TaskFile]:
    if not (folder / "tests").is_dir():
        raise ConfigError(f"{folder}: has no tests/.", "There is nothing that could give a reward.")
    return read_tree(resolve_within(folder, "tests"), "/tests", budget)


def _with_script(files: list[TaskFile], script: str) -> tuple[TaskFile, ...]:
    """Return files, the script among them made executable."""
    return tuple(file.model_copy(update={"executable": True}) if file.path == script else file for file in files)


def _verifier(
    files: list[TaskFile], command: str, reward: Any, limits: _Limits, options: ImportOptions, notes: list[str]
) -> Verifier:
    script = command.split()[-1]
    found = next((file for file in files if file.path == script), None)
    if options.test_command:
        command, reward = options.test_command, "exit"
    elif found is None:
        raise ConfigError(f"There is no {script.removeprefix('/')}.", "Add it, or give --test-command.")
    elif match := _NETWORK.search(found.data.decode("utf-8", "replace")):
        notes.append(f"its tests run {match[1]}: a sandbox has no network, so see that `validate` finds the row good")
    seconds = limits.timeout_sec or _VERIFIER_SECONDS
    return Verifier(files=_with_script(files, script), command=command, reward=reward, env=limits.env, seconds=seconds)


def _build_imported_task(
    folder: Path,
    question: str,
    container: Container,
    verifier: Verifier,
    solution: Solution | None,
    memory: int | None,
    agent_seconds: float | None,
    options: ImportOptions,
) -> ImportedTask:
    row = TaskDirRow(
        id=folder.resolve().name,
        question=question.strip(),
        image=container.image,
        workdir=container.workdir,
        env=container.env,
        memory=memory,
        setup=tuple(container.setup),
        verifier=verifier,
        keep=options.keep,
        solution=solution,
    )
    notes = [*container.notes, *([] if solution else ["it has no solution: nothing proves it"])]
    eval_seconds = max(_LEAST_EVAL_SECONDS, _EVAL_FACTOR * verifier.seconds)
    return ImportedTask(row, RolloutSettings(run_seconds=agent_seconds, eval_seconds=eval_seconds), tuple(notes))
