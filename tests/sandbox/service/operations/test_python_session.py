"""The python session beyond the conformance kit: IPython from a mount, figures, an old console."""

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator
from importlib import resources
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.python_packages import IPYTHON_TARGET, PackageSet, packages_mount
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC

pytestmark = pytest.mark.slow

WORKER = resources.files("prorl_gym.sandbox.guest").joinpath("cell_worker.py").read_text("utf-8")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


class Worker:
    """A worker started directly, without a sandbox."""

    def __init__(self, python: str, packages: str, path: str = "") -> None:
        ours, theirs = socketpair()
        os.set_inheritable(theirs.fileno(), True)
        code = WORKER.replace(f'PACKAGES = "{IPYTHON_TARGET}"', f"PACKAGES = {packages!r}")
        assert packages in code
        command = ["/bin/bash", "-c", f'exec "$0" -c "$1" 3<&{theirs.fileno()}', python, code]
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        env["TMPDIR"] = tempfile.gettempdir()  # the suite's own, which goes with it
        self.process = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        theirs.close()
        ours.settimeout(20)
        self.channel = ours.makefile("rwb")
        ours.close()

    def answer(self) -> dict[str, Any]:
        return json.loads(self.channel.readline())

    def run(self, code: str) -> dict[str, Any]:
        self.channel.write(json.dumps({"cell": "c", "code": code}).encode() + b"\n")
        self.channel.flush()
        return self.answer()

    def end(self) -> str:
        self.channel.close()
        output, _ = self.process.communicate(timeout=20)
        return output.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("IPython")
    with pytest.MonkeyPatch.context() as patch:  # one interpreter will do, and is quicker
        patch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", lambda: (sys.executable,))
        return packages_mount(tmp_path_factory.mktemp("cache"), os.geteuid()).source


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A python of the same version with nothing installed, as an image would have."""
    path = tmp_path_factory.mktemp("clean")
    venv.create(path, with_pip=False, symlinks=True)
    return str(path / "bin/python")


def test_an_older_python_gets_the_console(tmp_path: Path, clean_python: str) -> None:
    (tmp_path / "REQUIRES").write_text("99.0")
    worker = Worker(clean_python, str(tmp_path))
    assert worker.answer()["ready"] == "console"
    assert worker.run("1 + 1")["ok"]
    assert worker.run("None\nx = 5")["ok"]
    assert worker.run("_ + 1")["ok"]
    assert worker.run("import os, sys; os.close(1); sys.stderr.close()")["ok"]
    assert worker.run("print('printed'); print('error', file=sys.stderr)")["ok"]
    assert worker.end() == (
        "2\n3\n[The cell closed or redirected descriptor 1: it was put back.]\n"
        "[The cell left a sys.stderr that cannot be written to: it was put back.]\nprinted\n"
    )


def test_the_mount_is_readable_and_pure(packages: str) -> None:
    everything = list(Path(packages).rglob("*"))
    assert (Path(packages) / "IPython" / "__init__.py") in everything
    assert all(path.stat().st_mode & 0o004 for path in everything)
    assert not [path for path in everything if path.suffix == ".so"]
    assert not [path for path in Path(packages).parent.iterdir() if path.name.startswith(".building")]


def test_the_mount_brings_bytecode_of_this_python(packages: str) -> None:
    source = Path(packages) / "IPython" / "core" / "interactiveshell.py"
    bytecode = Path(cache_from_source(str(source))).read_bytes()
    assert bytecode[:4] == MAGIC_NUMBER
    assert int.from_bytes(bytecode[4:8], "little") == 1  # never compared with its source


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without bytecode, which takes time."""
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])


@pytest.mark.default
@pytest.mark.usefixtures("uncompiled")
def test_the_mount_is_made_once(tmp_path: Path) -> None:
    mount = packages_mount(tmp_path, os.geteuid())
    made = Path(mount.source).stat()
    assert packages_mount(tmp_path, os.geteuid()) == mount and mount.target == IPYTHON_TARGET
    assert Path(mount.source).stat().st_ino == made.st_ino


@pytest.mark.usefixtures("uncompiled")
def test_unused_copies_are_removed(tmp_path: Path) -> None:
    for name, used in (("ipython-old", 0), ("ipython-new", time.time())):
        (tmp_path / name / "IPython").mkdir(parents=True)
        os.utime(tmp_path / name, (used, used))
    mount = packages_mount(tmp_path, os.geteuid())
    assert {path.name for path in tmp_path.glob("*ipython*/")} == {"ipython-new", Path(mount.source).name}


@pytest.mark.usefixtures("uncompiled")
def test_what_a_killed_service_left_is_removed(tmp_path: Path) -> None:
    torn = tmp_path / f".building-ipython-{PackageSet.find_installed().content_key()}-x"
    torn.mkdir()
    (torn / "IPython").touch()
    mount = packages_mount(tmp_path, os.geteuid())
    assert not torn.exists() and (Path(mount.source) / "IPython" / "__init__.py").is_file()


@pytest.mark.usefixtures("uncompiled")
def test_a_cache_that_is_closed_to_the_sandboxes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="is closed to the sandboxes' uid 4242") as refused:
        packages_mount(tmp_path / "closed" / "cache", 4242)
    assert str(refused.value).count("\n") == 1


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/cache"):
        packages_mount(tmp_path / "file" / "cache", os.geteuid())


def test_files_of_the_working_directory_are_not_imported_by_the_worker(
    tmp_path: Path, clean_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "logging", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mine.py").write_text("x = 5")
    monkeypatch.chdir(tmp_path)
    worker = Worker(clean_python, str(tmp_path / "none"))
    assert worker.answer()["ready"] == "console"
    assert worker.run("import mine; mine.x")["ok"]
    assert worker.end() == "5\n"


@pytest.fixture
async def box() -> AsyncIterator[RunningSandbox]:
    backend = LocalBackend(allow_unsafe_local=True)
    yield await backend.start_sandbox(CHECK_SPEC)
    await backend.close()


async def test_figures_come_back_as_images(box: RunningSandbox) -> None:
    python = await box.python()
    fake = f"""
import sys, types, base64
pyplot = types.ModuleType("matplotlib.pyplot")
open_figures = [1]
class Figure:
    def savefig(self, out, **options): out.write(base64.b64decode("{PNG}"))
pyplot.get_fignums = lambda: list(open_figures)
pyplot.figure = lambda number: Figure()
pyplot.close = lambda which: open_figures.clear()
sys.modules["matplotlib.pyplot"] = pyplot
"""
    result = await python.run_cell(fake, timeout=20)
    assert result.ok and len(result.images) == 1 and result.images[0].startswith(b"\x89PNG")
    assert (await python.run_cell("1", timeout=20)).images == ()


async def test_cells_print_after_their_descriptors_were_closed(box: RunningSandbox) -> None:
    python = await box.python()
    away = "import os, sys\nfile = open('elsewhere', 'w')\n"
    for code in ("os.close(1)", "os.close(2)", "os.close(0)", "os.dup2(file.fileno(), 1)", "os.closerange(0, 3)"):
        said = await python.run_cell(away + code, timeout=20)
        assert said.ok and "it was put back.]" in said.output, (code, said)
        result = await python.run_cell("print('still here')\nprint('and here', file=sys.stderr)", timeout=20)
        assert sorted(result.output.splitlines()) == ["and here", "still here"], (code, result)


@pytest.mark.parametrize(
    "code", ["sys.stdout = None", "sys.stdout.close()", "sys.stdout = io.StringIO(); sys.stdout.close()"]
)
async def test_a_stream_that_cannot_be_written_is_put_back(box: RunningSandbox, code: str) -> None:
    python = await box.python()
    said = await python.run_cell(f"import io, sys; {code}", timeout=20)
    assert said.output == "[The cell left a sys.stdout that cannot be written to: it was put back.]\n"
    assert (await python.run_cell("print('printed'); 1 + 1", timeout=20)).output == "printed\n2\n"


async def test_a_stream_that_collects_is_left_and_said_once(box: RunningSandbox) -> None:
    python = await box.python()
    said = await python.run_cell("import io, sys; sys.stdout = io.StringIO()", timeout=20)
    assert said.output == "[The cell replaced sys.stdout. This undoes it: sys.stdout = sys.__stdout__]\n"
    assert (await python.run_cell("print('collected')", timeout=20)).output == ""
    await python.run_cell("collected, sys.stdout = sys.stdout.getvalue(), sys.__stdout__", timeout=20)
    assert (await python.run_cell("collected", timeout=20)).output == "'collected\\n'\n"
