"""``prorl-gym venvs DIR``: let every Gym server run in the environment that runs this command.

Gym gives each server directory an environment of its own (minutes, gigabytes). With ``skip_venv_if_present=true`` and
``uv_venv_dir=DIR`` it takes ``DIR/<type>/<name>/.venv`` as it finds it; here these are links to ``sys.prefix``.
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from prorl_gym.cli.root import gym_root
from prorl_gym.errors import ConfigError

SERVER_TYPES = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")


def link_venvs(tree: Path, prefix: Path) -> int:
    """Create the links for every server of every root; returns how many there are.

    Args:
        tree: directory to fill; Gym's ``uv_venv_dir``.
        prefix: the environment to link to. It must hold what the servers need.

    Raises:
        ConfigError: ``prefix`` is not a virtual environment, or ``tree`` cannot be written.
    """
    if not (prefix / "bin" / "activate").exists():
        raise ConfigError(
            f"{prefix}: not a virtual environment (bin/activate is missing), so Gym cannot reuse it.",
            "Run this command with the interpreter of the environment that has nemo-gym installed.",
        )
    count = 0
    for server in sorted(set(_servers())):
        try:
            _link(tree / server / ".venv", prefix)
        except OSError as error:
            raise ConfigError(f"{tree / server}: cannot be written ({error.strerror}).", "Name another DIR.") from None
        count += 1
    return count


def roots() -> list[Path]:
    """Return the directories in which Gym looks for servers: extra roots, here, and where it is installed."""
    extra = [Path(entry) for entry in os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep) if entry]
    gym = find_spec("nemo_gym")
    installed = [Path(gym.origin).parent.parent] if gym is not None and gym.origin else []
    return [*extra, gym_root(), Path.cwd(), *installed]


def _servers() -> Iterator[str]:
    for root in roots():
        for kind in SERVER_TYPES:
            for directory in (root / kind).glob("*"):
                if any((directory / name).exists() for name in ("requirements.txt", "pyproject.toml")):
                    yield f"{kind}/{directory.name}"


def _link(link: Path, target: Path) -> None:
    """Make or refresh one link; a real environment that somebody built there is left alone."""
    if link.exists() and not link.is_symlink():
        return
    if link.is_symlink():
        if Path(os.readlink(link)) == target:
            return
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def venvs(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to create the links.")]) -> None:
    """Link every Gym server's environment to this one, then print the flags that make Gym use them."""
    tree = directory.resolve()
    count = link_venvs(tree, Path(sys.prefix))
    typer.echo(f"{count} servers use {sys.prefix}", err=True)
    typer.echo(f"+skip_venv_if_present=true +uv_venv_dir={tree}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("venvs")(venvs)
