"""The scripts that write pages and pictures of the documentation."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> Any:
    """Return the module of a script."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return import_module(name)
    finally:
        sys.path.pop(0)
