"""One-shot commands, and the life of the sandbox itself."""

import asyncio
from dataclasses import replace
from errno import EADDRINUSE
from hashlib import sha256
from typing import Any

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.testing.sandbox.conformance._helpers import (
    TIMEOUT_SECONDS,
    assert_cancel_kills,
    count_processes,
    unique_sleep_seconds,
)


async def exec_separates_stdout_and_stderr(box: Sandbox) -> None:
    """Streams and exit code come back apart."""
    result = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout=TIMEOUT_SECONDS)
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3), result


async def exec_passes_binary_stdin(box: Sandbox) -> None:
    """Every byte value, and more than a pipe holds."""
    data = bytes(range(256)) * 1000
    result = await box.exec(["sha256sum"], stdin=data, timeout=TIMEOUT_SECONDS)
    assert result.stdout.split()[0].decode() == sha256(data).hexdigest(), result


async def exec_does_not_wait_for_unread_stdin(box: Sandbox) -> None:
    """A program that ignores its input ends all the same."""
    result = await box.exec(["true"], stdin=b"x" * 1_000_000, timeout=TIMEOUT_SECONDS)
    assert result.exit_code == 0 and not result.timed_out, result


async def exec_reports_missing_program(box: Sandbox) -> None:
    """As a shell would: 127."""
    assert (await box.exec(["/no/such/program"], timeout=TIMEOUT_SECONDS)).exit_code == 127
    assert (await box.exec(["no-such-program"], timeout=TIMEOUT_SECONDS)).exit_code == 127


async def exec_reports_unusable_program(box: Sandbox) -> None:
    """As a shell would: 126."""
    await box.write_file("plain", b"no program", mode=0o644)
    assert (await box.exec(["./plain"], timeout=TIMEOUT_SECONDS)).exit_code == 126


async def exec_reports_signals(box: Sandbox) -> None:
    """128 + number."""
    assert (await box.exec(["sh", "-c", "kill -TERM $$"], timeout=TIMEOUT_SECONDS)).exit_code == 128 + 15


async def exec_uses_cwd_and_env(box: Sandbox) -> None:
    """The spec's directory by default; given variables are added."""
    result = await box.exec(["sh", "-c", "pwd; cd /; echo $EXTRA"], env={"EXTRA": "yes"}, timeout=TIMEOUT_SECONDS)
    assert result.stdout.decode() == f"{box.spec.workdir}\nyes\n", result
    assert (await box.exec(["pwd"], cwd="/usr", timeout=TIMEOUT_SECONDS)).stdout == b"/usr\n"


async def exec_has_the_spec_environment_only(box: Sandbox) -> None:
    """Nothing of the service's environment comes in."""
    names = {
        line.split("=")[0] for line in (await box.exec(["env"], timeout=TIMEOUT_SECONDS)).stdout.decode().splitlines()
    }
    foreign = {name for name in names if name.startswith(("PRORL_GYM", "PYTEST", "VIRTUAL_ENV", "SSH_", "SUDO_"))}
    assert not foreign and "PATH" in names, names


async def exec_bounds_output(box: Sandbox) -> None:
    """Ten megabytes come back as head, marker and tail."""
    limit = box.spec.limits.output
    result = await box.exec(["sh", "-c", "echo first; head -c 10000000 /dev/zero; echo last"], timeout=TIMEOUT_SECONDS)
    assert result.truncated and len(result.stdout) < limit + 200, len(result.stdout)
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")
    assert b"bytes left out" in result.stdout


async def exec_keeps_output_before_a_timeout(box: Sandbox) -> None:
    """A command that is killed at its timeout keeps what it had printed."""
    result = await box.exec(["sh", "-c", f"echo early; sleep {unique_sleep_seconds()}"], timeout=0.5)
    assert result.timed_out and result.stdout == b"early\n" and result.exit_code == 137, result


async def exec_timeout_kills_the_tree(box: Sandbox) -> None:
    """Own sessions and double forks do not escape."""
    seconds = unique_sleep_seconds()
    script = f"setsid sleep {seconds} & (setsid sh -c 'sleep {seconds} & sleep {seconds}' &) ; wait; sleep {seconds}"
    result = await box.exec(["sh", "-c", script], timeout=0.5)
    assert result.timed_out, result
    assert await count_processes(box, seconds) == 0


async def exec_cancel_kills_the_tree(box: Sandbox) -> None:
    """A cancelled await leaves nothing running."""
    seconds = unique_sleep_seconds()
    command = box.exec(["sh", "-c", f"(setsid sleep {seconds} &); sleep {seconds}"], timeout=TIMEOUT_SECONDS)
    await assert_cancel_kills(box, command, seconds, 3)  # both sleeps and the script that names them


async def exec_does_not_wait_for_background_processes(box: Sandbox) -> None:
    """A background process that holds stdout open does not hold the result."""
    result = await box.exec(["sh", "-c", f"sleep {unique_sleep_seconds()} & echo done"], timeout=TIMEOUT_SECONDS)
    assert result.stdout == b"done\n" and not result.timed_out, result


async def exec_runs_concurrently(box: Sandbox) -> None:
    """Twenty at a time, each with its own output."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(box.exec(["sh", "-c", f"sleep 0.1; echo {n}"], timeout=TIMEOUT_SECONDS))
            for n in range(20)
        ]
    assert [task.result().stdout for task in tasks] == [f"{n}\n".encode() for n in range(20)]


async def exec_obeys_narrower_limits(box: Sandbox) -> None:
    """A file size limit for one command."""
    limits = replace(box.spec.limits, file_size=4096)
    command = ["sh", "-c", "head -c 100000 /dev/zero > big"]
    assert (await box.exec(command, limits=limits, timeout=TIMEOUT_SECONDS)).exit_code != 0
    assert len(await box.read_file("big")) == 4096
    assert (await box.exec(command, timeout=TIMEOUT_SECONDS)).exit_code == 0


async def listen_accepts_connections_from_inside(box: Sandbox) -> None:
    """Bytes travel both ways; the port is taken until the socket is closed, and only then free again."""
    loop = asyncio.get_running_loop()
    with await box.listen(0) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        try:
            (await box.listen(port)).close()
        except OSError as error:
            assert error.errno == EADDRINUSE, error
        else:
            raise AssertionError("two sockets listen at one port")
        script = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo question >&3; read -r answer <&3; echo got $answer"
        program = asyncio.ensure_future(box.exec(["bash", "-c", script], timeout=TIMEOUT_SECONDS))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            connection, _ = await loop.sock_accept(listener)
            with connection:
                assert await loop.sock_recv(connection, 100) == b"question\n"
                await loop.sock_sendall(connection, b"answer\n")
                assert (await program).stdout == b"got answer\n", program.result()
    refused = await box.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], timeout=TIMEOUT_SECONDS)
    assert refused.exit_code != 0, refused


async def sandbox_says_that_it_lives(box: Sandbox) -> None:
    """``is_alive`` before, not after ``close``; methods then raise ``SANDBOX_LOST``; ``close`` may be repeated."""
    assert await box.is_alive()
    await box.close()
    await box.close()
    assert not await box.is_alive()
    for call in (
        box.exec(["true"], timeout=TIMEOUT_SECONDS),
        box.shell(),
        box.python(),
        box.read_file("x"),
        box.list_dir("."),
        box.listen(0),
    ):
        try:
            await call
        except SandboxError as error:
            assert error.kind is FailureKind.SANDBOX_LOST
        else:
            raise AssertionError("a closed sandbox answered")


async def close_ends_calls_in_flight(box: Sandbox) -> None:
    """A waiting call raises ``SANDBOX_LOST``, it does not hang."""
    shell = await box.shell()
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(box.exec(["sleep", unique_sleep_seconds()], timeout=TIMEOUT_SECONDS)),
        asyncio.ensure_future(shell.run_command(f"sleep {unique_sleep_seconds()}", timeout=TIMEOUT_SECONDS)),
    ]
    await asyncio.wait(calls, timeout=0.2)
    await box.close()
    async with asyncio.timeout(TIMEOUT_SECONDS / 2):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, SandboxError) and outcome.kind is FailureKind.SANDBOX_LOST, outcome


EXECUTION_CHECKS = (
    exec_separates_stdout_and_stderr,
    exec_passes_binary_stdin,
    exec_does_not_wait_for_unread_stdin,
    exec_reports_missing_program,
    exec_reports_unusable_program,
    exec_reports_signals,
    exec_uses_cwd_and_env,
    exec_has_the_spec_environment_only,
    exec_bounds_output,
    exec_keeps_output_before_a_timeout,
    exec_timeout_kills_the_tree,
    exec_cancel_kills_the_tree,
    exec_does_not_wait_for_background_processes,
    exec_runs_concurrently,
    exec_obeys_narrower_limits,
    listen_accepts_connections_from_inside,
    sandbox_says_that_it_lives,
    close_ends_calls_in_flight,
)
