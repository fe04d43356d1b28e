"""The writable root: what installers, git and careless agents do to it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.sandbox.protocol import Mount, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image_box(backend: NamespaceBackend, tiny_image: Path) -> AsyncIterator[RunningSandbox]:
    box = await backend.start_sandbox(SandboxSpec(image=str(tiny_image), workdir="/project/here"))
    yield box
    await box.close()


async def bash(box: RunningSandbox, script: str) -> str:
    """Run a script that must succeed."""
    result = await box.exec(["/bin/bash", "-ec", script], timeout=20)
    assert (result.exit_code, result.stderr) == (0, b"")
    return result.stdout.decode()


async def test_image_directory_can_be_removed_and_made_again(image_box: RunningSandbox, tiny_image: Path) -> None:
    assert await bash(image_box, "cat /data/doomed/deep/file") == "old"
    assert await bash(image_box, "rm -rf /data/doomed; mkdir /data/doomed; ls -A /data/doomed") == ""
    assert (tiny_image / "data/doomed/deep/file").read_text() == "old"


async def test_image_directory_can_be_renamed(image_box: RunningSandbox, tiny_image: Path) -> None:
    assert (
        await bash(image_box, "mkdir -p /data/doomed/deep; mv /data/kept /data/moved; cat /data/moved/file") == "kept"
    )
    assert await bash(image_box, "mv /data/moved /data/kept; cat /data/kept/file") == "kept"
    assert (tiny_image / "data/kept/file").read_text() == "kept"


async def test_new_directory_inside_an_image_directory_can_be_renamed(image_box: RunningSandbox) -> None:
    assert await bash(image_box, "cd /data/kept; mkdir a; touch a/x; mv a b; ls b") == "x\n"


async def test_image_file_can_be_changed_without_changing_the_image(
    image_box: RunningSandbox, tiny_image: Path
) -> None:
    assert await bash(image_box, "echo new >> /data/kept/file; cat /data/kept/file") == "keptnew\n"
    assert (tiny_image / "data/kept/file").read_text() == "kept"


async def test_image_keeps_its_accounts_and_gets_no_name_server(image_box: RunningSandbox) -> None:
    assert await bash(image_box, "cat /etc/passwd /etc/resolv.conf") == "root:x:0:0:root:/root:/bin/bash\n"


async def test_working_directory_is_made(image_box: RunningSandbox) -> None:
    assert await bash(image_box, "pwd") == "/project/here\n"


async def test_image_files_belong_to_root_inside(image_box: RunningSandbox) -> None:
    assert await bash(image_box, "stat -c %u:%g /data/kept/file /usr/bin/bash /") == "0:0\n" * 3


async def test_two_sandboxes_of_an_image_do_not_share_changes(
    backend: NamespaceBackend, image_box: RunningSandbox, tiny_image: Path
) -> None:
    other = await backend.start_sandbox(SandboxSpec(image=str(tiny_image)))
    try:
        await bash(image_box, "echo mine > /data/kept/mine")
        assert await bash(other, "ls /data/kept") == "file\n"
    finally:
        await other.close()


async def test_host_usr_takes_files_and_directories(box: RunningSandbox) -> None:
    await bash(box, "for d in /usr /usr/bin /usr/lib /usr/local; do mkdir $d/new; echo x > $d/new/file; done")
    await bash(box, "mv /usr/new /usr/newer")
    assert await bash(box, "cat /usr/newer/file /usr/bin/new/file") == "x\nx\n"
    assert not {"new", "newer"} & {*os.listdir("/usr"), *os.listdir("/usr/bin")}


async def test_host_program_can_be_replaced_inside_only(box: RunningSandbox) -> None:
    before = os.stat("/usr/bin/true")
    await bash(box, "rm /usr/bin/true; printf '#!/bin/sh\\necho replaced\\n' > /usr/bin/true; chmod +x /usr/bin/true")
    assert await bash(box, "/usr/bin/true") == "replaced\n"
    assert os.path.samestat(os.stat("/usr/bin/true"), before)


async def test_host_directory_can_be_removed_and_made_again(box: RunningSandbox) -> None:
    await bash(box, "rm -rf /usr/local/bin; mkdir /usr/local/bin; echo x > /usr/local/bin/x")
    assert await bash(box, "ls -A /usr/local/bin") == "x\n"


async def test_names_may_be_any_unicode(box: RunningSandbox) -> None:
    name = "naïve ☃ \u202e file"
    await box.write_file(f"/workspace/{name}", "ü".encode())
    assert await bash(box, "cd /workspace; cat *☃*") == "ü"
    assert name in [entry.name for entry in await box.list_dir("/workspace")]


@pytest.mark.skipif(not os.path.exists("/usr/bin/git"), reason="the host has no /usr/bin/git")
async def test_git_takes_back_what_an_agent_did(box: RunningSandbox) -> None:
    script = """
    mkdir /workspace/repo; cd /workspace/repo; git init -q; git config user.email a@b; git config user.name n
    mkdir -p src/deep; echo one > src/deep/file; printf x > 'ü ☃'; chmod 755 src/deep/file
    git add -A; git commit -qm first; git checkout -q -b other
    rm -rf src; mkdir src; echo two > src/deep; git add -A; git commit -qm second
    git checkout -q master 2>/dev/null || git checkout -q main; rm -rf src 'ü ☃'; git checkout -q .
    cat src/deep/file; stat -c %a src/deep/file; git status --porcelain
    """
    assert await bash(box, script) == "one\n755\n"


async def test_mounts_are_read_only_whatever_their_path(backend: NamespaceBackend, ground: Path) -> None:
    source = ground / f"odd:na,me {backend.name}"
    source.mkdir()
    (source / "file").write_text("given")
    mounts = (Mount(str(source), "/given/here"), Mount(str(source / "file"), "/given/file"))
    box = await backend.start_sandbox(SandboxSpec(mounts=mounts))
    try:
        assert await bash(box, "cat /given/here/file /given/file") == "givengiven"
        for attempt in ("touch /given/here/x", "echo x > /given/file", "rm /given/here/file", "umount /given/file"):
            assert (await box.exec(["/bin/bash", "-c", attempt], timeout=10)).exit_code != 0, attempt
    finally:
        await box.close()
    assert [entry.name for entry in source.iterdir()] == ["file"]


async def test_devices_work(box: RunningSandbox) -> None:
    script = "head -c 3 /dev/zero | cat | wc -c; head -c 2 /dev/urandom | wc -c; echo x > /dev/null; test -c /dev/full"
    assert await bash(box, script) == "3\n2\n"


async def test_host_name_is_neutral(box: RunningSandbox) -> None:
    assert await bash(box, "cat /proc/sys/kernel/hostname /etc/hostname") == "sandbox\nsandbox\n"


COMMITS = """
git init repository; cd repository; git commit -q --allow-empty -m one
git config user.name Mine; git config user.email m@m; git commit -q --allow-empty -m two
GIT_AUTHOR_NAME=Given git commit -q --allow-empty -m three
git log --format='%an <%ae> %cn'
"""
"""Without an identity, with a configured one, with one of the environment."""


def identities(log: str) -> list[str]:
    return [line for line in log.splitlines() if "<" in line]


async def test_git_commits_without_an_identity(box: RunningSandbox) -> None:
    result = await box.exec(["/bin/bash", "-ec", f"cd $(mktemp -d); {COMMITS}"], timeout=20)
    assert (result.exit_code, result.stderr) == (0, b""), result
    assert identities(result.stdout.decode()) == [
        "Given <m@m> Mine",
        "Mine <m@m> Mine",
        "root <root@localhost> root",
    ]


async def test_git_works_in_the_directory_of_another_uid(box: RunningSandbox) -> None:
    assert (await bash(box, "git config --get-all safe.directory")) == "*\n"


async def test_python_has_its_short_name(box: RunningSandbox) -> None:
    assert await bash(box, "python -c 'import json; print(json.dumps(1))'") == "1\n"
    script = "printf '#!/usr/bin/env python\nprint(2)' > /tmp/program; chmod +x /tmp/program; /tmp/program"
    assert await bash(box, script) == "2\n"


async def test_virtual_environment_of_the_short_name_works(box: RunningSandbox) -> None:
    make = "cd $(mktemp -d); python -m venv --without-pip v; . v/bin/activate"
    prefix, directory = (await bash(box, f"{make}; python -c 'import json, sys; print(sys.prefix)'; pwd")).split()
    assert prefix == f"{directory}/v"


FOREIGN = "echo x > a; tar --owner=1234 --group=1234 -cf foreign.tar a; rm a; tar -xf foreign.tar; stat -c %u a"


async def test_archive_with_foreign_owners_is_unpacked(box: RunningSandbox) -> None:
    assert await bash(box, FOREIGN) == "0\n"


async def test_options_of_tar_are_the_callers_where_they_are_set(box: RunningSandbox) -> None:
    result = await box.exec(["/bin/bash", "-ec", FOREIGN], timeout=20, env={"TAR_OPTIONS": ""})
    assert result.exit_code == 2 and b"Cannot change ownership to uid 1234" in result.stderr
