"""``prorl-gym root``, ``venvs`` and ``doctor``: what NeMo Gym and sandboxes need of this installation and machine.

Gym gives each server directory an environment of its own (minutes, gigabytes). With ``skip_venv_if_present=true`` and
``uv_venv_dir=DIR`` it takes ``DIR/<type>/<name>/.venv`` as it finds it; ``venvs`` makes these links to ``sys.prefix``.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import prorl_gym
from prorl_gym._bootstrap import component_roots, gym_folder
from prorl_gym.errors import ConfigError

_SERVER_TYPES = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")


def gym_root() -> Path:
    """Return the component root inside the installed package."""
    return Path(prorl_gym.__file__).parent / "gym_root"


def root() -> None:
    """Print our component root (two for NeMo Gym < 0.7), for NEMO_GYM_EXTRA_ROOTS=$(prorl-gym root)."""
    typer.echo(os.pathsep.join(component_roots()))


def venvs(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to create the links.")]) -> None:
    """Link every Gym server's environment to this one, then print the flags that make Gym use them."""
    tree = directory.resolve()
    count = link_venvs(tree, Path(sys.prefix))
    typer.echo(f"{count} servers use {sys.prefix}", err=True)
    typer.echo(f"+skip_venv_if_present=true +uv_venv_dir={tree}")


def link_venvs(tree: Path, prefix: Path) -> int:
    """Create the links for every server of every root; return their number.

    Args:
        tree: directory to fill; Gym's ``uv_venv_dir``.
        prefix: the environment to link to, with everything that the servers need.

    Raises:
        ConfigError: ``prefix`` is not a virtual environment, or ``tree`` cannot be written.
    """
    if not (prefix / "bin" / "activate").exists():
        raise ConfigError(
            f"{prefix}: not a virtual environment (bin/activate is missing), so Gym cannot reuse it.",
            "Run this command with the interpreter of the environment that has nemo-gym installed.",
        )
    count = 0
    for server in sorted(set(_iter_servers())):
        try:
            _link(tree / server / ".venv", prefix)
        except OSError as error:
            raise ConfigError(f"{tree / server}: cannot be written ({error.strerror}).", "Name another DIR.") from None
        count += 1
    return count


def server_roots() -> list[Path]:
    """Return the directories in which Gym looks for servers: extra roots, here, and where it is installed."""
    extra = [Path(entry) for entry in os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep) if entry]
    gym = gym_folder()
    installed = [Path(gym).parent] if gym is not None else []
    return [*extra, gym_root(), Path.cwd(), *installed]


def _iter_servers() -> Iterator[str]:
    for root in server_roots():
        for kind in _SERVER_TYPES:
            for directory in (root / kind).glob("*"):
                if any((directory / name).exists() for name in ("requirements.txt", "pyproject.toml")):
                    yield f"{kind}/{directory.name}"


def _link(link: Path, target: Path) -> None:
    """Make or update one link; an environment that was really built there is left as it is."""
    if link.exists() and not link.is_symlink():
        return
    if link.is_symlink():
        if Path(os.readlink(link)) == target:
            return
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def doctor(
    scratch: Annotated[Path | None, typer.Option(help="Directory of the sandboxes' small files.")] = None,
    store: Annotated[Path | None, typer.Option(help="Directory of the image store.")] = None,
    uid: Annotated[int | None, typer.Option(help="Uid of sandboxes when run as root.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Start a sandbox on every backend and show what this machine lacks."""
    from prorl_gym.cli.doctor_report import run_doctor

    run_doctor(scratch, store, uid, as_json=as_json)
