"""OpenHands' command line: chat completions, not streamed. It brings Python along."""

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import Preset, PythonLayer

_VERSION = "1.16.0"

PRESET = Preset(
    name="openhands",
    version=_VERSION,
    wire="chat completions",
    layer=PythonLayer(
        requirements=(f"openhands=={_VERSION}",),
        lock="openhands.lock",
        pythons=("3.12",),
        check="openhands_cli.entrypoint",
    ),
    command=CommandConfig(
        argv=(
            *("$layer/python/bin/python3", "-I", "$layer/run.py", "openhands_cli.entrypoint"),
            *("--headless", "--json", "--yolo", "--override-with-envs", "-t", "$task"),
        ),
        env={
            "LLM_MODEL": "openai/$model",
            "LLM_BASE_URL": "$url/v1",
            "LLM_API_KEY": "$token",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
    ),
)
