"""What differs between the NeMo Gym versions that we support (0.5.1, which NeMo-RL pins, and newer)."""

from pathlib import Path
from typing import Any

try:
    from nemo_gym.base_resources_server import ReverifyMode

    REVERIFY_STATELESS: Any = ReverifyMode.STATELESS
except ImportError:
    REVERIFY_STATELESS = "stateless"


def verifier_fixture(server: type[Any], request_model: type[Any], cases: Path) -> Any:
    """Return the fixture object that ``gym env test`` looks for; ``None`` where Gym has no such thing."""
    try:
        from nemo_gym.verifier_fixture import VerifierFixture
    except ImportError:
        return None
    return VerifierFixture(
        server_factory=server, request_model=request_model, cases_path=cases, reseed=_nothing_to_reseed
    )


def _nothing_to_reseed(server: Any, request: Any) -> None:
    """Grading draws no random numbers."""
