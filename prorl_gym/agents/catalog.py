"""Agent programs by name: those of the service's configuration, and presets that are installed."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from prorl_gym.agents.command import CommandConfig
from prorl_gym.agents.presets import PRESETS
from prorl_gym.errors import FailureKind, TaskError


class AgentCatalog:
    """Finds agent programs.

    Args:
        configured: those of the configuration; they hide presets of the same name.
        layers: directory of installed presets.
    """

    def __init__(self, configured: Mapping[str, CommandConfig], layers: Path) -> None:
        self._configured = configured
        self._layers = layers

    def find(self, name: str) -> CommandConfig:
        """Return the program of this name.

        Raises:
            TaskError: ``BAD_ROW``, there is none, or it is a preset that is not installed.
        """
        if name in self._configured:
            return self._configured[name]
        require_known(name, self._configured)
        preset = PRESETS[name]
        if not preset.is_installed(self._layers):
            what = f"Agent '{name}' is not installed in {self._layers}."
            fix = f"Run: prorl-gym agents install {name} --directory {self._layers}"
            raise TaskError(FailureKind.BAD_ROW, what, fix)
        return preset.mounted(self._layers)


def require_known(name: str, configured: Iterable[str]) -> None:
    """Check that there is an agent program of this name, configured or a preset, installed or not.

    Raises:
        TaskError: ``BAD_ROW``, there is none.
    """
    known = sorted({*PRESETS, *configured})
    if name not in known:
        close = get_close_matches(name, known, n=1)
        fix = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}."
        raise TaskError(FailureKind.BAD_ROW, f"There is no agent '{name[:80]}'.", fix)
