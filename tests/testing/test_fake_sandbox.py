import asyncio

import pytest

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec, ShellResult
from prorl_gym.testing.sandbox.conformance.execution_checks import files_replace_what_was_there
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, FakeSandbox, SandboxCall, SandboxScript


async def test_answers_come_from_the_script_and_calls_are_kept() -> None:
    script = SandboxScript(
        on_exec=lambda argv, stdin: ExecResult(3, stdin, b""), on_shell_input=lambda text: ShellResult(text, 0, "/")
    )
    box = FakeSandbox(script=script)
    assert (await box.exec(["cat"], stdin=b"in", timeout=1)).stdout == b"in"
    assert (await (await box.shell()).run_command("ls", timeout=2)).output == "ls"
    assert box.calls[1] == SandboxCall("shell.run", ("ls",), {"timeout": 2})


async def test_files_behave() -> None:
    box = FakeSandbox()
    await files_replace_what_was_there(box)
    await box.write_file("/a/b/c", b"12", mode=0o755)
    assert [(entry.name, entry.kind) for entry in await box.list_dir("/a")] == [("b", "directory")]
    assert [(entry.name, entry.size, entry.mode) for entry in await box.list_dir("/a/b")] == [("c", 2, 0o755)]
    for call, error in (
        (box.read_file("/nothing"), FileNotFoundError),
        (box.read_file("/a"), IsADirectoryError),
        (box.list_dir("/a/b/c"), NotADirectoryError),
    ):
        with pytest.raises(error):
            await call


async def test_a_lost_sandbox_ends_calls_in_flight() -> None:
    box = FakeSandbox(script=SandboxScript(delay=asyncio.Event()))
    call = asyncio.ensure_future(box.exec(["sleep"], timeout=1))
    await asyncio.sleep(0)
    box.mark_lost()
    with pytest.raises(SandboxError) as raised:
        await call
    assert raised.value.kind is FailureKind.SANDBOX_LOST
    assert not await box.is_alive()


async def test_cancelled_calls_are_remembered() -> None:
    box = FakeSandbox(script=SandboxScript(delay=asyncio.Event()))
    call = asyncio.ensure_future(box.exec(["sleep"], timeout=1))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [call.method for call in box.cancelled] == ["exec"]


async def test_the_backend_remembers_and_can_fail() -> None:
    def refuse(spec: SandboxSpec) -> None:
        if spec.image == "/x":
            raise SandboxError(FailureKind.IMAGE_MISSING, "no such image")

    backend = FakeBackend(SandboxScript(on_start=refuse))
    box = await backend.start_sandbox(SandboxSpec())
    with pytest.raises(SandboxError):
        await backend.start_sandbox(SandboxSpec(image="/x"))
    await backend.close()
    assert backend.started == [box] and box.closed


async def test_fakes_listen_at_a_port_of_their_own() -> None:
    box, other = FakeSandbox(), FakeSandbox()
    with await box.listen(8000) as listener, await other.listen(8000) as second:
        assert listener.getsockname()[1] != second.getsockname()[1]
    assert box.calls == [SandboxCall("listen", (8000,))]
