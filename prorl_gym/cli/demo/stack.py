"""The programs of the demo: oracle engines, ``gym env start``, ``gym eval run``. All of them on loopback.

Gym starts servers and Ray, and Ray's daemons leave their parent's session and group. So the command makes itself the
*subreaper*: orphans below it become its children instead of init's, and everything that was started is exactly the
tree below this process. Processes are ended by id, never by name.
"""

import asyncio
import contextlib
import os
import re
import secrets
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from prorl_gym.cli.installation import link_venvs
from prorl_gym.errors import ProrlError
from prorl_gym.free_ports import free_ports
from prorl_gym.gym_roots import component_roots, has_environment_servers
from prorl_gym.process_identity import ProcessIdentity

HOST = "127.0.0.1"
ENVIRONMENTS = ("code", "math", "stem", "swe")
_ORACLE = ("--solve-rate", "0.7", "--seed", "7")  # some rollouts fail, so that there is something to see


def _iter_processes() -> Iterator[tuple[int, str, ProcessIdentity]]:
    """Yield parent, state and identity of every process of this machine."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any characters
            yield int(fields[1]), fields[0], ProcessIdentity(int(entry.name), int(fields[19]))


def descendants(root: int) -> list[ProcessIdentity]:
    """Return every living process below ``root``, except zombies, parents before children."""
    children: dict[int, list[ProcessIdentity]] = {}
    for parent, state, seen in _iter_processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(seen)
    found: list[ProcessIdentity] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [seen.pid for seen in below]
    return found


def send_signal(seen: ProcessIdentity, number: signal.Signals) -> None:
    """Signal a process if it is still the same."""
    if seen.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(seen.pid, number)


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A started program whose output goes to a file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of its output, below those of the server that ended it where Gym names one."""
        written = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        named = [name for line in written for name in re.findall(r"Process `(\w+)` finished unexpectedly", line)]
        its_own = [line for name in named[-1:] for line in written if line.startswith(f"({name}) ")]
        return "\n".join([*its_own[-lines:], *written[-lines:]])


class ProcessSupervisor:
    """Starts children, whose outputs go to files in ``logs``, and ends everything below this process."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: list[LoggedProcess] = []

    async def start_child(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> LoggedProcess:
        """Start a program in a session of its own, so that a Ctrl-C at the terminal reaches only this process."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        child = LoggedProcess(name, process, log)
        self.children.append(child)
        return child

    async def stop_all(self, grace: float = 12.0) -> int:
        """End everything: first the children, newest first, then what is left below. Never raises.

        Children have ``grace`` seconds after SIGTERM. Returns the number of processes that outlived SIGKILL: zero,
        unless the kernel holds one.
        """
        for child in reversed(self.children):
            if child.process.returncode is None:
                child.process.terminate()
        await self._wait_exited([child.process.wait() for child in self.children], grace)
        for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0), (signal.SIGKILL, 5.0)):
            left = descendants(os.getpid())
            for seen in left:
                send_signal(seen, number)
            await self._wait_exited([asyncio.to_thread(_wait_for_exit, seen, seconds) for seen in left], seconds + 1)
            _reap_adopted({child.process.pid for child in self.children})
        return len(descendants(os.getpid()))

    @staticmethod
    async def _wait_exited(waits: Sequence[Awaitable[object]], seconds: float) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()


def _wait_for_exit(seen: ProcessIdentity, seconds: float) -> None:
    """Wait by pidfd for the end of a process, which need not be a child."""
    try:
        descriptor = os.pidfd_open(seen.pid)
    except OSError:
        return
    try:
        if seen.is_alive:
            select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


def _reap_adopted(own: set[int]) -> None:
    """Collect the exit codes of adopted orphans; asyncio collects those of the children in ``own``."""
    for parent, state, seen in _iter_processes():
        if (parent, state) == (os.getpid(), "Z") and seen.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(seen.pid, os.WNOHANG)


class DemoError(ProrlError):
    """A part of the demo failed."""


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """Where the policy is served."""

    urls: tuple[str, ...]
    model: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class DemoFolders:
    """Directories of a run."""

    output: Path
    """Kept: results, logs, the page."""
    scratch: Path
    """Removed at the end: Ray's session (whose socket paths must be short), links, the ledger."""

    @property
    def results(self) -> Path:
        return self.output / "results.jsonl"


class DemoStack:
    """Starts the programs one after the other and waits until each is ready."""

    def __init__(self, supervisor: ProcessSupervisor, folders: DemoFolders) -> None:
        self._supervisor = supervisor
        self._folders = folders
        self._config = folders.output / "demo.yaml"
        self._head_url = ""
        self._ray_token = secrets.token_hex(32)

    async def start_oracles(self, count: int) -> PolicyEndpoint:
        """Start oracle engines, which play the example rows' gold answers, or wrong ones by seed."""
        ports = free_ports(count)
        children = [
            await self._start(f"engine-{index}", "prorl-gym", "engine", "oracle", "--port", str(port), *_ORACLE)
            for index, port in enumerate(ports)
        ]
        async with asyncio.TaskGroup() as waits:
            for child, port in zip(children, ports, strict=True):
                waits.create_task(self._wait_ready(child, f"http://{HOST}:{port}/health", seconds=60))
        return PolicyEndpoint(tuple(f"http://{HOST}:{port}/v1" for port in ports), "oracle", "small")

    async def check_server(self, url: str, model: str, tokenizer: str) -> PolicyEndpoint:
        """Check that a running server serves the model: Gym would wait ten minutes for it.

        Raises ``DemoError`` if it does not answer, or serves other models.
        """
        url = url.rstrip("/")
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session:
                async with session.get(f"{url}/models") as response:
                    answer: Any = await response.json(content_type=None)
            served = [str(entry["id"]) for entry in answer["data"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, LookupError) as error:
            raise DemoError(
                f"{url}/models: no vLLM server answers there ({type(error).__name__}).",
                "Give its address up to /v1 as BASE_URL, and look whether it is up.",
            ) from None
        if model not in served:
            raise DemoError(f"{url} does not serve '{model}'.", f"It serves: {', '.join(served)[:300]}.")
        return PolicyEndpoint((url,), model, tokenizer)

    async def start_gym(self, engines: PolicyEndpoint, on_ready: Callable[[str], None] = lambda name: None) -> None:
        """Start Gym with all environments on these engines; ``on_ready`` gets each server's name when it is ready."""
        link_venvs(self._folders.scratch / "venvs", Path(sys.prefix))
        servers = self.write_config(engines)
        child = await self._start("gym-servers", "gym", "env", "start", "--config", str(self._config))

        async def report_ready(name: str, url: str) -> None:
            if await self._wait_answering(child, url):
                on_ready(name)

        reports = [asyncio.create_task(report_ready(*server)) for server in servers.items()]
        try:
            for url in [f"{self._head_url}/readyz"] if has_environment_servers() else servers.values():
                await self._wait_ready(child, url, seconds=180)
        finally:
            for task in reports:  # Gym's own readiness decides, since 0.7; servers not reported yet need no report
                task.cancel()
            await asyncio.gather(*reports, return_exceptions=True)

    async def start_eval(self, rows: Path, repeats: int) -> LoggedProcess:
        """Start the collection of every row, ``repeats`` times."""
        return await self._start(
            "gym-eval",
            *("gym", "eval", "run", "--no-serve", "--config", str(self._config)),
            *("--input", str(rows), "--output", str(self._folders.results), "--num-repeats", str(repeats)),
        )

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        """Write the one file that both Gym commands read; return the address of each server's readiness.

        Every port is fixed: two demos must not share one.
        """
        servers = [("resources_servers", "prorl_rollout", "prorl_rollout")]
        servers += [("responses_api_agents", "prorl_rollout_agent", f"prorl_{name}_agent") for name in ENVIRONMENTS]
        if has_environment_servers():
            relays = [f"prorl_{name}_environment_server" for name in ENVIRONMENTS]
            servers += [("environment_servers", "legacy_agent", name) for name in relays]
        head, *ports = free_ports(1 + len(servers))
        self._head_url = f"http://{HOST}:{head}"
        config: dict[str, Any] = {
            "config_paths": [f"environments/prorl_{name}/config.yaml" for name in ENVIRONMENTS],
            **self._base_config(engines, head),
            "disable_health_check": True,  # it reads evidence that is not collected here (docs/gym.md)
            "prorl_service": {"ledger": {"path": str(self._folders.scratch / "ledger.sqlite")}},
        }
        for (kind, implementation, instance), port in zip(servers, ports, strict=True):
            config[instance] = {kind: {implementation: {"host": HOST, "port": port}}}
        self._config.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        names = [instance for _, _, instance in servers]
        path = "readyz" if has_environment_servers() else ""  # an older Gym's servers answer there when they listen
        return {name: f"http://{HOST}:{port}/{path}" for name, port in zip(names, ports, strict=True)}

    def _base_config(self, engines: PolicyEndpoint, head_port: int) -> dict[str, Any]:
        """Return what every configuration of Gym here has."""
        return {
            "head_server": {"host": HOST, "port": head_port},
            "default_host": HOST,
            "skip_venv_if_present": True,
            "uv_venv_dir": str(self._folders.scratch / "venvs"),
            "policy_base_url": list(engines.urls),
            "policy_model_name": engines.model,
            "policy_api_key": "unused",
            "prorl_tokenizer": engines.tokenizer,
        }

    async def _start(self, name: str, command: str, *arguments: str) -> LoggedProcess:
        roots = [*component_roots(), *filter(None, os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep))]
        temporary = self._folders.scratch / "tmp"  # what Ray, wandb and others never remove goes with the rest
        temporary.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "TMPDIR": str(temporary),
            "NEMO_GYM_EXTRA_ROOTS": os.pathsep.join(dict.fromkeys(roots)),
            "RAY_TMPDIR": str(self._folders.scratch),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only switch that makes Ray bind to loopback
            "RAY_AUTH_TOKEN": self._ray_token,  # Ray would write one into the home directory otherwise
            "RAY_enable_worker_prestart": "0",  # idle workers cost seconds on two cores
            "PYTHONUNBUFFERED": "1",
        }
        program = Path(sys.executable).parent / command
        if not program.exists():
            fix = "Run `make setup`, or install nemo-gym into this environment."
            raise DemoError(f"{program} does not exist.", fix)
        return await self._supervisor.start_child(name, [str(program), *arguments], env, self._folders.scratch)

    async def _wait_ready(self, child: LoggedProcess, url: str, seconds: float) -> None:
        """Wait until the address answers 200."""
        try:
            async with asyncio.timeout(seconds):
                if await self._wait_answering(child, url):
                    return
        except TimeoutError:
            raise self.program_error(child, f"was not ready after {seconds:g} s") from None
        raise self.program_error(child, f"ended with code {child.process.returncode}")

    @staticmethod
    async def _wait_answering(child: LoggedProcess, url: str) -> bool:
        """Poll the address until it answers 200; ``False``: the program ended first."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while child.process.returncode is None:
                try:
                    async with session.get(url) as response:
                        if response.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet
                await asyncio.sleep(0.25)
        return False

    def program_error(self, child: LoggedProcess, what: str) -> DemoError:
        """Return the error for a program, after showing the end of its log."""
        print(f"--- end of {child.log} ---\n{child.tail()}\n---", file=sys.stderr)
        return DemoError(f"{child.name} {what}.", f"Its log: {child.log}")
