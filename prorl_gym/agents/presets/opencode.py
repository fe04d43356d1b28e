"""OpenCode: chat completions, streamed."""

import json

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import NpmLayer, Preset

_VERSION = "1.18.33"

_SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "snapshot": False,
    "permission": "allow",  # the sandbox is the boundary
    "model": "gateway/$model",
    "small_model": "gateway/$model",
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$url/v1", "apiKey": "$token"},
            # It compacts its history by these and the reported usage.
            "models": {"$model": {"limit": {"context": 65536, "output": 8192}}},
        }
    },
}

PRESET = Preset(
    name="opencode",
    version=_VERSION,
    wire="chat completions",
    # The baseline build runs on processors without AVX2.
    layer=NpmLayer({"opencode": f"opencode-linux-{{arch}}-baseline@{_VERSION}"}),
    command=CommandConfig(
        argv=("$layer/opencode/bin/opencode", "run", "--format", "json", "$task"),
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files={"$home/.config/opencode/opencode.json": json.dumps(_SETTINGS)},
    ),
)
