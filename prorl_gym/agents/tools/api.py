"""``ApiTool``: a tool that calls an API from the host, with typed arguments and a key that stays out of the sandbox.

The agent's sandbox has no network and no secrets. Such a tool gives access to one API through one function of the
environment's author: its arguments are checked, its answer is bounded and cleaned.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from prorl_gym.agents.protocol import Observation, ToolSpec
from prorl_gym.agents.tools.api_client import ApiClient, ApiConfig, ApiOutage, ApiRefused, ApiResponse
from prorl_gym.agents.tools.observation_text import printable_text, shorten
from prorl_gym.agents.tools.tool_secret import Secret, redact_secrets
from prorl_gym.errors import FailureKind, SandboxError

__all__ = ["ApiClient", "ApiConfig", "ApiOutage", "ApiRefused", "ApiResponse", "ApiTool", "schema_of"]

ArgumentsT = TypeVar("ArgumentsT", bound=BaseModel)


class ApiTool(Generic[ArgumentsT]):
    """Implements ``Tool``. Holds nothing between calls: there is nothing to close.

    Args:
        name: as the model calls it.
        description: for the model.
        arguments: pydantic model of the arguments; its field descriptions are for the model too.
        handler: calls the API and returns the observation. What it raises beyond ``ApiRefused`` and ``ApiOutage`` is a
            defect of the environment and no observation.
        config: the API.
    """

    def __init__(
        self,
        name: str,
        description: str,
        arguments: type[ArgumentsT],
        handler: Callable[[ArgumentsT, ApiClient], Awaitable[str]],
        config: ApiConfig,
    ) -> None:
        self._spec = ToolSpec(name=name, description=description, parameters=schema_of(arguments))
        self._arguments = arguments
        self._handler = handler
        self._config = config
        self._secrets = (Secret(config.secret),) if config.secret is not None else ()

    @property
    def spec(self) -> ToolSpec:
        """See ``Tool``."""
        return self._spec

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Check the arguments, call the API, bound the answer.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``: the key is missing or refused, or there is an outage and the
                configuration lets it fail the attempt. The cause is infrastructure.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            return Observation(f"The arguments of '{self._spec.name}' were not accepted: {_validation_message(error)}.")
        try:
            async with asyncio.timeout(self._config.seconds):
                text = await self._handler(checked, ApiClient(self._config))
        except ApiRefused as refusal:
            text = f"The API refused: {refusal}"
        except ApiOutage as outage:
            text = self._outage_text(str(outage))
        except TimeoutError:
            text = self._outage_text(f"it did not answer within {self._config.seconds:g} seconds")
        # Redacted before it is cut: half a key would not be recognized.
        return Observation(shorten(printable_text(redact_secrets(text, self._secrets)), self._config.characters))

    def _outage_text(self, why: str) -> str:
        if self._config.outage == "tell":
            return f"The API is not available: {why}. Try again later, or go on without it."
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            redact_secrets(
                f"The API of tool '{self._spec.name}' at {self._config.host} is not available: {why}.", self._secrets
            ),
            "Check that the API is up and that this host may reach it.",
        )


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, without pydantic's titles, which are useless to a model."""
    schema: dict[str, Any] = _untitled(model.model_json_schema())
    schema.setdefault("properties", {})
    schema.pop("description", None)  # the docstring of a class is for people
    return schema


def _untitled(value: Any, *, names: bool = False) -> Any:
    """Drop titles; inside ``properties`` a key called ``title`` is an argument's name."""
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [_untitled(item) for item in items]
    if not isinstance(value, dict):
        return value
    entries: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    return {
        key: _untitled(item, names=key == "properties" and not names)
        for key, item in entries.items()
        if names or key != "title"
    }


def _validation_message(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    said = [f"'{'.'.join(map(str, fault['loc'])) or 'all'}': {fault['msg'].rstrip('.')}" for fault in faults[:3]]
    return "; ".join(said)[:500]
