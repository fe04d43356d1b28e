"""Example rows of the environments, turns that solve them with nothing but a shell, and an agent program at work."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripted_gateway import ScriptedGateway, ScriptedTurn

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments import registry
from prorl_gym.environments.protocol import Environment, Leases, RunContext
from prorl_gym.environments.row_format import read_rows
from prorl_gym.errors import LimitReached
from prorl_gym.harness.command import CommandAgent, CommandConfig
from prorl_gym.records import Score
from prorl_gym.settings import resolve_settings

_FILES = sorted(Path(__file__).parents[2].glob("environments/*/data/example.jsonl"))
EXAMPLE_ROWS = [row for file in _FILES for row in read_rows(file)]


def example_row(environment: str) -> Mapping[str, Any]:
    """Return the first example row of an environment, as its ``parse_row`` takes it."""
    return next(row.task for row in EXAMPLE_ROWS if row.environment == environment)


def solving_turns(environment: str) -> list[ScriptedTurn]:
    """Return turns that solve ``example_row`` by shell commands; an answer depends on their output."""
    row = example_row(environment)
    match environment:
        case "swe":
            apply = f"cat > /tmp/gold.patch <<'GOLD'\n{row['patch']}GOLD\ngit apply --whitespace=nowarn /tmp/gold.patch"
            look = ScriptedTurn("Let me look.", "git status --short; ls")
            return [look, ScriptedTurn("Now I repair it.", apply), ScriptedTurn("Repaired.")]
        case "code":
            program = next(step["arguments"]["command"] for step in row["gold_steps"] if step.get("tool") == "bash")
            source = program.split("<<'EOF'\n", 1)[1].split("EOF\n", 1)[0]
            return [ScriptedTurn("I try it.", program), ScriptedTurn(f"This is it:\n\n```python\n{source}```")]
        case "taskdir":
            steps = registry.get(environment).gold_steps(row)
            commands = [step.arguments["command"] for step in steps if step.tool == "bash" and step.arguments]
            return [*(ScriptedTurn("I do it.", command) for command in commands), ScriptedTurn("Done.")]
        case _:
            gold = row["answer"] if isinstance(row["answer"], str) else row["answer"][0]
            say = f"printf 'RESULT=%s\\n' {shlex.quote(gold)}"
            return [ScriptedTurn("I compute it.", say), ScriptedTurn("The answer is $\\boxed{{result}}$.")]


async def let_work(
    name: str, leases: Leases, command: CommandConfig, gateway: ScriptedGateway, artifacts: Artifacts
) -> Score:
    """Let a program work on the example row of an environment, and grade what it leaves."""
    environment: Environment[Any] = registry.get(name)
    settings = resolve_settings(environment.settings)
    task = environment.parse_row(example_row(name))
    episode = await environment.init(task, leases, settings)
    no_policy: Any = None  # no environment may call one
    context = RunContext(no_policy, leases, settings, artifacts, CommandAgent(command, gateway))
    try:
        await environment.run(task, episode, context)
    except LimitReached:
        pass
    return await environment.evaluate(task, artifacts, leases, settings)
