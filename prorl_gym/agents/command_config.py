"""The configuration of an agent program, and the names of those that there are.

What installs and runs them is in ``prorl_gym.harness``, which is reached by name only: it is loaded where a program is
configured, and the built-in loop needs none of it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.protocol import Mount

HARNESS = "prorl_gym.harness.programs"
"""Module of ``HarnessPrograms``, which runs agent programs."""
_PRESETS = "prorl_gym.harness.presets"


class CommandConfig(ConfigModel):
    """A program that works as an agent.

    In ``argv``, ``env`` and ``files``, ``$task``, ``$url``, ``$token``, ``$model``, ``$home`` and ``$layer`` are
    replaced, and ``$$`` is a dollar sign. It runs in the task's working directory, with its input closed.
    """

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments; no shell reads them."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment besides ``HOME``. ``$url`` is the gateway's address, without a path; ``$token`` opens it."""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """Text of files, by their path inside the sandbox, for example ``$home/.codex/config.toml``."""
    mounts: dict[str, str] = Field(default_factory=dict[str, str])
    """Read-only directories: path on this host, by the path inside. The sandboxes' uid must be able to read them."""
    task: str = ""
    """Text of ``$task``, made of ``$prompt``, the messages of the environment, and ``$answer``, what to hand in. By
    default the messages, and that an answer is handed in as the last message."""
    answer_file: str = ""
    """File that the program leaves its answer in; without one, the last text of the main conversation is the answer."""
    answer_key: tuple[str, ...] = ()
    """Where the answer is in that file, if it is JSON: a key for each level."""

    side_calls: tuple[str, ...] = ()
    """Words, in any case, of the system messages that open calls without tools which serve the program itself: titles,
    summaries. They are not trained by default."""

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        return tuple(Mount(source, target) for target, source in self.mounts.items())


def require_known_agent(name: str, configured: Iterable[str]) -> None:
    """Raise ``TaskError`` (``BAD_ROW``) unless there is an agent program of this name, configured or a preset."""
    if name in configured:
        return
    known = sorted({*import_module(_PRESETS).PRESETS, *configured})
    if name not in known:
        close = get_close_matches(name, known, n=1)
        fix = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}."
        raise TaskError(FailureKind.BAD_ROW, f"There is no agent '{name[:80]}'.", fix)
