"""The guest as one file, for containers that we cannot enter: run by the image's own python3, from memory.

A zip archive of the modules that the guest imports, found by reading their imports. It travels as an inherited, sealed
memory file: nothing has to be mounted into the image, and nobody inside can change it.
"""

import ast
import io
import zipfile
from functools import cache
from pathlib import Path

import ptyprocess  # pyright: ignore[reportMissingTypeStubs]

import prorl_gym

_ENTRY = "prorl_gym.sandbox.inside"

OLDEST_PYTHON = (3, 11)
"""What the guest's source needs of an image's interpreter."""

_MAIN = f"""\
import sys
if sys.version_info < {OLDEST_PYTHON}:
    sys.exit("its python3 is %d.%d, and {".".join(map(str, OLDEST_PYTHON))} is needed" % sys.version_info[:2])
from {_ENTRY} import main
main(sys.argv[1:])
"""


@cache
def guest_bundle() -> bytes:
    """Return the archive. Made once, by the spawner while it can still reach the installation.

    Raises:
        OSError: a source file cannot be read.
    """
    files = {f"ptyprocess/{path.name}": path.read_text("utf-8") for path in Path(ptyprocess.__path__[0]).glob("*.py")}
    waiting = [_ENTRY]
    while waiting:
        path = _source(waiting.pop())
        name = f"prorl_gym/{path.relative_to(prorl_gym.__path__[0])}"
        if name not in files:
            files[name] = path.read_text("utf-8")
            waiting += _imports(files[name])
    for name in list(files):  # packages: empty, since ours load what is not in here
        for parent in list(Path(name).parents)[:-1]:
            if parent.parts[0] == "prorl_gym":
                files[f"{parent}/__init__.py"] = ""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as bundle:  # an image's python may lack zlib
        for name, text in sorted({"__main__.py": _MAIN, **files}.items()):
            bundle.writestr(name, text)
    return archive.getvalue()


def _imports(text: str) -> list[str]:
    """Return the modules of this package that a source file imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prorl_gym."):
            module = str(node.module)
            below = [f"{module}.{alias.name}" for alias in node.names]
            found += [name for name in below if _source(name).is_file()] or [module]
    return found


def _source(module: str) -> Path:
    return Path(prorl_gym.__path__[0], *module.split(".")[1:]).with_suffix(".py")
