"""The host's interpreter, which sandboxes are forked from, in a payload's hands (as in CVE-2019-5736)."""

import asyncio
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox_support import closing, give_to_sandboxes, sandbox_uid

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service import spawner_client
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

pytestmark = pytest.mark.asyncio(loop_scope="function")

SEIZE = """
import os, stat, time
def seized():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"/tmp/never" in open(f"/proc/{name}/environ", "rb").read():
                return int(name), os.open(f"/proc/{name}/exe", os.O_RDONLY)
        except OSError:
            continue
while (found := seized()) is None:
    time.sleep(0.01)
pid, exe = found
os.kill(pid, 9)
print("seized", os.fstat(exe).st_size)
for attempt in (
    lambda: os.fchmod(exe, 0o4777),
    lambda: os.setxattr(exe, "user.evil", b"evil"),
    lambda: os.write(os.open(f"/proc/self/fd/{exe}", os.O_WRONLY | os.O_APPEND), b"evil"),
    lambda: os.truncate(f"/proc/self/fd/{exe}", 0),
):
    try:
        attempt()
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture
def own_python(ground: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This interpreter as an ordinary user has it: a file that belongs to the uid of the sandboxes."""
    directory = Path(tempfile.mkdtemp(dir=ground))
    copy = directory / "python"
    shutil.copy(os.path.realpath(sys.executable), copy)
    copy.chmod(0o755)
    give_to_sandboxes(directory)
    paths = [sysconfig.get_path("purelib"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setattr(spawner_client, "sys", SimpleNamespace(executable=str(copy)))
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    if (libraries := spawner_client.libpython_directory()) is not None:  # the copy is not beside its library
        monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    yield copy
    shutil.rmtree(directory)


def looks(path: Path) -> tuple[str, list[str], bytes]:
    """What a payload might change of a file: mode, attributes, content."""
    return stat.filemode(path.stat().st_mode), os.listxattr(path), sha256(path.read_bytes()).digest()


async def test_host_interpreter_cannot_be_changed(backend_name: str, own_scratch: Path, own_python: Path) -> None:
    before = looks(own_python)
    assert spawner_client.is_writable_by(str(own_python), sandbox_uid())
    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))) as backend:
        box = await backend.start_sandbox(SandboxSpec())
        # The loader opens the FIFO and waits there, as the host's interpreter and within the payload's reach.
        await box.exec(["/bin/bash", "-c", "mkfifo /tmp/never; ln -s /proc/self/exe /tmp/program"], timeout=10)
        run = box.exec(["/tmp/program"], env={"LD_PRELOAD": "/tmp/never"}, timeout=20)
        seize = box.exec(["/usr/bin/python3", "-c", SEIZE], timeout=20)
        _, result = await asyncio.gather(run, seize)
    assert result.stdout.startswith(b"seized "), result
    assert looks(own_python) == before


@pytest.mark.root
async def test_an_interpreter_that_is_in_no_payloads_reach_is_used_as_it_is(own_python: Path) -> None:
    os.chown(own_python, 0, 0)
    assert not spawner_client.is_writable_by(str(own_python), sandbox_uid())
    os.chmod(own_python, 0o775)
    assert spawner_client.is_writable_by(str(own_python), sandbox_uid())
