"""Gym's PTY protocol: terminals that people and agents hold, and the fast shell that ``sandbox.pty.exec`` reuses."""

import asyncio
import re
from collections.abc import AsyncIterator

import gym_needed  # noqa: F401
import pytest
import pytest_asyncio
from nemo_gym.sandbox import AsyncSandbox, SandboxPtyError, SandboxPtySession, SandboxSpec
from nemo_gym.sandbox.providers.base import SandboxPtySession as Protocol

APPTAINER = pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.product])

pytestmark = [
    *(pytest.mark.gym, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")),
    pytest.mark.usefixtures("found_by_gym"),
]

SECONDS = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["userns", APPTAINER])
async def sandbox(request: pytest.FixtureRequest, found_by_gym: None) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox({"prorl": {"backend": request.param}}, SandboxSpec()) as sandbox:
        yield await sandbox.start()


async def everything(session: SandboxPtySession) -> bytes:
    async with asyncio.timeout(SECONDS):
        return b"".join([chunk async for chunk in session])


async def until(session: SandboxPtySession, *texts: bytes) -> bytes:
    """Read until the texts have come, in this order."""
    seen = b""
    while not re.search(b".*".join(map(re.escape, texts)), seen, re.DOTALL):
        chunk = await session.read(timeout_s=SECONDS)
        assert chunk, seen
        seen += chunk
    return seen


async def test_command_has_a_terminal(sandbox: AsyncSandbox) -> None:
    script = "test -t 0 && test -t 2 && stty size; pwd; echo $OWN; exit 4"
    async with await sandbox.pty.create(script, rows=31, cols=77, cwd="/usr", env={"OWN": "x y"}) as session:
        assert isinstance(session, Protocol)
        assert await everything(session) == b"31 77\r\n/usr\r\nx y\r\n"
        assert await session.read() == b"" and await session.read_stderr() == b""
        assert (session.mode, session.closed, await session.wait_exit()) == ("pty", True, 4)


async def test_environment_is_free_of_our_machinery(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("env; ls /proc/self/fd") as session:
        output = await everything(session)
    assert b"PROMPT_COMMAND" not in output and b"__prorl" not in output and b"PS1=" not in output
    assert output.split()[-4:] == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself


async def test_pipes_keep_streams_apart(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("test -t 0 || echo none; read x; echo $x >&2", pty=False) as session:
        await session.write(b"typed\n")
        assert await everything(session) == b"none\n"
        assert await session.read_stderr() == b"typed\n"
        assert (session.mode, await session.wait_exit()) == ("pipe", 0)


async def test_shell_can_be_talked_to(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create() as session:
        await session.write(b"x=4; echo $((x + 1))$((x + 2))\n")
        await until(session, b"56")
        await session.write(b"sh -c 'echo run\"\"ning; exec sleep 1000'\n")
        await until(session, b"running")
        await session.write(b"\x03")
        await until(session, b"# ")  # until the next prompt, bash drops what is typed
        await session.write(b"echo $((x + 3))$?\n")
        # Before its prompt, readline reads the size and sets it again: a resize in between would be undone.
        await until(session, b"7130", b"# ")
        await session.resize(11, 222)
        await session.write(b"stty size\n")
        await until(session, b"11 222")
        await session.write(b"exit 9\n")
        await everything(session)
        assert await session.wait_exit() == 9


async def test_signal_reaches_a_command(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done") as session:
        await until(session, b"ready")
        await session.send_signal("SIGTERM")
        assert await session.wait_exit(timeout_s=SECONDS) == 5
        await session.send_signal("SIGTERM")  # too late: no process gets it
        with pytest.raises(ValueError, match="SIGNONE"):
            await session.send_signal("SIGNONE")


async def test_reading_and_waiting_time_out(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("sleep 1000") as session:
        for waiting in (session.read(timeout_s=0.05), session.wait_exit(timeout_s=0.05)):
            with pytest.raises(TimeoutError):
                await waiting
        assert not session.closed


async def test_closing_kills_everything_below(sandbox: AsyncSandbox) -> None:
    session = await sandbox.pty.create("setsid sleep 8765 & echo ready; sleep 8765")
    await until(session, b"ready")
    await session.close()
    await session.close()
    assert session.closed
    assert (await sandbox.exec("cat /proc/[0-9]*/cmdline | grep -c -a '876[5]'")).stdout == "0\n"
    with pytest.raises(SandboxPtyError, match="has ended"):
        await session.write(b"x")


async def test_unread_output_is_not_lost(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last") as session:
        output = await everything(session)
    assert output == b"x" * 3_000_000 + b"\r\nlast\r\n"


async def test_background_job_does_not_hold_the_end(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("trap '' HUP; sleep 1000 & echo done", pty=False) as session:
        assert await everything(session) == b"done\n"


async def test_missing_directory_is_an_exit_code(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create("true", cwd="/no/such") as session:
        assert b"/no/such" in await everything(session)
        assert await session.wait_exit() == 126


async def test_exec_reuses_the_default_shell(sandbox: AsyncSandbox) -> None:
    async with await sandbox.pty.create():
        await sandbox.pty.exec("cd /usr; kept=here")
        result = await sandbox.pty.exec("echo $PWD $kept; (exit 6)", timeout_s=SECONDS)
        assert (result.stdout, result.return_code, result.error_type) == ("/usr here\r\n", 6, None)


async def test_exec_alone_collects_a_command(sandbox: AsyncSandbox) -> None:
    result = await sandbox.pty.exec("echo out; echo err >&2; exit 2", pty=False)
    assert (result.stdout, result.stderr, result.return_code) == ("out\n", "err\n", 2)
    late = await sandbox.pty.exec("sleep 1000", timeout_s=0.2)
    assert late.error_type == "timeout"


async def test_detached_command_returns_its_output(sandbox: AsyncSandbox) -> None:
    result = await sandbox.pty.exec("echo one; echo two; (exit 3)", detach=True, timeout_s=SECONDS)
    assert (result.stdout, result.return_code) == ("one\ntwo\n", 3)
    with pytest.raises(SandboxPtyError, match="use exec"):
        await sandbox.pty.exec("head -c 2000000 /dev/zero | tr '\\0' x", detach=True, timeout_s=SECONDS)


async def test_lost_sandbox_is_an_error_of_its_sessions() -> None:
    async with AsyncSandbox({"prorl": {"backend": "userns"}}, SandboxSpec()) as sandbox:
        session = await (await sandbox.start()).pty.create("sleep 1000")
        await sandbox._require_handle().raw.sandbox.close()  # noqa: SLF001
        with pytest.raises(SandboxPtyError):
            await session.read(timeout_s=SECONDS)
        with pytest.raises(SandboxPtyError):
            await sandbox.pty.create()
