"""``prorl-gym doctor``: what works on this machine, and for every "no" the cause and the fix."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import typer
from rich.table import Table
from rich.text import Text

from prorl_gym.cli.doctor_host import host_facts, wide_console
from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.facts import gather
from prorl_gym.sandbox.findings import Finding, judge
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.protocol import Probe
from prorl_gym.sandbox.python_packages import Packages, ipython_mount

_COLOURS = {"yes": "green", "weak": "yellow", "no": "red", "info": ""}


def examine(scratch: Path | None, store: Path | None, uid: int | None, *, as_json: bool) -> None:
    """Do what the command says; its options are these."""
    given = {"scratch": scratch, "uid": uid}
    config = load_config(SandboxConfig, {key: value for key, value in given.items() if value is not None}, "options")
    facts = gather(config, store or ImagesConfig().place())
    probes = asyncio.run(probe_all(config))
    findings = [*judge(facts), *host_facts(), ipython_finding(config), *map(backend_finding, probes)]
    if as_json:
        report = {"facts": asdict(facts), "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        wide_console().print(as_table(findings))
    if not any(probe.ok for probe in probes):
        raise typer.Exit(1)


async def probe_all(config: SandboxConfig) -> list[Probe]:
    """Start one sandbox on each backend; also cleans up after services that were killed."""
    probes: list[Probe] = []
    for name in get_args(BackendName):
        backend = NamespaceBackend(name, config)
        try:
            probes.append(await backend.probe())
        finally:
            await backend.close()
    return probes


def ipython_finding(config: SandboxConfig) -> Finding:
    """Return what the python tool is in images that lack IPython. Copies it to its place, as a service would."""
    try:
        mount = ipython_mount(config.ipython_cache(), os.geteuid() or config.uid)
        packages = Packages.installed()
    except ConfigError as error:
        what = f"{error.what} Where an image has none, the python tool is the standard library's console."
        return Finding("IPython", "weak", what, error.fix)
    detail = f"{packages.version} for sandboxes with Python {packages.needed} or newer, in {mount.source}"
    return Finding("IPython", "yes", detail)


def backend_finding(probe: Probe) -> Finding:
    """Return the line of a probe."""
    return Finding(f"sandbox: {probe.backend}", "yes" if probe.ok else "no", probe.detail, probe.fix)


def as_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as people read them: a fix follows what does not work."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        mark = Text("" if finding.verdict == "info" else finding.verdict, _COLOURS[finding.verdict])
        table.add_row(Text(finding.name), mark, Text(finding.detail))
        if finding.fix and finding.verdict in ("no", "weak"):
            table.add_row("", "", Text(finding.fix, "cyan"))
    return table
