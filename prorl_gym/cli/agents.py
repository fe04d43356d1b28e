"""``prorl-gym agents``: list and install the presets of agent programs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from prorl_gym.errors import ConfigError

agents = typer.Typer(no_args_is_help=True, help="Agent programs that run unmodified in the sandbox: list, install.")

Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="Directory of the layers; the service's: `agents` in `sandbox.cache`."),
]


@agents.command("list")
def list_agents(
    directory: Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs, with what is run.")] = False,
) -> None:
    """List the presets, and which are installed."""
    from prorl_gym.agents.presets import PRESETS

    layers = directory or _default_directory()
    if as_json:
        rows = [
            {
                "name": preset.name,
                "version": preset.version,
                "wire": preset.wire,
                "installed": preset.is_installed(layers),
                "command": preset.mounted(layers).model_dump(mode="json"),
            }
            for preset in PRESETS.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for preset in PRESETS.values():
        state = "installed" if preset.is_installed(layers) else "-"
        typer.echo(f"{preset.name:18} {preset.version:10} {preset.wire:18} {state:11} {preset.licence}".rstrip())


@agents.command()
def install(
    name: Annotated[list[str], typer.Argument(help="Presets; `all` for every one.")],
    directory: Directory = None,
    python: Annotated[
        str | None, typer.Option(help="Python with pip that a preset from PyPI brings along; by default one that fits.")
    ] = None,
) -> None:
    """Install presets from npm or PyPI, pinned. What was fetched is kept, and used instead of the network next time."""
    from prorl_gym.agents.presets import PRESETS
    from prorl_gym.agents.presets.layers import install_preset

    wanted = list(PRESETS) if name == ["all"] else name
    for one in wanted:
        if one not in PRESETS:
            raise ConfigError(f"There is no preset '{one}'.", f"Known: {', '.join(PRESETS)}.")
    for one in wanted:
        if PRESETS[one].licence:
            typer.echo(f"{one}: {PRESETS[one].licence}", err=True)
        typer.echo(f"{one}: {install_preset(PRESETS[one], directory or _default_directory(), python)}")


def _default_directory() -> Path:
    from prorl_gym.sandbox.config import SandboxConfig

    return SandboxConfig().agents_cache_dir()
