"""What NeMo Gym adds to a rollout, thousands of rows at once, and the start of an environment.

Rollouts are instant, records have 20 kB, as in ``bench service``. What is added is the percentile of ``/run``, posted
with Gym's own client to our agent or to the environment server in front of it, less that of the same rollout submitted
to a service directly. Beside ours stands what Gym needs itself: an agent that only gives as many bytes back.
``--short`` measures a tenth.
"""

import asyncio
from pathlib import Path
from statistics import median

import _gym_stack
import _service_work as work
from _gym_servers import (
    AGENT,
    CALLERS,
    DIRECT,
    EMPTY,
    EMPTY_RELAY,
    RATE,
    RELAY,
    GymServers,
    is_installed,
    running_servers,
)
from _load import percentile
from _programs import bench_directory
from _report import Figure, Report, figure, peer, report
from _service_server import Server, running_server

from prorl_gym.errors import ConfigError

AT_ONCE = 500 if work.SHORT else 5000
STARTS = 1 if work.SHORT else 5
ADDED_MS = {50: 5.0, 95: None, 99: 30.0}
START_RATIO = 1.1
"""A start of ours may take so many times that of Gym's smallest environment."""
PATHS = {
    "agent's `/run`": (AGENT, EMPTY, "an empty agent of Gym (floor)"),
    "environment server's `/run`": (RELAY, EMPTY_RELAY, "an empty agent behind Gym's environment server (floor)"),
}


async def latency(servers: GymServers, direct: Server) -> list[Figure]:
    pids = [str(pid) for pid in (direct.pid, *servers.pids)]
    found = await servers.collect("latency", direct.url, *pids)
    rows, cpu = found["rows"], found["cpu"]
    figures: list[Figure] = []
    for path, (ours, empty, name) in PATHS.items():
        for percent, target in ADDED_MS.items():
            whole = percentile(rows[ours], percent)
            added = [whole - percentile(rows[DIRECT], percent)]
            floors = [peer(name, [percentile(rows[empty], percent)])]
            title = f"{path}, {RATE:g}/s, p{percent}"
            figures += [
                figure(title, [whole], "ms", peers=floors),
                figure(f"added by the {title}", added, "ms", target=target, peers=floors),
            ]
        floors = [peer(name, cpu[empty]), peer("the service, called directly", cpu[DIRECT])]
        title = f"{path}, {RATE:g}/s: CPU of all servers per row"
        figures.append(figure(title, cpu[ours], "ms", peers=floors))
    return figures


async def rates(servers: GymServers) -> list[Figure]:
    found = await servers.collect("rate")
    return [
        figure(
            f"{path}, {CALLERS} callers",
            found[ours],
            "1/s",
            better="higher",
            target=work.TARGETS["gym"],
            peers=[peer(name, found[empty])],
        )
        for path, (ours, empty, name) in PATHS.items()
    ]


async def crowd(servers: GymServers) -> list[Figure]:
    found = await servers.collect("crowd", str(AT_ONCE))
    name = f"{AT_ONCE:,} rows at once"
    floors = [peer(PATHS["environment server's `/run`"][2], [found["seconds"][EMPTY_RELAY]])]
    answered = [float(found["answered"])]
    return [
        figure(f"{name}: answered", answered, "", better="higher", target=float(AT_ONCE)),
        figure(f"{name}: all answered after", [found["seconds"][RELAY]], "s", peers=floors),
    ]


async def starts(directory: Path) -> list[Figure]:
    found: dict[str, list[_gym_stack.StartFigures]] = {_gym_stack.SMALLEST: [], _gym_stack.OURS: []}
    for number in range(STARTS):
        for place, (environment, seconds) in enumerate(found.items()):  # short names: Ray's sockets lie below
            seconds.append(await _gym_stack.measure(environment, directory / f"{number}-{place}"))
    ours, smallest = found[_gym_stack.OURS], found[_gym_stack.SMALLEST]
    title, name = f"`gym env start` of `{_gym_stack.OURS}`", f"Gym's `{_gym_stack.SMALLEST}`"
    target = START_RATIO * median(each.ready for each in smallest)
    return [
        figure(
            f"{title}: {what}",
            [getattr(each, field) for each in ours],
            "s",
            target=wanted,
            peers=[peer(name, [getattr(each, field) for each in smallest])],
        )
        for what, field, wanted in (
            ("Gym reports ready", "ready", target),
            ("all servers answer", "listening", None),
            ("CPU of all servers", "cpu", None),
        )
    ]


async def measure_all(directory: Path) -> list[Figure]:
    figures = await starts(directory)
    async with running_servers(directory) as servers:
        async with running_server("noop", directory) as direct:
            figures = [*await latency(servers, direct), *figures]
        figures += [*await rates(servers), *await crowd(servers)]
    return figures


def run() -> Report:
    """Measure. Raises ``ConfigError`` if there is no NeMo Gym with environment servers here."""
    if not is_installed():
        raise ConfigError("bench gym: NeMo Gym is not installed here.", "Install nemo-gym 0.7.0.")
    with bench_directory() as directory:
        figures = asyncio.run(measure_all(directory))
    return report("gym", figures, "nemo-gym", "aiohttp", "fastapi", "uvicorn", "pydantic")
