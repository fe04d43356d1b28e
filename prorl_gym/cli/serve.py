"""``prorl-gym serve``, ``engine oracle``, ``gc``: run a service or an engine, clean up a stopped service's ledger."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Annotated, Literal

import typer

engine = typer.Typer(no_args_is_help=True, help="Engines that come with prorl-gym.")


def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file; see prorl_gym/api/config.py.")],
    port: Annotated[int | None, typer.Option(help="Port, instead of the file's; 0: any free one.")] = None,
    nodes: Annotated[
        Literal["ray"] | None,
        typer.Option(help="Run attempts on nodes, one on each node of a Ray cluster with the resource prorl_node."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="With --nodes ray: HOST:PORT of the Ray cluster, or auto.")
    ] = None,
    node_memory: Annotated[
        int | None,
        typer.Option(min=1, help="With --nodes ray: bytes each node reserves; all of its Ray node's if unset."),
    ] = None,
) -> None:
    """Serve rollouts until SIGINT or SIGTERM.

    The first signal finishes running rollouts, for at most http.stop_seconds of the configuration (600 by default);
    queued ones wait for the next start. A second signal stops at once; the next start runs again what it cut off.
    """
    from prorl_gym.api.config import ServiceConfig
    from prorl_gym.api.service_process import serve as serve_until_signal
    from prorl_gym.config import load_config
    from prorl_gym.logs import configure_logging
    from prorl_gym.rollout.nodes.node_runners import NodesConfig
    from prorl_gym.rollout.nodes.ray_nodes import RayCluster, check_ray_address

    loaded = load_config(ServiceConfig, config)
    if port is not None:
        loaded = loaded.model_copy(update={"http": loaded.http.model_copy(update={"port": port})})
    ray = None
    if nodes == "ray":
        ray = RayCluster(address=check_ray_address(address), memory=node_memory)
        loaded = loaded.model_copy(update={"nodes": loaded.nodes or NodesConfig()})
    configure_logging(loaded.log.level, loaded.log.format)
    asyncio.run(serve_until_signal(loaded, ray))


def node(
    head: Annotated[str | None, typer.Option(envvar="PRORL_GYM_URL", help="Address of the service.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="The service's token; found as for every other command by default.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique name; the host's by default.")] = None,
    run: Annotated[int | None, typer.Option(min=1, help="Most running agents here, instead of runner.run.")] = None,
) -> None:
    """Run attempts for a service that has 'nodes' in its configuration.

    The first SIGINT or SIGTERM finishes the running attempts, then leaves; a second one leaves at once, and other nodes
    retry those attempts. Ends with status 2 when the service was not reached for nodes.lease_seconds.
    """
    from prorl_gym.api.node_process import run_node

    asyncio.run(run_node(head, name or socket.gethostname(), token_file, run))


@engine.callback()
def engines() -> None:
    """Engines that come with prorl-gym."""


@engine.command()
def oracle(
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    solve_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of rollouts that the policy solves.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Together with each call's own seed, selects which rollouts are solved.")
    ] = 0,
    rows: Annotated[
        list[Path] | None, typer.Option(help="Files of rows with their answers; the examples by default.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="'small', a directory, or a model name on a hub.")] = "small",
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "oracle",
    max_model_len: Annotated[int, typer.Option(min=1, help="Context in tokens.")] = 32768,
    tokens_per_second: Annotated[float, typer.Option(min=0, help="Speed of each call; 0: no delay.")] = 0.0,
) -> None:
    """Serve a scripted policy on vLLM's completions route. It knows its rows' answers; there is no model."""
    from prorl_gym.errors import ConfigError
    from prorl_gym.inference.tokens.template_check import load_codec
    from prorl_gym.oracle.oracle_policy import OraclePolicy, example_files, load_rows
    from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle

    codec = load_codec(tokenizer)
    known = load_rows(rows or example_files())
    policy = OraclePolicy(codec, known, solve_rate=solve_rate, seed=seed)
    server = OracleServer(codec, policy, OracleOptions(model, max_model_len, tokens_per_second))

    async def serve_until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with serve_oracle(server, host, port) as url:
            print(f"oracle engine: {url} model={model} rows={len(known)}", flush=True)
            await stop.wait()

    try:
        asyncio.run(serve_until_signal())
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot listen ({error.strerror}).", "Choose another --port.") from None


def gc(
    path: Annotated[
        Path | None, typer.Argument(help="File of the ledger; that of the default service when omitted.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The service's YAML file, which names the ledger and its retention."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
) -> None:
    """Release expired records, delete old tombstones, and return free space to the file system.

    A running service does the first two at its start and every hour; use this on a stopped service's file, for example
    when its disk is full. Records that were not acknowledged are kept for ledger.keep_days.
    """
    from prorl_gym.api.config import ServiceConfig
    from prorl_gym.client import default_state_dir
    from prorl_gym.config import load_config
    from prorl_gym.errors import ConfigError
    from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
    from prorl_gym.rollout.ledger.retention import collect_garbage

    if path is not None and config is not None:
        raise ConfigError("gc: both a file and --config are given.", "Give one: the configuration names the file.")
    if config is not None:
        ledger = load_config(ServiceConfig, config).ledger_config
    else:
        ledger = LedgerConfig(path=path or default_state_dir() / "ledger.sqlite", allow_network_filesystem=True)
    done = collect_garbage(ledger, dry_run=dry_run)
    would = "would be " if dry_run else ""
    typer.echo(
        f"{ledger.path}: {done.records} records {would}released (older than {ledger.keep_days:g} days), "
        f"{done.tombstones} tombstones {would}deleted (older than {ledger.tombstone_days:g} days)."
    )
    size = f"{done.bytes_before / (1 << 20):.1f} MiB"
    if not dry_run:
        size += f" before, {done.bytes_after / (1 << 20):.1f} MiB after"
    usage = done.usage_after
    typer.echo(f"{size}; {usage.pending} pending, {usage.kept} kept, {usage.released} tombstones.")
