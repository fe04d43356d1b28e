"""Agent programs in a real sandbox, behind a gateway with a scripted policy: rows that they solve, and attacks."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from example_turns import example_row, let_work, solving_turns
from scripted_gateway import ScriptedGateway, ScriptedTurn

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import LimitReached
from prorl_gym.harness.command import MODEL_PORT, CommandAgent, CommandConfig
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import Mount, SandboxBackend, SandboxSpec
from prorl_gym.settings import resolve_settings

AGENT = """
import json, os, subprocess, sys, urllib.request

def call(messages):
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {
        "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    said = call(messages)
    messages.append(said)
    print(said["content"], flush=True)
    if not said.get("tool_calls"):
        break
    for asked in said["tool_calls"]:
        command = json.loads(asked["function"]["arguments"])["command"]
        ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": asked["id"], "content": ran.stdout + ran.stderr})
sys.exit(7)
"""
"""A whole agent of thirty lines; its exit code means nothing."""

COMMAND = CommandConfig(
    argv=("python3", "$home/agent.py", "$task"), env={"URL": "$url", "KEY": "$token"}, files={"$home/agent.py": AGENT}
)


@pytest.mark.parametrize("name", ["math", "stem", "code", "swe", "taskdir"])
async def test_a_program_solves_an_example_row(name: str, leases: Leases):
    gateway = ScriptedGateway(solving_turns(name))
    artifacts = Artifacts()
    score = await let_work(name, leases, COMMAND, gateway, artifacts)
    assert score.reward == 1.0
    assert artifacts.log.endswith("[The program ended with exit code 7.]")
    assert [message.role for message in artifacts.messages[:2]] == ["user", "assistant"]


async def test_the_limit_of_turns_ends_the_program_and_what_it_did_is_graded(leases: Leases):
    gateway = ScriptedGateway([*solving_turns("swe")[:-1], *[ScriptedTurn("Again.", "true")] * 9], max_turns=3)
    artifacts = Artifacts()
    score = await let_work("swe", leases, COMMAND, gateway, artifacts)
    assert isinstance(await gateway.wait_stopped(), LimitReached)
    assert artifacts.log.endswith("[The program was stopped.]")
    assert score.reward == 1.0


async def run_program(
    leases: Leases, script: str, gateway: ScriptedGateway, artifacts: Artifacts | None = None
) -> Artifacts:
    """Run a shell script as the agent of a code row."""
    environment, artifacts = CodeEnvironment(), artifacts or Artifacts()
    settings = resolve_settings(environment.settings)
    episode = await environment.init(environment.parse_row(example_row("code")), leases, settings)
    command = CommandConfig(argv=("bash", "-c", script), env={"URL": "$url", "KEY": "$token"})
    await CommandAgent(command, gateway).run(episode, artifacts)
    return artifacts


TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}


def ask(body: Mapping[str, Any] = BODY) -> str:
    """A call of the model, in python: not every machine has curl in /usr."""
    script = (
        "import json,os,sys,urllib.request as r;"
        "q=r.Request(os.environ['URL']+'/v1/chat/completions',sys.argv[1].encode(),"
        "{'x-api-key':os.environ['KEY'],'Content-Type':'application/json'});"
        "print(json.load(r.urlopen(q))['choices'][0]['message']['content'])"
    )
    return f"python3 -c \"{script}\" '{json.dumps(body)}'"


async def test_the_end_of_a_long_log_is_kept(leases: Leases):
    gateway = ScriptedGateway([ScriptedTurn("x")])
    artifacts = await run_program(leases, f"{ask()}; seq 1 1000000; echo end", gateway)
    assert artifacts.log.endswith("1000000\nend\n\n[The program ended with exit code 0.]")
    assert len(artifacts.log) < 17 << 10


async def test_a_deadline_kills_the_program_and_all_below_it_and_keeps_its_log(leases: Leases):
    gateway = ScriptedGateway([ScriptedTurn("x")])
    artifacts = Artifacts()
    script = f"{ask()}; setsid sleep 4242 & sleep 4242"
    running = asyncio.ensure_future(run_program(leases, script, gateway, artifacts))
    async with asyncio.timeout(60):
        sandbox = await leases.get_agent_sandbox(CodeEnvironment.sandbox)
        count = ["sh", "-c", "grep -lsx sleep /proc/[0-9]*/comm | wc -l"]
        while int((await sandbox.exec(count, timeout=20)).stdout) < 2:  # noqa: ASYNC110 - nothing tells us from inside
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert int((await sandbox.exec(count, timeout=20)).stdout) == 0
    assert artifacts.log == "x\n\n[The program was stopped.]"
    assert (artifacts.answer or "").strip() == "x"


async def test_the_gateway_is_gone_when_the_program_is(leases: Leases):
    gateway = ScriptedGateway([ScriptedTurn("x")])
    await run_program(leases, ask(), gateway)
    sandbox = await leases.get_agent_sandbox(CodeEnvironment.sandbox)
    env = {"URL": f"http://127.0.0.1:{MODEL_PORT}", "KEY": gateway.token}
    late = await sandbox.exec(["bash", "-c", ask()], timeout=20, env=env)
    assert b"refused" in late.stderr
    assert len(gateway.engine.requests) == 1


@pytest.fixture
def layer() -> Iterator[Path]:
    """A directory that the sandboxes' user can read, which it cannot below pytest's own."""
    with TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.usefixtures("isolated")
async def test_a_mount_is_read_only_and_of_the_agents_sandbox_alone(backend: SandboxBackend, layer: Path):
    (layer / "tool").write_text("echo mounted")
    leases = SandboxLeases(backend)
    try:
        leases.mount_for_agent([Mount(str(layer), "/.prorl/agent")])
        gateway = ScriptedGateway([ScriptedTurn("x")])
        script = f"{ask()}; bash /.prorl/agent/tool; touch /.prorl/agent/new || echo refused"
        artifacts = await run_program(leases, script, gateway)
        assert "mounted" in artifacts.log
        assert "refused" in artifacts.log
        clean = await leases.start_clean_sandbox(SandboxSpec())
        assert (await clean.exec(["ls", "/.prorl/agent"], timeout=20)).exit_code != 0
    finally:
        await leases.close()
