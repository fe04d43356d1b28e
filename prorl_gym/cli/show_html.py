"""``prorl-gym show-html RESULTS``: a page of the rollouts in a Gym results file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from prorl_gym.errors import ConfigError


def read_results(path: Path) -> list[Mapping[str, Any]]:
    """Read a results file, one JSON object per line.

    Raises:
        ConfigError: it is missing, or a line is not a JSON object.
    """
    from prorl_gym.environments.gym_rows import json_lines

    results: list[Mapping[str, Any]] = []
    for where, line in json_lines(path):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: not a JSON object.", "Give a results file of `gym eval run`.")
        if "response" not in row or "reward" not in row:
            raise ConfigError(
                f"{where}: not a result ('response' and 'reward' are missing).",
                "Give a results file of `gym eval run`, not its input or another of its outputs.",
            )
        results.append(row)  # pyright: ignore[reportUnknownArgumentType]
    if not results:
        raise ConfigError(f"{path}: holds no results.", "Give a results file of `gym eval run`.")
    return results


def write_page(results: Path, tokenizer: str, page: Path) -> None:
    """Write the page of a results file."""
    from prorl_gym.inference.chat import load_codec
    from prorl_gym.pages.trajectory import render

    page.write_text(render(read_results(results), load_codec(tokenizer).decode), encoding="utf-8")


def show_html(
    results: Annotated[Path, typer.Argument(help="Results file of `gym eval run`.")],
    tokenizer: Annotated[str, typer.Option(help="`small`, a tokenizer directory, or a model name.")] = "small",
    output: Annotated[
        Path | None, typer.Option(help="The page to write; beside the results by default.", show_default=False)
    ] = None,
) -> None:
    """Write one self-contained HTML page with every rollout, token by token."""
    page = output or results.with_suffix(".html")
    write_page(results, tokenizer, page)
    typer.echo(str(page))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show-html")(show_html)
