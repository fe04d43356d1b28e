"""Asking a model hub, briefly: its client alone would try six times over, twice, and log each try."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false

import logging
from collections.abc import Generator
from contextlib import contextmanager

_LOGGERS = ("huggingface_hub", "transformers")
_SECONDS = 10.0


def reachable(name: str) -> bool:
    """Return whether the hub answers; asked once. Whether it has this model is for the loading to say."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_SECONDS)
    except HfHubHTTPError:
        return True  # it answered: no such model, no permission, no such file
    except Exception:  # which HTTP library the client stands on, and so what it raises, differs between its versions
        return False
    return True


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Keep the hub client's warnings out of the log while a tokenizer is loaded: the error says it all."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
