"""Agent programs that run unmodified: one file each, with versions, how it is installed and how it is started."""

from collections.abc import Mapping

from prorl_gym.agents.presets import claude_code, codex, mini_swe_agent, opencode, openhands, qwen_code
from prorl_gym.agents.presets.layers import Preset

PRESETS: Mapping[str, Preset] = {
    module.PRESET.name: module.PRESET for module in (claude_code, codex, mini_swe_agent, opencode, openhands, qwen_code)
}
"""By name."""
