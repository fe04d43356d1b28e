"""What is posted to the published routes, and a rollout request made from a body of ``/process``."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.compat.instance_task import convert_instance, resolve_environment
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.attempt import EnvironmentLookup
from prorl_gym.settings import RolloutSettings

_LOG = logging.getLogger(__name__)

_SETTING_BY_PARAM = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "max_iterations": "max_turns",
    "max_output_tokens": "max_turn_tokens",
    "max_model_len": "max_tokens",
}

_SILENTLY_IGNORED = frozenset({"token_level_generation", "api_key"})
"""Read elsewhere, or never: an API key is not stored."""

_MAX_KEYS = 256
"""Ignored keys that are remembered, since their names come from outside."""


CallerId = Annotated[str, Field(max_length=512)] | Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None
"""What a trainer calls a row or a trajectory; returned as it came."""


class _Body(BaseModel):
    """Base: unknown fields are ignored, as the published trainers send some."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ProcessRequest(_Body):
    """One rollout to make."""

    instance: dict[str, Any]
    """The dataset row, with ``data_source``, ``instance_id`` and ``trajectory_id`` in it."""
    sampling_params: dict[str, Any] = {}
    job_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """For ``/cancel``; free again once the call has its answer."""


class _InstanceIds(_Body):
    """The fields of an instance that are not the task."""

    data_source: Annotated[str, Field(max_length=128)] = "swebench"
    instance_id: CallerId = None
    trajectory_id: CallerId = None


class CancelJobRequest(_Body):
    """Which call of ``/process`` to cancel."""

    job_id: Annotated[str, Field(max_length=512)]


class AddressRequest(_Body):
    """Which engine to use."""

    address: Annotated[str, Field(max_length=2048)]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed body of ``/process``."""

    request: RolloutRequest
    instance_id: CallerId
    trajectory_id: CallerId
    include_tokens: bool
    """Whether the answer contains token ids."""


def parse_request(body: ProcessRequest, config: CompatConfig, environments: EnvironmentLookup) -> ParsedRequest:
    """Return the rollout request that a body describes.

    Raises:
        ApiError: 400, a data source without an environment; 503, this service does not offer its environment; 422, a
            name or a setting does not fit.
        TaskError: the instance is no row of that environment.
    """
    names = _names(body.instance)
    name = resolve_environment(names.data_source, config.data_sources)
    try:
        environment = environments(name)
    except TaskError as error:
        if error.kind is not FailureKind.UNKNOWN_ENVIRONMENT:
            raise
        raise ApiError(503, f"data_source '{names.data_source[:80]}': {error.what}", error.fix) from None
    task = convert_instance(name, body.instance)
    environment.parse_row(task)  # so that the caller gets the error of a bad row
    settings = parse_settings(body.sampling_params, RolloutSettings(mask_overlong=config.mask_overlong))
    if settings.seed is not None and names.trajectory_id is not None:
        # Trainers send one seed for all trajectories of a prompt, which would all be the same one.
        settings = settings.model_copy(update={"seed": _derive_seed(settings.seed, names.trajectory_id)})
    request = RolloutRequest(
        run_id=config.run_id,
        group_id=_group_id(name, task),
        environment=name,
        task=task,
        settings=settings,
        metadata=_metadata(body.job_id, names),
    )
    tokens = body.sampling_params.get("token_level_generation") is not False
    return ParsedRequest(request, names.instance_id, names.trajectory_id, tokens)


def _names(instance: Mapping[str, Any]) -> _InstanceIds:
    try:
        return _InstanceIds.model_validate(instance)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ApiError(
            422, f"instance.{first['loc'][0]} is wrong: {first['msg'][:300]}.", "Send a text or an integer."
        ) from None


def _group_id(environment: str, task: Mapping[str, Any]) -> str:
    """Name the trajectories of one prompt alike: they go where its prefix is cached."""
    try:
        text = json.dumps([environment, task], sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise TaskError(
            FailureKind.BAD_ROW, "The instance holds something that JSON cannot carry.", "Send finite numbers."
        ) from None
    return f"p-{blake2b(text.encode('ascii'), digest_size=12).hexdigest()}"


def _derive_seed(seed: int, trajectory_id: str | int) -> int:
    digest = blake2b(f"{seed}:{trajectory_id}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _metadata(job_id: str | None, names: _InstanceIds) -> dict[str, str]:
    given = {"job_id": job_id, "instance_id": names.instance_id, "trajectory_id": names.trajectory_id}
    return {"data_source": names.data_source, **{key: str(value) for key, value in given.items() if value is not None}}


def parse_settings(params: Mapping[str, Any], base: RolloutSettings) -> RolloutSettings:
    """Return the settings of ``sampling_params``, over ``base``. Unknown keys are left out.

    Raises:
        ApiError: 422, a known key has a value that does not fit.
    """
    given = {ours: params[theirs] for theirs, ours in _SETTING_BY_PARAM.items() if params.get(theirs) is not None}
    try:
        return RolloutSettings.model_validate(base.model_dump(exclude_none=True) | given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        theirs = next(
            (name for name, ours in _SETTING_BY_PARAM.items() if ours == first["loc"][0]), str(first["loc"][0])
        )
        raise ApiError(
            422, f"sampling_params.{theirs} is wrong: {first['msg'][:300]}.", "Correct it, or leave it out."
        ) from None


class IgnoredKeyWarnings:
    """Warns once for each key of ``sampling_params`` that has no effect here. Values are never shown."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn_new(self, params: Mapping[str, Any]) -> None:
        """Log the keys that are seen for the first time."""
        for key in params:
            name = key[:64]
            if (
                key in _SETTING_BY_PARAM
                or key in _SILENTLY_IGNORED
                or name in self._warned
                or len(self._warned) >= _MAX_KEYS
            ):
                continue
            self._warned.add(name)
            _LOG.warning("sampling_params: %r has no effect here (docs/migration.md)", name)
