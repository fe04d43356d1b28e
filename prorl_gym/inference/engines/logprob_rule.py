"""Whether an engine's log-probs are those of the distribution that was sampled from.

``raw`` log-probs are taken before temperature, top-p and top-k. They are the behaviour policy's only where these are
off (temperature 1, top-p 1, no top-k). Anywhere else an importance ratio made of them is wrong, silently. Evaluation
(priority above 0) is exempt: it is not trained on.
"""

import logging
from typing import Literal

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import GenerationRequest

log = logging.getLogger(__name__)

LogprobKind = Literal["raw", "processed"]

_FIX = "Start it with --logprobs-mode processed_logprobs and set 'logprob_kind: processed', or sample at temperature 1."


class LogprobRule:
    """The rule, for the engines of one pool.

    Args:
        pool: its name, for the warning.
        require_processed_logprobs: refuse such calls; otherwise log one warning.
    """

    def __init__(self, pool: str, *, require_processed_logprobs: bool = False) -> None:
        self._pool = pool
        self._require_processed_logprobs = require_processed_logprobs
        self._warned = False

    def check(self, request: GenerationRequest, kind: LogprobKind, address: str) -> None:
        """Check one call.

        Raises:
            EngineError: ``ENGINE_REFUSED``.
        """
        plain = request.temperature == 1.0 and request.top_p == 1.0 and request.top_k <= 0
        if kind == "processed" or plain or request.priority > 0:
            return
        what = f"its raw log-probs are not those of sampling at {_settings(request)}"
        if self._require_processed_logprobs:
            raise EngineError(FailureKind.ENGINE_REFUSED, f"engine {address}: {what}.", _FIX)
        if not self._warned:
            self._warned = True
            log.warning("pool %s, engine %s: %s.\n%s", self._pool, address, what, _FIX)


def _settings(request: GenerationRequest) -> str:
    return f"temperature {request.temperature:g}, top_p {request.top_p:g}, top_k {request.top_k}"
