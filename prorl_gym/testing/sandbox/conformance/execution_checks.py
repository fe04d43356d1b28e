"""One-shot commands, the life of the sandbox itself, files and paths that try to lead outside, the python session.

Of the python session: state, output, and cells that attack it. Wording differs between consoles; facts do not.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from errno import EADDRINUSE, EFBIG, EINVAL, EISDIR, ELOOP, ENOENT, ENOTDIR
from hashlib import sha256
from typing import Any

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import CellResult, PythonSession, Sandbox
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


# --- files ------------------------------------------------------------------------------------------------------------


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


# --- the python session -----------------------------------------------------------------------------------------------


async def _run_cell(session: PythonSession, code: str, timeout: float = TIMEOUT_SECONDS) -> CellResult:
    return await session.run_cell(code, timeout=timeout)


async def python_keeps_state(box: Sandbox) -> None:
    """Names, imports and functions of earlier cells; the last expression's value is shown."""
    python = await box.python()
    assert (await _run_cell(python, "import math\ndef f(x):\n    return x * k\nk = 3")).output == ""
    result = await _run_cell(python, "print('printed')\nf(14)")
    assert (result.output, result.ok) == ("printed\n42\n", True), result
    assert (await _run_cell(python, "None")).output == ""


async def python_shows_errors(box: Sandbox) -> None:
    """Exceptions and syntax errors are output, with the line, and harm nothing."""
    python = await box.python()
    await _run_cell(python, "x = 1")
    result = await _run_cell(python, "def f():\n    return 1 / 0\nf()")
    assert not result.ok and "ZeroDivisionError" in result.output and "return 1 / 0" in result.output, result
    result = await _run_cell(python, "def broken(:\n")
    assert not result.ok and "SyntaxError" in result.output, result
    assert not (await _run_cell(python, "import sys; sys.exit(3)")).restarted
    assert (await _run_cell(python, "x")).output == "1\n"


async def python_output_has_every_source(box: Sandbox) -> None:
    """stdout, stderr, the descriptor itself and subprocesses, in order."""
    python = await box.python()
    code = "import os, sys, subprocess\nprint(1)\nprint(2, file=sys.stderr)\nos.write(1, b'3\\n')\n"
    result = await _run_cell(python, code + "subprocess.run(['echo', '4'])\nprint(5)")
    assert result.output == "1\n2\n3\n4\n5\n", result


async def python_input_is_empty(box: Sandbox) -> None:
    """``input()`` does not hang."""
    result = await _run_cell(await box.python(), "input()")
    assert not result.ok and "EOFError" in result.output, result


async def python_bounds_output(box: Sandbox) -> None:
    """A hundred megabytes come back as head, marker and tail."""
    result = await _run_cell(await box.python(), "for _ in range(100): print('x' * 1000000)\nprint('last')", 60)
    assert result.ok and len(result.output) < box.spec.limits.output + 200, result.ok
    assert "bytes left out" in result.output and result.output.endswith("last\n")


async def python_timeout_interrupts(box: Sandbox) -> None:
    """Loops, sleeps and subprocesses end at the timeout; the state stays."""
    python = await box.python()
    await _run_cell(python, "x = 'kept'")
    for code in ("while True: pass", "import time; time.sleep(1000)", "import os; os.system('sleep 1000')"):
        result = await _run_cell(python, code, 0.3)
        assert result.timed_out and not result.ok and not result.restarted, (code, result)
    assert (await _run_cell(python, "x")).output == "'kept'\n"


async def python_timeout_kills_what_ignores_it(box: Sandbox) -> None:
    """A cell that swallows the interrupt is killed with everything it started; an empty session follows."""
    python = await box.python()
    seconds = unique_sleep_seconds()
    code = f"import subprocess, time\nx = 1\nsubprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
    code += "while True:\n    try:\n        time.sleep(1000)\n    except BaseException:\n        pass"
    result = await _run_cell(python, code, 0.3)
    assert result.timed_out and result.restarted and not result.ok, result
    assert await count_processes(box, seconds) == 0
    result = await _run_cell(python, "'x' in globals()")
    assert (result.output, result.restarted) == ("False\n", False), result


async def python_survives_its_death(box: Sandbox) -> None:
    """``os._exit``, a segmentation fault, memory: reported, restarted, usable."""
    python = await box.python()
    for code in (
        "import os; os._exit(1)",
        "import ctypes; ctypes.string_at(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ):
        result = await _run_cell(python, "print('before', flush=True)\n" + code)
        assert result.restarted and not result.ok and not result.timed_out, (code, result)
        assert result.output.startswith("before\n"), result
        assert (await _run_cell(python, "1 + 1")).output == "2\n"


async def python_forked_child_answers_nothing(box: Sandbox) -> None:
    """A child that a cell forks and that comes back from it, by whatever way, ends there; the worker goes on."""
    python = await box.python()
    for way in ("pass", "raise SystemExit", "1 / 0", "raise KeyboardInterrupt"):
        forked = f"child = os.fork()\nif not child:\n    {way}\nelse:\n    os.waitpid(child, 0)\nchild > 0"
        code = f"import os\nkeep = 1\n{forked}"
        result = await _run_cell(python, code)
        assert result.ok and not result.restarted and result.output.endswith("True\n"), (way, result)
        assert (await _run_cell(python, "child > 0, keep")).output == "(True, 1)\n", way


async def python_survives_garbage_on_its_channel(box: Sandbox) -> None:
    """Forged answers on any descriptor are at worst a restart."""
    python = await box.python()
    forge = (
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"cell": "x", "ok": true, "images": []}\\n\')\n'
    )
    await _run_cell(python, forge + "    except OSError: pass")
    await _run_cell(python, "import os; os.closerange(3, 20)")
    assert (await _run_cell(python, "'fine'")).output == "'fine'\n"


async def python_cancel_kills(box: Sandbox) -> None:
    """A cancelled await leaves nothing of its cell."""
    python = await box.python()
    seconds = unique_sleep_seconds()
    cell = _run_cell(python, f"import subprocess\nsubprocess.run(['sleep', '{seconds}'])")
    await assert_cancel_kills(box, cell, seconds, 1)
    assert (await _run_cell(python, "1 + 1")).output == "2\n"


async def python_works_beside_the_shell(box: Sandbox) -> None:
    """Both see the same files."""
    python, shell = await box.python(), await box.shell()
    await _run_cell(python, "open('shared', 'w').write('from python')")
    assert (await shell.run_command("cat shared", timeout=TIMEOUT_SECONDS)).output == "from python"
