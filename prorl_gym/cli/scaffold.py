"""``prorl-gym init NAME``: makes an environment from a template that is itself a working one."""

import keyword
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from prorl_gym.errors import ConfigError

_TEMPLATE = Path(__file__).parent / "init_template"

# Files of the template, and their places in the project. ``my_env`` is replaced by the name in paths and texts.
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "gitignore.txt": ".gitignore",
    "README.md.txt": "README.md",
    "init.py.txt": "my_env/__init__.py",
    "environment.py.txt": "my_env/environment.py",
    "rows.py.txt": "my_env/rows.py",
    "config.yaml.txt": "my_env/gym_root/environments/my_env/config.yaml",
    "manifest.yaml.txt": "my_env/gym_root/environments/my_env/manifest.yaml",
    "test.py.txt": "tests/test_my_env.py",
}

_LONGEST = 40
_ROWS_SECONDS = 120.0


def init(
    name: Annotated[str, typer.Argument(help="Name of the environment and its package, for example my_env.")],
    directory: Annotated[
        Path | None, typer.Option(help="Directory of the project; ./NAME by default. It must not exist.")
    ] = None,
) -> None:
    """Create a new environment: an installable package with rows, grader, NeMo Gym files and tests to fill in."""
    project = scaffold_environment(name, directory or Path(name))
    typer.echo(f"{project} is made. Next:")
    typer.echo(f"  cd {project} && pip install -e . && pytest")
    typer.echo(f"  prorl-gym validate {name} {name}/gym_root/environments/{name}/data/example.jsonl")


def scaffold_environment(name: str, directory: Path) -> Path:
    """Write the project of a new environment, a package with rows, NeMo Gym files and tests; return its directory.

    Raises ``ConfigError`` if the name is taken or invalid, the directory exists or cannot be written.
    """
    from prorl_gym.environments import registry

    _check_name(name, registry.names())
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory}: exists already.", "Give another place with --directory, or move it away.")
    draft = directory.with_name(f".{directory.name}.part")
    try:
        _write_files(name, draft)
        _write_rows(name, draft)
        draft.rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror}).", "Check the path.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _check_name(name: str, taken: Collection[str]) -> None:
    if not re.fullmatch(r"[a-z](_?[a-z0-9]+)*", name) or len(name) > _LONGEST or keyword.iskeyword(name):
        fix = f"Use lower-case letters, digits and single underscores, at most {_LONGEST}, for example my_env."
        raise ConfigError(f"'{name[:80]}' cannot be the name of an environment and its package.", fix)
    if name in taken:
        raise ConfigError(f"There is an environment '{name}' already.", "Choose another name.")
    if name in ("test", "tests") or find_spec(name) is not None:
        raise ConfigError(f"A Python package '{name}' is installed here.", f"Choose another, for example {name}_env.")


def _write_files(name: str, project: Path) -> None:
    stem = name.removesuffix("_env").removesuffix("_environment") or name
    class_name = "".join(part.capitalize() for part in stem.split("_")) + "Environment"
    for source, target in _FILES.items():
        text = (_TEMPLATE / source).read_text(encoding="utf-8")
        path = project / target.replace("my_env", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("MyEnvironment", class_name).replace("my_env", name)
        path.write_text(text.replace("my-env", name.replace("_", "-")), encoding="utf-8")


def _write_rows(name: str, project: Path) -> None:
    """Run the new package's ``rows`` module: example rows hold the prompt and the tools of the environment."""
    examples = project / name / "gym_root" / "environments" / name / "data"
    examples.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", f"{name}.rows"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=_ROWS_SECONDS,
        check=False,
    )
    for leftover in project.rglob("__pycache__"):
        shutil.rmtree(leftover)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"{name}: the new package cannot write its rows: {last[0]}.", "Report this: it is a defect.")
