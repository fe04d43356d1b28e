"""Versions of what peers are made of, as they say themselves."""

import os
import shutil
import subprocess
from pathlib import Path


def program_version(name: str, flag: str = "--version") -> dict[str, str]:
    """Return the version of a program, by its name; nothing where it is not installed."""
    path = shutil.which(name)
    if path is None:
        return {}
    said = subprocess.run([path, flag], capture_output=True, text=True, check=False).stdout.split()
    return {name: next((word for word in said if word[:1].isdigit()), "unknown")}


def package_versions(variable: str, *packages: str) -> dict[str, str]:
    """Return the versions of packages in the environment whose python an environment variable names."""
    python = os.environ.get(variable)
    return {} if python is None else versions_in(python, *packages)


def versions_in(python: str | Path, *packages: str) -> dict[str, str]:
    """Return the versions of packages in the environment of a python; nothing where it does not exist."""
    if not Path(python).exists():
        return {}
    code = "import importlib.metadata, sys; [print(importlib.metadata.version(name)) for name in sys.argv[1:]]"
    said = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=False).stdout.split()
    return dict(zip(packages, said, strict=False))
