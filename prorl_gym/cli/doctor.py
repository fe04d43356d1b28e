"""``prorl-gym doctor``: what works on this machine, and for every "no" the cause and the fix."""

import asyncio
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from prorl_gym.cli.doctor_host import host_facts, wide_console
from prorl_gym.config import load_config
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.diagnosis import read_sysctl
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.protocol import Probe
from prorl_gym.sandbox.scratch import default_scratch

_BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
_SETTINGS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the table."""

    name: str
    ok: bool | None
    """``None``: for information."""
    detail: str
    fix: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    scratch: Annotated[Path | None, typer.Option(help="Directory of the sandboxes' small files.")] = None,
    uid: Annotated[int | None, typer.Option(help="Uid of sandboxes when this runs as root.")] = None,
) -> None:
    """Try every sandbox backend for real and show what this machine lacks."""
    given = {"scratch": scratch, "uid": uid}
    config = load_config(SandboxConfig, {key: value for key, value in given.items() if value is not None}, "options")
    backends = [backend_fact(probe) for probe in asyncio.run(probe_all(config))]
    host = [Fact(*fact) for fact in host_facts()]
    wide_console().print(as_table([*machine_facts(config), *host, *backends]))
    if not any(fact.ok for fact in backends):
        raise typer.Exit(1)


def machine_facts(config: SandboxConfig) -> list[Fact]:
    """Return what the backends depend on; reads only."""
    uid = os.geteuid() or config.uid
    user = f"uid {uid}" if os.geteuid() else f"uid {uid}, since this runs as root"
    settings = [Fact(name, None, read_sysctl(name) or "not on this kernel") for name in _SETTINGS]
    return [
        Fact("kernel", None, f"{platform.system()} {platform.release()}"),
        *settings,
        Fact("sandboxes run as", None, user),
        Fact("scratch directory", None, str(config.scratch or default_scratch())),
    ]


async def probe_all(config: SandboxConfig) -> list[Probe]:
    """Start one sandbox on each backend; also cleans up after services that were killed."""
    probes: list[Probe] = []
    for name in _BACKENDS:
        backend = NamespaceBackend(name, config)
        try:
            probes.append(await backend.probe())
        finally:
            await backend.close()
    return probes


def backend_fact(probe: Probe) -> Fact:
    """Return the line of a probe."""
    return Fact(f"sandbox: {probe.backend}", probe.ok, probe.detail, probe.fix)


def as_table(facts: Sequence[Fact]) -> Table:
    """Return the facts as people read them: a fix follows each "no"."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for fact in facts:
        mark = {True: Text("yes", "green"), False: Text("no", "red"), None: Text()}[fact.ok]
        table.add_row(Text(fact.name), mark, Text(fact.detail))
        if fact.ok is False and fact.fix:
            table.add_row("", "", Text(fact.fix, "yellow"))
    return table
