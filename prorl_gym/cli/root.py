"""``prorl-gym root``: print the directory that NeMo Gym searches for our components."""

from pathlib import Path

import typer

import prorl_gym


def gym_root() -> Path:
    """Return the component root inside the installed package."""
    return Path(prorl_gym.__file__).parent / "gym_root"


def root() -> None:
    """Print our component root: export NEMO_GYM_EXTRA_ROOTS=$(prorl-gym root)."""
    typer.echo(str(gym_root()))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("root")(root)
