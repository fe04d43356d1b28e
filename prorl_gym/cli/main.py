"""The ``prorl-gym`` command: all commands in the order of its help, with one example each.

The modules of the commands import what is heavy inside their functions, so that ``prorl-gym root`` answers at once.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prorl_gym import __version__
from prorl_gym.cli.demo import demo
from prorl_gym.cli.images import images
from prorl_gym.cli.installation import agents, bench, doctor, root, venvs
from prorl_gym.cli.prepare import import_tasks, prepare
from prorl_gym.cli.scaffold import init
from prorl_gym.cli.serve import engine, gc, node, serve
from prorl_gym.cli.service_client.control import ack, cancel, demand, engines, hold, policy, release, submit
from prorl_gym.cli.service_client.evaluate import evaluate
from prorl_gym.cli.service_client.replay import replay
from prorl_gym.cli.service_client.show import dashboard, export, predictions, show, show_html
from prorl_gym.cli.service_client.watch import watch
from prorl_gym.cli.validate import validate
from prorl_gym.errors import ProrlError

if TYPE_CHECKING:
    from typer.models import CommandInfo

_COMMANDS = (
    *(serve, node, submit, cancel, watch, show, export, replay, demand, ack, hold, release, dashboard, gc, validate),
    *(prepare, doctor, bench, root, venvs, show_html, predictions, demo, init, import_tasks, evaluate),
)
_GROUPS = {"policy": policy, "engines": engines, "engine": engine, "images": images, "agents": agents}

EXAMPLES: Mapping[str, str] = {
    "serve": "--config service.yaml",
    "node": "--head http://10.0.0.5:8770 --token-file token --name worker-3",
    "submit": "rows.jsonl --run step-7 --group-size 8 --wait",
    "cancel": "--run step-7",
    "watch": "--run step-7",
    "show": "7f3a --html rollout.html",
    "export": "--run step-7 --format sft --min-reward 1 --out chats.jsonl",
    "replay": "7f3a --loose",
    "demand": "step-7 --groups 32 --spare 2",
    "ack": "step-7 1041",
    "hold": "",
    "release": "",
    "dashboard": "--open",
    "gc": "--config service.yaml --dry-run",
    "policy status": "",
    "policy pause": "--mode drain",
    "policy resume": "",
    "policy update": "12",
    "engines list": "",
    "engines add": "http://10.0.0.7:8000/v1",
    "engines remove": "policy-1",
    "engine oracle": "--port 8100 --solve-rate 0.5",
    "validate": "math rows.jsonl --runs 3",
    "prepare": "swe data.parquet --output rows.jsonl",
    "doctor": "--json",
    "evaluate": "math rows.jsonl --samples 8 --k 1,4 --temperature 0.6",
    "init": "my_env",
    "import-tasks": "tasks --output rows.jsonl --image-map python:3.13-slim=prorl-python --run built --keep /app",
    "images build": "prorl-python",
    "images pull": "docker://python:3.12-slim",
    "images import": "rootfs.tar --name mine",
    "images sync": "rows.jsonl --dry-run",
    "images list": "--json",
    "images prune": "mine",
    "agents list": "--json",
    "agents install": "codex qwen-code",
    "bench": "service --json",
    "root": "",
    "venvs": "venvs",
    "show-html": "results.jsonl",
    "predictions": "results.jsonl --model my-model",
    "demo": "--repeats 4 --output outputs",
}
"""Arguments of each command, by its name."""


def example_line(name: str) -> str:
    """Return the example of a command as one types it."""
    return f"prorl-gym {name} {EXAMPLES[name]}".rstrip()


def iter_commands(app: typer.Typer, prefix: str = "") -> "Iterator[tuple[str, CommandInfo]]":
    """Yield every command by its whole name."""
    for command in app.registered_commands:
        yield prefix + (command.name or getattr(command.callback, "__name__", "").replace("_", "-")), command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from iter_commands(group.typer_instance, f"{prefix}{group.name} ")


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


def _show_version(requested: bool) -> None:
    if requested:
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
    app.command()(_command)
for _name, _group in _GROUPS.items():
    app.add_typer(_group, name=_name)
for _name, _info in iter_commands(app):
    if _name in EXAMPLES:
        _info.epilog = f"Example: {example_line(_name)}"
