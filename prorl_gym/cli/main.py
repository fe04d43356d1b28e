"""The ``prorl-gym`` command: one small module per command, collected here.

Every module has ``register(app)`` and imports what is heavy inside its commands, so that ``prorl-gym root`` answers
at once.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from prorl_gym import __version__
from prorl_gym.cli.examples import show_in_help
from prorl_gym.errors import ProrlError

_COMMANDS = (
    *("serve", "submit", "watch", "show", "export", "replay", "demand", "policy", "hold", "dashboard", "gc"),
    *("engine", "validate", "prepare", "doctor_command", "images", "bench", "root", "venvs", "show_html", "demo"),
    *("init", "import_tasks", "evaluate"),
)


class _CommandLine(typer.Typer):
    """Shows errors of ours as their two lines; anything else is a defect and keeps its traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ProrlError as error:
            print(f"prorl-gym: {error}", file=sys.stderr)
            sys.exit(2)


app = _CommandLine(
    name="prorl-gym",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"prorl-gym {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rollout-as-a-service for reinforcement learning of multi-turn LLM agents."""


for _command in _COMMANDS:
    import_module(f"prorl_gym.cli.{_command}").register(app)
show_in_help(app)
