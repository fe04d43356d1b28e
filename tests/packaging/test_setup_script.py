"""The choice of an interpreter on a fresh machine."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/setup.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A machine with these interpreters on PATH and under ~/.pyenv, and nothing else."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def add(name: str, version: str, *, pyenv: bool = False, base: bool = True) -> Path:
        folder = tmp_path / "home/.pyenv/versions" / version / "bin" if pyenv else bin_folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/sh\necho cpython {version.replace('.', ' ')} {base}\n")
        path.chmod(0o755)
        return path

    return add


def choose(script: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Choose among the interpreters of the fake machine; the real /usr/bin is left out."""
    fake = [path for path in script["candidates"]() if not path.startswith("/usr")]
    globals_of = script["choose"].__globals__
    globals_of["candidates"] = lambda: fake
    return script["choose"]()


def test_newest_of_the_series(script: dict[str, Any], machine: Callable[..., Path]):
    machine("python3", "3.12.1")
    machine("python3.14", "3.14.0")
    machine("python", "3.13.14", base=False)
    machine("python3.13", "3.13.2")
    newest = machine("python3", "3.13.9", pyenv=True)
    assert choose(script) == ((3, 13, 9), str(newest))


def test_uv_is_asked_when_the_wanted_one_is_missing(script: dict[str, Any], machine: Callable[..., Path]):
    machine("python3.13", "3.13.0")
    fetched = machine("fetched", "3.13.20")
    uv = machine("uv", "0.0.0")
    uv.write_text(f'#!/bin/sh\ncase "$2" in install) exit 0;; find) echo {fetched};; esac\n')
    assert choose(script) == ((3, 13, 20), str(fetched))


def test_uv_that_cannot_fetch_is_no_obstacle(script: dict[str, Any], machine: Callable[..., Path]):
    here = machine("python3.13", "3.13.0")
    machine("uv", "0.0.0").write_text("#!/bin/sh\nexit 1\n")
    assert choose(script) == ((3, 13, 0), str(here))


def test_nothing_usable_is_one_clear_error(script: dict[str, Any], machine: Callable[..., Path]):
    machine("python3", "3.12.1")
    with pytest.raises(SystemExit) as caught:
        choose(script)
    message = str(caught.value)
    assert len(message.splitlines()) == 2
    assert "CPython 3.13" in message
    assert "uv python install 3.13" in message


def test_script_runs_on_an_old_python():
    """Nothing newer than 3.8 may be written in it."""
    code = f"import ast; ast.parse(open({str(SCRIPT)!r}).read(), feature_version=(3, 8))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_change_of_pyproject_or_interpreter_changes_the_stamp(script: dict[str, Any], tmp_path: Path):
    stamp = script["stamp_of"]
    for name in ("pyproject.toml", "scripts/setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    stamp.__globals__["ROOT"] = str(tmp_path)
    before = stamp((3, 13, 0), "/usr/bin/python3")
    assert stamp((3, 13, 1), "/usr/bin/python3") != before
    (tmp_path / "pyproject.toml").write_text("two")
    assert stamp((3, 13, 0), "/usr/bin/python3") != before
