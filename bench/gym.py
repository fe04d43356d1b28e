"""What NeMo Gym adds to a rollout, thousands of rows at once, and the start of an environment.

Rollouts are instant and records have 20 kB, as in ``bench service``. Rows are posted with Gym's own client, to our
agent and to the environment server in front of it, at random moments (Poisson), whether or not earlier ones are
answered. What is added is the percentile of ``/run`` less that of the same rollout submitted to a service directly,
whose record is awaited over HTTP. The arms take turns of some seconds, over the same arrivals; client, servers and
service share the machine. Beside ours stands what Gym needs itself: an agent that only gives as many bytes back.
``--short`` measures a tenth.
"""

import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median, quantiles

import _gym_start
import _service_work as work
from _gym_load import CALLERS, DIRECT, RATE
from _gym_servers import AGENT, EMPTY, EMPTY_RELAY, RELAY, ROLLOUTS, GymServers, is_installed, running_servers
from _report import Figure, Report, StartConditions, figure, peer, report
from _service_server import Server, running_server

from prorl_gym.errors import ConfigError

AT_ONCE = 500 if work.SHORT else 5000
STARTS = 1 if work.SHORT else 5
ADDED_MS = {50: 5.0, 95: None, 99: 30.0}
"""Targets by percentile."""
START_RATIO = 1.1
"""A start of ours may take so many times that of Gym's smallest environment."""
PATHS = {
    "agent's `/run`": (AGENT, EMPTY, "an empty agent of Gym (floor)"),
    "environment server's `/run`": (RELAY, EMPTY_RELAY, "an empty agent behind Gym's environment server (floor)"),
}
_LOAD = Path(__file__).with_name("_gym_load.py")


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of many values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def latency(servers: GymServers, direct: Server) -> list[Figure]:
    """Return what each path takes and adds, and the CPU time behind it."""
    pids = [str(pid) for pid in (direct.pid, *servers.pids)]
    found = await servers.run_program(_LOAD, "latency", direct.url, *pids)
    rows, cpu = found["rows"], found["cpu"]
    called = f"direct call of the service, {RATE:g}/s"
    figures = [
        figure(f"{called}, p{percent}", [percentile(rows[DIRECT], percent)], "ms", better="lower")
        for percent in ADDED_MS
    ]
    figures.append(figure(f"{called}: CPU of the service per rollout", cpu[DIRECT], "ms", better="lower"))
    for path, (ours, empty, name) in PATHS.items():
        for percent, target in ADDED_MS.items():
            whole = percentile(rows[ours], percent)
            added = [whole - percentile(rows[DIRECT], percent)]
            floors = [peer(name, [percentile(rows[empty], percent)])]
            title = f"{path}, {RATE:g}/s, p{percent}"
            figures += [
                figure(title, [whole], "ms", better="lower", peers=floors),
                figure(f"added by the {title}", added, "ms", better="lower", target=target, peers=floors),
            ]
        floors = [peer(name, cpu[empty]), peer("the service, called directly", cpu[DIRECT])]
        title = f"{path}, {RATE:g}/s: CPU of all servers per row"
        figures.append(figure(title, cpu[ours], "ms", better="lower", peers=floors))
    return figures


async def rates(servers: GymServers) -> list[Figure]:
    """Return rows per second of callers that wait for each answer."""
    found = await servers.run_program(_LOAD, "rate")
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
    """Return how rows that are posted at once are answered."""
    found = await servers.run_program(_LOAD, "crowd", str(AT_ONCE))
    name = f"{AT_ONCE:,} rows at once"
    floors = [peer(PATHS["environment server's `/run`"][2], [found["seconds"][EMPTY_RELAY]])]
    answered = [float(found["answered"])]
    return [
        figure(f"{name}: answered", answered, "", better="higher", target=float(AT_ONCE)),
        figure(f"{name}: all answered after", [found["seconds"][RELAY]], "s", better="lower", peers=floors),
        *(
            figure(f"{name}: peak RSS of {what}", [servers.peak_mb(server)], "MB", better="lower")
            for what, server in (
                ("the rollout server", ROLLOUTS),
                ("our agent", AGENT),
                ("Gym's environment server", RELAY),
                ("Gym's empty agent (floor)", EMPTY),
            )
        ),
    ]


async def starts(directory: Path) -> list[Figure]:
    """Return how long ``gym env start`` takes, ours and Gym's smallest in turns."""
    found: dict[str, list[_gym_start.StartFigures]] = {_gym_start.SMALLEST: [], _gym_start.OURS: []}
    for number in range(STARTS):
        for place, (environment, seconds) in enumerate(found.items()):  # short names: Ray's sockets lie below
            seconds.append(await _gym_start.measure(environment, directory / f"{number}-{place}"))
    ours, smallest = found[_gym_start.OURS], found[_gym_start.SMALLEST]
    title, name = f"`gym env start` of `{_gym_start.OURS}`", f"Gym's `{_gym_start.SMALLEST}`"
    target = START_RATIO * median(each.ready for each in smallest)
    return [
        figure(
            f"{title}: Gym reports ready",
            [each.ready for each in ours],
            "s",
            better="lower",
            target=target,
            peers=[peer(name, [each.ready for each in smallest])],
        ),
        figure(
            f"{title}: all servers answer",
            [each.listening for each in ours],
            "s",
            better="lower",
            peers=[peer(name, [each.listening for each in smallest])],
        ),
        figure(
            f"{title}: CPU of all servers",
            [each.cpu for each in ours],
            "s",
            better="lower",
            peers=[peer(name, [each.cpu for each in smallest])],
        ),
    ]


async def measure_all(directory: Path) -> list[Figure]:
    """Measure all, one after the other."""
    figures = await starts(directory)
    async with running_servers(directory) as servers:
        async with running_server("noop", directory) as direct:
            figures = [*await latency(servers, direct), *figures]
        figures += [*await rates(servers), *await crowd(servers)]
    return figures


def run() -> Report:
    """Measure.

    Raises:
        ConfigError: there is no NeMo Gym with environment servers here.
    """
    if not is_installed():
        raise ConfigError("bench gym: NeMo Gym is not installed here.", "Install nemo-gym 0.7.0.")
    begun = StartConditions.capture()
    # /var/tmp is on a disk where /tmp may be memory.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o711)  # sandboxes have another uid when this is root
        figures = asyncio.run(measure_all(directory))
    return report("gym", figures, "nemo-gym", "aiohttp", "fastapi", "uvicorn", "pydantic", begun=begun)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
