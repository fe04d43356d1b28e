"""The code environment's loop and tools in a real sandbox: what the model is shown, and what it cannot break."""

from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.protocol import Leases, RunContext, ScriptedStep
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings, resolve_settings

ROW = {"question": "Print 1.", "tests": {"kind": "stdio", "cases": [{"stdin": "", "stdout": "1"}]}}
STILL = "[The command is still running."


def bash(command: str, **more: Any) -> ScriptedStep:
    return ScriptedStep(tool="bash", arguments={"command": command, **more})


def python(code: str) -> ScriptedStep:
    return ScriptedStep(tool="python", arguments={"code": code})


async def observations(leases: Leases, *steps: ScriptedStep, seconds: float = 20.0) -> list[str]:
    """Play the steps and return what the tools said."""
    environment, artifacts = CodeEnvironment(), Artifacts()
    settings = resolve_settings(RolloutSettings(action_seconds=seconds))
    task = environment.parse_row(ROW)
    episode = await environment.init(task, leases, settings)
    await environment.run(task, episode, RunContext(ScriptedPolicy(steps), leases, settings, artifacts))
    return [message.content for message in artifacts.messages if message.role == "tool"]


async def test_shell_keeps_its_state_and_shares_files_with_python(leases: Leases):
    said = await observations(
        leases,
        bash("mkdir -p a && cd a && x=7 && echo 6 > f"),
        bash("echo $x; exit_code() { return 3; }; exit_code"),
        python("n = int(open('a/f').read())"),
        python("n * 7"),
    )
    assert said[1].startswith("7\n[Current working directory: ")
    assert said[1].endswith("/a]\n[Command finished with exit code 3]")
    assert said[2:] == ["[No output.]", "42"]


@pytest.mark.usefixtures("isolated")
async def test_observations_are_the_same_in_every_replica(backend: SandboxBackend):
    seen: list[list[str]] = []
    for _ in range(2):
        leases = SandboxLeases(backend)
        try:
            steps = (
                bash("pwd; whoami; hostname; ls -la; env | sort"),
                python("import os; print(os.getcwd())"),
                python("1/0"),
            )
            seen.append(await observations(leases, *steps))
        finally:
            await leases.close()
    first, second = ("\n".join(said) for said in seen)
    assert "workspace" in first
    assert without_times(first) == without_times(second)


def without_times(text: str) -> list[str]:
    """``ls -la`` shows when the sandbox's directories were made."""
    return [line for line in text.splitlines() if not line.startswith("d")]


async def test_running_program_is_polled_answered_and_interrupted(leases: Leases):
    said = await observations(
        leases,
        bash("read -p 'name? ' name; echo hello $name; sleep 60"),
        bash("ls"),
        bash("bob", is_input=True),
        bash(""),
        bash("C-c", is_input=True),
        bash("echo $name"),
        seconds=0.5,
    )
    assert "name?" in said[0]
    assert STILL in said[0]
    assert "was not started" in said[1]
    assert "hello bob" in said[2]
    assert STILL in said[3]
    assert "[Command finished with exit code 130]" in said[4]
    assert said[5].startswith("bob\n")


async def test_grading_never_sees_the_agents_files(leases: Leases):
    environment = CodeEnvironment()
    task, settings = environment.parse_row(ROW), resolve_settings(environment.settings)
    episode = await environment.init(task, leases, settings)
    artifacts = Artifacts()
    steps = (
        bash("echo 'print(1)' > helper.py; cp helper.py /tmp"),
        ScriptedStep(tool="finish", arguments={"answer": CHEAT}),
    )
    await environment.run(task, episode, RunContext(ScriptedPolicy(steps), leases, settings, artifacts))
    score = await environment.evaluate(task, artifacts, leases, settings)
    assert (score.reward, score.detail["why"]) == (0.0, "wrong output")


CHEAT = """
import os
for folder in (".", "/workspace", os.path.dirname(os.path.abspath(__file__))):
    if os.path.exists(os.path.join(folder, "helper.py")):
        print(1)
        break
"""
