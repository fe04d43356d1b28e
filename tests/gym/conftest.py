"""What tests of NeMo Gym's own processes share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Directory for Ray's sockets, whose paths may have 107 bytes: pytest's own are too long for them."""
    directory = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
