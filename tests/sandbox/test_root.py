"""The writable root, in memory or on disk: what installers, git and careless agents do to it, its size and its end."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import DEBIAN_IMAGE, bash_output, closing, needs_python

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

needs_git = pytest.mark.skipif(not os.path.exists("/usr/bin/git"), reason="the host has no /usr/bin/git")


@pytest_asyncio.fixture(loop_scope="module", params=["memory", "disk"])
async def image_box(
    backend: NamespaceBackend, tiny_image: Path, request: pytest.FixtureRequest
) -> AsyncIterator[RunningSandbox]:
    limits = SandboxLimits(root_on=request.param, root_size=24 << 20)
    spec = SandboxSpec(image=str(tiny_image), workdir="/project/here", limits=limits)
    async with closing(await backend.start_sandbox(spec)) as box:
        yield box


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param("cat data/doomed/deep/file; rm -rf data/doomed; mkdir data/doomed; ls -A data/doomed", "old"),
        pytest.param("mkdir -p data/doomed/deep; mv data/kept data/moved; cat data/moved/file", "kept"),
        pytest.param("cd data/kept; mkdir a; touch a/x; mv a b; ls b", "x\n", id="new directory renamed"),
        pytest.param("echo new >> data/kept/file; cat data/kept/file", "keptnew\n", id="file changed"),
        pytest.param("cd data/kept; rm file; ls -A; echo mine > file; cat file", "mine\n", id="file replaced"),
        pytest.param("cat etc/passwd etc/resolv.conf", "root:x:0:0:root:/root:/bin/bash\n", id="no name server"),
        pytest.param("stat -c %u:%g data/kept/file usr/bin/bash /", "0:0\n" * 3, id="owners"),
        pytest.param("cd -", "/project/here\n", id="working directory"),
    ],
)
async def test_image_is_a_root_that_may_be_changed(
    image_box: RunningSandbox, tiny_image: Path, script: str, shown: str
) -> None:
    assert await bash_output(image_box, f"cd /; {script}") == shown
    assert (tiny_image / "data/kept/file").read_text() == "kept"
    assert (tiny_image / "data/doomed/deep/file").read_text() == "old"


async def test_two_sandboxes_of_an_image_do_not_share_changes(
    backend: NamespaceBackend, image_box: RunningSandbox, tiny_image: Path
) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(tiny_image)))) as other:
        await bash_output(image_box, "echo mine > /data/kept/mine")
        assert await bash_output(other, "ls /data/kept") == "file\n"


@pytest.mark.parametrize("root_on", ["memory", "disk"])
async def test_host_usr_takes_files_and_directories(backend: NamespaceBackend, root_on: str) -> None:
    before = os.stat("/usr/bin/true")
    limits = SandboxLimits(root_on=root_on, root_size=24 << 20)  # type: ignore[arg-type]
    async with closing(await backend.start_sandbox(SandboxSpec(limits=limits))) as box:
        script = """
        for d in /usr /usr/bin /usr/lib /usr/local; do mkdir $d/new; echo x > $d/new/file; done; mv /usr/new /usr/newer
        cat /usr/newer/file /usr/bin/new/file
        rm -rf /usr/local/bin; mkdir /usr/local/bin; echo y > /usr/local/bin/y; ls -A /usr/local/bin
        rm /usr/bin/true; printf '#!/bin/sh\necho replaced\n' > /usr/bin/true; chmod +x /usr/bin/true; /usr/bin/true
        """
        assert await bash_output(box, script) == "x\nx\ny\nreplaced\n"
    assert not {"new", "newer"} & {*os.listdir("/usr"), *os.listdir("/usr/bin")}
    assert os.path.samestat(os.stat("/usr/bin/true"), before)


GIT_CHECKOUT = """
git init -q; git config user.email a@b; git config user.name n
mkdir -p src/deep; echo one > src/deep/file; printf x > 'ü ☃'; chmod 755 src/deep/file
git add -A; git commit -qm first; git checkout -q -b other
rm -rf src; mkdir src; echo two > src/deep; git add -A; git commit -qm second
git checkout -q master 2>/dev/null || git checkout -q main; rm -rf src 'ü ☃'; git checkout -q .
cat src/deep/file; stat -c %a src/deep/file; git status --porcelain
"""
MODES = """
umask 027; mkdir modes; echo x > modes/plain; install -m 4711 /dev/null modes/suid; chmod 1777 modes
cp -a modes copy; mv copy moved; stat -c '%a %n' moved moved/plain moved/suid
"""
VENV = """
python -m venv --without-pip v; . v/bin/activate
python -c 'import os, sys; print(sys.prefix == os.path.abspath("v"))'
"""
DEVICES = "head -c 3 /dev/zero | cat | wc -c; head -c 2 /dev/urandom | wc -c; echo x > /dev/null; test -c /dev/full"
FOREIGN = "echo x > a; tar --owner=1234 --group=1234 -cf foreign.tar a; rm a; tar -xf foreign.tar; stat -c %u a"


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param(GIT_CHECKOUT, "one\n755\n", id="git takes back what an agent did", marks=needs_git),
        pytest.param(MODES, "1777 moved\n640 moved/plain\n4711 moved/suid\n", id="modes are kept"),
        pytest.param(VENV, "True\n", id="virtual environment", marks=needs_python),
        pytest.param(DEVICES, "3\n2\n", id="devices"),
        pytest.param(FOREIGN, "0\n", id="archive with foreign owners"),
        pytest.param("cat /proc/sys/kernel/hostname /etc/hostname", "sandbox\nsandbox\n", id="host name"),
    ],
)
async def test_it_behaves_as_the_root_of_a_machine(box: RunningSandbox, script: str, shown: str) -> None:
    assert await bash_output(box, f"cd $(mktemp -d); {script}") == shown


async def test_options_of_tar_are_the_callers_where_they_are_set(box: RunningSandbox) -> None:
    result = await box.exec(["/bin/bash", "-ec", FOREIGN], timeout=20, env={"TAR_OPTIONS": ""})
    assert result.exit_code == 2 and b"Cannot change ownership to uid 1234" in result.stderr


async def test_mounts_are_read_only_whatever_their_path(backend: NamespaceBackend, ground: Path) -> None:
    source = ground / f"odd:na,me {backend.name}"
    source.mkdir()
    (source / "file").write_text("given")
    mounts = (Mount(str(source), "/given/here"), Mount(str(source / "file"), "/given/file"))
    async with closing(await backend.start_sandbox(SandboxSpec(mounts=mounts))) as box:
        assert await bash_output(box, "cat /given/here/file /given/file") == "givengiven"
        for attempt in ("touch /given/here/x", "echo x > /given/file", "rm /given/here/file", "umount /given/file"):
            assert (await box.exec(["/bin/bash", "-c", attempt], timeout=10)).exit_code != 0, attempt
    assert [entry.name for entry in source.iterdir()] == ["file"]


COMMITS = """
git init -q repository; cd repository; git commit -q --allow-empty -m one
git config user.name Mine; git config user.email m@m; git commit -q --allow-empty -m two
GIT_AUTHOR_NAME=Given git commit -q --allow-empty -m three
git log --format='%an <%ae> %cn'
"""
"""Without an identity, with a configured one, with one of the environment."""
IDENTITIES = "Given <m@m> Mine\nMine <m@m> Mine\nroot <root@localhost> root\n"


async def test_git_commits_without_an_identity(box: RunningSandbox) -> None:
    assert await bash_output(box, f"cd $(mktemp -d); {COMMITS}") == IDENTITIES


async def test_git_works_in_the_directory_of_another_uid(box: RunningSandbox) -> None:
    assert (await bash_output(box, "git config --get-all safe.directory")) == "*\n"


async def test_python_has_its_short_name(box: RunningSandbox) -> None:
    assert await bash_output(box, "python -c 'import json; print(json.dumps(1))'") == "1\n"
    script = "printf '#!/usr/bin/env python\nprint(2)' > /tmp/program; chmod +x /tmp/program; /tmp/program"
    assert await bash_output(box, script) == "2\n"


@pytest.mark.apptainer
@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param(f"cd $(mktemp -d); {GIT_CHECKOUT}", "one\n755\n", id="git checks out over removed directories"),
        pytest.param(f"cd $(mktemp -d); {COMMITS}", IDENTITIES, id="git commits without an identity"),
        pytest.param("rm -rf /usr/share/doc; mkdir /usr/share/doc; ls -A /usr/share/doc", "", id="remove and make"),
        pytest.param("cd /usr/lib; mkdir new; touch new/x; mv new newer; ls newer", "x\n", id="rename"),
        pytest.param("dpkg --force-all -r git >/dev/null 2>&1; ! command -v git", "", id="remove a package"),
        pytest.param("python3 -c 'import json, sqlite3; print(6 * 7)'", "42\n", id="python"),
    ],
)
async def test_image_of_a_real_distribution(
    backend: NamespaceBackend, debian_image: str, script: str, shown: str
) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(image=debian_image))) as box:
        assert await bash_output(box, script) == shown
    assert (DEBIAN_IMAGE / "usr/share/doc").is_dir() and (DEBIAN_IMAGE / "usr/bin/git").exists()


MB = 1 << 20
ON_DISK = SandboxLimits(root_on="disk", root_size=24 * MB, file_size=64 * MB)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disk_box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=ON_DISK))) as box:
        yield box


async def test_it_is_on_disk(disk_box: RunningSandbox, backend: NamespaceBackend) -> None:
    await bash_output(disk_box, "head -c 5000000 /dev/zero > /workspace/file; echo x > /usr/local/file")
    kept = backend.scratch / disk_box.id / "root"
    assert (kept / "root/workspace/file").stat().st_size == 5_000_000
    assert (kept / "usr/upper/local/file").read_text() == "x\n"
    await bash_output(disk_box, "rm /workspace/file /usr/local/file")


FILL = "i=0; while :; do i=$((i+1)); head -c 2000000 /dev/zero > /workspace/f$i || exit 7; sleep 0.02; done"
NAMELESS = "exec 9> /workspace/f; rm /workspace/f; while head -c 2000000 /dev/zero >&9; do sleep 0.02; done; exit 7"


async def clean(box: RunningSandbox) -> None:
    """Make room; that there is some is noticed a moment later."""
    remove = "chmod -R u+rwx /workspace; rm -rf /workspace/* /workspace/.[a-z]*"
    assert (await box.exec(["sh", "-c", remove], timeout=60)).exit_code == 0
    attempt = "until (echo x > /workspace/room); do sleep 0.05; done 2>/dev/null; rm /workspace/room"
    assert (await box.exec(["bash", "-c", attempt], timeout=30)).exit_code == 0


@pytest.mark.parametrize("script", [FILL, NAMELESS], ids=["many files", "a file without a name"])
async def test_full_root_is_named(disk_box: RunningSandbox, script: str) -> None:
    result = await disk_box.exec(["sh", "-c", script], timeout=30)
    assert result.exit_code != 0 and not result.timed_out and result.breach is Breach.DISK, result
    await clean(disk_box)


async def test_shell_of_a_full_root_can_make_room(disk_box: RunningSandbox) -> None:
    shell = await disk_box.shell()
    result = await shell.run_command(f"({FILL})", timeout=30)
    assert result.breach is Breach.DISK and not result.timed_out, result
    result = await shell.run_command("echo x > /workspace/more", timeout=10)
    assert (result.breach, result.restarted) == (Breach.DISK, False), result
    with pytest.raises(OSError, match="No space left"):
        await disk_box.write_file("/workspace/mine", b"x")
    await clean(disk_box)
    # Processes get their room back one after the other.
    again = "until echo x > /workspace/more; do sleep 0.05; done 2>/dev/null; cat /workspace/more"
    result = await shell.run_command(again, timeout=10)
    assert (result.output, result.exit_code, result.breach, result.restarted) == ("x\n", 0, None, False)


MAPPED = """
import mmap, os, resource, signal, time
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
maps = []
for n in range(40):
    file = os.open(f"/workspace/sparse{n}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 16 << 20)
    maps.append(mmap.mmap(file, 16 << 20))
for map in maps:
    for at in range(0, 16 << 20, 4096):
        map[at] = 1
    time.sleep(0.3)
time.sleep(30)
"""
DIRECTORIES = "i=0; while :; do i=$((i+1)); mkdir -p /workspace/$i/{1..400}; done"


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["/usr/bin/python3", "-c", MAPPED], id="memory maps", marks=needs_python),
        pytest.param(["bash", "-c", DIRECTORIES], id="directories", marks=pytest.mark.slow),
    ],
)
async def test_who_fills_a_full_root_dies(disk_box: RunningSandbox, argv: list[str]) -> None:
    result = await disk_box.exec(argv, timeout=30)
    assert (result.exit_code, result.timed_out, result.breach) == (137, False, Breach.DISK), result
    await clean(disk_box)


async def test_what_hides_is_counted(disk_box: RunningSandbox) -> None:
    script = "mkdir -p /workspace/.h/i; cd /workspace/.h/i; chmod 0 ..; " + FILL.replace("/workspace/f", "f")
    result = await disk_box.exec(["sh", "-c", script], timeout=30)
    assert result.exit_code != 0 and result.breach is Breach.DISK, result
    await clean(disk_box)


async def leave_things(backend: NamespaceBackend) -> RunningSandbox:
    """Start a sandbox on disk, and leave a closed directory in it, a deep one and removed ones of the image."""
    box = await backend.start_sandbox(SandboxSpec(limits=ON_DISK))
    await bash_output(box, "mkdir -p /workspace/a/b; touch /workspace/a/b/c; chmod 0 /workspace/a/b /workspace/a")
    await bash_output(box, "rm -rf /usr/local/bin; cd /tmp; for i in {1..60}; do mkdir ddddddddd; cd ddddddddd; done")
    assert os.listdir(backend.scratch) == [box.id]
    return box


async def test_nothing_is_left_of_it(own_backend: NamespaceBackend) -> None:
    await (await leave_things(own_backend)).close()
    await own_backend.wait_idle()
    assert os.listdir(own_backend.scratch) == []


async def test_nothing_is_left_when_it_ends_with_its_service(own_backend: NamespaceBackend) -> None:
    await (await leave_things(own_backend)).python()  # by a template, whose descriptor ends, too
    await own_backend.close()
    assert os.listdir(own_backend.scratch) == []


async def test_next_start_removes_what_a_killed_one_left(own_backend: NamespaceBackend) -> None:
    box = await leave_things(own_backend)
    os.kill(await own_backend.spawner_pid(), signal.SIGKILL)
    while await box.is_alive():
        continue
    assert os.listdir(own_backend.scratch) == [box.id]
    await own_backend.close()
    async with closing(NamespaceBackend("userns", SandboxConfig(scratch=own_backend.scratch))) as after:
        await after.spawner_pid()
    assert os.listdir(own_backend.scratch) == []


async def test_devices_and_setuid_have_no_effect(disk_box: RunningSandbox) -> None:
    root = (await bash_output(disk_box, "awk '$5 == \"/\" { print $6 }' /proc/self/mountinfo")).split(",")
    assert {"nosuid", "nodev"} <= {*root}
