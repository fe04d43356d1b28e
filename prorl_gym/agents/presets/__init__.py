"""Agent programs that run unmodified: one file each, with versions, how it is installed and how it is started."""

from collections.abc import Mapping

from prorl_gym.agents.presets import (
    claude_code,
    codex,
    mini_swe_agent,
    miniswe_sandboxed,
    opencode,
    openhands,
    qwen_code,
)
from prorl_gym.agents.presets.layers import Preset

_MODULES = (claude_code, codex, mini_swe_agent, miniswe_sandboxed, opencode, openhands, qwen_code)

PRESETS: Mapping[str, Preset] = {module.PRESET.name: module.PRESET for module in _MODULES}
"""By name."""
