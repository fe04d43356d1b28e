# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Names that NeMo Gym does not export for others, and differences between its versions 0.5.1 and 0.7.

No other module of this package imports such a name. Modules that only servers need are imported inside functions: the
sandbox provider does not load them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxResources,
    SandboxStatus,
)
from nemo_gym.sandbox.providers.base import SandboxSpec as GymSandboxSpec

try:
    from nemo_gym.sandbox.providers.base import SandboxPtyError, SandboxPtySpec
except ImportError:  # 0.5.1 has no terminals and calls nothing that would raise or take these
    SandboxPtyError, SandboxPtySpec = RuntimeError, object

__all__ = [
    "GymSandboxSpec",
    "SandboxCreateError",
    "SandboxExecResult",
    "SandboxHandle",
    "SandboxPtyError",
    "SandboxPtySpec",
    "SandboxResources",
    "SandboxStatus",
    "capture_rollout_id",
    "current_rollout_id",
    "has_trajectories",
    "headline_pass_metrics",
    "pass_metrics",
    "server_url",
    "verifier_fixture",
]


def server_url(global_config: Mapping[str, Any], instance: str) -> str:
    """Return the address of a server, by the name of its instance."""
    from nemo_gym.global_config import get_first_server_config_dict

    server = get_first_server_config_dict(global_config, instance)
    return f"http://{server['host']}:{server['port']}"


def current_rollout_id() -> str | None:
    """Return the rollout that the address of the current request names."""
    from nemo_gym import rollout_correlation

    return rollout_correlation.current_rollout_id()


def capture_rollout_id(row: Mapping[str, Any]) -> str | None:
    """Return the id under which Gym files what it captures of a row; ``None`` without a usable one."""
    from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body

    try:
        return maybe_rollout_id_from_run_body(row)
    except ValueError:
        return None


def has_trajectories() -> bool:
    """Whether this Gym reads ``ng_trajectory``: 0.5.1 does not."""
    from nemo_gym import rollout_observability

    return hasattr(rollout_observability, "TrajectoryRecord")


def pass_metrics(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return Gym's pass@k, and mean and deviation over repeats, in per cent; ``tasks`` are the results of each row."""
    from nemo_gym.reward_profile import compute_pass_majority_metrics

    return compute_pass_majority_metrics(tasks)[0]


def headline_pass_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``pass_metrics`` that are of all samples."""
    from nemo_gym.reward_profile import highest_k_metrics

    return highest_k_metrics(metrics, "pass@1[avg-of-{k}]") | highest_k_metrics(metrics, "pass@{k}")


def verifier_fixture(server: type[Any], request_model: type[Any], cases: Path) -> Any:
    """Return the fixture that ``gym env test`` looks for; ``None`` in 0.5.1, which has none."""
    try:
        from nemo_gym.verifier_fixture import VerifierFixture
    except ImportError:
        return None

    def reseed(server: Any, request: Any) -> None:
        """Grading draws no random numbers."""

    return VerifierFixture(server_factory=server, request_model=request_model, cases_path=cases, reseed=reseed)
