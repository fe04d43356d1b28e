"""The form of every published figure, and the conditions it was measured under."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Literal, TypedDict

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at 97.5 %, for 1 to 9 degrees of freedom."""
_Z95 = 1.959964

LOAD_AVERAGE = os.getloadavg()[0]
"""When a bench is loaded: its own work raises it, too."""
Better = Literal["lower", "higher"]
SHORT = os.environ.get("PRORL_BENCH_SHORT") == "1"
"""Measure a tenth, to try a bench: its report is not for publication. Set by ``prorl-gym bench NAME --short``; a
variable, since processes that a bench starts need it too."""


class Peer(TypedDict):
    """What a figure is compared with, measured in the same run."""

    name: str
    value: float
    target: float | None
    """How many times better than the peer the figure shall be."""


class Figure(TypedDict):
    """One number, with what it is to be compared with."""

    name: str
    backend: str | None
    """Of the sandboxes it was measured with; ``None`` where it has none."""
    value: float
    unit: str
    target: float | None
    better: Better
    peers: list[Peer]
    runs: list[float]
    interval: tuple[float, float] | None
    """Of the mean of the runs, where these differ by chance and not by noise of the machine."""


class Report(TypedDict):
    """What one bench prints."""

    bench: str
    date: str
    quick: bool
    """Too few repetitions to be published."""
    figures: list[Figure]
    ratios: dict[str, float] | None
    """How many times better than each peer; ``None`` when more was running than there are cores."""
    load_average: float
    """When the bench began."""
    load_average_after: float
    cores: int | None
    machine: str
    versions: dict[str, str]


def peer(name: str, runs: Sequence[float], *, target: float | None = None) -> Peer:
    """Return a peer whose value is the median of its runs."""
    return Peer(name=name, value=median(runs), target=target)


def figure(
    name: str,
    runs: Sequence[float],
    unit: str,
    *,
    better: Better = "lower",
    backend: str | None = None,
    target: float | None = None,
    peers: Sequence[Peer] = (),
    interval: tuple[float, float] | None = None,
) -> Figure:
    """Return a figure whose value is the median of its runs; their mean, where there is an interval of it."""
    return Figure(
        name=name,
        backend=backend,
        value=median(runs) if interval is None else mean(runs),
        unit=unit,
        target=target,
        better=better,
        peers=list(peers),
        runs=list(runs),
        interval=interval,
    )


def interval(runs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of some runs (Student's t)."""
    if len(runs) < 2:
        raise ValueError(f"no interval of {len(runs)} runs")
    freedom = len(runs) - 1
    if freedom <= len(_T95):
        t = _T95[freedom - 1]
    else:  # two terms of the expansion by 1/freedom: right to 0.2 % (Abramowitz and Stegun 26.7.5)
        t = _Z95 + (_Z95**3 + _Z95) / (4 * freedom) + (5 * _Z95**5 + 16 * _Z95**3 + 3 * _Z95) / (96 * freedom**2)
    half = t * stdev(runs) / len(runs) ** 0.5
    return mean(runs) - half, mean(runs) + half


def times_better(row: Figure, other: Peer) -> float | None:
    """Return how many times better a figure is than a peer: below 1 the peer wins. ``None`` against zero."""
    ours, theirs = (row["value"], other["value"]) if row["better"] == "lower" else (other["value"], row["value"])
    return theirs / ours if ours else None


def report(
    bench: str,
    figures: list[Figure],
    *packages: str,
    begun: float = LOAD_AVERAGE,
    also: Mapping[str, str] | None = None,
) -> Report:
    """Return the report, with the versions of Python, the kernel, this package and ``packages``."""
    versions = {"python": platform.python_version(), "kernel": platform.release().split("-")[0]}
    for package in ("prorl-gym", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    quiet = begun <= (os.cpu_count() or 1)  # a busy machine slows some peers more than others
    return Report(
        bench=bench,
        date=datetime.now(UTC).date().isoformat(),
        quick=SHORT,
        figures=figures,
        ratios=_ratios(figures) if quiet else None,
        load_average=begun,
        load_average_after=os.getloadavg()[0],
        cores=os.cpu_count(),
        machine=_machine(),
        versions={**versions, **(also or {})},
    )


def _ratios(figures: Sequence[Figure]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in figures:
        label = f"{row['backend']}: {row['name']}" if row["backend"] else row["name"]
        for other in row["peers"]:
            if (ratio := times_better(row, other)) is not None:
                found[f"{label} against {other['name']}"] = ratio
    return found


def _machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    kind = ", ".join(sorted(models)) or platform.machine()
    return f"{os.cpu_count()} cores ({kind}), {memory:.0f} GiB memory, started by {who}"


def program_version(name: str, flag: str = "--version") -> dict[str, str]:
    """Return the version of a program, by its name; nothing where it is not installed."""
    path = shutil.which(name)
    if path is None:
        return {}
    said = subprocess.run([path, flag], capture_output=True, text=True, check=False).stdout.split()
    return {name: next((word for word in said if word[:1].isdigit()), "unknown")}


def package_versions(variable: str, *packages: str) -> dict[str, str]:
    """Return the versions of packages in the environment whose python an environment variable names."""
    python = os.environ.get(variable)
    return {} if python is None else versions_in(python, *packages)


def versions_in(python: str | Path, *packages: str) -> dict[str, str]:
    """Return the versions of packages in the environment of a python; nothing where it does not exist."""
    if not Path(python).exists():
        return {}
    code = "import importlib.metadata, sys; [print(importlib.metadata.version(name)) for name in sys.argv[1:]]"
    said = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=False).stdout.split()
    return dict(zip(packages, said, strict=False))
