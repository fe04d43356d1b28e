"""Qwen Code: chat completions, streamed. It brings Node.js along."""

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import NpmLayer, Preset

_VERSION = "0.24.4"

PRESET = Preset(
    name="qwen-code",
    version=_VERSION,
    wire="chat completions",
    layer=NpmLayer(
        {
            "node": "node-linux-{arch}@22.23.3",
            "qwen": f"@qwen-code/qwen-code@{_VERSION}",
            # Without a terminal for its commands it loses the output of short ones at times.
            "qwen/node_modules/@lydell/node-pty": "@lydell/node-pty@1.2.0-beta.10",
            "qwen/node_modules/@lydell/node-pty-linux-{arch}": "@lydell/node-pty-linux-{arch}@1.2.0-beta.10",
        }
    ),
    command=CommandConfig(
        argv=(
            *("$layer/node/bin/node", "$layer/qwen/cli.js", "-p", "$task", "--yolo"),
            *("--auth-type", "openai", "--output-format", "json"),
        ),
        env={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$token", "OPENAI_MODEL": "$model"},
    ),
)
