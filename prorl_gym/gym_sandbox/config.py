# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the provider, and translation of Gym's requests into specs of our sandboxes."""

import logging
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from prorl_gym._gym_compat import GymSandboxSpec, SandboxCreateError, SandboxResources
from prorl_gym.config import ConfigModel, load_config
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.config import LimitsConfig, SandboxConfig
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec

log = logging.getLogger(__name__)

SHM_SIZE_KEY = "prorl-shm-size"
"""Key of ``metadata`` of Gym's ``SandboxSpec`` that carries /dev/shm's size from validation to creation."""

_OUTPUT_LIMIT = 16 << 20
"""In bytes. Gym's agents fetch whole patches and logs with a command and expect them complete."""


class ProviderConfig(SandboxConfig):
    """Keys below ``prorl:`` in a sandbox block; see ``SandboxConfig`` for the rest."""

    limits: LimitsConfig = LimitsConfig(output=_OUTPUT_LIMIT)
    """Bounds of every sandbox. A request's ``memory_mib`` replaces ``total_memory``, its ``disk_gib`` replaces
    ``root_size`` and ``file_size``."""
    command_seconds: Annotated[float, Field(gt=0)] = 180.0
    """Longest time of a command whose caller names none."""
    workdir: str = "/workspace"
    """Working directory of sandboxes whose request names none."""


class _ProviderOptions(ConfigModel):
    """Keys of a request's ``provider_options``."""

    mounts: tuple[tuple[str, str], ...] = ()
    """Read-only views of host paths: (source, target)."""
    egress: tuple[str, ...] = ()
    """Reachable hosts, ``host`` or ``host:port``; see docs/sandbox-limits.md. None by default."""


def to_spec(request: GymSandboxSpec, config: ProviderConfig) -> SandboxSpec:
    """Translate a request. The provider handles ``ttl_s`` and ``ready_timeout_s``, Gym handles ``files``.

    Raises:
        SandboxCreateError: our sandboxes cannot meet it.
    """
    if request.entrypoint:
        raise SandboxCreateError(
            "prorl: `entrypoint` is not supported: a sandbox starts without a main process.\nRun it with exec()."
        )
    try:
        options = load_config(_ProviderOptions, request.provider_options, "provider_options of 'prorl'")
    except ConfigError as error:
        raise SandboxCreateError(str(error)) from None
    return SandboxSpec(
        image=request.image or config.image,
        workdir=request.workdir or config.workdir,
        env=dict(request.env),
        mounts=tuple(Mount(source, target) for source, target in options.mounts),
        egress=options.egress,
        limits=_to_limits(request, config.limits.to_limits()),
    )


def _to_limits(request: GymSandboxSpec, limits: SandboxLimits) -> SandboxLimits:
    resources = request.resources
    assert isinstance(resources, SandboxResources)  # Gym's dataclass converts mappings
    if resources.gpu:
        raise SandboxCreateError("prorl: `resources.gpu` is not supported: sandboxes see no devices.\nRemove it.")
    _check_positive(resources)
    if resources.cpu is not None:
        # Gym's own configurations set it everywhere: refusing it would refuse them.
        log.warning(
            "prorl: resources.cpu (%g) is not enforced: a share of the processors takes a cgroup. "
            "limits.cpu_seconds bounds the time of each process.",
            resources.cpu,
        )
    if resources.memory_mib is not None:
        limits = replace(limits, total_memory=resources.memory_mib << 20)
    if resources.disk_gib is not None:
        limits = replace(limits, root_size=resources.disk_gib << 30, file_size=resources.disk_gib << 30)
    if SHM_SIZE_KEY in request.metadata:
        limits = replace(limits, shm_size=int(request.metadata[SHM_SIZE_KEY]))
    return limits


def _check_positive(resources: SandboxResources) -> None:
    for name in ("cpu", "memory_mib", "disk_gib"):
        value = getattr(resources, name)
        if value is not None and not value > 0:
            raise SandboxCreateError(f"prorl: `resources.{name}` is {value}.\nIt must be positive, or left out.")
