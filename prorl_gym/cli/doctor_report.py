"""``prorl-gym doctor``: what works on this machine, and for every "no" the cause and the fix."""

import asyncio
import json
import logging
import os
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.config import ImagesConfig, SandboxConfig
from prorl_gym.sandbox.protocol import ProbeResult
from prorl_gym.sandbox.service.host_facts import Finding, collect_host_facts, run_checks
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.python_packages import PackageSet, packages_mount
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

_MIN_PYTHON = (3, 11)
_GYM_MIN_PYTHON = (3, 13, 14)
_SANDBOX_PYTHON = "/usr/bin/python3"
_COLOURS = {"yes": "green", "weak": "yellow", "no": "red", "info": ""}


def run_doctor(scratch: Path | None, store: Path | None, uid: int | None, *, as_json: bool) -> None:
    """Run ``prorl-gym doctor`` with its options. Exit code 1: no backend works."""
    given = {"scratch": scratch, "uid": uid}
    config = load_config(SandboxConfig, {key: value for key, value in given.items() if value is not None}, "options")
    facts = collect_host_facts(config, store or ImagesConfig().store_directory())
    logging.disable(logging.WARNING)  # the table has what probes warn about
    try:
        probes = asyncio.run(probe_backends(config))
    finally:
        logging.disable(logging.NOTSET)
    findings = [*run_checks(facts), *program_findings(), ipython_finding(config)]
    for probe in probes:
        name = f"sandbox: {probe.backend}"
        findings.append(Finding(name, "yes" if probe.ok else "no", probe.detail, probe.fix))
    if as_json:
        report = {"facts": asdict(facts), "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = Text("" if finding.verdict == "info" else finding.verdict, _COLOURS[finding.verdict])
            table.add_row(Text(finding.name), mark, Text(finding.detail))
            if finding.fix and finding.verdict in ("no", "weak"):
                table.add_row("", "", Text(finding.fix, "cyan"))
        wide_console().print(table)
    if not any(probe.ok for probe in probes):
        raise typer.Exit(1)


def program_findings(sandbox_python: str = _SANDBOX_PYTHON) -> list[Finding]:
    """Check the programs of this host; starts nothing."""

    def check(name: str, is_good: bool, detail: str, fix: str) -> Finding:
        return Finding(name, "yes" if is_good else "no", detail, fix)

    here = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    bash = shutil.which("bash", path="/usr/bin:/bin")
    has_python = os.access(sandbox_python, os.X_OK)
    python = os.path.realpath(sandbox_python) if has_python else "not there: sandboxes of the host's /usr need it"
    try:
        gym = check("NeMo Gym", True, version("nemo-gym"), "")
    except PackageNotFoundError:  # for information only, since it is optional
        wanted = ".".join(map(str, _GYM_MIN_PYTHON))
        gym = Finding("NeMo Gym", "info", f"not installed here (pip install nemo-gym, Python {wanted} or newer)")
    return [
        check("python", sys.version_info >= _MIN_PYTHON, here, "prorl-gym needs Python 3.11 or newer."),
        gym,
        check(sandbox_python, has_python, python, "apt install python3, or give images of your own."),
        check("bash", bash is not None, bash or "not in /usr/bin or /bin", "apt install bash."),
    ]


def wide_console() -> Console:
    """Return a console that does not cut lines in a file or a pipe, which have no width."""
    console = Console()
    return console if console.is_terminal else Console(width=400)


async def probe_backends(config: SandboxConfig) -> list[ProbeResult]:
    """Start one sandbox on each backend; this also cleans up after services that were killed."""
    probes: list[ProbeResult] = []
    for name in get_args(BackendName):
        backend = NamespaceBackend(name, config)
        try:
            probes.append(await backend.probe())
        finally:
            await backend.close()
    return probes


def ipython_finding(config: SandboxConfig) -> Finding:
    """Check the python tool for images that lack IPython. Installs its copy, as a service would."""
    try:
        mount = packages_mount(config.ipython_cache_dir(), os.geteuid() or config.uid)
        packages = PackageSet.find_installed()
    except ConfigError as error:
        what = f"{error.what} Where an image has none, the python tool is the standard library's console."
        return Finding("IPython", "weak", what, error.fix)
    detail = f"{packages.version} for sandboxes with Python {packages.requires_python} or newer, in {mount.source}"
    return Finding("IPython", "yes", detail)
