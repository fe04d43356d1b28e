"""``prorl-gym replay``: play the recorded actions of a rollout in a fresh sandbox, and grade them again."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prorl_gym.cli.service_client.service_connection import LOCAL_URL, UrlOption, connect, find_rollout, printable
from prorl_gym.cli.validate import BackendName
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_gym.environments.playback import ReplayedAction, ReplayResult
    from prorl_gym.records import Rollout
    from prorl_gym.sandbox.config import SandboxConfig

EXIT_REWARD_DIFFERS = 1
EXIT_OBSERVATIONS_DIFFER = 3


def replay(
    rollout_id: Annotated[str, typer.Argument(help="Id of a finished rollout, or a unique prefix of it.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Use the sandboxes of this service's configuration.")
    ] = None,
    backend: Annotated[BackendName, typer.Option(help="Sandbox backend, without --config.")] = "auto",
    allow_unsafe_local: Annotated[bool, typer.Option(help="Permit the backend without isolation.")] = False,
    ignore_volatile: Annotated[bool, typer.Option("--loose", help="Ignore times, addresses and process ids.")] = False,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Repeat the actions of a rollout's agent, and show where the sandbox answers differently.

    Exit code 0: the same answers and the same reward; 1: another reward; 3: the same reward, but other answers.
    """
    from prorl_gym.api.config import ServiceConfig
    from prorl_gym.config import load_config
    from prorl_gym.sandbox.config import SandboxConfig

    with connect(url) as client:
        rollout_id = find_rollout(client, rollout_id)
        rollout = client.poll_result(rollout_id)
        if rollout is None:
            raise ConfigError(f"{rollout_id}: is not finished.", "Replay it when it is.")
        task = client.request(rollout_id).task
    if config is None:
        sandbox = SandboxConfig(backend=backend, allow_unsafe_local=allow_unsafe_local)
    else:
        sandbox = load_config(ServiceConfig, config).sandbox
    replayed = asyncio.run(_replay(rollout, task, sandbox))
    differing = _print_differences(replayed.actions, ignore_volatile=ignore_volatile)
    before = "none" if rollout.reward is None else f"{rollout.reward:g}"
    typer.echo(
        f"{len(replayed.actions) - 1} answers, {differing} differ; reward was {before}, is {replayed.score.reward:g}"
    )
    if rollout.reward is not None and rollout.reward != replayed.score.reward:
        raise typer.Exit(EXIT_REWARD_DIFFERS)
    if differing:
        raise typer.Exit(EXIT_OBSERVATIONS_DIFFER)


async def _replay(rollout: "Rollout", task: "Mapping[str, Any]", sandbox: "SandboxConfig") -> "ReplayResult":
    from prorl_gym.environments import registry
    from prorl_gym.environments.playback import replay as replay_rollout
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
    from prorl_gym.sandbox.backend_selection import open_backend

    environment = registry.get(rollout.environment)
    backend = await open_backend(sandbox)
    leases = SandboxLeases(backend)
    try:
        return await replay_rollout(environment, task, rollout, leases)
    finally:
        await leases.close()
        await backend.close()


def _print_differences(actions: "tuple[ReplayedAction, ...]", *, ignore_volatile: bool) -> int:
    """Print every difference; return how many answers differ."""
    from prorl_gym.environments.playback import mask_volatile, replay_diff

    differing = 0
    for one in actions:
        then, now = one.recorded or "", one.replayed or ""
        if ignore_volatile:
            then, now = mask_volatile(then), mask_volatile(now)
        name = f"turn {one.turn}, {one.action or 'message'}" if one.turn else "prompt"
        lines = replay_diff(then, now, name)
        if (one.recorded is None) != (one.replayed is None):
            lines = lines or [f"{name}: {'was not there' if one.recorded is None else 'is not there any more'}"]
        differing += bool(lines)
        for line in lines:
            typer.echo(printable(line))
    return differing
