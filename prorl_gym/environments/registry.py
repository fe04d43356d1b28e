"""Finding environments by name: the built-in ones, and those of other packages.

Another package registers a class or a factory without arguments in the entry-point group ``prorl_gym.environments``.
An environment is imported at its first ``get``.
"""

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prorl_gym.environments.protocol import Environment
from prorl_gym.errors import FailureKind, TaskError

ENTRY_POINT_GROUP = "prorl_gym.environments"

# Known without installed metadata; another package cannot replace one of these.
_BUILT_IN = {
    "code": "prorl_gym.environments.code.environment:CodeEnvironment",
    "math": "prorl_gym.environments.math.environment:MathEnvironment",
    "taskdir": "prorl_gym.environments.taskdir.environment:TaskDirEnvironment",
    "stem": "prorl_gym.environments.stem.environment:StemEnvironment",
    "swe": "prorl_gym.environments.swe.environment:SweEnvironment",
}


def names() -> list[str]:
    """Return the names of all environments, sorted."""
    return sorted({*_BUILT_IN, *installed_plugins()})


@cache
def get(name: str) -> Environment[Any]:
    """Return the environment of this name; one object serves all rollouts.

    Raises ``TaskError`` (UNKNOWN_ENVIRONMENT) with the nearest known name, or why a plug-in cannot be loaded.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)()
    plugin = installed_plugins().get(name)
    if plugin is None:
        close = get_close_matches(name, names(), n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(names())}."
        raise TaskError(FailureKind.UNKNOWN_ENVIRONMENT, f"There is no environment '{name[:80]}'.", hint)
    try:
        return plugin.load()()
    except Exception as error:  # foreign code may raise anything: name the plug-in
        raise TaskError(
            FailureKind.UNKNOWN_ENVIRONMENT,
            f"Environment '{name}' ({plugin.value}) cannot be loaded: {type(error).__name__}: {error}.",
            "Repair or uninstall the package that provides it.",
        ) from error


@cache  # reading the metadata of every installed package takes tens of milliseconds of the service's loop
def installed_plugins() -> dict[str, EntryPoint]:
    """Return the environments of other packages, by name."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
