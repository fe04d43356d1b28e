"""The agent programs of a service: those of its configuration, and presets that are installed."""

from collections.abc import Mapping
from pathlib import Path

from prorl_gym.agents.command_config import CommandConfig, require_known_agent
from prorl_gym.agents.protocol import Agent
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.harness.command import CommandAgent
from prorl_gym.harness.presets import PRESETS
from prorl_gym.harness.rollout_gateway import RolloutGateway
from prorl_gym.rollout.protocol import AttemptSession, Job
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.sandbox.protocol import Mount
from prorl_gym.settings import ResolvedSettings


def find_program(name: str, configured: Mapping[str, CommandConfig], layers: Path) -> CommandConfig:
    """Return the program of this name. Raises ``TaskError`` (``BAD_ROW``) where it is unknown or not installed."""
    if name in configured:
        return configured[name]
    require_known_agent(name, configured)
    preset = PRESETS[name]
    if not preset.is_installed(layers):
        what = f"Agent '{name}' is not installed in {layers}."
        fix = f"Run: prorl-gym agents install {name} --directory {layers}"
        raise TaskError(FailureKind.BAD_ROW, what, fix)
    return preset.mounted(layers)


class HarnessPrograms:
    """Implements ``AgentPrograms``. Programs of the configuration hide presets of the same name."""

    def __init__(self, configured: Mapping[str, CommandConfig], layers: Path, source: ModelPolicySource) -> None:
        self._configured = configured
        self._layers = layers
        self._source = source

    def mounts_of(self, name: str) -> tuple[Mount, ...]:
        return find_program(name, self._configured, self._layers).sandbox_mounts()

    def open_agent(self, job: Job, settings: ResolvedSettings) -> tuple[AttemptSession, Agent]:
        program = find_program(settings.agent, self._configured, self._layers)
        session = self._source.open_harness_session(job, settings)
        gateway = RolloutGateway(
            *(session.model_session, self._source.codec, settings, program.side_calls), program=settings.agent
        )
        return session, CommandAgent(program, gateway)
