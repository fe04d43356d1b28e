"""mini-swe-agent: chat completions, not streamed. It brings Python along."""

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import Preset, PythonLayer

_VERSION = "2.4.6"

PRESET = Preset(
    name="mini-swe-agent",
    version=_VERSION,
    wire="chat completions",
    layer=PythonLayer(
        requirements=(f"mini-swe-agent=={_VERSION}", "mcp"),  # litellm imports mcp, and does not ask for it
        lock="mini_swe_agent.lock",
        pythons=("3.11", "3.12", "3.13"),
        check="minisweagent.run.mini",
    ),
    command=CommandConfig(
        argv=(
            *("$layer/python/bin/python3", "-I", "$layer/run.py", "minisweagent.run.mini"),
            *("-m", "openai/$model", "-t", "$task", "--yolo", "--exit-immediately", "-o", "$home/trajectory.json"),
        ),
        env={
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_API_KEY": "$token",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        task=(
            "$prompt\n\nUse your bash tool in place of the ones that are named above. Where you are told to call "
            "finish, submit instead: the output of your last command is COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT in its "
            "first line, and below it your whole answer: $answer"
        ),
        answer_file="/home/agent/trajectory.json",
        answer_key=("info", "submission"),
    ),
)
