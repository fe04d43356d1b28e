"""NeMo Gym's own simple agent over our model server and our rollout server's tools. Slow: it starts Gym and Ray."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from prorl_gym.cli.installation import gym_root
from prorl_gym.trainers.nemo_rl import check_result

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

# In a process of its own: ending what was started needs to adopt orphans, which a test process must not.
RUN = """
    import asyncio, sys
    from pathlib import Path

    import yaml

    from prorl_gym.cli.demo.process_supervisor import ProcessSupervisor
    from prorl_gym.cli.demo.stack import HOST, PolicyEndpoint, DemoFolders, DemoStack, free_ports
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    class ForeignStack(DemoStack):
        def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
            (head,) = free_ports(1)
            self._head_url = f"http://{HOST}:{head}"
            agent = {
                "entrypoint": "app.py",
                "max_steps": 8,
                "resources_server": {"type": "resources_servers", "name": "prorl_rollout"},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
            relay = {"entrypoint": "app.py", "agent_server": {"type": "responses_api_agents", "name": "simple"}}
            config = {
                "config_paths": [
                    "resources_servers/prorl_rollout/configs/prorl_rollout.yaml",
                    "responses_api_models/prorl_model/configs/prorl_model.yaml",
                ],
                **self._base_config(engines, head),
                "simple": {"responses_api_agents": {"simple_agent": agent}},
                "simple_environment": {"environment_servers": {"legacy_agent": relay}},
            }
            self._config.write_text(yaml.safe_dump(config))
            return {}  # no server is listed here: Gym chooses their ports

    async def main(output: Path, scratch: Path, rows: Path) -> None:
        set_child_subreaper()
        family = ProcessSupervisor(output)
        stack = ForeignStack(family, DemoFolders(output, scratch))
        try:
            await stack.start_gym(await stack.start_oracles(2))
            evaluation = await stack.start_eval(rows, 2)
            await asyncio.wait_for(evaluation.process.wait(), 120)
            print(evaluation.tail() if evaluation.process.returncode else "collected")
        finally:
            print("left", await family.stop_all())

    asyncio.run(main(*map(Path, sys.argv[1:])))
"""


def test_simple_agent_makes_token_exact_rollouts_with_our_tools(tmp_path: Path, short_directory: Path):
    folder = gym_root() / "environments"
    rows = [
        json.loads(line)
        for environment in ("math", "swe")
        for line in (folder / f"prorl_{environment}/data/example.jsonl").read_text().splitlines()
    ]
    for row in rows:
        row["agent_ref"]["name"] = "simple"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path), str(short_directory), str(tmp_path / "rows.jsonl")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["collected", "left", "0"], done.stdout
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(results) == 20
    for result in results:
        check_result(result)
    assert any(item["type"] == "function_call_output" for result in results for item in result["response"]["output"])
    for environment in ("math", "swe"):  # the oracle solves most of them; swe takes bash and the editor
        rewards = [result["reward"] for result in results if result["environment"] == environment]
        assert 1.0 in rewards, (environment, rewards)
    outputs = [item for result in results for item in result["response"]["output"]]
    assert not any("Not Found" in str(item.get("output")) for item in outputs if item["type"] == "function_call_output")
