"""The tools: what they ask of the sandbox, and how they tell the model."""

from collections.abc import Sequence
from typing import Any

import pytest

from prorl_gym.agents.tools import BashTool, PythonTool
from prorl_gym.agents.tools.bash import INPUT_SECONDS
from prorl_gym.errors import Cause, FailureKind, SandboxError
from prorl_gym.sandbox.protocol import CellResult, ShellResult
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox, SandboxCall


class ScriptedSandbox(FakeSandbox):
    """Plays ``answers`` in order; an exception among them is raised."""

    def __init__(self, answers: Sequence[Any], alive: bool) -> None:
        super().__init__()
        self._answers = list(answers)
        self._alive = alive
        self.leases = 0

    async def lease(self) -> "ScriptedSandbox":
        self.leases += 1
        return self

    async def is_alive(self) -> bool:
        return self._alive

    async def record_call(self, call: SandboxCall, answer: Any) -> Any:
        self.calls.append(call)
        scripted = self._answers.pop(0)
        if isinstance(scripted, Exception):
            raise scripted
        return scripted

    @property
    def asked(self) -> list[tuple[Any, ...]]:
        """Method, arguments and limit of each call."""
        return [(call.method.rpartition(".")[2], *call.args, *call.options.values()) for call in self.calls]


def done(output: str = "", exit_code: int | None = 0, **more: Any) -> ShellResult:
    return ShellResult(output=output, exit_code=exit_code, cwd="/workspace", **more)


def bash(*answers: object, alive: bool = True) -> tuple[BashTool, ScriptedSandbox]:
    sandbox = ScriptedSandbox(answers, alive=alive)
    return BashTool(sandbox.lease, 30.0), sandbox


def python(*answers: object, alive: bool = True) -> tuple[PythonTool, ScriptedSandbox]:
    sandbox = ScriptedSandbox(answers, alive=alive)
    return PythonTool(sandbox.lease, 30.0), sandbox


async def test_command_reports_output_directory_and_exit_code():
    tool, sandbox = bash(done("hi\n", 3))
    said = await tool({"command": "echo hi; false"})
    assert sandbox.asked == [("start", "echo hi; false", 30.0)]
    assert said.text == "hi\n[Current working directory: /workspace]\n[Command finished with exit code 3]"
    assert said.answer is None


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"restarted": True, "state_kept": True}, "variables that it had at its end"),
        ({"restarted": True, "state_kept": False}, "variables from before this command"),
        ({"restarted": True, "timed_out": True}, "stopped after 30 seconds"),
    ],
)
async def test_a_new_shell_and_what_it_has_are_reported(ended: dict[str, Any], words: str):
    tool, _ = bash(done("", 1, **ended))
    said = (await tool({"command": "exit 1"})).text
    assert "started again" in said and words in said


async def test_running_command_can_be_polled_typed_into_and_interrupted():
    tool, sandbox = bash(done("name? ", None), done("", None), done("hello bob\n", None), done("^C\n", 130))
    first = await tool({"command": "./greet"})
    assert "still running" in first.text and "printed nothing" not in first.text
    assert "still running" in (await tool({"command": "ls"})).text, "a second command is refused"
    assert "It has printed nothing since the last look." in (await tool({"command": ""})).text
    await tool({"command": "bob", "is_input": True})
    last = await tool({"command": "C-c"})
    assert sandbox.asked[1:] == [("send", "", 30.0), ("send", "bob\n", INPUT_SECONDS), ("send", "C-c", INPUT_SECONDS)]
    assert last.text.endswith("[Command finished with exit code 130]")


@pytest.mark.parametrize(
    "spelling", ["C-c", "C-C", " C-c ", "C-c\n", "^C", "ctrl+c", "Ctrl-C", "C-\\", "C-d", "C-z", "\x03"]
)
@pytest.mark.parametrize("typed", [{}, {"is_input": True}])
async def test_key_is_pressed_and_not_run(spelling: str, typed: dict[str, object]):
    tool, sandbox = bash(done("", None), done("", 130))
    await tool({"command": "sleep 100"})
    await tool({"command": spelling, **typed})
    assert sandbox.asked[1] == ("send", spelling, INPUT_SECONDS)


@pytest.mark.parametrize("spelling", ["C-c", "^C", "ctrl+d", "C-\\"])
@pytest.mark.parametrize("typed", [{}, {"is_input": True}])
async def test_key_with_nothing_running_is_not_run(spelling: str, typed: dict[str, object]):
    tool, sandbox = bash()
    assert (await tool({"command": spelling, **typed})).text == (
        "Nothing is running, so the key was not sent. Send a command."
    )
    assert sandbox.leases == 0


@pytest.mark.parametrize("arguments", [{"restart": True}, {"command": "", "restart": True, "is_input": True}])
async def test_restart_frees_a_shell_that_is_held(arguments: dict[str, object]):
    tool, sandbox = bash(done("", None), done("tick\n", restarted=True), done("back\n"))
    assert "restart=true" in (await tool({"command": "./ignores-keys"})).text
    assert "restart=true" in (await tool({"command": "ls"})).text
    said = (await tool(arguments)).text
    assert said.startswith("tick\n[The shell was restarted") and "exit code" not in said
    assert (await tool({"command": "echo back"})).text.startswith("back\n")
    assert [asked[0] for asked in sandbox.asked] == ["start", "restart", "start"]


async def test_restart_runs_no_command():
    tool, sandbox = bash(done(restarted=True))
    said = (await tool({"command": "ls", "restart": True})).text
    assert "[The command was not run. Send it without restart.]" in said
    assert sandbox.asked == [("restart",)]


async def test_nul_is_refused():
    tool, sandbox = bash()
    assert "NUL" in (await tool({"command": "echo a\0b"})).text
    assert sandbox.asked == []


@pytest.mark.parametrize("arguments", [{"command": ""}, {"command": " \n"}, {"command": "y", "is_input": True}, {}])
async def test_nothing_running_is_said_without_a_sandbox(arguments: dict[str, object]):
    tool, sandbox = bash()
    assert (await tool(arguments)).text.startswith("Nothing is running")
    assert sandbox.leases == 0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CellResult("42\n", True), "42"),
        (CellResult("", True), "[No output.]"),
        (CellResult("ValueError: x", False), "ValueError: x"),
        (CellResult("", True, images=(b"png", b"png")), "[2 figure(s) were drawn; they cannot be shown here.]"),
        (CellResult("tick\n", False, timed_out=True), "tick\n[The code was stopped after 30 seconds.]"),
        (
            CellResult("", False, restarted=True),
            "[The Python session ended and was started again: its variables are lost.]",
        ),
    ],
)
async def test_cell_is_described(result: CellResult, text: str):
    tool, sandbox = python(result)
    assert (await tool({"code": "6*7"})).text == text
    assert sandbox.asked == [("run", "6*7", 30.0)]


LOST = SandboxError(FailureKind.SANDBOX_LOST, "The sandbox does not answer.")
FULL = SandboxError(FailureKind.SANDBOX_LIMIT, "The disk is full.")


@pytest.mark.parametrize("make", [bash, python])
@pytest.mark.parametrize(
    ("raised", "alive", "kind", "cause"),
    [
        (LOST, True, FailureKind.SANDBOX_BROKEN_BY_AGENT, Cause.POLICY),
        (LOST, False, FailureKind.SANDBOX_LOST, Cause.INFRASTRUCTURE),
        (FULL, True, FailureKind.SANDBOX_LIMIT, Cause.POLICY),
    ],
    ids=["it still answers", "it is silent", "a named cause is kept"],
)
async def test_whose_fault_a_lost_sandbox_is(make: Any, raised: SandboxError, alive: bool, kind: Any, cause: Cause):
    tool, _ = make(raised, alive=alive)
    with pytest.raises(SandboxError) as caught:
        await tool({"command": "kill -9 -1", "code": "x"})
    assert (caught.value.kind, caught.value.cause) == (kind, cause)


async def test_failed_start_is_not_blamed_on_the_agent():
    async def no_sandbox() -> ScriptedSandbox:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, "No backend.")

    with pytest.raises(SandboxError) as caught:
        await BashTool(no_sandbox, 1.0)({"command": "ls"})
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE
