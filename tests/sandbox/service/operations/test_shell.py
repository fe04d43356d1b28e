"""What a session in our shell shows is what ``bash -i`` on a terminal shows for the same lines, in the same run.

What differs is listed with its reason, and a difference that is none any more fails too. At the end, what the kit$
cannot see: exactness under load, released descriptors.
"""

import os
import pty
import random
import re
import subprocess
import termios
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.operations.shell import PersistentShell
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC

pytestmark = pytest.mark.asyncio(loop_scope="module")

Session = Sequence[str]

SAME: dict[str, Session] = {
    "status": ("(exit 7)", "echo $?", "echo $?", "false", "true", "echo $?"),
    "pipe status": ("false | true | (exit 3); echo ${PIPESTATUS[@]}", "(exit 4)", "echo ${PIPESTATUS[@]}"),
    "last argument": ("mkdir -p d/e; cd $_; basename $PWD; cd ../..",),
    "err trap": ("trap 'echo ERR' ERR", "false", "true", "false; true; false", "trap - ERR", "false", "echo $?"),
    "err trap in the same line": ("trap 'echo ERR' ERR; false", "true", "false; trap - ERR"),
    "err trap sees": ("trap 'echo $? $BASH_COMMAND' ERR", "(exit 3)", "true", "sh -c 'exit 5'", "echo $?"),
    "err trap is spared": ("trap 'echo ERR' ERR", "if false; then :; fi", "! true", "false || true", "(exit 2) | true"),
    "err trap in functions": ("f() { false; }", "trap 'echo ERR' ERR", "f", "set -E", "f", "(false)", "set +E; f"),
    "err trap of lines": ("trap 'echo one\necho two' ERR", "false", "trap -p ERR", "true"),
    "debug trap": ("trap 'echo D $BASH_COMMAND' DEBUG", "echo a", "true; false", "echo $?", "trap - DEBUG", "echo b"),
    "debug trap in loops": ("trap 'echo DEBUG' DEBUG", "for i in 1 2; do echo $i; done", "f() { echo f; }", "f"),
    "traced functions": ("trap 'echo DEBUG' DEBUG", "f() { echo f; }", "set -T", "f", "set +T", "f"),
    "return trap": ("trap 'echo RETURN' RETURN", "f() { echo f; }", "f", "set -T", "f", "true", "set +T", "f"),
    "three traps": ("trap 'echo E' ERR; trap 'echo D' DEBUG; trap 'echo R' RETURN", "false", "trap - DEBUG", "false"),
    "verbose": ("set -v", "echo a", "for i in 1; do\necho $i\ndone", "set +v", "echo b"),
    "unset variables": ("set -u", "echo $nothing; echo not reached", "set +u", "echo ${nothing?gone}", "echo $?"),
    "command in words": (
        "echo $BASH_COMMAND",
        "f() { echo $BASH_COMMAND ${FUNCNAME[@]}; }",
        "f x",
        "echo $BASH_SUBSHELL",
    ),
    "functions listed": ("f() { echo $x; }", "declare -f", "declare -F", "unset -f f", "declare -F"),
    "errors": ("nosuch", "cd nowhere", "cat nothing", "/", "echo x > /", "local x", "$", "let 1/0", "echo $?"),
    "texts": ("cat <<END\na $((1+1))\nEND", "cat <<< word", "echo 'a\nb'", "echo a \\\n b", "echo {1..3}", "# nothing"),
    "aliases": ("alias x='echo alias'", "x y", "unalias x", "alias"),
    "exit": ("trap 'echo bye' EXIT", "exit 3"),
    "errexit": ("set -e", "true", "false || true", "false"),
}

DIFFERENT: dict[str, tuple[Session, str]] = {
    "line numbers": (("echo", "echo $LINENO"), "each command begins at line 1"),
    "tracing": (("set -x", "true"), "the command stands deeper, which PS4 shows with more signs"),
    "pipe status, later": (("false | true", "echo ${PIPESTATUS[@]}"), "only that of the last program is kept"),
    "last argument, later": (("echo word", "echo $_"), "not kept"),
    "loop control": (("break",), "the machinery is a loop"),
    "prompt command": (("PROMPT_COMMAND='echo prompted'", "true"), "there is no prompt"),
    "history": (("true", "!!"), "an exclamation mark in a command is an exclamation mark"),
    "job started": (("sleep 0 & wait",), "bash tells at its own prompt only"),
    "traps listed": (("trap",), "a trap of ours saves directory and variables when the shell exits"),
    "syntax errors": ((")",), "the message names eval and a line"),
    "variables of the machinery": (("set | grep -c '^__prorl'",), "they are in the same shell"),
}

_PROMPT = re.compile(rb"\x02(\d+)\x03")


class RawBash:
    """``bash -i`` on a terminal that does not echo; the prompt tells the end of a command, and its code."""

    def __init__(self, cwd: str) -> None:
        self._master, terminal = pty.openpty()
        modes = termios.tcgetattr(terminal)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
        env = {"PATH": os.environ["PATH"], "PS1": "\2$?\3", "PS2": "", "HOME": cwd, "TERM": "dumb", "LANG": "C.UTF-8"}
        argv = ["setsid", "--ctty", "bash", "--noprofile", "--norc", "--noediting", "-i"]
        self._process = subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, env=env, cwd=cwd)
        os.close(terminal)
        self._until_prompt()

    def run(self, command: str) -> tuple[str, int]:
        os.write(self._master, command.encode() + b"\n")
        return self._until_prompt()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def _until_prompt(self) -> tuple[str, int]:
        seen = b""
        while (prompt := _PROMPT.search(seen)) is None:
            try:
                seen += os.read(self._master, 65536)
            except OSError:  # bash ended
                return seen.decode().replace("exit\n", "", 1), self._process.wait()
        return seen[: prompt.start()].decode(), int(prompt[1])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def box() -> AsyncIterator[RunningSandbox]:
    backend = LocalBackend(allow_unsafe_local=True)
    yield await backend.start_sandbox(CHECK_SPEC)
    await backend.close()


@pytest.fixture
def raw(box: RunningSandbox) -> Iterator[RawBash]:
    bash = RawBash(box.spec.workdir)
    yield bash
    bash.close()


@pytest_asyncio.fixture(loop_scope="module")
async def shell(box: RunningSandbox) -> AsyncIterator[PersistentShell]:
    """The sandbox has one; what a test leaves in it ends with it."""
    shell = await box.shell()
    yield shell
    await shell.close()


async def show(shell: PersistentShell, session: Session) -> list[tuple[str, int | None]]:
    results = [await shell.run_command(command, timeout=20) for command in session]
    return [(result.output, result.exit_code) for result in results]


@pytest.mark.parametrize("session", SAME.values(), ids=SAME)
async def test_a_session_looks_the_same(shell: PersistentShell, raw: RawBash, session: Session) -> None:
    assert await show(shell, session) == [raw.run(command) for command in session]


@pytest.mark.parametrize(("session", "why"), DIFFERENT.values(), ids=DIFFERENT)
async def test_a_listed_difference_is_one(shell: PersistentShell, raw: RawBash, session: Session, why: str) -> None:
    assert await show(shell, session) != [raw.run(command) for command in session], f"no longer true: {why}"


async def test_two_thousand_commands_lose_no_byte(shell: PersistentShell) -> None:
    await shell.run_command("big=$(printf '%*s' 8000 '' | tr ' ' x)", timeout=10)
    sizes = random.Random(7)
    for number in range(2000):
        size = sizes.choice((0, 1, 10, 500, 4095, 4096, 8000))
        result = await shell.run_command(f"printf '%s' {number}-${{big:0:{size}}}; (({number} % 2))", timeout=10)
        assert result.output == f"{number}-" + "x" * size
        assert result.exit_code == (0 if number % 2 else 1)


async def test_descriptors_are_released(box: RunningSandbox) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    shell, python = await box.shell(), await box.python()
    await shell.run_command("true", timeout=10)
    before = held()
    for _ in range(5):
        await shell.run_command("exit 0", timeout=10)
        await shell.run_command("true", timeout=10)
        await python.run_cell("import os; os._exit(0)", timeout=10)
        await python.run_cell("1", timeout=10)
        await box.exec(["sh", "-c", "sleep 0 & echo x"], timeout=10)
        await box.write_file("f", b"x" * 100_000)
        await box.read_file("f")
        await box.list_dir(".")
    assert held() == before


async def test_closing_releases_everything() -> None:
    before = len(os.listdir("/proc/self/fd"))
    backend = LocalBackend(allow_unsafe_local=True)
    box = await backend.start_sandbox(CHECK_SPEC)
    shell = await box.shell()
    await box.python()
    await shell.start_command("cat", wait=0)
    await box.close()
    await backend.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not Path(box.spec.workdir).exists()  # noqa: ASYNC240


async def test_type_ahead_into_a_program_that_ended_does_not_reach_the_next(shell: PersistentShell) -> None:
    await shell.start_command("read first", wait=0.05)
    assert (await shell.send_input("one\ntwo\nthree\n", wait=10)).exit_code == 0
    assert (await shell.run_command('read -t 0.1 rest; echo "<$rest>"', timeout=10)).output == "<>\n"
