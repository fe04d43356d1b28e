"""Makes Gym find what this checkout's ``pyproject.toml`` publishes, also where an older install has not heard of it."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_gym.sandbox.providers import registry

from prorl_gym import __version__

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@contextmanager
def published(directory: Path) -> Iterator[None]:
    """Put this distribution's entry points, as an installer would write them, before what is installed."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    metadata = directory / f"prorl_gym-{__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: prorl-gym\nVersion: {__version__}\n")
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.insert(0, str(directory))
    registry._ENTRY_POINT_LOADERS = None  # noqa: SLF001
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        registry._ENTRY_POINT_LOADERS = None  # noqa: SLF001
