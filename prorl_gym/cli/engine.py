"""``prorl-gym engine``: engines that this package brings along."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

engine = typer.Typer(no_args_is_help=True, help="Engines that come with prorl-gym.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.add_typer(engine, name="engine")


@engine.callback()
def engines() -> None:
    """Engines that come with prorl-gym."""


@engine.command()
def oracle(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    solve_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of rollouts that it solves.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides, with each call's own seed, which rollouts it solves.")] = 0,
    rows: Annotated[
        list[Path] | None, typer.Option(help="Files of rows that it knows; the examples by default.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="'small', a directory, or a model name on a hub.")] = "small",
    model: Annotated[str, typer.Option(help="Name under which it serves.")] = "oracle",
    max_model_len: Annotated[int, typer.Option(min=1, help="Context in tokens.")] = 32768,
    tokens_per_second: Annotated[float, typer.Option(min=0, help="Speed of each call; 0 answers at once.")] = 0.0,
) -> None:
    """Serve a scripted policy that knows the answers of its rows, on vLLM's route. It is no model."""
    from prorl_gym.errors import ConfigError
    from prorl_gym.inference.chat import load_codec
    from prorl_gym.oracle.player import Player
    from prorl_gym.oracle.rows import example_files, load_rows
    from prorl_gym.oracle.server import OracleOptions, OracleServer, serving

    codec = load_codec(tokenizer)
    known = load_rows(rows or example_files())
    player = Player(codec, known, solve_rate=solve_rate, seed=seed)
    server = OracleServer(codec, player, OracleOptions(model, max_model_len, tokens_per_second))

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with serving(server, host, port) as url:
            print(f"oracle engine: {url} model={model} rows={len(known)}", flush=True)
            await stop.wait()

    try:
        asyncio.run(serve())
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot listen ({error.strerror}).", "Choose another --port.") from None
