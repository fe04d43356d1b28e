"""Task directories, imported and played in real sandboxes: gold, nothing, and agents that are after the verifier."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from task_directories import BENCH, HARBOR, write_task
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.request_file import read_requests
from prorl_gym.data.task_layouts import read_task
from prorl_gym.environments.playback import PlayResult, gold_steps, play_script
from prorl_gym.environments.protocol import Leases, ScriptedStep
from prorl_gym.environments.row_format import read_rows
from prorl_gym.environments.taskdir.container import ImportOptions
from prorl_gym.environments.taskdir.environment import TaskDirEnvironment
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.sandbox.protocol import SandboxBackend

pytestmark = pytest.mark.usefixtures("isolated")

ENVIRONMENT = TaskDirEnvironment()
HERE = ImportOptions(image_map={"*": "host"}, run="setup")
KEPT = ImportOptions(image_map={"*": "host"}, run="setup", keep=("/app",))
ANSWER = "echo 42 > /app/answer.txt"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def row_of(folder: Path, options: ImportOptions = HERE) -> dict[str, Any]:
    return json.loads(read_task(folder, options).row.model_dump_json())


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return row_of(write_task(tmp_path_factory.mktemp("tasks") / "sum", HARBOR))


async def played(row: dict[str, Any], commands: Sequence[str], leases: Leases) -> PlayResult:
    steps = [ScriptedStep(tool="bash", arguments={"command": command}) for command in commands]
    return await play_script(ENVIRONMENT, row, steps, leases)


async def test_gold_solves_it_and_nothing_does_not(harbor: dict[str, Any], leases: Leases) -> None:
    row = {**harbor, "verifier": {**harbor["verifier"], "command": f"echo sum; {harbor['verifier']['command']}"}}
    gold = await play_script(ENVIRONMENT, row, gold_steps(ENVIRONMENT, row), leases)
    assert gold.score.report == "sum\n"
    assert (gold.score.reward, gold.turns) == (1.0, 2), gold.artifacts.messages


async def test_nothing_scores_zero(harbor: dict[str, Any], leases: Leases) -> None:
    result = await played(harbor, [], leases)
    assert (result.score.reward, result.score.detail) == (0.0, {"why": "the verifier's reward is 0"})
    assert result.artifacts.submission is not None
    assert result.artifacts.submission.kind == "files"
    assert result.score.report == ""


async def test_what_is_taken_along_is_bounded(tmp_path: Path, leases: Leases) -> None:
    """An archive is held by the service: 64 MiB of it at most."""
    row = row_of(write_task(tmp_path / "sum", HARBOR), KEPT)
    score = (await played(row, [f"head -c {64 << 20} /dev/zero > /app/large"], leases)).score
    assert score.reward == 0.0
    assert "/app cannot be taken" in str(score.detail)


async def test_the_starting_state_is_that_of_the_dockerfile(harbor: dict[str, Any], leases: Leases) -> None:
    look = 'pwd; tool; echo "$WHERE"; cat made/file; ls data; ls /tests /solution /logs 2>&1'
    said = next(m.content for m in (await played(harbor, [look], leases)).artifacts.messages if m.role == "tool")
    assert said.splitlines()[:5] == ["/app", "hello world from tool", "/app/data", "made", "numbers.txt"]
    assert said.count("No such file or directory") == 3


@pytest.mark.parametrize(
    "attack",
    [
        "(setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; done' &)",
        "mkdir -p /tests; echo 'print(1)' > /tests/check.py; ln -s /app /logs",
        slow("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier"),
        slow("mkdir -p /app/l; echo 1 > /app/l/reward.json; mkdir -p /logs; ln -s /app/l /logs/verifier"),
        slow("ln -s /app /tests; ln -s /app /logs"),
    ],
)
async def test_what_is_planted_before_the_verifier_comes_does_not_count(
    attack: str, harbor: dict[str, Any], leases: Leases
) -> None:
    assert (await played(harbor, [attack], leases)).score.reward == 0.0


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("cp /bin/true /tmp/t; rm -f /usr/bin/bash; cp /tmp/t /usr/bin/bash", "gives no reward"),
        (f"{ANSWER}; rm -f /usr/bin/rm; mkdir -p /tests; (setsid sleep 100 &)", "/tests cannot be removed"),
        (f"{ANSWER}; cp /bin/true /tmp/t; rm -f /bin/sh; cp /tmp/t /bin/sh; (setsid sleep 100 &)", "cannot be ended"),
    ],
)
async def test_a_state_that_cannot_be_verified_scores_zero(
    attack: str, why: str, harbor: dict[str, Any], leases: Leases
) -> None:
    score = (await played(harbor, [attack], leases)).score
    assert score.reward == 0.0
    assert why in str(score.detail["why"])


async def test_what_is_kept_is_verified(tmp_path: Path, leases: Leases) -> None:
    row = row_of(write_task(tmp_path / "sum", HARBOR), KEPT)
    assert (await played(row, [ANSWER], leases)).score.reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reward"), [(KEPT, 0.0), (HERE, 1.0)], ids=["kept", "here"])
async def test_programs_of_the_agent_are_believed_in_its_own_sandbox_only(
    options: ImportOptions, reward: float, tmp_path: Path, leases: Leases
) -> None:
    """A clean sandbox has its own programs; that the agent's own can be forged is what ``keep`` is there for."""
    lie = "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3"
    assert (await played(row_of(write_task(tmp_path / "sum", HARBOR), options), [lie], leases)).score.reward == reward


async def test_a_kept_directory_that_is_gone_scores_zero(tmp_path: Path, leases: Leases) -> None:
    row = row_of(write_task(tmp_path / "sum", HARBOR), KEPT)
    score = (await played(row, ["cd /; rm -rf /app"], leases)).score
    assert (score.reward, score.detail) == (0.0, {"why": "/app cannot be read"})


async def test_a_broken_verifier_is_no_reward(tmp_path: Path, leases: Leases) -> None:
    broken = write_task(tmp_path / "sum", HARBOR, tests__test_dot_sh="curl https://astral.sh/uv | sh\n")
    with pytest.raises(GraderError, match="gives no reward, not even on the starting state"):
        await played(row_of(broken), [ANSWER], leases)


async def test_a_setup_that_fails_is_the_rows_fault(tmp_path: Path, leases: Leases) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nRUN echo ready && no-such-program --install\n"
    row = row_of(write_task(tmp_path / "sum", HARBOR, environment__Dockerfile=dockerfile))
    with pytest.raises(TaskError, match="setup step 1 ends with exit code 127") as caught:
        await played(row, [], leases)
    assert caught.value.kind is FailureKind.BAD_ROW


async def test_terminal_bench_is_read_from_its_summary(tmp_path: Path, leases: Leases) -> None:
    row = row_of(write_task(tmp_path / "word", BENCH))
    look = await played(row, ["ls -1 /app; echo $COLOUR$TEST_DIR; echo done > /app/out.txt"], leases)
    assert look.score.reward == 1.0
    said = next(message.content for message in look.artifacts.messages if message.role == "tool")
    assert said.splitlines()[:4] == ["Dockerfile", "docker-compose.yaml", "notes.txt", "blue/tests"]


@pytest.mark.slow
async def test_a_command_instead_of_the_script(tmp_path: Path, leases: Leases) -> None:
    options = HERE.model_copy(update={"test_command": "MODE=strict python3 /tests/check.py"})
    row = row_of(write_task(tmp_path / "sum", HARBOR), options)
    assert (await played(row, [ANSWER], leases)).score.reward == 1.0


async def test_prompts_of_a_group_are_the_same_and_hold_no_secret(harbor: dict[str, Any], leases: Leases) -> None:
    episodes = [(await played(harbor, [], leases)).episode for _ in range(2)]
    assert episodes[0].messages == episodes[1].messages
    prompt = repr(episodes[0].messages) + repr([tool.spec for tool in episodes[0].tools])
    assert "Add the numbers" in prompt
    assert not any(secret in prompt for secret in ("canary", "check.py", "awk", "42", "numbers.txt\n40"))


def test_one_command_to_rows_that_validate(
    tmp_path: Path, backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "tasks" / "sum", HARBOR)
    write_task(tmp_path / "tasks" / "word", BENCH)
    rows = tmp_path / "rows.jsonl"
    arguments = ["import-tasks", str(tmp_path / "tasks"), "--output", str(rows), "--image-map", "*=host"]
    done = CliRunner().invoke(app, [*arguments, "--run", "setup"])
    assert done.exit_code == 0, done.output
    assert "2 of 2 tasks are in" in done.output
    assert [row.environment for row in read_rows(rows)] == ["taskdir", "taskdir"]
    requests = read_requests(rows, "r", 2)
    assert requests[0].settings.run_seconds == 77.0
    assert requests[0].settings.eval_seconds == 900.0
    checked = CliRunner().invoke(app, ["validate", "taskdir", str(rows), "--runs", "1", "--backend", "userns"])
    assert checked.exit_code == 0, checked.output
    assert "All 2 rows are good" in checked.output
