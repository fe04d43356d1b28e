"""Codex: OpenAI's responses, streamed."""

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import NpmLayer, Preset

_VERSION = "0.169.0"

_SETTINGS = """\
model = "$model"
model_provider = "gateway"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "$url/v1"
env_key = "GATEWAY_TOKEN"
wire_api = "responses"

[analytics]
enabled = false
"""

PRESET = Preset(
    name="codex",
    version=_VERSION,
    wire="responses",
    layer=NpmLayer(
        {"codex": f"@openai/codex@{_VERSION}-linux-{{arch}}"}, {"codex": "vendor/{machine}-unknown-linux-musl"}
    ),
    command=CommandConfig(
        argv=(
            *("$layer/codex/bin/codex", "exec", "--json", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",  # the sandbox is the boundary
            "$task",
        ),
        env={"GATEWAY_TOKEN": "$token", "CODEX_HOME": "$home/.codex"},
        files={"$home/.codex/config.toml": _SETTINGS},
    ),
)
