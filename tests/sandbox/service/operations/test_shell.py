"""What the conformance kit cannot see: exactness under load, bounded memory, released descriptors."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC


@pytest.fixture
async def box() -> AsyncIterator[RunningSandbox]:
    backend = LocalBackend(allow_unsafe_local=True)
    yield await backend.start_sandbox(CHECK_SPEC)
    await backend.close()


async def test_two_thousand_commands_lose_no_byte(box: RunningSandbox) -> None:
    shell = await box.shell()
    await shell.run_command("big=$(printf '%*s' 8000 '' | tr ' ' x)", timeout=10)
    sizes = random.Random(7)
    for number in range(2000):
        size = sizes.choice((0, 1, 10, 500, 4095, 4096, 8000))
        result = await shell.run_command(f"printf '%s' {number}-${{big:0:{size}}}; (({number} % 2))", timeout=10)
        assert result.output == f"{number}-" + "x" * size
        assert result.exit_code == (0 if number % 2 else 1)


async def test_output_of_external_programs_is_complete(box: RunningSandbox) -> None:
    shell = await box.shell()
    for number in range(100):
        result = await shell.run_command(f"seq {number} {number + 900} | cat", timeout=10)
        assert result.output == "".join(f"{n}\n" for n in range(number, number + 901))


async def test_errors_read_as_in_a_terminal(box: RunningSandbox) -> None:
    shell = await box.shell()
    result = await shell.run_command("true\nno_such_program", timeout=10)
    assert result.output == "bash: no_such_program: command not found\n"
    assert result.exit_code == 127


async def test_a_replaced_shell_is_reported_once(box: RunningSandbox) -> None:
    shell = await box.shell()
    assert (await shell.run_command("exit 1", timeout=10)).restarted
    assert not (await shell.run_command("true", timeout=10)).restarted


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


async def test_a_dead_guest_is_a_lost_sandbox(box: RunningSandbox) -> None:
    shell = await box.shell()
    guest = (await shell.run_command("echo $PPID", timeout=10)).output.strip()
    waiting = asyncio.ensure_future(shell.run_command("sleep 1000", timeout=60))
    await asyncio.sleep(0.05)
    os.kill(int(guest), 9)
    for call in (
        lambda: waiting,
        lambda: shell.run_command("true", timeout=10),
        lambda: box.exec(["true"], timeout=10),
        lambda: box.read_file("x"),
    ):
        with pytest.raises(SandboxError) as raised:
            await call()
        assert raised.value.kind is FailureKind.SANDBOX_LOST


async def test_type_ahead_into_a_program_that_ended_does_not_reach_the_next(box: RunningSandbox) -> None:
    shell = await box.shell()
    await shell.start_command("read first", wait=0.05)
    assert (await shell.send_input("one\ntwo\nthree\n", wait=10)).exit_code == 0
    assert (await shell.run_command('read -t 0.1 rest; echo "<$rest>"', timeout=10)).output == "<>\n"


async def test_no_bash_is_a_broken_image(box: RunningSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    from errno import ENOENT

    from prorl_gym.sandbox.service.guest_channel import ChildStartError, GuestChannel

    async def refuse(self: GuestChannel, op: str, **fields: object) -> None:
        raise ChildStartError(ENOENT, "exec")

    monkeypatch.setattr(GuestChannel, "request", refuse)
    with pytest.raises(SandboxError, match="has no bash") as raised:
        await box.shell()
    assert raised.value.kind is FailureKind.IMAGE_BROKEN
    with pytest.raises(SandboxError, match="has no python3") as raised:
        await box.python()
    assert raised.value.kind is FailureKind.IMAGE_BROKEN
