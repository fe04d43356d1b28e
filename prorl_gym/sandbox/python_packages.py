"""IPython for images that lack it: a directory of pure-Python packages, mounted read-only into sandboxes.

The worker uses it when the sandbox's python is new enough (see ``REQUIRES`` in the directory), and its own console of
the standard library otherwise.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Mount

TARGET = "/opt/prorl/python"
"""Where the worker looks for it, inside."""
_NAME = re.compile(r"^[A-Za-z0-9._-]+")
_COMPILED = (".so", ".pyd", ".dylib")


def ipython_mount(cache: Path) -> Mount:
    """Return a mount of IPython with what it needs, copied once from this installation.

    Args:
        cache: directory that the sandbox's user may enter; the copy's name comes from its contents.

    Raises:
        ConfigError: IPython is not installed here.
    """
    packages = sorted(_closure("ipython"), key=lambda package: _normal(package.name))
    key = hashlib.sha256("\n".join(f"{package.name}=={package.version}" for package in packages).encode())
    metadata = distribution("ipython").metadata
    needed = metadata["Requires-Python"] if "Requires-Python" in metadata else ">=3.11"
    place = cache / f"ipython-{key.hexdigest()[:16]}"
    if not place.is_dir():
        _assemble(packages, needed, place)
    return Mount(str(place), TARGET)


def _assemble(packages: list[Distribution], needed: str, place: Path) -> None:
    """Build beside its final name, then rename: a torn copy is never used."""
    place.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=place.parent, prefix=".building-"))
    try:
        for package in packages:
            _copy(package, building)
        version = re.search(r">=\s*(\d+\.\d+)", needed)
        (building / "REQUIRES").write_text(version.group(1) if version else "3.11")
        for path in (building, *building.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            building.rename(place)
        except OSError:
            if not place.is_dir():  # otherwise somebody was faster, with the same contents
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _copy(package: Distribution, target: Path) -> None:
    for file in package.files or ():
        if ".." in file.parts or file.suffix == ".pyc" or file.parts[0].endswith(".data"):
            continue  # scripts and man pages lie outside of site-packages
        source = Path(os.fspath(file.locate()))
        destination = target.joinpath(*file.parts)
        if source.is_file():
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)


def _closure(root: str) -> Iterator[Distribution]:
    """Yield a distribution and what it needs, compiled packages left out: IPython does without them."""
    waiting, seen = [root], set[str]()
    while waiting:
        name = waiting.pop()
        if _normal(name) in seen:
            continue
        seen.add(_normal(name))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name == root:
                raise ConfigError("IPython is not installed beside prorl-gym.", "Run `pip install ipython`.") from None
            continue  # needed elsewhere only (another platform, another Python)
        if any(file.suffix in _COMPILED for file in package.files or ()):
            continue
        yield package
        waiting += [_requirement(line) for line in package.requires or () if "extra ==" not in line]


def _requirement(line: str) -> str:
    found = _NAME.match(line)
    return found.group() if found else line


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
