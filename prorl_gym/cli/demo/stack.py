"""The programs of the demo: oracle engines, ``gym env start``, ``gym eval run``. All of them on loopback."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from prorl_gym._bootstrap import component_roots, has_environment_servers
from prorl_gym.cli.demo.process_supervisor import LoggedProcess, ProcessSupervisor
from prorl_gym.cli.installation import link_venvs
from prorl_gym.errors import ProrlError

HOST = "127.0.0.1"
ENVIRONMENTS = ("code", "math", "stem", "swe")
_ORACLE = ("--solve-rate", "0.7", "--seed", "7")  # some rollouts fail, so that there is something to see


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
        """The results file."""
        return self.output / "results.jsonl"


def free_ports(count: int) -> list[int]:
    """Return different unused ports, each found by binding it."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def program_path(name: str) -> str:
    """Return the path of a command of this environment.

    Raises:
        DemoError: it is not installed there.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DemoError(f"{path} does not exist.", "Run `make setup`, or install nemo-gym into this environment.")
    return str(path)


class DemoStack:
    """Starts the programs one after the other and waits until each is ready.

    Args:
        supervisor: starts and ends processes.
        folders: of this run.
    """

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

        Raises:
            DemoError: it does not answer, or serves other models.
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
        """Start Gym with all environments on these engines.

        Args:
            engines: where the policy is served.
            on_ready: called with the name of each server when it is ready.
        """
        link_venvs(self._folders.scratch / "venvs", Path(sys.prefix))
        servers = self.write_config(engines)
        child = await self._start("gym-servers", "gym", "env", "start", "--config", str(self._config))
        reports = [asyncio.create_task(self._report_ready(child, *server, on_ready)) for server in servers.items()]
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

    async def _report_ready(self, child: LoggedProcess, name: str, url: str, on_ready: Callable[[str], None]) -> None:
        if await self._wait_answering(child, url):
            on_ready(name)

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
        return await self._supervisor.start_child(name, [program_path(command), *arguments], env, self._folders.scratch)

    async def _wait_ready(self, child: LoggedProcess, url: str, seconds: float) -> None:
        """Wait until the address answers 200.

        Raises:
            DemoError: the program ended, or the time is up; with the end of its log.
        """
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
