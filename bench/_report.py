"""The form of every published figure, and the conditions it was measured under."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Literal, TypedDict


class Figure(TypedDict):
    """One number, with what it is to be compared with."""

    name: str
    value: float
    unit: str
    target: float | None
    better: Literal["lower", "higher"]
    peer: str | None
    peer_value: float | None
    runs: list[float]


class Report(TypedDict):
    """What one bench prints."""

    bench: str
    figures: list[Figure]
    ratios: dict[str, float] | None
    """Peer over value, per figure with a peer; ``None`` when more was running than there are cores."""
    load_average: float
    cores: int | None
    versions: dict[str, str]


def figure(
    name: str,
    runs: Sequence[float],
    unit: str,
    *,
    better: Literal["lower", "higher"],
    target: float | None = None,
    peer: tuple[str, float] | None = None,
) -> Figure:
    """Return a figure whose value is the median of its runs; ``peer``: a name and a value from the same run."""
    peer_name, peer_value = peer or (None, None)
    return Figure(
        name=name,
        value=median(runs),
        unit=unit,
        target=target,
        better=better,
        peer=peer_name,
        peer_value=peer_value,
        runs=list(runs),
    )


def report(bench: str, figures: list[Figure], *packages: str) -> Report:
    """Return the report, with the versions of Python, the kernel, this package and ``packages``."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("prorl-gym", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    load, cores = os.getloadavg()[0], os.cpu_count()
    compared = [(f"{row['name']} against {row['peer']}", row["peer_value"], row["value"]) for row in figures]
    ratios = {name: peer_value / value for name, peer_value, value in compared if peer_value is not None and value}
    return Report(
        bench=bench,
        figures=figures,
        ratios=ratios if load <= (cores or 1) else None,  # a busy machine slows some peers more than others
        load_average=load,
        cores=cores,
        versions=versions,
    )
