"""One of Gym's own sandboxed agents, mini-swe-agent 2, over our provider; a scripted model takes the policy's place."""

from collections.abc import Iterator

import gym_needed  # noqa: F401
import pytest
from responses_api_agents.mini_swe_agent_2.sandbox_environment import (
    MiniSWESandboxEnvironment,  # pyright: ignore[reportAttributeAccessIssue] - it comes from mini-swe-agent, which a bare machine lacks
)

pytestmark = [pytest.mark.slow, pytest.mark.gym, pytest.mark.mini_swe_agent]

EDIT = "mkdir -p pkg && printf 'def f():\\n    return 41\\n' > pkg/mod.py && sed -i 's/41/42/' pkg/mod.py"
LOOK = "cat pkg/mod.py; echo warned >&2; (exit 3)"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat pkg/mod.py"
RESULT = "def f():\n    return 42\n"


@pytest.fixture(params=["userns", pytest.param("apptainer", marks=pytest.mark.apptainer)])
def environment(request: pytest.FixtureRequest, found_by_gym: None) -> Iterator[MiniSWESandboxEnvironment]:
    provider = {"prorl": {"backend": request.param}}  # the one line of a Gym configuration
    with MiniSWESandboxEnvironment(image="host", provider=provider, env={"A": "b"}) as environment:
        yield environment


def test_agent_runs_to_its_submission(environment: MiniSWESandboxEnvironment) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.test_models import DeterministicModel, make_output

    outputs = [make_output("", [{"command": command}]) for command in (EDIT, LOOK, SUBMIT)]
    agent = DefaultAgent(
        DeterministicModel(outputs=outputs), environment, system_template="s", instance_template="{{task}}"
    )
    outcome = agent.run("return 42")
    assert (outcome["exit_status"], outcome["submission"]) == ("Submitted", RESULT)
    assert any("warned" in str(message["content"]) for message in agent.messages)
