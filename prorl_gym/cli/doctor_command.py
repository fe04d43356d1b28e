"""``prorl-gym doctor``; ``doctor`` does the work, and is slow to import."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    scratch: Annotated[Path | None, typer.Option(help="Directory of the sandboxes' small files.")] = None,
    store: Annotated[Path | None, typer.Option(help="Directory of the image store.")] = None,
    uid: Annotated[int | None, typer.Option(help="Uid of sandboxes when this runs as root.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Try every sandbox backend for real and show what this machine lacks."""
    from prorl_gym.cli.doctor import examine

    examine(scratch, store, uid, as_json=as_json)
