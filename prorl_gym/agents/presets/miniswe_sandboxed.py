"""NeMo Gym's ``miniswe_sandboxed_agent``: mini-swe-agent as it sets it up, over responses, not streamed."""

import json

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets import mini_swe_agent
from prorl_gym.agents.presets.layers import Preset

_MINI = mini_swe_agent.PRESET

_SETTINGS = {
    "agent": {"agent_class": "default", "step_limit": 0, "cost_limit": 0},  # the gateway counts turns
    "environment": {"environment_class": "local", "timeout": 600},
    "model": {
        "model_class": "litellm_response",
        "model_name": "openai/$model",
        "cost_tracking": "ignore_errors",
        "model_kwargs": {"api_base": "$url/v1", "api_key": "$token", "drop_params": True, "parallel_tool_calls": True},
    },
}

PRESET = Preset(
    name="miniswe-sandboxed",
    version=_MINI.version,
    wire="responses",
    layer=_MINI.layer,
    layer_of=_MINI.name,
    command=CommandConfig(
        argv=(
            *("$layer/python/bin/python3", "-I", "$layer/run.py", "minisweagent.run.mini"),
            *("-c", "mini.yaml", "-c", "$home/gym.yaml", "-t", "$task", "-o", "$home/trajectory.json"),
        ),
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={"$home/gym.yaml": json.dumps(_SETTINGS)},
        task=_MINI.command.task,
        answer_file=_MINI.command.answer_file,
        answer_key=_MINI.command.answer_key,
    ),
)
