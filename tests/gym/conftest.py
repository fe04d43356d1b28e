"""What tests of NeMo Gym's own processes share."""

import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_gym import __version__


@pytest.fixture(scope="module")
def found_by_gym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make Gym find what ``pyproject.toml`` publishes, also where an older install has not heard of it.

    Entry points, as an installer would write them, stand before what is installed.
    """
    from nemo_gym.sandbox.providers import registry

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    directory = tmp_path_factory.mktemp("published")
    metadata = directory / f"prorl_gym-{__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: prorl-gym\nVersion: {__version__}\n")
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        registry._ENTRY_POINT_LOADERS = None  # noqa: SLF001
        yield
    registry._ENTRY_POINT_LOADERS = None  # noqa: SLF001


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Directory for Ray's sockets, whose paths may have 107 bytes: pytest's own are too long for them."""
    directory = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
