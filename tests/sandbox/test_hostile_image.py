"""Images that attack: while a sandbox is built from one, and when what we run from it is not what it is called."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sandbox_support import closing, fails_as, give_to_sandboxes, make_tiny_image

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import Mount, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

SECONDS = 20.0

REMEMBER = """#!/usr/bin/real
while read -r line; do echo "$line"; done < /proc/self/status >> /tmp/seen
exec /usr/bin/real "$@"
"""
"""A bash that notes what it could do each time it was run."""

WAYS_OUT = [
    pytest.param("/proc/self/fd/{}", id="a root"),
    pytest.param("/proc/self/fd/{}/../../../../../..", id="a directory"),
    pytest.param("/proc/self/fd/{}/1/root", id="a process table", marks=pytest.mark.slow),
    pytest.param("/proc/self/fd/{}/2/root", id="a runtime in a process table", marks=pytest.mark.slow),
]
"""Links to something of the host's that a guest may have open; with the number to be filled in."""

LYING_SHELLS = {
    "ends at once": "#!/usr/bin/real\nexit 0\n",
    "never reads": "#!/usr/bin/real\nexec sleep 1000\n",
    "closes everything": "#!/usr/bin/real\nfor n in {3..210}; do eval exec $n'>&-'; done\nexec sleep 1000\n",
    "floods the terminal": "#!/usr/bin/real\nwhile :; do echo flood; done\n",
    "floods its reports": "#!/usr/bin/real\nwhile :; do for n in {180..210}; do echo x >&$n; done 2>/dev/null; done\n",
    "is a directory": "",
    "is no program": "neither ELF nor script",
    "is itself": "#!/bin/bash\n",
}


@pytest.fixture
def image(backend: NamespaceBackend, ground: Path) -> Iterator[Path]:
    """An image of its own, to be made hostile, then given to the sandboxes."""
    path = make_tiny_image(Path(tempfile.mkdtemp(dir=ground)) / "image")
    path.parent.chmod(0o755)
    yield path
    shutil.rmtree(path.parent)


@pytest.fixture
def target(ground: Path) -> Path:
    """An empty host directory that the sandboxes' uid may write to."""
    path = Path(tempfile.mkdtemp(dir=ground))
    give_to_sandboxes(path)
    return path


@asynccontextmanager
async def started(backend: NamespaceBackend, image: Path, **fields: object) -> AsyncGenerator[RunningSandbox, None]:
    give_to_sandboxes(image)
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(image), **fields))) as box:
        yield box


def replace_bash(image: Path, text: str) -> None:
    (image / "usr/bin/bash").rename(image / "usr/bin/real")
    (image / "usr/bin/bash").write_text(text)
    (image / "usr/bin/bash").chmod(0o755)


@pytest.mark.parametrize("way", WAYS_OUT)
async def test_links_to_what_is_open_while_it_is_built_write_nothing_to_the_host(
    backend: NamespaceBackend, image: Path, target: Path, way: str
) -> None:
    shutil.rmtree(image / "etc")
    mounts = (Mount("/usr/bin/true", "/testbed/file"),)
    for number in range(3, 16):
        for name in ("etc", "testbed"):
            (image / name).unlink(missing_ok=True)
            (image / name).symlink_to(way.format(number) + str(target))
        try:
            async with started(backend, image, workdir="/testbed/made", mounts=mounts):
                pass
        except SandboxError:
            pass  # to refuse it is right, too
        assert os.listdir(target) == [], number


@pytest.mark.default
async def test_nothing_of_an_image_runs_before_it_is_confined(backend: NamespaceBackend, image: Path) -> None:
    replace_bash(image, REMEMBER)
    for place in (".singularity.d/env", ".singularity.d/actions"):
        (image / place).mkdir(parents=True)
    for script in ("env/99-own.sh", "actions/exec", "runscript", "startscript"):
        (image / ".singularity.d" / script).write_text(REMEMBER)
        (image / ".singularity.d" / script).chmod(0o755)
    async with started(backend, image) as box:
        await box.exec(["/bin/bash", "-c", "true"], timeout=SECONDS)
        seen = (await box.read_file("/tmp/seen")).decode()
    facts = {line for line in seen.splitlines() if line.startswith(("Seccomp:", "NoNewPrivs:", "CapEff:"))}
    assert {" ".join(fact.split()) for fact in facts} == {"Seccomp: 2", "NoNewPrivs: 1", "CapEff: 00000000000404fb"}


@pytest.mark.parametrize("name", ["proc", "dev", "sys", "tmp", "root", "run", "var", "workspace"])
async def test_a_link_in_place_of_a_directory_shows_nothing_of_the_guest(
    backend: NamespaceBackend, image: Path, name: str
) -> None:
    (image / "elsewhere").mkdir()
    (image / name).symlink_to("elsewhere")
    try:
        async with started(backend, image) as box:
            for path in ("/proc/self/environ", "/proc/1/environ", "/elsewhere/self/environ", "/elsewhere/1/environ"):
                with pytest.raises(OSError):
                    await box.read_file(path)
            assert (await box.exec(["/bin/bash", "-c", "echo > /proc/sys/kernel/panic"], timeout=SECONDS)).exit_code
    except SandboxError as error:  # to refuse it is right, too
        assert error.kind in (FailureKind.IMAGE_BROKEN, FailureKind.SANDBOX_UNAVAILABLE), error


@pytest.mark.parametrize("lie", LYING_SHELLS)
async def test_a_lying_bash_costs_a_bounded_time_and_no_other_sandbox(
    backend: NamespaceBackend, image: Path, box: RunningSandbox, lie: str
) -> None:
    replace_bash(image, LYING_SHELLS[lie])
    if lie == "is a directory":
        (image / "usr/bin/bash").unlink()
        (image / "usr/bin/bash").mkdir()
    async with asyncio.timeout(SECONDS):
        async with started(backend, image) as liar:
            try:
                result = await (await liar.shell()).run_command("echo hi", timeout=0.3)
                assert result.timed_out or result.restarted or result.exit_code, result
            except SandboxError as error:
                assert error.kind in (FailureKind.IMAGE_BROKEN, FailureKind.SANDBOX_BROKEN_BY_AGENT), error
            assert await liar.is_alive()
    assert (await (await box.shell()).run_command("echo hi", timeout=SECONDS)).output == "hi\n"


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        ("exit 0", FailureKind.IMAGE_BROKEN),
        ("echo garbage >&3; exec sleep 1000", FailureKind.IMAGE_BROKEN),
        ("exec sleep 1000", FailureKind.SANDBOX_UNAVAILABLE),  # slow, as any python is on a busy machine
        ("while :; do echo flood; done", FailureKind.SANDBOX_UNAVAILABLE),
    ],
)
async def test_a_lying_python_costs_a_bounded_time(
    impatient_backend: NamespaceBackend, image: Path, lie: str, kind: FailureKind
) -> None:
    (image / "usr/bin/python3").write_text(f"#!/bin/bash\n{lie}\n")
    (image / "usr/bin/python3").chmod(0o755)
    async with asyncio.timeout(SECONDS):
        async with started(impatient_backend, image) as box:
            with fails_as(kind):
                await box.python()
            assert await box.is_alive()
