"""Files that go in and come out, and paths that try to lead outside."""

from collections.abc import Awaitable
from errno import EFBIG, EINVAL, EISDIR, ELOOP, ENOENT, ENOTDIR
from typing import Any

from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.testing.sandbox.conformance._helpers import TIMEOUT_SECONDS


async def _errno_of(call: Awaitable[Any]) -> int | None:
    try:
        await call
    except OSError as error:
        return error.errno
    return None


async def _run_script(box: Sandbox, script: str) -> str:
    result = await box.exec(["sh", "-c", script], timeout=TIMEOUT_SECONDS)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def files_are_binary_safe(box: Sandbox) -> None:
    """Every byte value, empty, and large."""
    for data in (b"", bytes(range(256)), b"\r\n\x00\xff" * 500_000):
        await box.write_file("data", data)
        assert await box.read_file("data") == data
        assert int(await _run_script(box, "wc -c < data")) == len(data)


async def files_have_directories_made(box: Sandbox) -> None:
    """Missing parents are made; relative paths start in the workdir."""
    await box.write_file("a/b/../c/file", b"x")
    assert await box.read_file(f"{box.spec.workdir}/a/c/file") == b"x"


async def files_have_modes(box: Sandbox) -> None:
    """A new file has exactly the mode, an existing one keeps its own unless one is given; owner and links stay."""
    await box.write_file("script", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await box.exec(["./script"], timeout=TIMEOUT_SECONDS)).stdout == b"ran\n"
    await box.write_file("script", b"#!/bin/sh\necho again\n")
    assert await _run_script(box, "stat -c %a script; ./script") == "755\nagain\n"
    await box.write_file("secret", b"", mode=0o600)
    assert await _run_script(box, "stat -c %a secret") == "600\n"
    await box.write_file("plain", b"")
    assert await _run_script(box, "stat -c %a plain") == "644\n"
    for mode in ("750", "600", "711", "707"):
        await _run_script(box, f"chmod {mode} plain; ln -sf plain link; ln -f plain twin")
        await box.write_file("link", mode.encode())
        assert (
            await _run_script(box, "stat -c %a plain; cat plain; test -L link && cat twin") == f"{mode}\n{mode}{mode}"
        ), mode
    await box.write_file("plain", b"", mode=0o640)
    assert await _run_script(box, "stat -c %a plain") == "640\n"


async def files_have_any_name(box: Sandbox) -> None:
    """Unicode, spaces, newlines, and bytes that are no text."""
    for name in ("grüße €.txt", " a b\n", "-rf", "\udcff\udcfe", "日本"):
        await box.write_file(f"names/{name}", name.encode("utf-8", "surrogateescape"))
        assert await box.read_file(f"names/{name}") == name.encode("utf-8", "surrogateescape")
    names = [entry.name for entry in await box.list_dir("names")]
    assert names == sorted(["grüße €.txt", " a b\n", "-rf", "\udcff\udcfe", "日本"]), names


async def files_replace_what_was_there(box: Sandbox) -> None:
    """A shorter content leaves no rest."""
    await box.write_file("file", b"long content")
    await box.write_file("file", b"x")
    assert await box.read_file("file") == b"x"


async def files_follow_links_inside_only(box: Sandbox) -> None:
    """Links to / and to .. are resolved as a program inside would."""
    await box.write_file("target", b"inside")
    await _run_script(box, "ln -s target link; ln -s / root; ln -s nothing dangling; ln -s loop loop")
    assert await box.read_file("link") == b"inside"
    assert await box.read_file(f"root{box.spec.workdir}/target") == b"inside"
    for path in ("root/etc/hostname", "../../../../../../etc/hostname"):
        inside = await box.exec(["cat", path], timeout=TIMEOUT_SECONDS)
        try:
            seen = await box.read_file(path)
        except FileNotFoundError:
            assert inside.exit_code != 0, path
        else:
            assert seen == inside.stdout, path
    assert await _errno_of(box.read_file("dangling")) == ENOENT
    assert await _errno_of(box.read_file("loop")) == ELOOP


async def files_do_not_lead_through_proc(box: Sandbox) -> None:
    """The guest's own memory, environment, descriptors and root are out of reach."""
    for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/self/fd/0", "/proc/self/fd/3"):
        assert await _errno_of(box.read_file(path)) is not None, path
    for path in ("/proc/self/root/tmp/x", "/proc/self/cwd/x", "/proc/self/fd/1", "/proc/self/mem"):
        assert await _errno_of(box.write_file(path, b"x")) is not None, path
    await _run_script(box, "ln -s /proc/self/environ innocent")
    assert await _errno_of(box.read_file("innocent")) is not None


async def only_regular_files_are_read(box: Sandbox) -> None:
    """FIFOs, directories and devices are refused at once, in both directions."""
    await _run_script(box, "mkfifo fifo; mkdir directory")
    assert await _errno_of(box.read_file("fifo")) == EINVAL
    assert await _errno_of(box.write_file("fifo", b"x")) == EINVAL
    assert await _errno_of(box.read_file("directory")) == EISDIR
    assert await _errno_of(box.write_file("directory", b"x")) == EISDIR
    assert await _errno_of(box.read_file("/dev/zero")) == EINVAL
    assert await _errno_of(box.write_file("/dev/null", b"x")) == EINVAL


async def large_files_are_refused(box: Sandbox) -> None:
    """By their size, before they are read; the limit itself is allowed."""
    await _run_script(box, "truncate -s 1000001 big; truncate -s 1T sparse || truncate -s 1G sparse")
    assert await _errno_of(box.read_file("big", limit=1_000_000)) == EFBIG
    assert await _errno_of(box.read_file("sparse")) == EFBIG
    assert len(await box.read_file("big", limit=1_000_001)) == 1_000_001


async def missing_paths_are_told_apart(box: Sandbox) -> None:
    """``ENOENT``, ``ENOTDIR``."""
    await box.write_file("file", b"")
    assert await _errno_of(box.read_file("nothing")) == ENOENT
    assert await _errno_of(box.list_dir("nothing")) == ENOENT
    assert await _errno_of(box.list_dir("file")) == ENOTDIR
    assert await _errno_of(box.write_file("file/below", b"")) == ENOTDIR
    assert await _errno_of(box.read_file("nul\0byte")) == EINVAL


async def directories_are_listed(box: Sandbox) -> None:
    """Kinds, sizes and modes, sorted, links not followed; also many."""
    await _run_script(box, "mkdir d; cd d; printf 123 > f; chmod 640 f; mkdir sub; ln -s /etc/passwd l; mkfifo p")
    found = [(entry.name, entry.kind) for entry in await box.list_dir("d")]
    assert found == [("f", "file"), ("l", "symlink"), ("p", "other"), ("sub", "directory")], found
    entry = (await box.list_dir("d"))[0]
    assert (entry.size, entry.mode) == (3, 0o640), entry
    await _run_script(box, "mkdir many; cd many; seq -f 'a-rather-long-file-name-%.0f' 2000 | xargs touch")
    assert len(await box.list_dir("many")) == 2000


FILE_CHECKS = (
    files_are_binary_safe,
    files_have_directories_made,
    files_have_modes,
    files_have_any_name,
    files_replace_what_was_there,
    files_follow_links_inside_only,
    files_do_not_lead_through_proc,
    only_regular_files_are_read,
    large_files_are_refused,
    missing_paths_are_told_apart,
    directories_are_listed,
)
