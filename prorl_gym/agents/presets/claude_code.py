"""Claude Code: Anthropic's messages, streamed."""

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets.layers import NpmLayer, Preset

_VERSION = "2.1.330"

PRESET = Preset(
    name="claude-code",
    version=_VERSION,
    wire="messages",
    layer=NpmLayer({"claude": f"@anthropic-ai/claude-code-linux-{{arch}}@{_VERSION}"}),
    licence="Proprietary: installing it accepts Anthropic's terms.",
    command=CommandConfig(
        argv=(
            *("$layer/claude/claude", "-p", "$task", "--output-format", "json"),
            "--dangerously-skip-permissions",  # the sandbox is the boundary
        ),
        env={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$token",
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_SMALL_FAST_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # it refuses to skip permissions as root otherwise
            # Without a billing text that changes, deferred tools and server-side edits of the context.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        },
    ),
)
