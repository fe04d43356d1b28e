"""The command line: one small module per command, collected here."""

import typer

app = typer.Typer(name="prorl-gym", no_args_is_help=True, add_completion=False, help=__doc__)
