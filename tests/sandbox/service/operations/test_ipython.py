"""IPython in sandboxes whose image has none: host-``/usr`` here; other backends import these tests."""

import logging
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from sandbox_support import cell_output, closing, fails_as, run_cell

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.python_packages import IPYTHON_TARGET
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURE = "b'\\x89PNG\\r\\n\\x1a\\n' + bytes(9)"


async def test_python_tool_is_ipython(box: RunningSandbox) -> None:
    assert (await box.python()).cell_runner == "ipython"
    assert "InteractiveShell" in await cell_output(box, "get_ipython()")


async def test_magics_and_shell_lines_work(box: RunningSandbox) -> None:
    assert "per loop" in await cell_output(box, "%timeit -n 1 -r 1 pass")
    failed = await run_cell(box, "1 / 0")
    assert "ZeroDivisionError" in failed.output and "\x1b" not in failed.output
    assert await cell_output(box, "names = !echo from the shell\nnames[0]") == "'from the shell'\n"
    assert await cell_output(box, "import asyncio\nawait asyncio.sleep(0, 'awaited')") == "'awaited'\n"


async def test_displayed_pictures_come_back(box: RunningSandbox) -> None:
    code = f"from IPython.display import Image, display\npicture = Image(data={PICTURE})\n"
    displayed = await run_cell(box, f"{code}display(picture)")
    assert displayed.output == "<IPython.core.display.Image object>\n" and len(displayed.images) == 1
    assert len((await run_cell(box, "display(picture)\npicture")).images) == 2
    assert (await run_cell(box, "1 + 1")).images == ()


async def test_packages_of_the_mount_come_last(box: RunningSandbox) -> None:
    last = f"import sys\nassert sys.path[-1] == {IPYTHON_TARGET!r}\nsys.path[0]"
    assert await cell_output(box, last) == "''\n"


async def test_mount_cannot_be_written(box: RunningSandbox) -> None:
    result = await box.exec(["touch", f"{IPYTHON_TARGET}/IPython/__init__.py"], timeout=20)
    assert result.exit_code == 1, result
    flags = await box.exec(["grep", "-oE", f"{IPYTHON_TARGET} ro[a-z,]*", "/proc/self/mountinfo"], timeout=20)
    assert {"nosuid", "nodev"} <= set(flags.stdout.decode().strip().split(","))


async def test_environment_of_programs_is_not_touched(box: RunningSandbox) -> None:
    assert await cell_output(box, "import os\n[name for name in os.environ if 'IPYTHON' in name]") == "[]\n"


async def test_python_that_does_not_work_is_a_broken_image(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(env={"PATH": "/workspace/bin:/usr/bin:/bin"}))) as box:
        await box.write_file("bin/python3", b"#!/bin/sh\necho cannot load libpython\nexit 1\n", mode=0o755)
        with fails_as(FailureKind.IMAGE_BROKEN, match="cannot load libpython") as raised:
            await box.python()
        assert str(raised.value).count("\n") == 1


@pytest.mark.slow
async def test_without_ipython_on_the_host_it_is_the_plain_console_and_said(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def not_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.distribution", not_installed)
    async with closing(NamespaceBackend("userns", SandboxConfig(scratch=scratch))) as backend:
        with caplog.at_level(logging.WARNING):
            box = await backend.start_sandbox(SandboxSpec())
        assert (await box.python()).cell_runner == "console"
        assert [record.getMessage() for record in caplog.records if "IPython is not installed" in record.getMessage()]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without bytecode, which takes time."""
    monkeypatch.setattr("prorl_gym.sandbox.service.python_packages.host_pythons", tuple[str, ...])


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
async def test_copy_that_was_removed_is_made_again(scratch: Path, ground: Path) -> None:
    cache = ground / "cache"
    async with closing(NamespaceBackend("userns", SandboxConfig(scratch=scratch, cache=cache))) as backend:
        await (await backend.start_sandbox(SandboxSpec())).close()
        shutil.rmtree(cache)
        assert (await (await backend.start_sandbox(SandboxSpec())).python()).cell_runner == "ipython"


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
async def test_closed_cache_does_not_stop_sandboxes(
    scratch: Path, ground: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (ground / "shut").mkdir(mode=0o600)
    async with closing(
        NamespaceBackend("userns", SandboxConfig(scratch=scratch, cache=ground / "shut" / "cache"))
    ) as backend:
        assert (await (await backend.start_sandbox(SandboxSpec())).python()).cell_runner == "console"
        assert "the sandboxes' IPython cannot be kept in" in caplog.text
