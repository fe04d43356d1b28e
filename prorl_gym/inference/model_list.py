"""``GET /v1/models``, which most servers have: whether they are there, what they serve, and how long its context is."""

import json
import logging
from contextlib import suppress
from typing import Any, cast

from prorl_gym.inference.checks import printable
from prorl_gym.inference.protocol import EngineHealth

log = logging.getLogger(__name__)


class ModelList:
    """Reads one server's list again and again, and warns of a wrong name once.

    Args:
        address: of the server, for messages.
        model: the name it is expected to serve.
    """

    def __init__(self, address: str, model: str) -> None:
        self.aliases: frozenset[str] = frozenset()
        """Other names that the server lists the same model under."""
        self._address = address
        self._model = model
        self._warned_of: list[str] = []

    def health(self, payload: bytes) -> EngineHealth:
        """Return that the server is well: it answered. Whether a model that it does not list is there, a call shows."""
        listed = self._listed(payload)
        names = list(listed)
        self.aliases = self._aliases_of(listed)
        if not names or self._model in names:
            return EngineHealth(ok=True, max_model_len=_length(listed.get(self._model, {})))
        unlisted = f"does not list model '{self._model}' but {printable(', '.join(names)[:300])}"
        if names != self._warned_of:
            self._warned_of = names  # probes ask again and again; the same news is told once
            log.warning(
                "engine %s does not serve model '%s'.\nIt serves: %s. Set 'inference.model' to one of these.",
                *(self._address, self._model, printable(", ".join(names)[:300])),
            )
        return EngineHealth(ok=True, unlisted=f"engine {self._address}: {unlisted}.")

    def _listed(self, payload: bytes) -> dict[str, dict[str, Any]]:
        """Read the models by name, as far as the answer is a list of them."""
        with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
            models = cast("list[dict[str, Any]]", json.loads(payload)["data"])
            return {str(model["id"]): model for model in models}
        return {}

    def _aliases_of(self, listed: dict[str, dict[str, Any]]) -> frozenset[str]:
        """Names of the same weights: vLLM answers with its first --served-model-name, whichever was asked for."""
        root = listed.get(self._model, {}).get("root")
        if not isinstance(root, str):
            return frozenset()
        return frozenset(name for name, model in listed.items() if model.get("root") == root)


def _length(model: dict[str, Any]) -> int | None:
    length = model.get("max_model_len")
    return length if type(length) is int and length > 0 else None
